"""Prove that transitions and resumes lose nothing: no sample, no decision, no bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from autodp.messages import gather_json
from autopipe.schedule import draw, one_f_one_b
from freeze import FreezeSchedule
from freeze.policy import FreezeContext, FreezePolicy
from pipetransformer import Trainer
from pipetransformer.elastic.deployment import Deployment
from tests.helpers.inspection import layered_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import NUM_SAMPLES, tiny_data, tiny_model
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.resumes import (
    EVERY_2_STEPS,
    Interrupted,
    assert_resumes_with_the_same_bits,
    fit_until,
    leave_interrupted,
    make_trainer,
    resume,
    uninterrupted,
)
from tests.helpers.scenario import Scenario, Shape, assert_equal, assert_same_bits, merge

SHRINKING = {0: Shape(2, 3), 5: Shape(2, 2), 7: Shape(1, 2)}


@measuring(never)
def fit_until_transition(scenario: Scenario, folder: str, number: int) -> None:
    """Train until an interruption within a transition, after its decision has been recorded."""
    change, calls = Deployment.change, []

    def interrupted_change(self: Deployment, decision: Any) -> int:
        calls.append(decision)
        if len(calls) > number:
            raise Interrupted
        return change(self, decision)

    Deployment.change = interrupted_change  # type: ignore[method-assign]
    try:
        with pytest.raises(Interrupted), make_trainer(scenario, folder) as trainer:
            trainer.fit()
    finally:
        Deployment.change = change  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("last_step", [6, 9, 12])
def test_a_resumed_run_ends_with_the_uninterrupted_one_s_bits(
    two_ranks: Pool, tmp_path: Path, last_step: int
) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32")
    assert_resumes_with_the_same_bits(two_ranks, tmp_path, scenario, fit_until, last_step)


@pytest.mark.parametrize("last_step", [slow(3), slow(7), slow(9), 14])
def test_a_run_resumed_within_an_epoch_ends_with_the_same_bits_and_report(
    two_ranks: Pool, tmp_path: Path, last_step: int
) -> None:
    settings = {**EVERY_2_STEPS, "evaluate_every_epochs": 1}
    scenario = Scenario(
        SHRINKING, frozen=(0, 2, 3), dtype="float32", dropout=0.2, settings=settings
    )
    assert_resumes_with_the_same_bits(two_ranks, tmp_path, scenario, fit_until, last_step)


@final
class Remembering(FreezePolicy):
    """Freeze nothing, and remember the norms that were shown."""

    signals = frozenset({"gradient_norm"})

    def __init__(self) -> None:
        self.shown: list[list[float | None]] = []

    def decide(self, context: FreezeContext) -> None:
        """Note the norms."""
        self.shown.append([layer.gradient_norm for layer in context.layers])

    def state_dict(self) -> dict[str, Any]:
        """Return all norms so far."""
        return {"shown": self.shown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the list."""
        self.shown = list(state["shown"])


@pytest.mark.parametrize("last_step", [5, 11])
@pytest.mark.slow
def test_a_policy_s_state_and_the_norms_of_half_an_interval_survive_a_resume(
    two_ranks: Pool, tmp_path: Path, last_step: int
) -> None:
    settings = {**EVERY_2_STEPS, "freeze": Remembering(), "freeze_interval_steps": 3}
    scenario = Scenario({0: Shape(2, 2)}, dtype="float32", settings=settings)
    assert_resumes_with_the_same_bits(two_ranks, tmp_path, scenario, fit_until, last_step)


@pytest.mark.slow
def test_four_replicas_resume_with_the_same_bits(four_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(4, 2), 6: Shape(1, 2)}, frozen=(0, 1), dtype="float32")
    assert_resumes_with_the_same_bits(four_ranks, tmp_path, scenario, fit_until, 12)


def test_a_run_killed_within_a_transition_resumes_with_the_same_bits(
    two_ranks: Pool, tmp_path: Path
) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32")
    assert_resumes_with_the_same_bits(two_ranks, tmp_path, scenario, fit_until_transition, 2)


@pytest.mark.parametrize("pattern", ["*_weights-*", slow("*_optimizer-*"), slow("manifest.json")])
def test_a_run_whose_newest_checkpoint_went_bad_resumes_from_the_one_before(
    two_ranks: Pool, tmp_path: Path, pattern: str
) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32", settings=EVERY_2_STEPS)
    whole = uninterrupted(two_ranks, scenario, tmp_path)
    leave_interrupted(two_ranks, scenario, tmp_path / "cut", 9)
    file = sorted((tmp_path / "cut/checkpoints/step-00000008").glob(pattern))[0]
    data = file.read_bytes()
    file.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    assert_same_bits(merge(two_ranks.run(resume, scenario, str(tmp_path / "cut"))), whole)
    # The damaged one was replaced when its step was reached again, and aged.
    left = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir())
    assert left == ["latest", "step-00000014", "step-00000015"]


