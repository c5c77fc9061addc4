"""Compare data, model and pipeline parallelism as PipeDream's paper does.

    python -m experiments.pipedream accuracy --network vgg16 --optimizer sgd --rates 0.003 0.01 \\
        --runs runs.jsonl
    python -m experiments.pipedream simulate graph.txt --clusters A B
    python -m experiments.pipedream draw --stages 4 --micro_batches 4 --picture schedules.png

`accuracy` trains small networks on scikit-learn's digits, with flushes and without: it tunes the
rate of each rule, and trains with it from several seeds. `simulate` predicts every way for
profiles as PipeDream's profiler writes them, on the machines of its paper, beside the published
speed-ups; `experiments.benchmarks.engine` times some of them on this machine. `draw` puts the
schedules side by side, with their bubble, memory and communication beside the formulas. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.finetune.series import markdown
from experiments.pipedream import drawn, staleness
from experiments.pipedream.clusters import CLUSTERS, PUBLISHED
from experiments.pipedream.cuts import trimmed
from experiments.pipedream.layer_graph import read_graph
from experiments.pipedream.networks import NETWORKS
from experiments.pipedream.simulated import predict


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="experiments.pipedream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ways = parser.add_subparsers(dest="what", required=True)
    accuracy = ways.add_parser("accuracy", help="train each rule of versions at its best rate")
    accuracy.add_argument("--network", choices=NETWORKS, required=True, help="a narrow one")
    accuracy.add_argument("--optimizer", choices=staleness.OPTIMIZERS, required=True)
    accuracy.add_argument("--rates", nargs="+", type=float, required=True, help="to try")
    accuracy.add_argument("--stages", type=int, default=2, help="of the rules without flushes")
    accuracy.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    accuracy.add_argument("--epochs", type=int, default=15)
    accuracy.add_argument("--warm_up", type=int, default=2, help="epochs")
    accuracy.add_argument("--runs", type=Path, required=True, help="file of finished runs")
    simulate = ways.add_parser("simulate", help="predict every way on a described cluster")
    simulate.add_argument(
        "profiles", nargs="+", type=Path, help="vgg16.txt is VGG-16's, and so on"
    )
    simulate.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    draw = ways.add_parser("draw", help="draw the schedules side by side")
    draw.add_argument("--stages", type=int, default=2)
    draw.add_argument("--micro_batches", type=int, default=4)
    draw.add_argument("--small", action="store_true", help="measure a narrow network")
    draw.add_argument("--simulated", action="store_true", help="measure nothing")
    draw.add_argument("--picture", type=Path, help="draw into this file")
    return parser.parse_args(arguments)


def run_accuracy(options: argparse.Namespace) -> None:
    """Train, and print a table; a command that was ended goes on."""
    first = staleness.Run(options.network, options.optimizer, options.epochs, options.warm_up)
    found = staleness.compare(
        first,
        stages=options.stages,
        rates=options.rates,
        seeds=options.seeds,
        path=options.runs,
    )
    print(f"{options.network}, {options.optimizer}\n\n{staleness.table(found)}\n")
    print(json.dumps([asdict(one) for one in found]))


def run_simulate(options: argparse.Namespace) -> None:
    """Predict, and print a table for each profile and cluster."""
    found = []
    for path in options.profiles:
        graph = trimmed(read_graph(path.read_text()))
        for cluster in options.clusters:
            published = PUBLISHED.get((path.stem, cluster))
            rows = predict(graph, CLUSTERS[cluster], published.replicas if published else None)
            base = rows[0].seconds
            lines = [["way", "stages", "ms a minibatch", "of data parallel"]]
            lines += [
                [row.name, row.plan, f"{1e3 * row.seconds:.3g}", f"{base / row.seconds:.2f}"]
                for row in rows
            ]
            print(f"{path.stem} on {cluster}\n\n{markdown(lines)}")
            if published is not None:
                reached = published.accuracy and f", {published.accuracy:.2f} to the accuracy"
                print(f"published: {published.plan}, {published.epoch:.2f} x{reached or ''}")
            print()
            found.append(
                {"profile": path.stem, "cluster": cluster, "rows": [asdict(row) for row in rows]}
            )
    print(json.dumps(found))


def run_draw(options: argparse.Namespace) -> None:
    """Draw, and print a table."""
    shape = options.stages, options.micro_batches
    all_drawn = drawn.all_drawn(*shape)
    measured = {} if options.simulated else drawn.measure(*shape, small=options.small)
    print(drawn.table(all_drawn, measured))
    if options.picture is not None:
        drawn.draw(all_drawn, options.picture)
    print(json.dumps({name: asdict(one) for name, one in measured.items()}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the three."""
    options = parse(arguments)
    {"accuracy": run_accuracy, "simulate": run_simulate, "draw": run_draw}[options.what](options)


if __name__ == "__main__":
    main()
