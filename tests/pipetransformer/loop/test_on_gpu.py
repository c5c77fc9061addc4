"""Beside a GPU a warm step waits as seldom as a plain one, and uploads nothing unpinned."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import freeze as freezing
from autocache import HIDDEN, DeviceStore, RowStore, TieredStore, WriteBehind
from pipetransformer import attach
from tests.helpers.any_models import KINDS, Kind, build, data
from tests.helpers.feeds import put_half_on_device
from tests.helpers.stand_in_gpu import CUDA, StandInGpu, put_on_gpu, stand_in_gpu
from tests.pipetransformer.loop.test_cached_loop import Samples

NUM_EPOCHS, DEPTH = 3, 2


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that reads nothing on the host."""
    given = {name: entry for name, entry in batch.items() if name != "labels"}
    logits: Tensor = model(**given).logits
    return (logits.float() - batch["labels"].float().mean()).square().mean()


def descend(model: nn.Module, loss: Tensor) -> None:
    """Take a step of plain descent, which reads nothing on the host."""
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None


def train(kind: Kind, gpu: StandInGpu, batches: Any, model: nn.Module) -> tuple[Any, Any]:
    """Train; return all losses, and what each step of the last epoch but its first waits for."""
    loader = DataLoader(
        Samples(dict(data(kind).tensors)),
        5,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        pin_memory=True,
    )
    losses, waits = [], list[Counter[str]]()
    for _ in range(NUM_EPOCHS):
        waits.clear()
        for batch in batches(loader):
            moved = {name: entry.to(CUDA, non_blocking=True) for name, entry in batch.items()}
            descend(model, loss := loss_of(model, moved))
            losses.append(loss.detach())
            waits.append(Counter(what.split(" at ")[0] for what in gpu.waits.elements()))
            gpu.reset()
    return [float(loss.cpu()) for loss in losses], waits[1:]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


def note_reads(patch: pytest.MonkeyPatch) -> list[bool]:
    """Return what will say of each read of a file's rows whether it was beside a step."""
    beside, read = list[bool](), RowStore.read

    def noted(store: RowStore, *args: Any, **options: Any) -> Any:
        found = read(store, *args, **options)
        if found.depth.any() and HIDDEN in found.rows:
            beside.append(threading.current_thread() is not threading.main_thread())
        return found

    patch.setattr(RowStore, "read", noted)
    return beside


@contextmanager
def attached(model: nn.Module, folder: Path, place: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        put_half_on_device(patch)
        beside = note_reads(patch)
        with attach(model, freeze=DEPTH, cache_folder=folder, cache_device=place) as cached:
            yield cached.epoch
            # Each row is read, wherever it is; in host memory before its step asks for it.
            assert cached.stats.hits == 10
            assert beside[-2:] == ([] if place == "cuda" else [False, True])
            kinds = {"cuda": DeviceStore, "cpu": WriteBehind, "auto": TieredStore}
            assert isinstance(cached._rows.feed.keeper.store, kinds[place])


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param("gpt2_classifier", "cuda", marks=pytest.mark.slow),
        ("gpt2_classifier", "auto"),
        ("beit", "cpu"),
        pytest.param("gpt2_classifier", "cpu", marks=pytest.mark.slow),
        pytest.param("beit", "cuda", marks=pytest.mark.slow),
        pytest.param("llama", "cpu", marks=pytest.mark.slow),
        pytest.param("llama", "cuda", marks=pytest.mark.slow),
    ],
)
def test_a_warm_step_waits_for_no_more_than_a_plain_one(
    name: str, place: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    with stand_in_gpu() as gpu:
        model = build(kind)
        put_on_gpu(model)
        freezing.apply(model, DEPTH, layers=[*model.get_submodule(kind.blocks)])
        plainly = train(kind, gpu, iter, model)
        wanted = weights_of(model)
        model = build(kind)
        put_on_gpu(model)
        with attached(model, tmp_path, place) as epoch:
            ours = train(kind, gpu, epoch, model)
        for name, value in weights_of(model).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)
    assert ours[0] == pytest.approx(plainly[0], rel=1e-9)
    for mine, theirs in zip(ours[1], plainly[1], strict=True):
        assert not mine - theirs
        assert "upload" not in mine
