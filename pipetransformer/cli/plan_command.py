"""Offer `pipetransformer plan`: say what pipeline a model would get, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from autopipe.cluster import parse_bytes
from autopipe.plan import Tables, throughput_tables
from autopipe.trace import Trace
from pipetransformer.cli.model_choice import ModelChoice
from pipetransformer.cli.model_options import MODEL_HELP, add_model_options, model_choice
from pipetransformer.cli.named_model import WEIGHT_DTYPES
from pipetransformer.cli.places import (
    Place,
    default_slots,
    described_place,
    make_request,
    place_at_hand,
)
from pipetransformer.cli.plan_answer import Answer, Refusal, find_plan
from pipetransformer.cli.plan_table import answers_json, answers_text, replicated_text
from pipetransformer.cli.replicated_stages import PIPEDREAM, add_profile_options, run_profile
from pipetransformer.config import PLANS

BATCH_A_SLOT = 32
"""Samples of a step for each slot, if --batch is not given."""

_RECOMPUTE = {"auto": (False, True), "always": (True,), "never": (False,)}

_OF_A_PROFILE = ("machines", "bandwidth", "activations")
_OF_A_MODEL = (
    "model", "cluster", "slots", "batch", "frozen", "stage_workers", "samples", "cached", "dtype",
    "image_size", "seq_length", "task", "lora", "lora_targets", "trace",
    "activation_checkpointing",
)  # fmt: skip


def add_plan_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help=MODEL_HELP,
    )
    parser.add_argument(
        "--cluster", help="TOML that describes a cluster; else the machine at hand"
    )
    parser.add_argument("--slots", type=int, help="processes on the machine at hand")
    parser.add_argument(
        "--batch", type=int, help=f"samples a step; {BATCH_A_SLOT} a slot if unsaid"
    )
    parser.add_argument(
        "--frozen", default="0", help="frozen layers, one number or several: 0,3,6"
    )
    parser.add_argument("--memory-limit", help="of a slot, such as 16GiB")
    parser.add_argument(
        "--activation-checkpointing",
        choices=tuple(_RECOMPUTE),
        default="auto",
        help="whether stages keep activations or compute them again; auto: as memory asks for",
    )
    parser.add_argument(
        "--stage-workers", help="plan one pipeline with so many slots a stage: 2,1,1"
    )
    parser.add_argument(
        "--plan",
        choices=tuple(PLANS),
        help="whose choice to take: fastest by default, pipedream for a --profile",
    )
    add_profile_options(parser)
    parser.add_argument(
        "--samples", type=int, help="of the training set, to say what a cache of all of it takes"
    )
    parser.add_argument("--cached", action="store_true", help="read the frozen prefix's output")
    parser.add_argument("--dtype", choices=tuple(WEIGHT_DTYPES), default="float32")
    add_model_options(parser)
    parser.add_argument(
        "--trace", help="write the chosen schedule to this file, for ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Plan, print the answers, and return whether all numbers of frozen layers have a plan.

    Raises:
        ImportError: the model's package is not installed.
        ValueError: the question cannot be read or answered.
        WorkerFailedError: measuring the machine at hand failed.
    """
    if options.profile is not None:
        _refuse_given(options, _OF_A_MODEL, "does not go with --profile")
        run_profile(options, say)
        return True
    if options.model is None:
        raise ValueError("there is nothing to plan; name a model, or give a --profile")
    _refuse_given(options, _OF_A_PROFILE, "is for a --profile")
    frozen, plan = _read_numbers("--frozen", options.frozen), options.plan or "fastest"
    if options.stage_workers and plan == "published":
        raise ValueError("the published rules know no --stage-workers; leave one of them out")
    workers = options.stage_workers and tuple(
        _read_numbers("--stage-workers", options.stage_workers)
    )
    choice = model_choice(options, dtype=options.dtype)
    limit = None if options.memory_limit is None else parse_bytes(options.memory_limit)
    _refuse(options)
    place, global_batch = _find_place(choice, options)
    requests = [
        make_request(
            place,
            global_batch=global_batch,
            num_frozen=num_frozen,
            memory_limit_bytes=limit,
            cached=options.cached,
            stage_workers=workers,
        )
        for num_frozen in frozen
    ]
    recompute = _RECOMPUTE[options.activation_checkpointing]
    requests = [replace(request, recompute=recompute) for request in requests]
    answers = [find_plan(place, request, plan=plan) for request in requests]
    tables = _published_tables(answers[0]) if plan == "published" else {}
    model = f"{choice.name} in {choice.dtype}"
    if options.json:
        say(json.dumps(answers_json(model, answers, tables=tables)))
    else:
        text = answers_text(model, answers, num_samples=options.samples, tables=tables)
        if plan == PIPEDREAM:
            text = "\n\n".join([*map(replicated_text, answers), text])
        say(text)
    traces = [] if options.trace is None else _write_traces(answers, Path(options.trace))
    if traces and not options.json:
        say("\n" + "\n".join(map(str, traces)))
    return not any(isinstance(answer.chosen, Refusal) for answer in answers)


def _read_numbers(option: str, text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"{option} is {text!r}; give numbers, separated by commas")
    return [int(number) for number in numbers]


def _refuse_given(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse options that were given, and would have no effect."""
    usual = argparse.ArgumentParser()  # A second one, to ask for the defaults.
    add_plan_parser(usual)
    for name in names:
        if getattr(options, name) != usual.get_default(name):
            option = "a model" if name == "model" else f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {why}; leave it out")


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
    for name in ("--slots", "--batch", "--samples"):
        value = getattr(options, name[2:])
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; give at least 1")


def _find_place(choice: ModelChoice, options: argparse.Namespace) -> tuple[Place, int]:
    if options.cluster is not None:
        place = described_place(choice, options.cluster)
        return place, options.batch or BATCH_A_SLOT * place.num_slots
    num_slots = options.slots or default_slots()
    global_batch = options.batch or BATCH_A_SLOT * num_slots
    return place_at_hand(choice, num_slots=num_slots, global_batch=global_batch), global_batch


def _published_tables(answer: Answer) -> Tables:
    """Return the tables from which the published rules take M; they do not depend on freezing."""
    try:
        return throughput_tables(answer.place.profile, answer.request)
    except ValueError:
        return {}  # The rules know no length, as the answer says.


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
