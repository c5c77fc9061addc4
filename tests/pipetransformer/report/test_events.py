"""Prove that every rank hears of the same events, and that what one says holds for all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from freeze import FreezeSchedule
from pipetransformer import (
    Callback,
    CallbackError,
    Change,
    Decision,
    FitReport,
    StepResult,
    Trainer,
)
from tests.helpers.marks import slow
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool


class Diary(Callback):
    """Write down what is heard."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[Mapping[str, Any]] = []

    def on_train_begin(self, trainer: Trainer) -> None:
        self.lines.append(f"begin at {trainer.global_step}")

    def on_freeze(self, trainer: Trainer, decision: Decision) -> None:
        self.lines.append(f"freeze {decision.num_frozen}")

    def on_transition(self, trainer: Trainer, change: Change) -> None:
        self.lines.append(f"transition before step {change.decision.step}")

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.lines.append(f"step {trainer.global_step}")

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.lines.append(f"evaluate {','.join(metrics)}")

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        assert (folder / "manifest.json").exists()
        self.lines.append(f"save {folder.name}")

    def on_log(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        assert trainer.is_main_process
        self.records.append(record)

    def on_train_end(self, trainer: Trainer, report: FitReport) -> None:
        assert report is trainer.report
        self.lines.append("end")


def trainer_of(*callbacks: Callback, length: int = 1, **settings: Any) -> Trainer:
    """Build a trainer of two epochs of three steps, with a layer frozen in the second."""
    return Trainer(
        tiny_model(),
        tiny_data(num_samples=24),
        eval_dataset=tiny_data(num_samples=6),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=FreezeSchedule((0, 1)),
        callbacks=list(callbacks),
        pipeline_length=length,
        **{"epochs": 2, "global_batch_size": 8, "progress": False, **settings},
    )


def diary_of(length: int, folder: Path | None) -> tuple[list[str], list[str]]:
    """Train; return what was heard, and the kinds of the records."""
    diary = Diary()
    settings = {} if folder is None else {"folder": folder, "checkpoint_every_epochs": 1}
    with trainer_of(diary, length=length, **settings) as trainer:
        trainer.fit()
    return diary.lines, [record["kind"] for record in diary.records]


EXPECTED = [
    "begin at 0",
    "transition before step 0",
    *("step 1", "step 2", "step 3", "evaluate accuracy,loss"),
    *("freeze 1", "transition before step 3"),
    *("step 4", "step 5", "step 6", "evaluate accuracy,loss"),
    "end",
]


def test_events_come_in_the_same_order_on_every_rank(two_ranks: Pool) -> None:
    (lines, kinds), (others, no_kinds) = two_ranks.run(diary_of, 2, None)
    assert lines == others == EXPECTED
    assert no_kinds == []
    steps = ["step"] * 3
    assert [kind for kind in kinds if kind != "outcome"] == [
        *("decision", "transition", *steps, "epoch", "evaluation"),
        *("decision", "transition", *steps, "epoch", "evaluation", "end"),
    ]


def test_every_rank_hears_of_a_complete_checkpoint(two_ranks: Pool, tmp_path: Path) -> None:
    (lines, _), (others, _) = two_ranks.run(diary_of, 1, tmp_path)
    assert lines == others
    saves = [line for line in lines if line.startswith("save")]
    assert saves == ["save step-00000003", "save step-00000006"]
    assert [line for line in lines if line not in saves] == EXPECTED


class Faulty(Callback):
    """Raise in an event, on one rank."""

    def __init__(self, event: str, rank: int) -> None:
        self._rank = rank
        setattr(self, event, self._fail)

    def _fail(self, trainer: Trainer, *facts: Any) -> None:
        if trainer.world.rank == self._rank:
            raise KeyError("no such key")


def failure_of(event: str, rank: int, folder: Path) -> list[Any]:
    """Train with a callback that raises; return the error, its cause, and what was heard."""
    diary = Diary()
    settings = {"folder": folder, "checkpoint_every_epochs": 1}
    with pytest.raises(CallbackError, match="Faulty") as caught:
        with trainer_of(Faulty(event, rank), diary, **settings) as trainer:
            trainer.fit()
    return [str(caught.value), type(caught.value.__cause__).__name__, trainer.global_step]


@pytest.mark.parametrize(
    ("event", "rank", "num_steps"),
    [
        ("on_train_begin", 1, 0),
        slow("on_transition", 0, 0),
        slow("on_freeze", 1, 3),
        ("on_step_end", 1, 1),
        slow("on_evaluate", 1, 3),
        ("on_train_end", 0, 6),
    ],
)
def test_a_callback_that_raises_on_one_rank_ends_all_by_name(
    two_ranks: Pool, tmp_path: Path, event: str, rank: int, num_steps: int
) -> None:
    text = f"rank {rank}: Faulty.{event} raised KeyError: 'no such key'"
    causes = ["KeyError" if rank == own else "NoneType" for own in range(2)]
    found = two_ranks.run(failure_of, event, rank, tmp_path)
    assert found == [[text, cause, num_steps] for cause in causes]


def test_what_a_listener_to_records_raises_ends_all_ranks_at_the_next_event(
    two_ranks: Pool, tmp_path: Path
) -> None:
    text = "rank 0: Faulty.on_log raised KeyError: 'no such key'"
    # The first record is of the start's transition.
    found = two_ranks.run(failure_of, "on_log", 0, tmp_path)
    assert found == [[text, "KeyError", 0], [text, "NoneType", 0]]


class Stopper(Callback):
    """Ask in an event, on one rank, for the end."""

    def __init__(self, event: str, rank: int, at_step: int) -> None:
        self._rank, self._step = rank, at_step
        setattr(self, event, self._stop)

    def _stop(self, trainer: Trainer, *facts: Any) -> None:
        if trainer.world.rank == self._rank and trainer.global_step == self._step:
            trainer.stop()


def stopped(event: str, rank: int, at_step: int, folder: Path) -> list[Any]:
    """Train until a rank asks for the end, then go on; return when that was, and all losses."""
    settings: dict[str, Any] = {"folder": folder, "checkpoint_every_epochs": 2, "resume": "auto"}
    diary = Diary()
    with trainer_of(Stopper(event, rank, at_step), diary, **settings) as trainer:
        trainer.fit()
        ends = [trainer.global_step, trainer.is_over, diary.lines[-1]]
        saves = [line for line in diary.lines if line.startswith("save")]
    with trainer_of(diary, **settings) as trainer:
        trainer.fit()
        weights = {name: t.clone() for name, t in trainer.state_dict().items()}
    return [ends, saves, diary.lines[-1], trainer.global_step, weights]


def trained() -> Any:
    with trainer_of() as trainer:
        trainer.fit()
        return {name: t.clone() for name, t in trainer.state_dict().items()}


@pytest.fixture(scope="module")
def whole(two_ranks: Pool) -> dict[str, Tensor]:
    """Return the weights of a run that nothing stops."""
    weights: dict[str, Tensor] = two_ranks.run(trained)[0]
    return weights


@pytest.mark.parametrize(
    ("event", "at_step"), [slow("on_step_end", 2), slow("on_evaluate", 3), ("on_transition", 3)]
)
def test_stop_on_one_rank_ends_all_after_the_step_and_a_resume_goes_on(
    two_ranks: Pool, tmp_path: Path, whole: dict[str, Tensor], event: str, at_step: int
) -> None:
    # A transition belongs to the step that it comes before.
    last = at_step + (event == "on_transition")
    for rank, found in enumerate(two_ranks.run(stopped, event, 1, at_step, tmp_path)):
        ends, saves, last_line, num_steps, weights = found
        assert ends == [last, True, "end"]
        assert saves == [f"save step-{last:08d}"]
        assert (last_line, num_steps) == ("end", 6)
        if rank == 0:
            assert weights.keys() == whole.keys()
            for name, tensor in weights.items():
                # Bit by bit is another test's claim: K, M may be chosen anew.
                assert (tensor - whole[name]).abs().max() <= 1e-9, name


def stopped_from_outside(rank: int) -> list[Any]:
    """Ask for the end between steps, without any callback."""
    with trainer_of() as trainer:
        for _ in range(2):
            trainer.step()
        if trainer.world.rank == rank:
            trainer.stop()
        while not trainer.is_over:
            trainer.step()
        with pytest.raises(RuntimeError, match="epochs are done, or the run was stopped"):
            trainer.step()
        return [trainer.global_step]


def test_stop_from_outside_makes_the_coming_step_the_last_on_all_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(stopped_from_outside, 1) == [[3], [3]]
    assert stopped_from_outside(0) == [3]


def on_rank_0_alone() -> str:
    callbacks = [Diary()] if os.environ["RANK"] == "0" else []
    with pytest.raises(ValueError, match="give all ranks the same") as caught:
        trainer_of(*callbacks)
    return str(caught.value)


def test_ranks_with_other_callbacks_are_refused(two_ranks: Pool) -> None:
    for text in two_ranks.run(on_rank_0_alone):
        assert text.startswith("callbacks are [['Diary'], []], rank by rank")


@pytest.mark.parametrize("callback", [print, Diary, None])
def test_what_is_no_callback_is_refused(callback: Any) -> None:
    with pytest.raises(TypeError, match=r"callbacks\[0\] is .*; give instances of Callback"):
        trainer_of(callback)
