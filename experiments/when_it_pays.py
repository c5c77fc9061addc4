"""Fine-tune by many ways of saving time, and draw accuracy over the time that each took.

    python -m experiments.when_it_pays --folder runs/pays --picture runs/pays.png \\
        --cifar10 cifar10_jpeg.npz --vit model.safetensors --sst2 GLUE/SST-2 --minilm MINILM

Started again it goes on; the last line is JSON. A time is a share of what the unfrozen plain loop
takes in steps and measuring, without evaluations, and without what other programs had of the core.
What is saved by:

    fewer steps             the plain loop's whole schedule in a share of the steps
    LoRA                    low-rank updates, in steps that fit the share
    frozen from the start   half or three quarters of the layers, cached
    early stopping          at the first evaluation that is no better
    fewer steps, budget     the root of the share in steps, `budget` of as much: half of each
    another policy          cached, over all steps; it takes its own time
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.figures import new_figure, open_frame
from experiments.finetune.finished_run import FinishedRun
from experiments.finetune.series import Series, markdown, spread
from experiments.finetune.usage import start

SHARES = (0.3, 0.5, 0.7)
UNFROZEN, LORA = "nothing saved", "LoRA 1"
POLICIES = ("paper:1/2", "linear")
"""Policies that no share can be given to; the paper's decides once an epoch, as published."""


@dataclass(frozen=True)
class Task:
    """Name what is fine-tuned.

    Args:
        title: over its half of the picture.
        script, recipe: as `Series` takes them.
        layers: that can freeze.
        options: of the command line that are folders or files, as the script names them.
        further: options of the script for all runs.
    """

    title: str
    script: str
    recipe: str
    layers: int
    options: Mapping[str, str]
    further: tuple[str, ...]


TASKS = {
    "cifar10": Task(
        "CIFAR-10 (JPEG), ViT-S/14",
        "vit",
        "cifar10",
        12,
        {"cifar10": "data", "vit": "weights"},
        ("--max_train_samples", "600", "--max_eval_samples", "2000"),
    ),
    "sst2": Task(
        "SST-2, MiniLM",
        "bert",
        "sst2",
        6,
        {"sst2": "data_dir", "minilm": "model_name_or_path"},
        ("--held_out_samples", "3000", "--group_by_length", "true"),
    ),
}


@dataclass(frozen=True)
class Point:
    """Hold one way of saving time, over all seeds.

    Args:
        task, way, row: a way has several rows, one for each share of the time.
        accuracy: in percent, by seed.
        share: of the unfrozen run's time, by seed.
    """

    task: str
    way: str
    row: str
    accuracy: list[float]
    share: list[float]


def ways_of(task: Task) -> dict[str, list[str]]:
    """Return the rows of each way of saving time, `UNFROZEN` first."""
    return {
        UNFROZEN: [UNFROZEN],
        "fewer steps": [f"fewer steps {share}" for share in SHARES],
        "fewer steps, budget": [f"budget {share}" for share in SHARES],
        "LoRA": [LORA, "LoRA 0.5"],
        "frozen from the start": [f"frozen {task.layers * n // 4}" for n in (2, 3)],
        "early stopping": ["early stopping"],
        **{f"policy {name}": [name] for name in POLICIES},
    }


def options_of(series: Series, row: str, seed: int) -> list[str]:
    """Return what a row adds to the recipe; rows that it follows from are complete."""
    kind, _, value = row.partition(" ")
    at_end = ["--evaluate_every_epochs", "0"]
    if row == UNFROZEN:
        return ["--baseline", "ddp", *at_end]
    if row == "early stopping":
        return ["--baseline", "early-stop", "--freeze", "none", "--evaluate_every_epochs", "1"]
    if kind == "frozen":
        return ["--freeze", f"schedule:{value}", *at_end]
    often = ["--freeze_interval_share", "0.02"]
    if kind in ("fewer", "budget", "LoRA"):
        unfrozen = series.run_of(UNFROZEN, seed)
        share = float(value.split()[-1])
        if kind == "budget":
            share = math.sqrt(share)
        elif kind == "LoRA" and share < 1:
            share /= series.run_of(LORA, seed).own_s / unfrozen.own_s
        of_all = ["--max_steps", str(round(min(1.0, share) * unfrozen.summary["steps"])), *at_end]
        if kind == "budget":
            return ["--freeze", f"budget:{share:.2f}", *often, *of_all]
        return ["--baseline", "ddp" if kind == "fewer" else "lora", *of_all]
    return ["--freeze", row, *(often if row != "paper:1/2" else []), *at_end]


