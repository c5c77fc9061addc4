"""Prove that channels keep order, shape and type, and that a stage in trouble is named."""

from __future__ import annotations

import dataclasses
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp import PeerError
from autopipe.engine.executor import StageRun
from autopipe.engine.links import Peer, Receiver, Sender, TensorSpec
from autopipe.engine.stream_watchdog import Watchdog
from autopipe.schedule import SCHEDULES
from tests.helpers.pool import Pool
from tests.helpers.stages import StackWork, connect, layers_of, place, stage_model

CPU = torch.device("cpu")


DTYPES = ("float32", "bfloat16", "float64", "float16", "int64", "bool", "uint8")


def peer(group: dist.ProcessGroup | None, *, tag: int = 1, timeout_s: float = 30.0) -> Peer:
    """Name the other one of two ranks."""
    assert group is not None
    return Peer(1 - dist.get_rank(), group, tag, "activations", timeout_s)


def batches(dtype: str, sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(size, 5, 3, generator=generator) * 9 for size in sizes]
    return [tensor.to(getattr(torch, dtype)) for tensor in noise]


def transfer(order: tuple[int, ...], sizes: tuple[int, ...], transposed: bool) -> list[str]:
    """Send micro-batches of every dtype in an order; return what arrived wrong."""
    wrong = []
    sender, receiver = Sender(peer(dist.group.WORLD)), Receiver(peer(dist.group.WORLD), CPU)
    for dtype in DTYPES:
        tensors = batches(dtype, sizes)
        if transposed:
            tensors = [tensor.transpose(1, 2) for tensor in tensors]
        if dist.get_rank() == 0:
            sender.send_header({"hidden": TensorSpec.of(tensors[0])})
            for i in order:
                sender.send(tensors[i])
            sender.flush()
            continue
        receiver.begin(order, sizes)
        receiver.spec = receiver.receive_header()["hidden"]
        for i in order:
            got = receiver.receive(i)
            if got.dtype != tensors[i].dtype or not torch.equal(got, tensors[i]):
                wrong.append(f"{dtype} {i}")
    return wrong


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_micro_batches_arrive_as_sent_in_every_dtype(
    two_ranks: Pool, order: tuple[int, ...], transposed: bool
) -> None:
    assert two_ranks.run(transfer, order, (2, 0, 3, 1), transposed) == [[], []]


def interleave_channels() -> list[float]:
    """Send on one channel first, receive on the other first."""
    tensors = [torch.full((2, 3), float(tag)) for tag in (1, 2)]
    if dist.get_rank() == 0:
        senders = [Sender(peer(dist.group.WORLD, tag=tag)) for tag in (1, 2)]
        for sender, tensor in zip(senders, tensors, strict=True):
            sender.send(tensor)
        for sender in senders:
            sender.flush()
        return []
    values = []
    for tag in (2, 1):
        receiver = Receiver(peer(dist.group.WORLD, tag=tag), CPU)
        receiver.begin([0], [2])
        receiver.spec = TensorSpec((3,), "float32")
        values.append(float(receiver.receive(0).mean()))
    return values


def test_channels_between_the_same_ranks_do_not_mix(two_ranks: Pool) -> None:
    assert two_ranks.run(interleave_channels)[1] == [2.0, 1.0]


def exchange_headers() -> dict[str, TensorSpec]:
    specs = {
        "hidden": TensorSpec((5, 3), "bfloat16", True),
        "mask": TensorSpec((), "bool"),
        "größe": TensorSpec((7,), "int64"),
    }
    if dist.get_rank() == 0:
        sender = Sender(peer(dist.group.WORLD))
        for sent in (specs, {}):
            sender.send_header(sent)
        sender.flush()
        return specs
    receiver = Receiver(peer(dist.group.WORLD), CPU)
    received = receiver.receive_header()
    assert receiver.receive_header() == {}
    return received


def test_a_header_arrives_as_it_was_sent(two_ranks: Pool) -> None:
    sent, received = two_ranks.run(exchange_headers)
    assert received == sent
    assert list(received) == list(sent)


def send_long_header() -> str:
    try:
        Sender(peer(dist.group.WORLD)).send_header(
            {f"entry {i}": TensorSpec((128,), "float32") for i in range(40)}
        )
    except ValueError as error:
        return str(error)
    return ""


def test_a_header_with_too_many_entries_is_refused(two_ranks: Pool) -> None:
    for message in two_ranks.run(send_long_header):
        assert message.startswith("a batch with 40 entries needs a header of ")
        assert message.endswith("1024 are allowed: use fewer or shorter entry names")


