"""Run loops that people write, as they are and with our change, and print a table.

    python -m experiments.foreign_loops --only Trainer

Models and data are tiny and random: equality is shown here, and no speed.
"""

from __future__ import annotations

import argparse
import sys

import torch

from experiments.foreign_loops import loops, trainers
from experiments.foreign_loops.runner import NUM_SAMPLES, Outcome, outcome_of

LOOPS = loops.LOOPS + trainers.LOOPS


def line_of(one: Outcome) -> str:
    """Lay an outcome out as a line of a table in markdown."""
    equal = "equal" if one.apart == 0 else f"apart by {one.apart:.0e}"
    rows = f"{one.kind}, {one.hits} of {NUM_SAMPLES}" if one.hits else one.kind
    numbers = "" if one.kind == "refused" else equal
    return f"| {one.loop.name} | {one.num_lines} | {numbers} | {rows} | {' / '.join(one.said)} |"


def main(given: list[str] | None = None) -> int:
    """Print the table; return how many loops are not what is due of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="loops whose name has this")
    asked = parser.parse_args(given)
    # Equality bit by bit holds for a fixed number of threads.
    torch.set_num_threads(1)
    print("| loop | lines changed | numbers | rows | what is said |\n|---|---|---|---|---|")
    num_odd = 0
    for loop in LOOPS:
        if asked.only in loop.name:
            outcome = outcome_of(loop)
            print(line_of(outcome), flush=True)
            num_odd += outcome.kind != loop.due
    return num_odd


if __name__ == "__main__":
    sys.exit(main())
