"""Prove that a run on a GPU fills and reads its cache without waiting, wherever rows lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autocache import DeviceStore, WrittenBehind
from pipetransformer import Trainer
from tests.stand_in_gpu import put_on_gpu, stand_in_gpu

_NUM, _BATCH = 48, 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
    ]
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5, 2))
    return nn.Sequential(nn.Linear(8, 16), *blocks, head).double()


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_NUM, 5, 8, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.mean((1, 2)) > 0).long())


def run(patch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[float], type, list[int]]:
    """Train with one layer more frozen each epoch; return losses, the store's kind, and waits."""
    # It takes the stand-in's parameters for special ones.
    patch.setattr("pipetransformer.checks.model_checks._refuse_parameters", lambda _: None)
    model = make_model()
    with stand_in_gpu() as gpu:
        put_on_gpu(model)
        with Trainer(
            model,
            make_data(),
            loss_fn=nn.CrossEntropyLoss(),
            freeze=lambda context: min(2, context.epoch),
            epochs=4,
            global_batch_size=_BATCH,
            pipeline_length=1,
            progress=False,
            **settings,
        ) as trainer:
            losses, waits = [], []
            while not trainer.is_over:
                gpu.reset()
                losses.append(trainer.step().loss)
                waits.append(sum(gpu.waits.values()))
            return losses, type(trainer._feed._store), waits


def test_steps_that_fill_grow_and_read_the_cache_wait_for_nothing_and_train_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_device, device_kind, device_waits = run(monkeypatch, cache_device="cuda")
    in_file, file_kind, file_waits = run(monkeypatch, cache_device="cpu")
    computed, no_kind, _ = run(monkeypatch, cache=False)
    assert (device_kind, file_kind, no_kind) == (DeviceStore, WrittenBehind, type(None))
    assert on_device == in_file == computed
    # Where an epoch begins and ends it is decided, and looked at the frozen layers.
    inner = range(1, len(on_device), _NUM // _BATCH)
    assert [device_waits[step] for step in inner] == [file_waits[step] for step in inner]
    assert not any(device_waits[step] for step in inner)
