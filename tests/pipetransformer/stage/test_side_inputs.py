"""Prove that masks and targets of any dtype and shape arrive bit by bit on another rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.engine.links import Peer, Receiver, Sender, TensorSpec
from pipetransformer.stage.side_inputs import SideReceiver, SideSender
from tests.helpers.pool import Pool

Batch = dict[str, Tensor]


def carry(steps: Sequence[Sequence[Batch]], names: tuple[str, ...]) -> list[list[Batch]]:
    """Send each step's micro-batches from rank 0 to rank 1, and return what arrived there."""
    group = dist.group.WORLD
    assert group is not None
    peer = Peer(1 - dist.get_rank(), group, 3, "side inputs", 30.0)
    arrived = []
    if dist.get_rank() == 0:
        sender = SideSender([Sender(peer)], names)
        for step in steps:
            for micro_batch, batch in enumerate(step):
                sender.send(micro_batch, batch)
            sender.finish_step()
    else:
        channel = Receiver(peer, torch.device("cpu"))
        receiver = SideReceiver([channel])
        for step in steps:
            sizes = [len(next(iter(batch.values()))) for batch in step]
            receiver.begin(sizes, range(len(sizes)))
            arrived.append([receiver.receive(i) for i in range(len(step))])
    return arrived


def make_batch(size: int, seed: int = 0) -> Batch:
    """Make entries of many dtypes and shapes; five bools a sample leave the rest unaligned."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(size, 5, generator=generator)
    return {
        "flags": noise > 0,
        "label": (noise[:, 0] * 1e9).long(),
        "weights": noise,
        "half": noise.bfloat16(),
        "boxes": torch.stack([noise, noise * 2], 2).double(),
        "one_flag": noise[:, 1] > 0,
        "bytes": (noise * 10).to(torch.int8),
        "unused": noise,
    }


def assert_arrived(
    two_ranks: Pool, steps: Sequence[Sequence[Batch]], names: tuple[str, ...]
) -> None:
    """Carry steps over, and compare every entry that was asked for."""
    arrived = two_ranks.run(carry, steps, names)[1]
    assert [len(step) for step in arrived] == [len(step) for step in steps]
    for step, other in zip(steps, arrived, strict=True):
        for batch, got in zip(step, other, strict=True):
            assert list(got) == [name for name in names if name in batch]
            for name, tensor in got.items():
                sent = batch[name]
                assert (tensor.dtype, tensor.shape) == (sent.dtype, sent.shape), name
                assert torch.equal(tensor, sent), name


# With one sample a slice of the message is contiguous, and would start at an unaligned byte.
@pytest.mark.parametrize("sizes", [(4, 4), (3, 2), (1,), (2, 1)], ids=str)
def test_mixed_entries_arrive_bit_by_bit_in_the_order_asked_for(
    two_ranks: Pool, sizes: tuple[int, ...]
) -> None:
    names = ("flags", "label", "one_flag", "weights", "bytes", "boxes", "half")
    assert_arrived(two_ranks, [[make_batch(size, seed) for seed, size in enumerate(sizes)]], names)


def test_entries_the_dataset_does_not_give_are_left_out(two_ranks: Pool) -> None:
    assert_arrived(two_ranks, [[make_batch(2)]], ("mask", "label", "token_types"))


def test_a_step_without_any_of_the_entries_arrives_empty(two_ranks: Pool) -> None:
    assert_arrived(two_ranks, [[make_batch(2)] * 3, [make_batch(1)]], ("mask",))


def test_each_step_may_have_other_shapes_and_entries(two_ranks: Pool) -> None:
    longer = {"weights": torch.ones(2, 9), "flags": torch.ones(2, 1, dtype=torch.bool)}
    shorter = {"weights": torch.ones(3, 2, dtype=torch.float64)}
    assert_arrived(
        two_ranks,
        [[make_batch(4)], [longer, longer], [shorter], [make_batch(1)]],
        ("flags", "weights"),
    )


def test_a_transposed_view_arrives_as_it_looks(two_ranks: Pool) -> None:
    view = torch.arange(12.0).view(3, 4).T
    assert_arrived(two_ranks, [[{"weights": view}]], ("weights",))


class Outbox:
    """Stand for a Sender, and keep what is sent."""

    def __init__(self) -> None:
        self.headers: list[dict[str, TensorSpec]] = []
        self.messages: list[Tensor] = []

    def send_header(self, specs: dict[str, TensorSpec]) -> None:
        self.headers.append(specs)

    def send(self, tensor: Tensor) -> None:
        self.messages.append(tensor)

    def flush(self) -> None:
        """Have nothing to wait for."""


def test_a_step_announces_its_entries_once_and_sends_one_message_a_micro_batch() -> None:
    outbox: Any = Outbox()
    sender = SideSender([outbox], ("flags", "label"))
    for step in range(2):
        for micro_batch, size in enumerate((4, 2, 1)):
            sender.send(micro_batch, make_batch(size))
        sender.finish_step()
        assert outbox.headers == (step + 1) * [
            {"flags": TensorSpec((5,), "bool"), "label": TensorSpec((), "int64")}
        ]
    assert [tuple(message.shape) for message in outbox.messages] == [(4, 13), (2, 13), (1, 13)] * 2


@pytest.mark.parametrize(
    "other",
    [
        {"weights": torch.ones(1, 6)},
        {"weights": torch.ones(1, 5).half()},
        {"label": torch.ones(1)},
    ],
    ids=["shape", "dtype", "entries"],
)
def test_a_micro_batch_unlike_the_first_is_refused_and_never_misread(other: Batch) -> None:
    outbox: Any = Outbox()
    sender = SideSender([outbox], ("weights",))
    sender.send(0, {"weights": torch.ones(1, 5)})
    with pytest.raises(ValueError, match=r"side inputs .* need the same entries .*: pad them"):
        sender.send(1, other)
    assert len(outbox.messages) == 1
