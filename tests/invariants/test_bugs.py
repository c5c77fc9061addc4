"""Keep fixed bugs fixed, each with its story."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from torch import nn
from torch.utils.data import TensorDataset

from pipetransformer import (
    FreezeContext,
    FreezeSchedule,
    PipelinePlan,
    PlanSituation,
    PolicyError,
    Trainer,
    fastest_plan,
    launch,
)
from pipetransformer.checkpoint.resume import note_launchers, resumes
from pipetransformer.config import TrainConfig
from pipetransformer.processes.world import connect
from tests.forced import check, train_watched
from tests.models import tiny_data, tiny_model
from tests.pool import Pool
from tests.scenario import PEAK_LEARNING_RATE, Deep, Scenario, Shape, slow_start


def evaluate_one_example() -> dict[str, float]:
    """Evaluate fewer examples than there are replicas, before any training."""
    x, y = tiny_data().tensors
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        global_batch_size=8,
        pipeline_length=1,
        progress=False,
    ) as trainer:
        return trainer.evaluate(TensorDataset(x[:1], y[:1]))


@pytest.mark.slow
def test_a_replica_without_examples_takes_part_in_evaluation(four_ranks: Pool) -> None:
    # split() of an empty tensor yields one empty piece, which was cut into zero micro-batches; and
    # a trainer that had not trained yet had no stage to evaluate with.
    x, y = tiny_data().tensors
    output = tiny_model()(x[:1])
    expected = nn.functional.cross_entropy(output, y[:1]).item()
    for metrics in four_ranks.run(evaluate_one_example):
        assert abs(metrics["loss"] - expected) < 1e-9
        assert metrics["accuracy"] == float(output.argmax() == y[0])


def failing_policy(context: FreezeContext) -> None:
    """Fail after the first epoch."""
    if context.epoch:
        raise KeyError("no such layer")


def test_processes_that_are_started_again_because_another_node_s_failed_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun counts a restart where a process failed, and there alone. The other nodes' processes
    # took themselves for a second run, and refused the folder that their own run was in.
    config = TrainConfig(folder=tmp_path, checkpoint_every_epochs=1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not resumes(config)
    note_launchers(tmp_path, connect("cpu", timeout_s=60.0))
    (tmp_path / "journal.jsonl").touch()
    assert resumes(config)


def train_with_failing_policy() -> str:
    """Return what this rank hears of a policy that fails on rank 0."""
    with (
        pytest.raises(PolicyError) as caught,
        Trainer(
            tiny_model(),
            tiny_data(),
            loss_fn=nn.CrossEntropyLoss(),
            global_batch_size=8,
            epochs=2,
            freeze=failing_policy,
            progress=False,
        ) as trainer,
    ):
        trainer.fit()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_policy_that_fails_on_rank_0_is_heard_of_on_every_rank(two_ranks: Pool) -> None:
    # Rank 0 raised and left; the others waited in the broadcast until its timeout.
    first, second = two_ranks.run(train_with_failing_policy)
    text = "the freeze policy failing_policy raised KeyError at step 4: 'no such layer'"
    text += f" ({__file__}, line {failing_policy.__code__.co_firstlineno + 3})"
    assert (first, second) == (f"PolicyError: {text}", f"PolicyError: rank 0: {text}")


def train_with_few_active_layers() -> int:
    """Freeze all but the head under a pipeline length of 2."""
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        global_batch_size=8,
        epochs=2,
        pipeline_length=2,
        freeze=FreezeSchedule([0, 5]),
        progress=False,
    ) as trainer:
        trainer.fit()
        assert trainer.decision is not None
        return trainer.decision.plan.length


def test_a_set_length_gives_way_where_fewer_layers_are_active(two_ranks: Pool) -> None:
    # The planner found no pipeline of two stages over one layer, and the run died in its middle.
    assert two_ranks.run(train_with_few_active_layers) == [1, 1]


def plan_too_low(situation: PlanSituation) -> PipelinePlan:
    """Plan as if nothing were frozen."""
    request = dataclasses.replace(situation.request, num_frozen=0)
    return fastest_plan(dataclasses.replace(situation, request=request))


def test_a_plan_that_trains_frozen_layers_is_refused() -> None:
    # Its frozen layers ran twice, once in the prefix and once in the first stage.
    with (
        pytest.raises(ValueError, match=r"first boundary is 0, but with 2 frozen layers .* is 2"),
        Trainer(
            tiny_model(),
            tiny_data(),
            loss_fn=nn.CrossEntropyLoss(),
            progress=False,
            freeze=FreezeSchedule([2]),
            plan=plan_too_low,
        ) as trainer,
    ):
        trainer.fit()


def test_a_policy_is_shown_the_learning_rate_at_every_step(two_ranks: Pool) -> None:
    # It was shown 0 before the first step, and wherever all of stage 0 was the user's own fixed
    # layers: a rule that waits for the warm-up's end never saw it.
    scenario = Scenario(
        {0: Shape(1, 2), 2: Shape(2, 2, cuts=(3,))},
        {0: 0},
        settings={"epochs": 1},
        deep=Deep(fixed=("embedding", "mix0", "mlp0")),
    )
    contexts = two_ranks.run(train_watched, scenario)[0].extra["contexts"]
    assert [context["learning_rate"] for context in contexts] == pytest.approx(
        [PEAK_LEARNING_RATE * slow_start(step, 5) for step in range(5)]
    )


def test_a_stage_may_need_a_gradient_in_some_micro_batches_only(two_ranks: Pool) -> None:
    # All that stage 0 trains is an expert: the output of a micro-batch that visits it needs a
    # gradient, that of another none. The sender raised, and the receiver waited for its time.
    scenario = Scenario(
        {0: Shape(2, 3, cuts=(7,))},
        {0: 2},
        settings={"epochs": 1, "step_timeout_s": 5.0},
        deep=Deep(fixed=("mix2",)),
    )
    check(two_ranks, scenario)


def thread_names() -> list[str]:
    """Name the threads of this process, native ones included."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def threads_after_a_run(folder: str) -> None:
    """Train, close, and note the names of this process's threads that are left."""
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=FreezeSchedule([0, 2]),
        epochs=2,
        global_batch_size=8,
        folder=Path(folder, "run"),
        checkpoint_every_epochs=1,
        progress=False,
    ) as trainer:
        trainer.fit()
        assert "gloo" in " ".join(thread_names())
    Path(folder, f"rank{trainer.world.rank}").write_text("\n".join(thread_names()))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not name threads in /proc")
def test_no_thread_of_a_closed_world_is_left(tmp_path: Path) -> None:
    # The trainer kept the default group while it was alive itself, and torch._dynamo, which the
    # first optimizer imports, for good. One process in some hundred aborted at its end, when a
    # thread of gloo met an interpreter that was gone.
    launch(threads_after_a_run, (str(tmp_path),), num_slots=2)
    for rank in range(2):
        names = (tmp_path / f"rank{rank}").read_text()
        assert names and "gloo" not in names
