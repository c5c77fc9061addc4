"""Print an ablation's table: of trained runs, or of a cluster that is only described.

    python -m experiments.ablation train --script bert --recipe sst2 --folder runs/parts \\
        --processes 2 -- --model_name_or_path MINILM --data_dir GLUE/SST-2
    python -m experiments.ablation simulate docs/clusters/8x8-h100.toml \\
        --model vit_base_patch16_224 --samples 1281167 --batch 4096 --epochs 10

Trained rows freeze what "freeze only" froze, step for step, at one global batch; simulated ones
stand beside those of a batch that grows with the replicas, as the published one did. --sweep
varies one thing instead: alpha of the published rule, or, simulated alone, M from K to 6 K or the
first cached layer. Beside the published machines and model stand the published figures;
`experiments/results/ablation` says why they differ. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from autopipe.cluster import load_cluster
from experiments.ablation import simulated, trained
from experiments.ablation.parts import ABLATION, PartsRow, product_of_parts, runs_of_equals
from experiments.figures import new_figure, open_frame
from experiments.finetune.series import add_series_options, markdown, series_of, spread
from experiments.finetune.usage import as_usage, start
from experiments.published.setting import (
    ALPHA,
    BATCH,
    CLUSTER,
    EPOCHS,
    NUM_SAMPLES,
    SPEED_UPS,
)
from pipetransformer.cli import ModelChoice, described_place

PUBLISHED_MODEL = "vit_base_patch16_224"
_WIDE = 10.0
"""Where rates differ by more, their picture is logarithmic."""


def table(rows: Sequence[PartsRow], published: Mapping[str, float]) -> str:
    """Return a markdown table of speed-ups over the first row.

    Args:
        rows: the first is what the others are compared with.
        published: speed-ups by row, where the published system was measured.
    """
    first, shown = rows[0], []
    head = ["row", "s", "speed-up"]
    head += ["growing batch"] * any(row.grown for row in rows)
    head += ["metric"] * any(row.metrics for row in rows)
    head += ["published"] * bool(published)
    shown.append([*head, "K x R (epochs)"])
    for row in rows:
        cells = [row.name, spread(row.seconds, 0), f"{_ratio(first.seconds, row.seconds):.2f}"]
        if "growing batch" in head:
            base = first.grown or first.seconds
            cells.append(f"{_ratio(base, row.grown):.2f}" if row.grown else "")
        if "metric" in head:
            cells.append(spread(row.metrics))
        if "published" in head:
            cells.append(f"{published[row.name]:.2f}" if row.name in published else "")
        shown.append([*cells, runs_of_equals(row.pipelines)])
    return markdown(shown)


def draw_rates(rows: Sequence[PartsRow], path: Path) -> None:
    """Draw each row's samples/s by epoch."""
    from matplotlib.ticker import MaxNLocator  # Loaded where something is drawn.

    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for row in rows:
        axes.plot(range(len(row.rates)), row.rates, marker=".", label=row.name)
    open_frame(axes, xlabel="epoch", ylabel="samples per second")
    rates = [rate for row in rows for rate in row.rates if rate > 0]
    if rates and max(rates) > _WIDE * min(rates):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, None)
    axes.legend(frameon=False)
    figure.savefig(path)


def _ratio(before: Sequence[float], after: Sequence[float]) -> float:
    return statistics.mean(before) / statistics.mean(after)


def _trained(options: argparse.Namespace) -> list[PartsRow]:
    with as_usage():
        series = series_of(options)
    if options.sweep is not None:
        return trained.sweep_alpha(series, processes=options.processes)
    return trained.train_parts(series, processes=options.processes)


def _simulated(options: argparse.Namespace) -> list[PartsRow]:
    choice = ModelChoice(options.model, options.image_size, options.seq_length, options.dtype)
    place = described_place(choice, options.cluster)
    if place.profile.cache_bytes_per_s is None:
        raise ValueError(
            f"{options.cluster} does not say how fast a cache is read; add cache_bytes_per_s"
        )
    frozen = simulated.frozen_by_epoch(
        float(Fraction(options.alpha)), simulated.num_layers(place), options.epochs
    )
    training = simulated.SimulatedTraining(options.samples, options.batch, frozen)
    if options.sweep is not None:
        return simulated.sweep(place, training, options.sweep, trained.ALPHAS)
    return simulated.simulate_parts(place, training)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="experiments.ablation", description=__doc__)
    ways = parser.add_subparsers(dest="way", required=True)
    train = ways.add_parser("train", help="train the rows")
    add_series_options(train)
    train.add_argument("--processes", type=int, default=2, help="of each run")
    train.add_argument("--sweep", choices=("alpha",))
    simulate = ways.add_parser("simulate", help="predict the rows for a described cluster")
    simulate.add_argument("cluster", help="TOML, as in docs/clusters")
    simulate.add_argument("--model", default=PUBLISHED_MODEL, help="as for pipetransformer plan")
    simulate.add_argument("--image-size", type=int)
    simulate.add_argument("--seq-length", type=int)
    simulate.add_argument("--dtype", default="float32")
    simulate.add_argument("--samples", type=int, default=NUM_SAMPLES, help="of an epoch")
    simulate.add_argument("--batch", type=int, default=2 * BATCH, help="samples of a step")
    simulate.add_argument("--epochs", type=int, default=EPOCHS)
    simulate.add_argument("--alpha", default="1/3", help="of the published rule")
    simulate.add_argument("--sweep", choices=("alpha", "micro_batches", "cached_from"))
    simulate.add_argument("--picture", type=Path, help="draw samples/s by epoch into this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    options = parse(arguments)
    is_simulated = options.way == "simulate"
    rows = _simulated(options) if is_simulated else _trained(options)
    print(table(rows, SPEED_UPS if is_simulated and _is_published(options) else {}))
    speed_ups = {row.name: _ratio(rows[0].seconds, row.seconds) for row in rows}
    if speed_ups.keys() == ABLATION.keys():
        print(f"\nparts: {product_of_parts(speed_ups)}")
    if options.picture is not None:
        draw_rates(rows, options.picture)
    print(json.dumps([asdict(row) for row in rows]))


def _is_published(options: argparse.Namespace) -> bool:
    """Return whether what is simulated is the published experiment."""
    model = (options.model, options.image_size, options.dtype) == (
        PUBLISHED_MODEL,
        None,
        "float32",
    )
    given = (options.samples, options.batch, options.epochs, float(Fraction(options.alpha)))
    run = given == (NUM_SAMPLES, 2 * BATCH, EPOCHS, ALPHA)
    return model and run and options.sweep is None and load_cluster(options.cluster) == CLUSTER


if __name__ == "__main__":
    start(main)
