"""Prove that a pipeline of processes computes what the plain model does, in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.executor import StageReport, StageRun
from autopipe.engine.links import Payload
from autopipe.schedule import SCHEDULES, forward_only
from tests.helpers.models import NUM_FEATURES
from tests.helpers.pool import Pool
from tests.helpers.stages import (
    NUM_LAYERS,
    CountingSender,
    StackWork,
    connect,
    layers_of,
    place,
    stage_model,
)

# One uneven step for each number of micro-batches.
SIZES = ((5,), (4, 1), (3, 1, 2), (1, 2, 3, 1), (2, 1, 1, 3, 2))

RunStages = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=[1, 2, 4])
def run_stages(request: pytest.FixtureRequest) -> RunStages:
    """Offer to run a function on every stage of a pipeline of 1, 2 or 4 processes."""
    if request.param == 1:
        return lambda function, *arguments: [function(*arguments)]
    pool: Pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
    return pool.run


@dataclass(frozen=True)
class Outcome:
    """Bring home what a stage did in a step.

    Args:
        differences: of each parameter's gradient from the plain model's, over what is allowed.
        num_gradients_sent: over all steps so far.
    """

    report: StageReport
    events: list[str]
    differences: dict[str, float]
    num_gradients_sent: int


def train(
    schedule: str,
    steps: Sequence[Sequence[int]],
    num_frozen: int = 0,
    inplace: bool = False,
    checkpoint: str = "never",
) -> list[Outcome]:
    """Run steps of the given micro-batch sizes over the same links, each with a fresh model."""
    stage, length, group = place()
    links, outcomes = connect(group), []
    for sizes in steps:
        model = stage_model(inplace=inplace)
        model[:num_frozen].requires_grad_(False)
        layers = layers_of(model, stage, length)
        work = StackWork(layers, sizes)
        recomputed = range(len(sizes) - (checkpoint == "except_last"))
        program = SCHEDULES[schedule](
            length, len(sizes), recomputed=() if checkpoint == "never" else recomputed
        )[stage]
        report = StageRun(program, work, links, sizes).run(
            before_last_backward=partial(work.events.append, "last")
        )
        sender = getattr(links.below, "gradients", None)
        sent = sender.num_sent if isinstance(sender, CountingSender) else 0
        outcomes.append(Outcome(report, work.events, compare(model, layers, work), sent))
    return outcomes


def compare(model: nn.Sequential, layers: nn.Sequential, work: StackWork) -> dict[str, float]:
    """Return each |difference| from the plain model's gradient over 1e-9 + 1e-7 * max.

    The tolerance is that of float64 summed in another order.
    """
    gradients = {id(p): p.grad for p in layers.parameters()}
    ours = {name: gradients[id(p)] for name, p in model.named_parameters() if id(p) in gradients}
    model.zero_grad(set_to_none=True)
    output, target = model(torch.cat(work.x)), torch.cat(work.y)
    nn.functional.cross_entropy(output, target, reduction="sum").backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    return {name: distance(gradient, theirs[name]) for name, gradient in ours.items()}


def distance(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    return float((ours - theirs).abs().max()) / (1e-9 + 1e-7 * float(theirs.abs().max()))


def assert_plain_gradients(stages: list[list[Outcome]], *, inplace: bool = False) -> None:
    """Check that the stages hold every parameter once, each with the plain model's gradient."""
    wanted = sorted(name for name, _ in stage_model(inplace=inplace).named_parameters())
    for step in range(len(stages[0])):
        found = [item for stage in stages for item in stage[step].differences.items()]
        assert sorted(name for name, _ in found) == wanted
        assert [(name, value) for name, value in found if not value <= 1.0] == []


Trained = dict[str, list[list[Outcome]]]
"""What each stage did in each step, by schedule."""


