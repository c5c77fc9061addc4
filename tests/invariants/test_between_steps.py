"""Prove what scripts may do with a model between two steps, and that the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipetransformer import Trainer
from tests.helpers.inspection import model_of, stage_of
from tests.helpers.loops import TINY, make_trainer
from tests.helpers.models import Block, tiny_data
from tests.helpers.pool import Pool


def swap(trainer: Trainer) -> None:
    """Put another block into the model."""
    model_of(trainer)[2] = Block(8, 0.0).double()


def unfreeze(trainer: Trainer) -> None:
    """Let a layer train that was frozen."""
    model_of(trainer)[1].requires_grad_(True)


def freeze(trainer: Trainer) -> None:
    """Freeze a layer by hand."""
    model_of(trainer)[4].requires_grad_(False)


def hook(trainer: Trainer) -> None:
    """Hook a parameter late."""
    model_of(trainer)[4].inner.weight.register_hook(torch.sign)


def assign(trainer: Trainer) -> None:
    """Load other parameter objects."""
    model = model_of(trainer)
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (swap, "modules of the model were added or replaced"),
        (unfreeze, "requires_grad of parameter '1.* was changed .* let freeze= decide"),
        (freeze, "requires_grad of parameter '4.* was changed"),
        (hook, "parameter '4.inner.weight' was given a hook"),
        (assign, "parameter '.*' was replaced between two steps"),
    ],
)
def test_what_a_step_would_not_honour_is_refused(
    act: Callable[[Trainer], None], message: str
) -> None:
    # Layers that were unfrozen never trained, a freeze was undone at the next transition, a block
    # that was put in was saved untrained; nothing said so.
    with make_trainer(replace(TINY, frozen=(2,))) as trainer:
        trainer.step()
        act(trainer)
        before = [p.detach().clone() for p in stage_of(trainer).trained.parameters.values()]
        with pytest.raises(ValueError, match=message):
            trainer.step()
        now = list(stage_of(trainer).trained.parameters.values())
        assert all(map(torch.equal, now, before))


def test_gathered_weights_of_the_middle_of_a_run_cannot_be_used_later(two_ranks: Pool) -> None:
    # What rank 0 does not train stayed in its model after `state_dict()`, unguarded and old after
    # the next step: using the model gave a number of no model that ever was.
    assert two_ranks.run(use_the_model_between_steps) == ["released", "not asked"]


def use_the_model_between_steps() -> str:
    """Gather, step, and call rank 0's model."""
    job = replace(TINY, settings={"pipeline_length": 2, "micro_batches": 2})
    with make_trainer(job) as trainer:
        trainer.step()
        state = trainer.state_dict()
        kept = {name: t.clone() for name, t in state.items()}
        trainer.step()
        # Of one step, all of them, whatever is trained since.
        assert all(torch.equal(state[name], t) for name, t in kept.items())
        if not trainer.world.is_main:
            return "not asked"
        with pytest.raises(RuntimeError, match=r"is released: this rank does not hold it"):
            model_of(trainer)(tiny_data().tensors[0])
        return "released"


def test_fit_goes_on_where_steps_have_stopped() -> None:
    # There was no public way to ask how far a run had come.
    with make_trainer(TINY) as trainer, make_trainer(TINY) as other:
        assert (trainer.global_step, trainer.max_steps, trainer.is_over) == (0, 8, False)
        for done in range(1, 4):
            trainer.step()
            assert trainer.global_step == done
        trainer.fit()
        other.fit()
        assert (trainer.global_step, trainer.max_steps, trainer.is_over) == (8, 8, True)
        for name, tensor in trainer.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
        with pytest.raises(RuntimeError, match="all 2 epochs are done"):
            trainer.step()
