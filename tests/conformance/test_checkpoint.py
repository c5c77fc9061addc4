"""Hold checkpointing, its random numbers and memory, deferred norms, and what failures do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from autopipe.engine.current_micro_batch import is_checkpointing, is_recomputing
from autopipe.loss import Loss
from tests.helpers.pipes import (
    CLOSE,
    Call,
    assert_same_gradients,
    assert_transparent,
    every_mode,
    linears,
    on_cpu,
    ramp,
)

LOGS = {
    ("always", 1): ([(True, False)], [(False, True)]),
    ("always", 3): ([(True, False)] * 3, [(False, True)] * 3),
    ("except_last", 1): ([(False, False)], []),
    ("except_last", 3): ([(True, False)] * 2 + [(False, False)], [(False, True)] * 2),
    ("never", 1): ([(False, False)], []),
    ("never", 3): ([(False, False)] * 3, []),
}


class Detect(nn.Module):
    """Note under which circumstances the forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[tuple[bool, bool]] = []

    def forward(self, input: Tensor) -> Tensor:
        self.logs.append((is_checkpointing(), is_recomputing()))
        return input


@pytest.mark.parametrize(("mode", "chunks"), list(LOGS))
@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_layers_can_tell_checkpointed_forwards_and_recomputations(
    mode: str, chunks: int, balance: list[int]
) -> None:
    detect = Detect()
    model = on_cpu(nn.Sequential(detect, nn.Linear(1, 1)), balance, chunks=chunks, checkpoint=mode)
    output = model(torch.rand(3, 1, requires_grad=True))
    assert detect.logs == LOGS[mode, chunks][0]
    detect.logs.clear()
    output.sum().backward()
    assert detect.logs == LOGS[mode, chunks][1]
    assert (is_checkpointing(), is_recomputing()) == (False, False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_except_last_spares_the_last_of_fewer_micro_batches_and_in_a_step(schedule: str) -> None:
    detect = Detect()
    model = on_cpu(nn.Sequential(detect, nn.Linear(1, 1)), [1, 1], chunks=8, schedule=schedule)
    model(torch.rand(2, 1, requires_grad=True)).sum().backward()
    assert detect.logs == [(True, False), (False, False), (False, True)]
    detect.logs.clear()
    model.step(torch.rand(3, 1, requires_grad=True), torch.rand(3, 1), F.mse_loss)
    assert sorted(detect.logs) == sorted(
        [(True, False)] * 2 + [(False, False)] + [(False, True)] * 2
    )


@every_mode
def test_nothing_is_checkpointed_in_evaluation_or_without_gradients(mode: str) -> None:
    detect = Detect()
    model = on_cpu(nn.Sequential(nn.Linear(1, 1), detect), [1, 1], chunks=2, checkpoint=mode)
    model.eval()
    model(torch.rand(2, 1)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.train()
    with torch.no_grad():
        model(torch.rand(2, 1))
    model.requires_grad_(False)
    model(torch.rand(2, 1))
    assert detect.logs == [(False, False)] * 6


@every_mode
def test_a_side_effect_that_asks_happens_once_a_micro_batch(mode: str) -> None:
    calls = {"all": 0, "once": 0}

    def count(input: Tensor) -> Tensor:
        calls["all"] += 1
        calls["once"] += not is_recomputing()
        return input

    layers = nn.Sequential(nn.Linear(1, 1), Call(count))
    on_cpu(layers, [1, 1], chunks=4, checkpoint=mode)(torch.rand(4, 1)).sum().backward()
    assert calls == {"all": 4 + {"always": 4, "except_last": 3, "never": 0}[mode], "once": 4}


@every_mode
def test_integers_booleans_and_tensors_without_gradient_cross_checkpointed_partitions(
    mode: str,
) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4).double(),
        Call(lambda x: (x, torch.arange(len(x)), x > 0, x.detach())),
        Call(lambda t: (t[0] * t[2], t[1], t[2], t[3])),
        Call(lambda t: (t[0] + t[1][:, None] + t[3], t[1] * 2, t[2])),
    )
    plain, pipe = copy.deepcopy(model), on_cpu(model, [2, 1, 1], chunks=1, checkpoint=mode)
    for expected, ours in zip(plain(ramp(6, 3)), pipe(ramp(6, 3)), strict=True):
        assert torch.equal(ours, expected) and ours.dtype == expected.dtype
        assert ours.requires_grad == expected.requires_grad
    integers = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2)).double()
    for chunks in (1, 3):
        given = torch.tensor([[1, 2], [3, 3], [8, 0], [4, 1]])
        assert_transparent(integers, [1, 1], given, chunks=chunks, checkpoint=mode)
        pair = nn.Sequential(
            Call(lambda t: (t[0].exp(), t[1] + 1)), Call(lambda t: t[0] * t[1][:, None])
        )
        input = (ramp(4, 3).requires_grad_(), torch.arange(4))
        assert_transparent(pair, [1, 1], input, chunks=chunks, checkpoint=mode)


