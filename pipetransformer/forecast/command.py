"""Answer on the command line what pipeline a model would get, and why: `pipetransformer plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autopipe.cluster import parse_bytes
from autopipe.plan import Tables, draw_tables, table_text, throughput_tables
from autopipe.trace import save_picture
from pipetransformer.forecast.answer import PLANS, Answer, Refusal, find_plan
from pipetransformer.forecast.machine import default_slots, place_at_hand
from pipetransformer.forecast.named_model import BERTS, DTYPES, ModelChoice
from pipetransformer.forecast.place import Place, described_place, make_request
from pipetransformer.forecast.table import (
    answer_json,
    answer_text,
    frozen_text,
    parts_text,
    place_text,
    title,
)

BATCH_A_SLOT = 32
"""Samples of a step for each slot, where the command line does not say."""


@dataclass(frozen=True)
class PlanQuestion:
    """Hold what the command line asks.

    Args:
        choice: the model.
        cluster: a file that describes a cluster; None is the machine at hand.
        num_slots: of the machine at hand; None is all.
        global_batch: samples of a step over all replicas; None is BATCH_A_SLOT a slot.
        frozen: numbers of frozen layers, each planned for.
        memory_limit_bytes: of a slot; None is what the place has.
        plan: whose plan is chosen, one of PLANS.
        cached: whether the frozen prefix's activations may come from the cache.
        picture: file to draw the chosen schedule to; None draws none.
        as_json: whether the answer is JSON.
    Raises:
        ValueError: a value is out of range, or values contradict each other.
    """

    choice: ModelChoice
    cluster: str | None = None
    num_slots: int | None = None
    global_batch: int | None = None
    frozen: tuple[int, ...] = (0,)
    memory_limit_bytes: int | None = None
    plan: str = "fastest"
    cached: bool = False
    picture: str | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.cluster is not None and self.num_slots is not None:
            raise ValueError(
                "--slots is for the machine at hand; leave it out beside --cluster, whose file "
                "states the slots"
            )
        if self.picture is not None and not Path(self.picture).absolute().parent.is_dir():
            raise ValueError(
                f"--picture is {self.picture}, in a folder that does not exist; make "
                "the folder, or choose another"
            )
        for name, value in (("--slots", self.num_slots), ("--batch", self.global_batch)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")


def add_plan_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipetransformer plan`."""
    parser.add_argument(
        "model", help=f"a timm VisionTransformer, {' or '.join(BERTS)}, or module:function"
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
    parser.add_argument("--plan", choices=PLANS, default="fastest", help="whose choice to take")
    parser.add_argument("--cached", action="store_true", help="read the frozen prefix's output")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--image-size", type=int, help="pixels of a side, for a timm model")
    parser.add_argument("--seq-length", type=int, help="tokens of a sample, for BERT")
    parser.add_argument("--picture", help="draw the chosen schedule to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def read_question(options: argparse.Namespace) -> PlanQuestion:
    """Check the arguments.

    Raises:
        ValueError: a value cannot be read, is out of range, or contradicts another.
    """
    numbers = options.frozen.split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise ValueError(
            f"--frozen is {options.frozen!r}; give numbers of layers, separated by commas"
        )
    limit = options.memory_limit
    return PlanQuestion(
        choice=ModelChoice(options.model, options.image_size, options.seq_length, options.dtype),
        cluster=options.cluster,
        num_slots=options.slots,
        global_batch=options.batch,
        frozen=tuple(int(number) for number in numbers),
        memory_limit_bytes=None if limit is None else parse_bytes(limit),
        plan=options.plan,
        cached=options.cached,
        picture=options.picture,
        as_json=options.json,
    )


def run_plan(question: PlanQuestion, say: Callable[[str], None]) -> bool:
    """Plan, and say what was found.

    Args:
        question: from the command line.
        say: shows a text to the person who asks.
    Returns:
        whether there is a plan for every number of frozen layers.
    Raises:
        ValueError: the question cannot be answered; the message says why.
        WorkerFailedError: measuring the machine at hand failed.
    """
    place, global_batch = _find_place(question)
    answers = [
        find_plan(
            place,
            make_request(
                place,
                global_batch=global_batch,
                num_frozen=num_frozen,
                memory_limit_bytes=question.memory_limit_bytes,
                cached=question.cached,
            ),
            plan=question.plan,
        )
        for num_frozen in question.frozen
    ]
    tables = _published_tables(question, place, answers)
    write = _as_json if question.as_json else _as_text
    say(write(question, place, answers, tables))
    drawn = [] if question.picture is None else _draw(answers, tables, Path(question.picture))
    if drawn and not question.as_json:
        say("\n" + "\n".join(map(str, drawn)))
    return not any(isinstance(answer.chosen, Refusal) for answer in answers)


def _published_tables(question: PlanQuestion, place: Place, answers: list[Answer]) -> Tables:
    """Return the tables from which the published rules take M, whatever is frozen."""
    if question.plan != "published":
        return {}
    try:
        return throughput_tables(place.profile, answers[0].request)
    except ValueError:
        return {}  # The rules know no length, as the answer says.


def _as_text(question: PlanQuestion, place: Place, answers: list[Answer], tables: Tables) -> str:
    head = place_text(_model_name(question), place, answers[0].request.global_batch)
    alone = len(answers) == 1
    text = f"{head}\n\n{answer_text(answers[0], place) if alone else frozen_text(answers)}"
    return f"{text}\n\n{table_text(tables)}" if tables else text


def _as_json(question: PlanQuestion, place: Place, answers: list[Answer], tables: Tables) -> str:
    return json.dumps(
        {
            "model": _model_name(question),
            "place": place.name,
            "num_slots": place.num_slots,
            "global_batch": answers[0].request.global_batch,
            "answers": [answer_json(answer, place) for answer in answers],
            "throughputs": tables,
        }
    )


def _model_name(question: PlanQuestion) -> str:
    return f"{question.choice.name} in {question.choice.dtype}"


def _find_place(question: PlanQuestion) -> tuple[Place, int]:
    if question.cluster is not None:
        place = described_place(question.choice, question.cluster)
        return place, question.global_batch or BATCH_A_SLOT * place.num_slots
    num_slots = question.num_slots or default_slots()
    global_batch = question.global_batch or BATCH_A_SLOT * num_slots
    place = place_at_hand(question.choice, num_slots=num_slots, global_batch=global_batch)
    return place, global_batch


def _draw(answers: list[Answer], tables: Tables, path: Path) -> list[Path]:
    """Draw every chosen schedule; several to files of their own, named by what is frozen.

    Tables are drawn to a file beside them.
    """
    drawn = []
    for answer in answers:
        chosen, frozen = answer.chosen, answer.request.num_frozen
        if isinstance(chosen, Refusal):
            continue
        if len(answers) > 1:
            drawn.append(path.with_stem(f"{path.stem}-frozen{frozen}"))
        else:
            drawn.append(path)
        heading = (f"{title(chosen, answer)} (predicted)", parts_text(chosen))
        save_picture(chosen.spans(), drawn[-1], heading=heading)
    if tables:
        drawn.append(path.with_stem(f"{path.stem}-throughput"))
        draw_tables(tables, drawn[-1])
    return drawn