def test_a_damaged_journal_does_not_stop_a_resume(two_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32")
    whole = uninterrupted(two_ranks, scenario, tmp_path)
    leave_interrupted(two_ranks, scenario, tmp_path / "cut", 9)
    journal = tmp_path / "cut" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert b'"step": 7,' in lines[7]
    journal.write_bytes(b"".join([*lines[:7], lines[7].replace(b"1f1b", b"1f1c"), *lines[8:]]))
    assert_same_bits(merge(two_ranks.run(resume, scenario, str(tmp_path / "cut"))), whole)


@pytest.mark.parametrize(("saved_on", "length"), [(2, 2), slow(4, 4)])
@pytest.mark.parametrize("resumed_on", [slow(1), slow(2), 4])
def test_a_run_resumes_within_an_epoch_on_any_number_of_processes(  # noqa: PLR0913
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path, saved_on: int, length: int, resumed_on: int
) -> None:
    scenario = Scenario({0: Shape(length, 3)}, frozen=(0, 2, 3), settings=EVERY_2_STEPS)
    pools = {2: two_ranks, 4: four_ranks}
    leave_interrupted(pools[saved_on], scenario, tmp_path / "cut", 7)
    smaller = dataclasses.replace(scenario, shapes={0: Shape(min(2, resumed_on), 1)})
    if resumed_on == 1:
        outcomes = [resume(smaller, str(tmp_path / "cut"))]
    else:
        outcomes = pools[resumed_on].run(resume, smaller, str(tmp_path / "cut"))
    reference = plain(scenario)
    assert_equal(dataclasses.replace(merge(outcomes), losses=reference.losses), reference)


@pytest.mark.parametrize("slots_per_node", [1, 2])
@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_nodes(
    four_ranks: Pool, tmp_path: Path, slots_per_node: int
) -> None:
    scenario = Scenario({0: Shape(4, 3)}, frozen=(0, 2, 3), settings=EVERY_2_STEPS)
    four_ranks.run(fit_until, scenario, str(tmp_path), 7)
    spread = dataclasses.replace(scenario, slots_per_node=slots_per_node)
    outcome = merge(four_ranks.run(resume, spread, str(tmp_path)))
    reference = plain(scenario)
    assert_equal(dataclasses.replace(outcome, losses=reference.losses), reference)


def test_the_journal_wins_over_the_planner_after_a_resume(two_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32")
    whole = uninterrupted(two_ranks, scenario, tmp_path)
    leave_interrupted(two_ranks, scenario, tmp_path / "cut", 9)
    other = dataclasses.replace(scenario, shapes={**SHRINKING, 8: Shape(2, 2), 9: Shape(1, 2)})
    assert_same_bits(merge(two_ranks.run(resume, other, str(tmp_path / "cut"))), whole)


class Logged(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Note which samples are read."""

    def __init__(self) -> None:
        self.data = tiny_data()
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.data[index]


def read_by_epoch(scenario: Scenario) -> list[list[int]]:
    """Return the samples read in each epoch, by all ranks together."""
    data, epochs = Logged(), []
    with Trainer(
        tiny_model(),
        data,
        loss_fn=nn.CrossEntropyLoss(),
        cache=False,
        freeze=FreezeSchedule(scenario.frozen),
        **scenario.options,
    ) as trainer:
        trainer.begin()
        data.read.clear()
        for _ in range(trainer.config.epochs):
            for _ in range(5):
                trainer.step()
            gathered = gather_json(data.read, group=trainer.world.group)
            epochs.append(sorted(index for one in gathered for index in one))
            data.read.clear()
    return epochs


def test_every_epoch_reads_every_sample_once_across_transitions(four_ranks: Pool) -> None:
    scenario = Scenario({0: Shape(4, 2), 3: Shape(2, 2), 8: Shape(1, 1), 11: Shape(2, 3)})
    for epochs in four_ranks.run(read_by_epoch, scenario):
        assert epochs == [list(range(NUM_SAMPLES))] * 3


def held_sublayers(scenario: Scenario) -> list[int]:
    """Return which sublayers each rank holds after a step in the second epoch."""
    with make_trainer(scenario, None, checkpoint_every_epochs=0) as trainer:
        for _ in range(6):
            trainer.step()
        model = layered_of(trainer)
        return [
            i
            for i in range(len(model.sublayers))
            if not any(t.is_meta for t in model.tensors(i).values())
        ]


def test_a_rank_holds_its_own_layers_and_nothing_else(two_ranks: Pool) -> None:
    assert two_ranks.run(held_sublayers, Scenario({0: Shape(2, 2)})) == [[0, 1, 2], [3, 4, 5]]
    frozen = Scenario({0: Shape(2, 2)}, frozen=(0, 2))
    assert two_ranks.run(held_sublayers, frozen) == [[0, 1, 2, 3], [4, 5]]


def trace_one_step() -> tuple[str, list[int], float]:
    """Train one traced step; return its grid, the peaks of kept micro-batches and the loss."""
    scenario = Scenario({0: Shape(2, 3)})
    with Trainer(
        tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), **scenario.options
    ) as trainer:
        trace = trainer.trace_step()
        peaks = [
            max(span.num_graphs for span in trace.spans if span.stage == stage)
            for stage in range(2)
        ]
        return trace.grid(), peaks, trainer.step().loss


def test_a_traced_step_shows_the_first_pipelines_schedule_on_every_rank(two_ranks: Pool) -> None:
    outcomes = two_ranks.run(trace_one_step)
    for grid, peaks, _ in outcomes:
        assert grid == draw(one_f_one_b(2, 3))
        assert peaks == [2, 1]