def points_of(name: str, series: Series) -> list[Point]:
    """Return what is complete."""
    whole = [run.own_s for run in series.runs_of(UNFROZEN)]
    points = []
    for way, rows in ways_of(TASKS[name]).items():
        for row in rows:
            runs = series.runs_of(row)
            shares = [run.own_s / s for run, s in zip(runs, whole, strict=False)]
            if runs:
                points.append(Point(name, way, row, [_accuracy(run) for run in runs], shares))
    return points


def _accuracy(run: FinishedRun) -> float:
    """Return the accuracy on the largest evaluation set there is, in percent."""
    found = run.summary["metrics"]
    held_out = next((name for name in found if name.endswith("_accuracy")), "accuracy")
    return float(found[held_out])


def table(points: Sequence[Point]) -> str:
    """Return a task's points as a markdown table."""
    lines = [["way", "row", "share of the time", "accuracy", "by seed"]]
    for point in points:
        seeds = " ".join(f"{one:.1f}" for one in point.accuracy)
        lines.append([point.way, point.row, spread(point.share, 2), spread(point.accuracy), seeds])
    return markdown(lines)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw accuracy over the share of the time: means, and bands of a standard deviation."""
    names = list(dict.fromkeys(point.task for point in points))
    figure = new_figure(4.5 * len(names) + 2, 4)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [point for point in points if point.task == name]
        for number, way in enumerate(dict.fromkeys(point.way for point in own)):
            _draw_way(axes, [point for point in own if point.way == way], f"C{number}")
        about = {"title": TASKS[name].title, "xlabel": "share of the unfrozen run's time"}
        open_frame(axes, **about, xlim=(0, None))
    figure.axes[0].set_ylabel("accuracy (%)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right center")
    figure.savefig(path)


def _draw_way(axes: Any, points: Sequence[Point], color: str) -> None:
    points = sorted(points, key=lambda point: statistics.mean(point.share))
    xs = [statistics.mean(point.share) for point in points]
    ys = [statistics.mean(point.accuracy) for point in points]
    off = [statistics.stdev(p.accuracy) if len(p.accuracy) > 1 else 0.0 for p in points]
    low = [y - one for y, one in zip(ys, off, strict=True)]
    high = [y + one for y, one in zip(ys, off, strict=True)]
    axes.plot(xs, ys, color=color, marker="o", label=points[0].way)
    if len(points) > 1:
        axes.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)
    else:
        axes.vlines(xs, low, high, color=color, alpha=0.4)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Compare ways of saving time.")
    parser.add_argument("--folder", type=Path, required=True, help="where the runs' folders are")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, help="draw into this file")
    for task in TASKS.values():
        for option, meaning in task.options.items():
            parser.add_argument(f"--{option}", help=f"of {task.title}: the script's --{meaning}")
    options = parser.parse_args(arguments)
    for name in options.tasks:
        if missing := [f"--{one}" for one in TASKS[name].options if not getattr(options, one)]:
            parser.error(f"{name} needs {' and '.join(missing)}")
    return options


def series_of(name: str, options: argparse.Namespace) -> Series:
    """Return a task's runs."""
    task = TASKS[name]
    given = [part for own, theirs in task.options.items() for part in
             (f"--{theirs}", getattr(options, own))]  # fmt: skip
    further = (*given, *task.further, "--precision", "bf16")
    return Series(task.script, task.recipe, options.folder / name, tuple(options.seeds), further)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and print the tables."""
    options = parse(arguments)
    points: list[Point] = []
    for name in options.tasks:
        series = series_of(name, options)
        rows = [row for rows in ways_of(TASKS[name]).values() for row in rows]
        series.run_all(rows, partial(options_of, series))
        found = points_of(name, series)
        print(f"{TASKS[name].title}\n\n{table(found)}\n", flush=True)
        points += found
    if options.picture is not None:
        draw(points, options.picture)
    print(json.dumps([asdict(point) for point in points]))


if __name__ == "__main__":
    start(main)
