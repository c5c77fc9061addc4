"""Offer `pipetransformer plan`: say what pipeline a model would get, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from autopipe.cluster import parse_bytes
from autopipe.trace import Trace
from pipetransformer.cli.named_model import WEIGHT_DTYPES, add_model_options, model_choice
from pipetransformer.cli.places import default_slots, described_place, make_request, place_at_hand
from pipetransformer.cli.plan_answer import Answer, Refusal, find_plan
from pipetransformer.cli.plan_table import answers_json, answers_text

BATCH_A_SLOT = 32
"""Samples of a step for each slot, if --batch is not given."""

_RECOMPUTE = {"auto": (False, True), "always": (True,), "never": (False,)}


def add_plan_parser(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add = parser.add_argument
    add("--dtype", choices=tuple(WEIGHT_DTYPES), default="float32")
    add("--cluster", help="TOML that describes a cluster; else the machine at hand")
    add("--slots", type=int, help="processes on the machine at hand")
    add("--batch", type=int, help=f"samples a step; {BATCH_A_SLOT} a slot if unsaid")
    add("--frozen", default="0", help="frozen layers, one number or several: 0,3,6")
    add("--memory-limit", help="of a slot, such as 16GiB")
    again = "whether activations are computed again, not kept; auto: as memory asks for"
    add("--activation-checkpointing", choices=tuple(_RECOMPUTE), default="auto", help=again)
    add("--stage-workers", help="plan one pipeline with so many slots a stage: 2,1,1")
    add("--cached", action="store_true", help="read the frozen prefix's output")
    add("--trace", help="write the chosen schedule to this file, for ui.perfetto.dev")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Plan, print the answers, and return whether all numbers of frozen layers have a plan.

    Raises:
        ImportError: the model's package is not installed.
        ValueError: the question cannot be read or answered.
        WorkerFailedError: measuring the machine at hand failed.
    """
    frozen, workers = _numbers(options, "frozen"), _numbers(options, "stage_workers")
    choice = model_choice(options, dtype=options.dtype)
    limit = None if options.memory_limit is None else parse_bytes(options.memory_limit)
    _refuse(options)
    if options.cluster is not None:
        place = described_place(choice, options.cluster)
        batch = options.batch or BATCH_A_SLOT * place.num_slots
    else:
        num_slots = options.slots or default_slots()
        batch = options.batch or BATCH_A_SLOT * num_slots
        place = place_at_hand(choice, num_slots=num_slots, global_batch=batch)
    answers = [
        find_plan(
            place,
            make_request(
                place,
                global_batch=batch,
                num_frozen=num_frozen,
                cached=options.cached,
                memory_limit_bytes=limit,
                stage_workers=workers or None,
                recompute=_RECOMPUTE[options.activation_checkpointing],
            ),
        )
        for num_frozen in frozen
    ]
    model = f"{choice.name} in {choice.dtype}"
    if options.json:
        say(json.dumps(answers_json(model, answers)))
    else:
        say(answers_text(model, answers))
    traces = [] if options.trace is None else _write_traces(answers, Path(options.trace))
    if traces and not options.json:
        say("\n" + "\n".join(map(str, traces)))
    return not any(isinstance(answer.chosen, Refusal) for answer in answers)


def _numbers(options: argparse.Namespace, name: str) -> tuple[int, ...]:
    text: str = getattr(options, name)
    numbers = text.split(",") if text else []
    if not all(number.strip().isdecimal() for number in numbers):
        option = f"--{name.replace('_', '-')}"
        raise ValueError(f"{option} is {text!r}; give numbers, separated by commas")
    return tuple(map(int, numbers))


def _refuse(options: argparse.Namespace) -> None:
    if options.cluster is not None and options.slots is not None:
        raise ValueError(
            "--slots is for the machine at hand; leave it out beside --cluster, whose file "
            "states the slots"
        )
    if options.trace is not None and not Path(options.trace).absolute().parent.is_dir():
        raise ValueError(
            f"--trace is {options.trace}, in a folder that does not exist; make the folder, or "
            "choose another"
        )
    for name in ("--slots", "--batch"):
        value = getattr(options, name[2:])
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; give at least 1")


def _write_traces(answers: Sequence[Answer], path: Path) -> list[Path]:
    """Write every chosen schedule, one a file; return the files."""
    written = []
    for answer in answers:
        if isinstance(answer.chosen, Refusal):
            continue
        stem = f"{path.stem}-frozen{answer.request.num_frozen}"
        written.append(path if len(answers) == 1 else path.with_stem(stem))
        Trace.of(answer.chosen.spans()).save_chrome(written[-1])
    return written
