"""Prove that Ctrl-C ends with a line that says where the run stands, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipetransformer import Callback, Trainer
from tests.helpers.models import tiny_trainer
from tests.helpers.pool import Pool

GOES_ON = "with train(resume_from_checkpoint=True) of pipetransformer.hf"


class Interrupts(Callback):
    """Press Ctrl-C after so many steps."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, trainer: Trainer, result: Any) -> None:
        if trainer.global_step == self._after:
            raise KeyboardInterrupt


def make_trainer(after: int, **settings: Any) -> Trainer:
    return tiny_trainer(epochs=4, global_batch_size=6, callbacks=[Interrupts(after)], **settings)


def said(after: int, *, steps: bool = False, **settings: Any) -> str:
    """Interrupt a run; return what the interrupt says."""
    trainer = make_trainer(after, **settings)
    with pytest.raises(KeyboardInterrupt, match=".*") as caught, trainer:
        while steps:
            trainer.step()
        trainer.fit()
    return str(caught.value)


@pytest.mark.parametrize("steps", [False, True], ids=["fit", "steps"])
def test_an_interrupt_names_the_step_and_the_newest_checkpoint(
    tmp_path: Path, steps: bool
) -> None:
    saved: dict[str, Any] = {"folder": tmp_path, "checkpoint_every_steps": 3, "resume": "auto"}
    assert said(8, steps=steps, **saved) == (
        f"stopped at step 8; the newest checkpoint is step-00000006: continue it with "
        f"resume='auto', or {GOES_ON}"
    )
    assert said(10, steps=steps, **saved).startswith(
        "stopped at step 10; the newest checkpoint is step-00000009"
    )


def test_an_interrupt_before_the_first_checkpoint_says_so(tmp_path: Path) -> None:
    assert said(2, folder=tmp_path, checkpoint_every_steps=3) == (
        "stopped at step 2, before the first checkpoint; resume='auto' starts the run anew"
    )


def test_an_interrupt_of_a_run_that_saves_nothing_says_what_it_would_have_needed() -> None:
    assert said(2).startswith("stopped at step 2; there is no checkpoint: ")


def test_an_interrupt_after_the_run_s_end_says_nothing() -> None:
    with pytest.raises(KeyboardInterrupt, match="^$"), make_trainer(-1) as trainer:
        trainer.fit()
        raise KeyboardInterrupt


def said_by_rank(folder: str) -> str:
    return said(4, folder=folder, checkpoint_every_steps=3)


def test_of_several_ranks_the_main_one_says_it(two_ranks: Pool, tmp_path: Path) -> None:
    first, second = two_ranks.run(said_by_rank, str(tmp_path))
    two_ranks.close()  # As after any failure: the interrupted run's groups are left.
    assert first.startswith("stopped at step 4; the newest checkpoint is step-00000003")
    assert second == ""
