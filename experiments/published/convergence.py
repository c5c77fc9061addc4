"""Draw how similar each layer's outputs are to those of a run's last look, as the post's figure 2.

    python -m experiments.vit --recipe cifar10 --data cifar10_jpeg.npz \\
        --weights model.safetensors --freeze none --signals probe_change \\
        --freeze_interval_share 0.05 --output_dir runs/looks
    python -m experiments.published.convergence runs/looks --picture looks.png

The numbers are those that report.html draws: SVCCA of as many directions as samples can tell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.figures import new_figure, open_frame
from experiments.finetune.series import markdown
from pipetransformer.elastic import PROBE_FOLDER, read_looks
from pipetransformer.report import similarities


def main() -> None:
    """Print a table of the looks, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, with looks at its probe")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = similarities(read_looks(options.run / PROBE_FOLDER))
    cells = [[str(step), *(f"{value or 0:.2f}" for value in row)] for step, row in rows.items()]
    print(markdown([["step", *map(str, range(len(cells[0]) - 1))], *cells]))
    if options.picture is not None:
        figure = new_figure(8, 4.5)
        axes = figure.subplots()
        for layer, values in enumerate(zip(*rows.values(), strict=True)):
            share = layer / max(1, len(cells[0]) - 2)
            axes.plot(list(rows), values, label=f"layer {layer}", color=(share, 0.4, 1 - share))
        open_frame(axes, xlabel="step", ylabel="SVCCA with the last look")
        axes.legend(frameon=False, ncols=2)
        figure.savefig(options.picture)


if __name__ == "__main__":
    main()