def test_a_checkpointed_input_that_was_changed_is_refused() -> None:
    class Change(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            first, second = pair
            return first * second.add_(1)

    first, second = torch.ones(2, requires_grad=True), torch.ones(2)
    output = on_cpu(nn.Sequential(Change()), [1], checkpoint="always")((first, second))
    with pytest.raises(RuntimeError, match="was changed in place"):
        output.sum().backward()
    for mode in ("always", "except_last"):
        model = on_cpu(linears(3, 3, 2), [2, 2], chunks=2, checkpoint=mode)
        input = ramp(4, 3)
        output = model(input)
        input.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place|modified by an inplace"):
            output.sum().backward()


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("balance", [[8], [4, 4], [2, 2, 4]])
def test_only_tensors_at_boundaries_outlive_a_checkpointed_forward(
    chunks: int, balance: list[int]
) -> None:
    storages: list[tuple[int, StorageWeakRef]] = []
    layers = linears(5, 5, 5, 5, 5)
    for number, layer in enumerate(layers):
        layer.register_forward_hook(
            lambda _, __, output, number=number: storages.append(
                (number, StorageWeakRef(output.untyped_storage()))
            )
        )
    model = on_cpu(layers, balance, chunks=chunks, checkpoint="always")
    output = model(ramp(8, 5))
    alive = [number for number, storage in storages if not storage.expired()]
    ends = [sum(balance[: j + 1]) - 1 for j in range(len(balance))]
    # With one micro-batch its output is the model's; several are put together in a new tensor.
    kept = ends if chunks == 1 else ends[:-1]
    assert sorted(alive) == sorted(kept * chunks)
    output.sum().backward()
    del output
    assert not [number for number, storage in storages if not storage.expired()]


def test_recomputation_holds_one_micro_batch_at_a_time() -> None:
    alive: list[StorageWeakRef] = []
    most = 0

    def note(input: Tensor) -> Tensor:
        nonlocal most
        output = input.sigmoid()
        if is_recomputing():
            alive.append(StorageWeakRef(output.untyped_storage()))
            most = max(most, sum(not storage.expired() for storage in alive))
        return output

    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Call(note), nn.Linear(3, 3))
    model = on_cpu(layers, [1, 3], chunks=6, checkpoint="always")
    model(torch.rand(12, 3)).sum().backward()
    assert (len(alive), most) == (6, 1)


@pytest.mark.parametrize("num_layers", [2, 5])
@pytest.mark.parametrize("chunks", [2, 4, 8])
@every_mode
def test_a_partition_keeps_its_inputs_and_one_micro_batch_s_activations(
    mode: str, chunks: int, num_layers: int
) -> None:
    # Batch + layers / partitions * batch / micro-batches when checkpointed, of one layer's output.
    batch, width = 16, 3
    seen: set[StorageWeakRef] = set()
    most_bytes = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal most_bytes
        seen.add(StorageWeakRef(tensor.untyped_storage()))
        alive = sum(not storage.expired() for storage in seen)
        most_bytes = max(most_bytes, alive * tensor.nbytes)
        return tensor

    upper = [Call(lambda input: note(note(input).sigmoid())) for _ in range(num_layers)]
    layers = nn.Sequential(nn.Linear(width, width), *upper, Call(lambda output: output.mean(1)))
    model = on_cpu(layers, [1, num_layers + 1], chunks=chunks, checkpoint=mode)
    model(torch.rand(batch, width)).sum().backward()
    one = batch // chunks
    # A sigmoid keeps its output alone: unless recomputed, an input goes with its forward.
    inputs, activations = (one, batch) if mode == "never" else (batch, one)
    assert most_bytes == 4 * width * (inputs + num_layers * activations)


@every_mode
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("num_samples", [8, 7, 3])
def test_deferred_norms_track_the_mini_batch_once_in_every_mode(
    mode: str, chunks: int, num_samples: int
) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).double()
    model = on_cpu(
        copy.deepcopy(plain)[:1], [1], chunks=chunks, checkpoint=mode, deferred_batch_norm=True
    )
    for step in range(2):
        input = ramp(num_samples, 3, 4, 4) * 3 + step
        plain[0](input)
        model(input.requires_grad_()).sum().backward()
    for ours, expected in zip(model.buffers(), plain[0].buffers(), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)
    with torch.no_grad():
        plain[0](input)
        model(input)
    for ours, expected in zip(model.buffers(), plain[0].buffers(), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)
    torch.testing.assert_close(model.eval()(input), plain[0].eval()(input), **CLOSE)


@every_mode
def test_plain_norms_track_each_micro_batch_once(mode: str) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    model = on_cpu(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=mode)
    input = ramp(9, 3)
    model(input).sum().backward()
    for part in input.split(3):
        plain(part)
    for ours, expected in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


@every_mode
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_step_gives_the_loss_and_gradients_of_the_plain_model(
    schedule: str, mode: str, chunks: int
) -> None:
    def mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return (F.cross_entropy(output, target[0], reduction="none") * target[1]).mean()

    def counted(output: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(output, target[0], ignore_index=0, reduction="sum")
        return losses, (target[0] != 0).sum()

    labels, weights = torch.tensor([0, 1, 3, 2, 1, 0, 3]), ramp(7)
    for loss_fn in (mean, counted):
        plain = linears(3, 5, 4)
        input, own = ramp(7, 3).requires_grad_(), ramp(7, 3).requires_grad_()
        expected: Any = loss_fn(plain(input), (labels, weights))
        expected = expected[0] / expected[1] if isinstance(expected, tuple) else expected
        expected.backward()
        model = on_cpu(linears(3, 5, 4), [2, 1, 1], chunks=chunks, checkpoint=mode)
        found = model.step(own, (labels, weights), loss_fn, schedule=schedule)
        assert not found.requires_grad
        torch.testing.assert_close(found, expected.detach(), **CLOSE)
        torch.testing.assert_close(own.grad, input.grad, **CLOSE)
        assert_same_gradients(model, plain)


def test_a_step_computes_an_exact_loss_of_a_micro_batch_once() -> None:
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(int(target[0]))
        return output.mean()

    model = on_cpu(linears(1, 1), [1, 1], chunks=3, checkpoint="always")
    model.step(ramp(3, 1), torch.arange(3), Loss(loss, is_exact=True))
    assert sorted(calls) == [0, 1, 2]
