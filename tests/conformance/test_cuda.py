"""Hold on GPUs what the manual says of devices, copies and memory; skipped without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.balance.balance import balance_by_size, balance_by_time
from autopipe.gpipe.module import GPipe
from tests.conformance.test_skip import u_net
from tests.helpers.pipes import MODES, Call, assert_same_gradients, linears, ramp

pytestmark = pytest.mark.cuda
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def partitions_on_cuda(num_partitions: int) -> list[int]:
    """Return a device a partition, all of them in turn."""
    return [j % torch.cuda.device_count() for j in range(num_partitions)]


def test_default_devices_are_the_cuda_devices_in_order() -> None:
    count = torch.cuda.device_count()
    model = GPipe(nn.Sequential(*(nn.Linear(1, 1) for _ in range(count))), [1] * count)
    assert model.devices == [torch.device("cuda", j) for j in range(count)]
    with pytest.raises(IndexError, match="too few devices"):
        GPipe(nn.Sequential(*(nn.Linear(1, 1) for _ in range(count + 1))), [1] * (count + 1))


def test_each_partition_is_moved_to_its_device_and_the_output_is_on_the_last() -> None:
    devices: list[Any] = ["cuda:0", "cpu"]
    model = GPipe(linears(3, 4, 2), [2, 2], devices=devices, chunks=2)
    for partition, device in zip(model.partitions, model.devices, strict=True):
        assert {p.device for p in partition.parameters()} == {device}
    assert model(ramp(4, 3).cuda()).device == model.devices[-1]
    with pytest.raises(ValueError, match="move the input to"):
        model(ramp(4, 3))


def test_layers_on_their_devices_train_without_a_balance() -> None:
    plain = linears(3, 4, 2).cuda()
    placed = copy.deepcopy(plain)
    placed[2:].cpu()
    model = GPipe(placed, chunks=2)
    assert model.balance == [2, 2]
    for module in (plain, model):
        module(ramp(4, 3).cuda()).sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and expected.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), expected.grad.cpu())


def test_a_parameter_on_two_devices_is_refused() -> None:
    first, last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
    last.weight = first.weight
    with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
        GPipe(nn.Sequential(first, last), [1, 1], devices=["cpu", "cuda:0"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["forward", "gpipe", "1f1b"])
def test_gradients_on_cuda_equal_those_of_the_plain_module(schedule: str, mode: str) -> None:
    plain = u_net().cuda()
    model = GPipe(
        copy.deepcopy(plain),
        [2, 2, 1, 2],
        devices=partitions_on_cuda(4),
        chunks=3,
        checkpoint=mode,
    )
    input, target = ramp(7, 3).to(model.devices[0]), ramp(7, 3).to(model.devices[-1])
    nn.functional.mse_loss(plain(input.cuda(0)), target.cuda(0)).backward()
    if schedule == "forward":
        nn.functional.mse_loss(model(input), target).backward()
    else:
        model.step(input, target, nn.functional.mse_loss, schedule=schedule)
    for partition in model.partitions:
        partition.to("cuda:0")
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_dropout_on_cuda_is_recomputed_with_the_same_random_numbers(mode: str) -> None:
    layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.4), nn.Dropout(0.3))
    model = GPipe(layers, [1, 1, 1], devices=partitions_on_cuda(3), chunks=10, checkpoint=mode)
    input = torch.ones(100, 30, device=model.devices[0], requires_grad=True)
    output = model(input)
    output.norm().backward()
    assert input.grad is not None
    assert torch.equal(output.to(input.device) == 0, input.grad == 0)


@two_devices
def test_every_tensor_of_a_tuple_and_shifted_views_are_copied_before_they_are_used() -> None:
    def views(input: Tensor) -> Any:
        big = input.repeat(1, 64)
        torch.cuda._sleep(50_000_000)
        return tuple(part * 2 for part in big.split(big.shape[1] // 4, dim=1))

    def join(parts: Any) -> Tensor:
        return torch.cat(parts, dim=1)

    plain = nn.Sequential(
        Call(views), Call(lambda parts: tuple(p[:, 1:] for p in parts)), Call(join)
    )
    model = GPipe(plain, [1, 1, 1], devices=[0, 1, 0], chunks=4, checkpoint="never")
    input = torch.rand(64, 1024, device="cuda:0")
    for _ in range(3):
        assert torch.equal(model(input), plain(input))


def test_checkpointing_lowers_the_peak_memory() -> None:
    def peak(mode: str) -> int:
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)))
        model = GPipe(layers, [8, 8], devices=[0, 0], chunks=8, checkpoint=mode)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        # So many that activations are most of it: libraries' workspaces take tens of megabytes.
        model(torch.rand(65536, 256, device="cuda:0")).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak("always") < 0.6 * peak("never")


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_balancing_measures_on_cuda(balance: Any) -> None:
    module, sample = linears(3, 4, 4, 2).cuda(), ramp(8, 3).cuda()
    assert sum(balance(3, module, sample, device="cuda")) == 6
    with pytest.raises(ValueError, match="must be on one device"):
        balance(3, module, ramp(8, 3))