def wait_in_vain(what: str) -> str:
    """Let rank 1 wait for a rank 0 that does nothing."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    message = ""
    if dist.get_rank() == 1:
        silent = peer(group, timeout_s=0.2)
        try:
            if what == "header":
                Receiver(silent, CPU).receive_header()
            elif what == "header between GPUs":
                watched = dataclasses.replace(silent, watchdog=Watchdog(group.abort))
                Receiver(watched, CPU).receive_header()
            elif what == "tensor":
                receiver = Receiver(silent, CPU)
                receiver.begin([0], [2])
                receiver.spec = TensorSpec((3,), "float32")
                receiver.receive(0)
            else:
                sender = Sender(silent)
                sender.send(torch.ones(2, 3))
                sender.flush()
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    dist.destroy_process_group(group)
    return message


@pytest.mark.parametrize(
    ("what", "waited"),
    [
        ("header", "for the activations of rank 0"),
        ("tensor", "for the activations of rank 0"),
        ("header between GPUs", "for the activations of rank 0"),
        ("taken", "for rank 0 to take its activations"),
    ],
)
def test_a_timeout_says_who_waited_for_what(two_ranks: Pool, what: str, waited: str) -> None:
    message = two_ranks.run(wait_in_vain, what)[1]
    assert message.startswith(f"rank 1 waited {waited} (limit 0.2 s): ")


def test_a_spec_leaves_the_sample_dimension_out() -> None:
    tensor = torch.zeros(4, 5, 6, dtype=torch.bfloat16, requires_grad=True)
    spec = TensorSpec.of(tensor)
    assert spec == TensorSpec((5, 6), "bfloat16", True)
    assert spec.empty(2, CPU).shape == (2, 5, 6)
    assert spec.empty(2, CPU).dtype == torch.bfloat16


SIZES = (1, 2, 1)


class FailingLayer(nn.Module):
    """Fail at micro-batches of two samples."""

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) == 2:
            raise ArithmeticError("a layer's own trouble")
        return hidden


class WideningLayer(nn.Module):
    """Give a micro-batch of two samples twice the width."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.repeat(1, len(hidden))


def attempt(fault: str) -> str:
    """Run a step in which something goes wrong, in a group of its own; return the traceback."""
    rank, length, _ = place()
    # A wait that ran out leaves its group unusable; the world's has to survive.
    group = dist.new_group(list(range(length)))
    assert isinstance(group, dist.ProcessGroup)
    layers = layers_of(stage_model(), rank, length)
    added = {"shape on 0": WideningLayer, "layer on 1": FailingLayer}.get(f"{fault} on {rank}")
    work = StackWork(layers if added is None else nn.Sequential(*layers, added()), SIZES)
    program = SCHEDULES["1f1b"](length, len(SIZES))[rank]
    try:
        if fault != f"silent {rank}":
            # The rank at fault is to fail by its own fault, however slow its neighbour is.
            links = connect(group, timeout_s=0.3 if added is None else 30.0)
            StageRun(program, work, links, SIZES).run()
    except (ValueError, PeerError, ArithmeticError):
        return traceback.format_exc()
    finally:
        dist.barrier()
        dist.destroy_process_group(group)
    return ""


def test_a_micro_batch_of_another_shape_is_an_error(two_ranks: Pool) -> None:
    first, _ = two_ranks.run(attempt, "shape")
    assert "ValueError: micro-batch 1 leaves the stage as TensorSpec(shape=(" in first
    assert "samples of one step need one shape: pad them" in first


def test_an_exception_in_a_layer_surfaces_on_its_rank_with_its_traceback(two_ranks: Pool) -> None:
    first, second = two_ranks.run(attempt, "layer")
    assert "ArithmeticError: a layer's own trouble" in second
    assert 'raise ArithmeticError("a layer\'s own trouble")' in second
    assert "PeerError: rank 0 waited for the gradients of rank 1" in first


def test_a_neighbour_that_never_sends_is_named_after_the_timeout(two_ranks: Pool) -> None:
    _, second = two_ranks.run(attempt, "silent 0")
    assert "PeerError: rank 1 waited for the activations of rank 0 (limit 0.3 s)" in second
    first, _ = two_ranks.run(attempt, "silent 1")
    assert "PeerError: rank 0 waited for the gradients of rank 1 (limit 0.3 s)" in first
