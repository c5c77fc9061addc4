"""Keep wrong numbers that were once trained with right, or refused; each with its story."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.loops import Job, assert_as_loop, loop, make_trainer, train
from tests.models import tiny_data, tiny_model
from tests.pool import Pool

Named = Sequence[tuple[str, nn.Parameter]]


def adamw(named: Named) -> Optimizer:
    """Build a fused AdamW, which works on memory whatever the strides."""
    return AdamW([p for _, p in named], lr=1e-3, fused=True)


def sgd(named: Named) -> Optimizer:
    """Build SGD with momentum."""
    return SGD([p for _, p in named], lr=0.1, momentum=0.9)


TINY = Job(tiny_model, tiny_data, sgd, settings={"pipeline_length": 1, "micro_batches": 2})


def images() -> TensorDataset:
    """Make images of two classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(26, 3, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.mean(dim=(1, 2, 3)) > 0).long())


def convolutions() -> nn.Module:
    """Build convolutions whose weights are channels_last."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Sequential(nn.Conv2d(c, 4, 3, padding=1), nn.GELU()) for c in (3, 4, 4)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        model = nn.Sequential(*body, head)
    return model.double().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("length", [1, 2])
def test_channels_last_parameters_train_as_in_a_plain_loop(two_ranks: Pool, length: int) -> None:
    # A summed gradient came back contiguous, whatever its parameter's strides; so did layers that
    # moved. Fused AdamW reads both as memory: the first convolution was off by 4.7e-2 after nine
    # steps, and differently so on each replica.
    job = Job(convolutions, images, adamw, frozen=(0, 1, 0), settings={"epochs": 3})
    job = replace(job, settings={**job.settings, "pipeline_length": length})
    for result in two_ranks.run(train, job):
        assert_as_loop(replace(result, weights=loop(job).weights), loop(job))
    assert_as_loop(two_ranks.run(train, job)[0], loop(job))


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    """Compute in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@pytest.mark.parametrize(
    ("surrounding", "message"),
    [
        (autocast, r"torch.autocast\('cpu'\) is on around the Trainer"),
        (torch.no_grad, r"torch.no_grad\(\) is on around the Trainer"),
        (torch.inference_mode, r"torch.inference_mode\(\) is on around the Trainer"),
    ],
)
def test_modes_that_would_freeze_the_weights_are_refused(surrounding: Any, message: str) -> None:
    # An autocast keeps its low-precision weights until it is left: every step trained with the
    # first step's, and the loss stayed where it was. Without gradients nothing trained at all.
    with make_trainer(TINY) as trainer:
        with surrounding(), pytest.raises(ValueError, match=message):
            trainer.fit()
        with surrounding(), pytest.raises(ValueError, match=message):
            trainer.step()
        assert trainer.global_step == 0
        with torch.no_grad():
            trainer.evaluate(tiny_data())
        trainer.fit()
    assert trainer.is_over


def noted_model() -> nn.Module:
    """Note on some weights that they are not to decay."""
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter._no_decay = "inner" in name  # type: ignore[attr-defined]
    return model


def decay_by_note(named: Named) -> Optimizer:
    """Let the notes decide what decays."""
    plain = [p for _, p in named if getattr(p, "_no_decay", False)]
    decayed = [p for _, p in named if not getattr(p, "_no_decay", False)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.5}]
    return SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.9)


def test_what_is_noted_on_parameters_moves_with_them(two_ranks: Pool) -> None:
    # Where a layer had moved, its parameters were bare: replica 0 did not decay them, the others
    # did, and the replicas drifted apart (norms 2.29 and 1.98).
    job = Job(noted_model, tiny_data, decay_by_note, settings={"pipeline_length": 1})
    for result in two_ranks.run(train, job):
        assert_as_loop(replace(result, weights=loop(job).weights), loop(job))


def test_hooks_on_parameters_are_refused() -> None:
    # They ran on replica 0 alone, and on every micro-batch's part of the gradient.
    model = tiny_model()
    model[1].inner.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    with pytest.raises(ValueError, match=r"parameter '1.inner.weight' has tensor hooks"):
        make_trainer(replace(TINY, build=lambda: model))


def parametrised() -> nn.Module:
    """Compute some weights from others."""
    model = tiny_model()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nn.utils.parametrizations.weight_norm(model[1].inner)
        nn.utils.parametrizations.orthogonal(model[2].outer, orthogonal_map="cayley")
    return model


def test_parametrisations_train_as_in_a_plain_loop(two_ranks: Pool) -> None:
    job = Job(
        parametrised,
        tiny_data,
        sgd,
        frozen=(0, 2, 0),
        settings={"epochs": 3, "pipeline_length": 2},
    )
    assert_as_loop(two_ranks.run(train, job)[0], loop(job))


