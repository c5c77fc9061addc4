"""Train one recipe elastically and as its rivals, over several seeds, and print one table.

    python -m experiments.compare --script bert --recipe sst2 --seeds 0 1 2 --folder runs/sst2 \\
        -- --model_name_or_path MINILM --data_dir GLUE/SST-2

Runs that are complete are not repeated: started again it goes on. Seeds are the outer loop, so
that rows which are compared ran close to each other in time. All train on the same cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("--baseline", "ddp", "--freeze", "none"),
    "ddp+freeze": ("--baseline", "ddp+freeze"),
    "ddp+freeze+cache": ("--baseline", "ddp+freeze+cache"),
    "ours, nothing frozen": ("--freeze", "none"),
    "ours": (),
    "early-stop": ("--baseline", "early-stop", "--freeze", "none"),
    "static": ("--baseline", "static", "--freeze", "none"),
    "lora": ("--baseline", "lora", "--freeze", "none"),
    "small": ("--baseline", "small", "--freeze", "none"),
    "short": ("--baseline", "short", "--freeze", "none"),
}
"""What each row adds to the recipe; `short` also gets the seconds that ours took."""

POINTS = 0.5
"""How much below the unfrozen loop's metric a run may stay and count as having reached it."""


@dataclass(frozen=True)
class Row:
    """Hold a row's runs, one for each seed.

    Args:
        name: as in ROWS.
        metric: final ones.
        train_s: seconds of training, without evaluations.
        reached_s: of those, until the unfrozen loop's final metric less POINTS; None where a run
            did not come there.
        kept_bytes: of activations that were kept.
    """

    name: str
    metric: list[float]
    train_s: list[float]
    reached_s: list[float | None]
    kept_bytes: list[int]


def run_all(options: argparse.Namespace) -> None:
    """Run what is not yet complete; each in a process of its own."""
    for seed in options.seeds:
        for name in sorted(options.rows, key=lambda row: row == "short"):
            folder = folder_of(options.folder, name, seed)
            if (folder / "summary.json").exists():
                continue
            command = [sys.executable, "-m", f"experiments.{options.script}"]
            command += ["--recipe", options.recipe, "--seed", str(seed)]
            command += [*options.further, *ROWS[name], "--output_dir", str(folder)]
            if name == "short":
                ours = json.loads(
                    (folder_of(options.folder, "ours", seed) / "summary.json").read_text()
                )
                command += ["--budget_s", str(ours["train_s"])]
            if name == "static":
                command += ["--static_layers", str(options.static_layers)]
            print(f"seed {seed}, {name}", flush=True)
            log = folder.with_suffix(".log")
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w") as file:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=True)


def folder_of(folder: Path, name: str, seed: int) -> Path:
    """Return where a run's results are."""
    return Path(folder) / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"


def read_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows whose runs are complete for all seeds."""
    goals = {}
    for seed in options.seeds:
        summary = folder_of(options.folder, "ddp", seed) / "summary.json"
        if summary.exists():
            found = json.loads(summary.read_text())
            goals[seed] = found["metrics"][found["metric"]] - POINTS
    rows = []
    for name in options.rows:
        folders = {seed: folder_of(options.folder, name, seed) for seed in options.seeds}
        if not all((folder / "summary.json").exists() for folder in folders.values()):
            continue
        found = [json.loads((one / "summary.json").read_text()) for one in folders.values()]
        metric = found[0]["metric"]
        rows.append(
            Row(
                name,
                [one["metrics"][metric] for one in found],
                [one["train_s"] for one in found],
                [reached_s(folders[seed], metric, goals.get(seed)) for seed in options.seeds],
                [one["details"].get("kept_bytes", 0) for one in found],
            )
        )
    return rows


def reached_s(folder: Path, metric: str, goal: float | None) -> float | None:
    """Return the seconds of training until an evaluation of a run reached a metric, if any did."""
    training = 0.0
    for record in records_of(folder):
        if record["kind"] == "step":
            training += record["seconds"]
        elif record["kind"] == "evaluation" and goal is not None:
            if record.get(metric, -1.0) >= goal:
                return training
    return None


def records_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, of ours or of a rival."""
    path = folder / "run" / "records.jsonl"
    path = path if path.exists() else folder / "records.jsonl"
    yield from map(json.loads, path.read_text().splitlines())


def table(rows: Sequence[Row]) -> str:
    """Return a markdown table: means and standard deviations over the seeds."""
    first = next((row for row in rows if row.name == "ddp"), rows[0])
    base = statistics.mean(first.train_s)
    lines = [
        "| row | metric | train s | of ddp | s to ddp's metric less 0.5 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = statistics.mean(row.train_s)
        reached = [one for one in row.reached_s if one is not None]
        when = (
            f"{statistics.mean(reached):.0f}"
            if len(reached) == len(row.reached_s)
            else (f"{len(reached)} of {len(row.reached_s)} seeds")
        )
        lines.append(
            f"| {row.name} | {spread(row.metric)} | {spread(row.train_s, 0)} "
            f"| {seconds / base:.2f} | {when} |"
        )
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return a mean, and where there are several values their standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Compare a recipe with its rivals.")
    parser.add_argument("--script", choices=("bert", "vit"), required=True)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs' folders are")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--static_layers", type=int, default=2, help="that `static` never trains")
    parser.add_argument("further", nargs="*", help="options of the script, behind --")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and print the table."""
    options = parse(arguments)
    run_all(options)
    rows = read_rows(options)
    print(table(rows))
    print(json.dumps({row.name: vars(row) for row in rows}))


if __name__ == "__main__":
    main()
