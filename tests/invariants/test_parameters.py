"""Prove that parameters of unusual kinds train as in a plain loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autodp.gradient_reducer import GradientReducer
from freeze import FreezeSchedule
from pipetransformer import Trainer
from tests.helpers.adapted import classifier
from tests.helpers.loops import (
    TINY,
    Job,
    assert_as_loop,
    fused_adamw,
    loop,
    make_trainer,
    sgd,
    train,
)
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool
from tests.helpers.unusual import decay_by_note, noted_model, repeated


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
    job = Job(convolutions, images, fused_adamw, frozen=(0, 1, 0), settings={"epochs": 3})
    job = replace(job, settings={**job.settings, "pipeline_length": length})
    expected = loop(job)
    first, second = two_ranks.run(train, job)
    assert_as_loop(first, expected)
    assert_as_loop(replace(second, weights=expected.weights), expected)


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


def test_a_parameter_may_get_its_gradient_in_several_backwards(two_ranks: Pool) -> None:
    # Every reentrant checkpoint has a backward of its own. The first to report let the gradients
    # leave for the other replicas, and what the later ones added was overwritten (off by 4e-2).
    job = Job(
        repeated, tiny_data, sgd, settings={"pipeline_length": 1, "micro_batches": 2, "epochs": 3}
    )
    for result in two_ranks.run(train, job):
        assert_as_loop(replace(result, weights=loop(job).weights), loop(job))


def train_tables(least_bytes: int) -> tuple[dict[str, Tensor], list[int]]:
    """Train a BERT on two replicas, with a freeze on the way; return its weights, and the numbers
    of tables.

    The replicas are taken to be on two nodes, so that gradients travel.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 20, (24, 6), generator=generator)
    numbers, build = list[int](), GradientReducer.__init__

    def noted(self: GradientReducer, *arguments: Any, **settings: Any) -> None:
        numbers.append(len(settings.get("tables", ())))
        build(self, *arguments, **{**settings, "on_one_node": False})

    with (
        patch("pipetransformer.model.modules.tensors._LEAST_TABLE_BYTES", least_bytes),
        patch.object(GradientReducer, "__init__", noted),
        Trainer(
            classifier(), TensorDataset(ids, ids[:, 0] % 3), global_batch_size=8, epochs=3,
            freeze=FreezeSchedule([0, 0, 1]), pipeline_length=1, micro_batches=2, progress=False,
        ) as trainer,
    ):  # fmt: skip
        trainer.fit()
        return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}, numbers


def test_two_replicas_end_with_the_same_bits(two_ranks: Pool) -> None:
    (found, tables), _ = two_ranks.run(train_tables, 0)
    (wanted, none), _ = two_ranks.run(train_tables, 1 << 40)
    assert max(tables) > 0 and tables[-1] == 0 and not any(none)  # The last: its layer is frozen.
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