class Repeated(nn.Module):
    """Call one block several times, each under reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            if hidden.requires_grad and torch.is_grad_enabled():
                hidden = checkpoint(self._once, hidden, use_reentrant=True)
            else:
                hidden = self._once(hidden)
        return hidden

    def _once(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def repeated() -> nn.Module:
    """Build a model with a block that is called several times."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 8), Repeated(), nn.Linear(8, 8), Repeated(), nn.Linear(8, 3)
        ).double()


def test_a_parameter_may_get_its_gradient_in_several_backwards(two_ranks: Pool) -> None:
    # Every reentrant checkpoint has a backward of its own. The first to report let the gradients
    # leave for the other replicas, and what the later ones added was overwritten (off by 4e-2).
    job = Job(
        repeated, tiny_data, sgd, settings={"pipeline_length": 1, "micro_batches": 2, "epochs": 3}
    )
    for result in two_ranks.run(train, job):
        assert_as_loop(replace(result, weights=loop(job).weights), loop(job))


def dropping() -> nn.Module:
    """Build the tiny model with dropout."""
    return tiny_model(dropout=0.5)


def test_the_mode_that_a_user_s_call_leaves_does_not_matter() -> None:
    # `model.train()` put dropout into the frozen layers, and what they gave was cached;
    # `model.eval()` took it from the others.
    def trained(disturb: bool) -> dict[str, Tensor]:
        job = replace(TINY, build=dropping, frozen=(2,))
        with make_trainer(job) as trainer:
            while not trainer.is_over:
                trainer.step()
                if disturb:
                    trainer._task.model.model.train(trainer.global_step % 2 == 0)
            return {name: t.clone() for name, t in trainer.state_dict().items()}

    undisturbed = trained(False)
    for name, tensor in trained(True).items():
        assert torch.equal(tensor, undisturbed[name]), name


class Counting(nn.Module):
    """Scale by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls.data += 1
        return hidden / self.calls.sqrt()


class Running(nn.Module):
    """Normalise by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, hidden: Tensor) -> Tensor:
        normal: Tensor = self.norm(hidden.view(-1, 2, 4))
        return normal.view(-1, 8)


class Bounded(nn.Module):
    """Look tokens up in a table that renorms its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 8, max_norm=0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.table((hidden[:, 0] > 0).long())
        return hidden + found


@pytest.mark.parametrize(
    ("layer", "tensor"),
    [
        (Counting, "calls"),
        (Running, "norm.running_mean"),
        (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "weight_u"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "weight.0._u"),
        (Bounded, "table.weight"),
    ],
)
def test_a_forward_that_writes_into_its_own_tensors_is_refused(layer: Any, tensor: str) -> None:
    # Each replica kept statistics of its own samples; frozen layers gave other activations to who
    # had computed more of them.
    model = nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 3)).double()
    before = {name: t.clone() for name, t in model.named_buffers()}
    with (
        make_trainer(replace(TINY, build=lambda: model)) as trainer,
        pytest.raises(ValueError, match=rf"sublayer '1' writes into its own '.*{tensor}'"),
    ):
        trainer.step()
    for name, now in model.named_buffers():
        assert torch.equal(now, before[name]), name


class LateWriter(nn.Module):
    """Write into its buffer for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) > 2:
            self.seen.add_(1)
        return hidden + self.seen


def test_a_forward_that_writes_later_ends_the_run_before_the_weights_change() -> None:
    model = nn.Sequential(nn.Linear(8, 8), LateWriter(), nn.Linear(8, 3)).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with (
        make_trainer(replace(TINY, build=lambda: model)) as trainer,
        pytest.raises(ValueError, match=r"sublayer '1' writes into its own '1.seen'"),
    ):
        trainer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


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
            trainer._task.model.model(tiny_data().tensors[0])
        return "released"


def test_another_optimizer_is_refused_on_resume(tmp_path: Path) -> None:
    # SGD went on with AdamW's leftovers; AdamW after SGD ended in a KeyError of 'exp_avg'.
    saves = {**TINY.settings, "folder": tmp_path, "checkpoint_every_epochs": 1}
    job = replace(TINY, settings=saves)
    with make_trainer(job) as trainer:
        trainer.fit()
    resumes = {"resume": "auto", "epochs": 3}
    with (
        make_trainer(replace(job, optimizer=adamw), **resumes) as trainer,
        pytest.raises(ValueError, match=r"saved with .*torch.optim.sgd.SGD.* has .*AdamW"),
    ):
        trainer.fit()
    with make_trainer(job, **resumes) as trainer:
        trainer.fit()