@pytest.fixture(scope="module")
def trained(run_stages: RunStages) -> Trained:
    """Train in each schedule, a step for each number of micro-batches."""
    return {schedule: run_stages(train, schedule, SIZES) for schedule in SCHEDULES}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_equal_the_plain_models_for_every_parameter(
    trained: Trained, schedule: str
) -> None:
    assert_plain_gradients(trained[schedule])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_empty_micro_batch_changes_no_gradient(run_stages: RunStages, schedule: str) -> None:
    assert_plain_gradients(run_stages(train, schedule, [(2, 0, 1), (3,)]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_frozen", [3, 7])
def test_with_frozen_layers_only_trained_ones_below_are_sent_gradients(
    run_stages: RunStages, schedule: str, num_frozen: int
) -> None:
    steps = SIZES[2:4]
    stages = run_stages(train, schedule, steps, num_frozen)
    assert_plain_gradients(stages)
    for stage, outcomes in enumerate(stages):
        wanted = sum(map(len, steps)) if num_frozen < NUM_LAYERS * stage // len(stages) else 0
        assert outcomes[-1].num_gradients_sent == wanted


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_may_begin_with_a_layer_that_works_in_place(
    run_stages: RunStages, schedule: str
) -> None:
    assert_plain_gradients(run_stages(train, schedule, SIZES[2:3], 0, True), inplace=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_checkpointing_keeps_one_graph_and_gives_the_plain_models_gradients(
    run_stages: RunStages, schedule: str, checkpoint: str
) -> None:
    steps = SIZES[::2]
    stages = run_stages(train, schedule, steps, 0, False, checkpoint)
    assert_plain_gradients(stages)
    for outcomes in stages:
        for sizes, outcome in zip(steps, outcomes, strict=True):
            # Under except_last, 1F1B also keeps the last one's while others are repeated.
            assert outcome.report.peak_in_flight <= (1 if checkpoint == "always" else 2)
            repeated = [f"R{i}" for i in range(len(sizes) - (checkpoint == "except_last"))]
            events = [event for event in outcome.events if event != "last"]
            assert sorted(event for event in events if event[0] == "R") == repeated
            for event in repeated:
                following = events[events.index(event) + 1]
                assert following == event.replace("R", "B")


def test_1f1b_keeps_at_most_k_minus_j_micro_batches_and_gpipe_all(trained: Trained) -> None:
    for schedule, stages in trained.items():
        for j, outcomes in enumerate(stages):
            kept = [outcome.report.peak_in_flight for outcome in outcomes]
            assert kept == [
                len(sizes) if schedule == "gpipe" else min(len(sizes), len(stages) - j)
                for sizes in SIZES
            ]


@pytest.mark.parametrize(("schedule", "step"), [("gpipe", -1), ("1f1b", 1)])
def test_backwards_run_downwards_under_gpipe_and_upwards_under_1f1b(
    trained: Trained, schedule: str, step: int
) -> None:
    for outcomes in trained[schedule]:
        for sizes, outcome in zip(SIZES, outcomes, strict=True):
            backwards = [event for event in outcome.events if event.startswith("B")]
            assert backwards == [f"B{i}" for i in range(len(sizes))][::step]


def test_the_last_backward_is_announced_once_right_before_it(trained: Trained) -> None:
    for schedule, stages in trained.items():
        for outcomes in stages:
            for sizes, outcome in zip(SIZES, outcomes, strict=True):
                last = "B0" if schedule == "gpipe" else f"B{len(sizes) - 1}"
                assert outcome.events[-2:] == ["last", last]
                assert outcome.events.count("last") == 1


class EvaluatingWork(StackWork):
    """Keep the outputs' values, not the outputs."""

    def __init__(self, layers: nn.Sequential, sizes: Sequence[int]) -> None:
        super().__init__(layers, sizes)
        self.values: list[list[float]] = []

    def finish(self, micro_batch: int, outputs: Payload) -> None:
        (output,) = outputs.tensors
        self.values += output.tolist()


def evaluate(sizes: Sequence[int], with_grad: bool) -> tuple[bool, list[str], StageReport]:
    """Run forwards; tell whether they gave the plain outputs, and what they left alive."""
    stage, length, group = place()
    model = stage_model()
    work = EvaluatingWork(layers_of(model, stage, length), sizes)
    program = forward_only((1,) * length, len(sizes))[stage]
    with torch.set_grad_enabled(with_grad):
        report = StageRun(program, work, connect(group), sizes).run()
    values = torch.tensor(work.values, dtype=torch.float64)
    with torch.no_grad():
        right = stage < length - 1 or torch.allclose(values, model(torch.cat(work.x)), rtol=1e-12)
    return right, work.alive, report


@pytest.mark.parametrize("with_grad", [False, True])
def test_forward_only_gives_the_plain_outputs_and_keeps_nothing(
    run_stages: RunStages, with_grad: bool
) -> None:
    for right, alive, report in run_stages(evaluate, (2, 1, 3, 2), with_grad):
        assert right
        assert alive == []
        assert report.peak_in_flight == 0


class MeanHead(nn.Module):
    """Classify the mean over positions, (samples, positions, 8) -> (samples, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3).double()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden.tanh().mean(dim=1))


def change_shapes() -> list[dict[str, float]]:
    """Take steps of other lengths over the same links, the third with the first layer frozen."""
    stage, length, group = place()
    links, differences = connect(group), []
    for num_positions, frozen in ((3, False), (5, False), (2, True), (4, False)):
        torch.manual_seed(0)
        first = nn.Linear(NUM_FEATURES, 8).double().requires_grad_(not frozen)
        model = nn.Sequential(first, MeanHead())
        layers = layers_of(model, stage, length)
        work = StackWork(layers, (2, 1))
        positions = torch.arange(1.0, num_positions + 1, dtype=torch.float64)
        work.x = tuple(x[:, None] * positions[:, None] for x in work.x)
        StageRun(SCHEDULES["gpipe"](length, 2)[stage], work, links, (2, 1)).run()
        differences.append(compare(model, layers, work))
    return differences


def test_each_step_may_have_shapes_and_frozen_layers_of_its_own(two_ranks: Pool) -> None:
    for name, differences in zip(("0.", "1.linear."), two_ranks.run(change_shapes), strict=True):
        for step in differences:
            assert list(step) == [f"{name}weight", f"{name}bias"]
            assert max(step.values()) <= 1.0


def cut_the_graph() -> list[float]:
    """Let the second stage ignore what it received."""
    stage, length, group = place()
    weight = nn.Parameter(torch.ones(NUM_FEATURES, 3, dtype=torch.float64))

    def multiply(hidden: Tensor) -> Tensor:
        return hidden @ weight if stage == 0 else hidden.detach() * weight[0]

    work = StackWork(multiply, (2, 1))
    StageRun(SCHEDULES["1f1b"](length, 2)[stage], work, connect(group), (2, 1)).run()
    assert weight.grad is not None
    return weight.grad.flatten().tolist()


def test_a_stage_that_ignores_its_input_sends_zeros_to_the_one_that_waits(two_ranks: Pool) -> None:
    first, second = two_ranks.run(cut_the_graph)
    assert first == [0.0] * 3 * NUM_FEATURES
    assert any(second)
