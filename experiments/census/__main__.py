"""Try every Transformer of transformers and timm, tiny and random.

    python -m experiments.census                       # all, resumed from the results' file
    python -m experiments.census --task causal --only GPT2LMHeadModel
    python -m experiments.census --write docs/models.md
    python -m experiments.census --parts               # `attach(parts=)`, with other classes

Each class is verified, then trained four steps, two blocks frozen and cached after two. Its losses
are held against a hand-written loop's. Every tenth class also trains on two processes.

With `--parts` a module of each class is frozen, and two epochs by `attach(parts=)` are held
against a plain loop: losses, all tensors, and that the module runs no more in the last epoch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from experiments.census.judge import Outcome, judge
from experiments.census.page import part_tables, tables, write_page
from experiments.census.part_judge import judge_part
from experiments.census.part_subjects import PART_TASKS, part_subjects
from experiments.census.pool import Job, Tried, tried
from experiments.census.subjects import TASKS, Subject, of_timm, of_transformers

_PART_LIMIT_S = 120.0
"""How long a class may take of which a part is frozen."""

_EVERY = 10
"""Of so many classes one trains on two processes, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the census; return 1 where a class is wrong or crashes."""
    options = _parser().parse_args(arguments)
    file = "parts.jsonl" if options.parts else "census.jsonl"
    options.results = options.results or Path("runs", file)
    known = _read(options.results)
    if options.write is not None:
        write_page(options.write, (part_tables if options.parts else tables)([*known.values()]))
        return 0
    jobs = _jobs(options)
    if not options.only:
        jobs = [job for job in jobs if job.subject not in known]
    for one in tried(jobs, options.workers):
        known[one.subject] = one
        with options.results.open("a") as file:
            file.write(json.dumps(asdict(one)) + "\n")
        print(_line(one), flush=True)
    kinds = Counter(one.outcome.kind for one in known.values())
    print(", ".join(f"{kind} {number}" for kind, number in kinds.most_common()))
    return int(bool(kinds["wrong"] or kinds["crash"]))


def _jobs(options: argparse.Namespace) -> list[Job]:
    """Return what is asked for; which classes train on two processes hangs on no option."""
    if options.parts:
        jobs = [Job(subject, judge_part, _PART_LIMIT_S) for subject in part_subjects()]
    else:
        jobs = [
            Job(subject, partial(judge, with_pipeline=number % _EVERY == 0))
            for number, subject in enumerate([*of_transformers(), *of_timm()])
        ]
    if options.task:
        jobs = [job for job in jobs if job.subject.task in options.task]
    if options.only:
        jobs = [job for job in jobs if job.subject.name in options.only]
    if options.quick:
        first = {job.subject.family: job for job in reversed(jobs)}
        jobs = [first[family] for family in sorted(first)]
    return jobs


def _line(one: Tried) -> str:
    subject, outcome = one.subject, one.outcome
    about = f"{outcome.reason} [{outcome.detail}] {one.seconds:.1f} s"
    return f"{outcome.kind:9} {subject.task:8} {subject.name} {about}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", nargs="+", choices=[*TASKS, "timm", *PART_TASKS, "backbone"], help="these alone"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these classes, tried anew")
    parser.add_argument("--quick", action="store_true", help="one class of each family")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="try none, write the tables")
    parser.add_argument("--parts", action="store_true", help="freeze a module of each class")
    parser.add_argument("--results", type=Path, help="default: runs/census.jsonl, parts.jsonl")
    parser.add_argument("--workers", type=int, default=2)
    return parser


def _read(path: Path) -> dict[Subject, Tried]:
    """Return the last outcome of each subject."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in lines:
        entry = json.loads(line)
        subject = Subject(**entry["subject"])
        found[subject] = Tried(subject, Outcome(**entry["outcome"]), entry["seconds"])
    return found


if __name__ == "__main__":
    sys.exit(main())
