"""Prove that a pipeline of processes computes what the plain model does, in its schedule's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import SCHEDULES, StageReport, forward_only, run_program
from tests.models import tiny_model
from tests.pool import Pool
from tests.stages import CountingSender, StackWork, connect, place

# One uneven step for each number of micro-batches.
SIZES = ((5,), (4, 1), (3, 1, 2), (1, 2, 3, 1), (2, 1, 1, 3, 2))


@dataclass
class Outcome:
    """Bring home what a stage did; differences are relative to what is allowed."""

    report: StageReport
    events: list[str]
    differences: dict[str, float] = field(default_factory=dict)
    num_gradients_sent: int = 0


def compare(model: nn.Sequential, layers: nn.Sequential, work: StackWork) -> dict[str, float]:
    """Return |difference| to the plain model's gradient over 1e-9 + 1e-7 * max, by parameter.

    The tolerance is the one of float64 under another order of summation.
    """
    own = {id(p): p.grad for p in layers.parameters()}
    mine = {name: own[id(p)] for name, p in model.named_parameters() if id(p) in own}
    model.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(torch.cat(work.x)), torch.cat(work.y), reduction="sum")
    loss.backward()
    differences = {}
    for name, parameter in model.named_parameters():
        if name not in mine:
            continue
        ours, theirs = mine[name], parameter.grad
        if ours is None or theirs is None:
            differences[name] = 0.0 if ours is theirs else float("inf")
        else:
            allowed = 1e-9 + 1e-7 * float(theirs.abs().max())
            differences[name] = float((ours - theirs).abs().max()) / allowed
    return differences


def train(schedule: str, steps: Sequence[Sequence[int]], num_frozen: int = 0,
          inplace: bool = False) -> list[Outcome]:
    """Run steps of the given micro-batch sizes over the same links, with a fresh model each."""
    stage, length, group = place()
    links, outcomes = connect(group), []
    for sizes in steps:
        model = tiny_model(num_blocks=6)
        if inplace:
            model = nn.Sequential(*[m for layer in model for m in (nn.SiLU(inplace=True), layer)])
        model[:num_frozen].requires_grad_(False)
        layers = model[len(model) * stage // length:len(model) * (stage + 1) // length]
        work = StackWork(layers, sizes)
        report = run_program(SCHEDULES[schedule](length, len(sizes))[stage], work, links, sizes,
                             before_last_backward=lambda work=work: work.events.append("last"))
        sender = links.gradient_out
        sent = sender.num_sent if isinstance(sender, CountingSender) else 0
        outcomes.append(Outcome(report, work.events, compare(model, layers, work), sent))
    return outcomes


@pytest.fixture(params=[1, 2, 4])
def run_stages(request: pytest.FixtureRequest) -> Any:
    """Offer a function that runs another on every stage of a pipeline of 1, 2 or 4 processes."""
    if request.param == 1:
        return lambda function, *arguments: [function(*arguments)]
    pool: Pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
    return pool.run


def assert_plain_gradients(stages: list[list[Outcome]], num_modules: int = 8) -> None:
    """Check that the stages hold every parameter once, each with the plain model's gradient."""
    wanted = sorted(name for name, _ in tiny_model(num_blocks=6).named_parameters())
    for step in range(len(stages[0])):
        found = [item for stage in stages for item in stage[step].differences.items()]
        assert len(found) == len({name for name, _ in found}) == len(wanted)
        assert num_modules != 8 or sorted(name for name, _ in found) == wanted
        assert [(name, value) for name, value in found if not value <= 1.0] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_equal_the_plain_models_for_every_parameter(run_stages: Any, schedule: str) -> None:
    assert_plain_gradients(run_stages(train, schedule, (*SIZES, (2, 0, 1), (3,))))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_frozen", [1, 3, 4, 7])
def test_gradients_equal_the_plain_models_with_frozen_layers_below(
        run_stages: Any, schedule: str, num_frozen: int) -> None:
    stages = run_stages(train, schedule, SIZES[2:4], num_frozen)
    assert_plain_gradients(stages)
    for stage, outcomes in enumerate(stages):
        below = 8 * stage // len(stages)
        total = sum(map(len, SIZES[2:4])) if num_frozen < below else 0
        assert outcomes[-1].num_gradients_sent == total, "only trained layers below want gradients"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_may_begin_with_a_layer_that_works_in_place(run_stages: Any, schedule: str) -> None:
    assert_plain_gradients(run_stages(train, schedule, SIZES[:3], 0, True), num_modules=16)


def test_1f1b_keeps_at_most_k_minus_j_micro_batches_and_gpipe_all(run_stages: Any) -> None:
    for schedule in SCHEDULES:
        stages = run_stages(train, schedule, SIZES)
        for j, outcomes in enumerate(stages):
            kept = [outcome.report.peak_in_flight for outcome in outcomes]
            assert kept == [len(sizes) if schedule == "gpipe" else min(len(sizes), len(stages) - j)
                            for sizes in SIZES]


def test_backwards_run_downwards_under_gpipe_and_upwards_under_1f1b(run_stages: Any) -> None:
    for schedule, step in (("gpipe", -1), ("1f1b", 1)):
        for outcomes in run_stages(train, schedule, SIZES):
            for sizes, outcome in zip(SIZES, outcomes, strict=True):
                backwards = [event for event in outcome.events if event.startswith("B")]
                assert backwards == [f"B{i}" for i in range(len(sizes))][::step]


def test_the_last_backward_is_announced_once_right_before_it(run_stages: Any) -> None:
    for schedule in SCHEDULES:
        for outcomes in run_stages(train, schedule, SIZES):
            for sizes, outcome in zip(SIZES, outcomes, strict=True):
                last = "B0" if schedule == "gpipe" else f"B{len(sizes) - 1}"
                assert outcome.events[-2:] == ["last", last]
                assert outcome.events.count("last") == 1


class EvaluatingWork(StackWork):
    """Keep the outputs' values, not the outputs."""

    def finish(self, micro_batch: int, output: Tensor) -> Any:
        self.values = [*getattr(self, "values", []), *output.tolist()]


def evaluate(sizes: Sequence[int], with_grad: bool) -> tuple[list[Any], list[str], StageReport]:
    stage, length, group = place()
    model = tiny_model(num_blocks=6)
    work = EvaluatingWork(model[8 * stage // length:8 * (stage + 1) // length], sizes)
    with torch.set_grad_enabled(with_grad):
        report = run_program(forward_only(length, len(sizes))[stage], work, connect(group), sizes)
        expected = model(torch.cat(work.x))
    mine = torch.tensor(getattr(work, "values", []), dtype=torch.float64)
    wrong = [] if stage < length - 1 or torch.allclose(mine, expected, atol=1e-12) else [mine]
    return wrong, work.alive, report


@pytest.mark.parametrize("with_grad", [False, True])
def test_forward_only_gives_the_plain_outputs_and_keeps_nothing(
        run_stages: Any, with_grad: bool) -> None:
    for wrong, alive, report in run_stages(evaluate, (2, 1, 3, 2), with_grad):
        assert wrong == []
        assert alive == []
        assert report.peak_in_flight == 0
