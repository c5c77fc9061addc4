"""Prove that a model trains alike where only an embedding's touched rows are summed."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from autodp.gradient_reducer import GradientReducer
from freeze import FreezeSchedule
from pipetransformer import Trainer
from tests.adapted import classifier
from tests.pool import Pool


def train(least_bytes: int) -> tuple[dict[str, Tensor], list[int]]:
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
        patch("pipetransformer.model.layered_model._LEAST_TABLE_BYTES", least_bytes),
        patch.object(GradientReducer, "__init__", noted),
        Trainer(
            classifier(), TensorDataset(ids, ids[:, 0] % 3), global_batch_size=8, epochs=3,
            freeze=FreezeSchedule([0, 0, 1]), pipeline_length=1, micro_batches=2, progress=False,
        ) as trainer,
    ):  # fmt: skip
        trainer.fit()
        return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}, numbers


def test_two_replicas_end_with_the_same_bits(two_ranks: Pool) -> None:
    (found, tables), _ = two_ranks.run(train, 0)
    (wanted, none), _ = two_ranks.run(train, 1 << 40)
    assert max(tables) > 0 and tables[-1] == 0 and not any(none)  # The last: its layer is frozen.
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
