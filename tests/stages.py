"""Build the stages of pipelines that the tests of the engine run on processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import Peer, Receiver, Sender, StageLinks, StageWork
from tests.models import tiny_data
from tests.pool import Pool

NUM_LAYERS = 8
CPU = torch.device("cpu")


class CountingSender(Sender):
    """Count the micro-batches sent."""

    num_sent = 0

    def send(self, tensor: Tensor) -> None:
        self.num_sent += 1
        super().send(tensor)


def connect(group: dist.ProcessGroup | None, *, timeout_s: float = 30.0) -> StageLinks:
    """Link this rank to its neighbours in a pipeline of all ranks; alone it has none."""
    if group is None:
        return StageLinks()
    rank, links = dist.get_rank(), StageLinks()

    def peer(other: int, tag: int, name: str) -> Peer:
        return Peer(other, group, tag, name, timeout_s)

    if rank > 0:
        links.activation_in = Receiver(peer(rank - 1, 1, "activations"), CPU)
        links.gradient_out = CountingSender(peer(rank - 1, 2, "gradients"))
    if rank < dist.get_world_size() - 1:
        links.activation_out = CountingSender(peer(rank + 1, 1, "activations"))
        links.gradient_in = Receiver(peer(rank + 1, 2, "gradients"), CPU)
    return links


class StackWork(StageWork):
    """Run some layers of a model, and note what runs when."""

    def __init__(self, layers: nn.Sequential, sizes: Sequence[int]) -> None:
        self.layers = layers
        x, y = tiny_data(num_samples=sum(sizes)).tensors
        self.x, self.y = x.split(list(sizes)), y.split(list(sizes))
        self.events: list[str] = []
        self.seen: list[tuple[str, weakref.ref[Tensor]]] = []
        self.alive: list[str] = []

    def first_input(self, micro_batch: int) -> Tensor:
        return self.x[micro_batch].clone()

    def forward(self, micro_batch: int, hidden: Tensor) -> Tensor:
        self.events.append(f"F{micro_batch}")
        self.alive += [name for name, tensor in self.seen if tensor() is not None]
        output = self.layers(hidden)
        if output.requires_grad:
            output.register_hook(lambda _: self.events.append(f"B{micro_batch}"))
        self.seen += [(f"input {micro_batch}", weakref.ref(hidden)),
                      (f"output {micro_batch}", weakref.ref(output))]
        return output

    def finish(self, micro_batch: int, output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, self.y[micro_batch], reduction="sum")


def place() -> tuple[int, int, dist.ProcessGroup | None]:
    """Return this process's stage, the number of stages and their group."""
    if not dist.is_initialized():
        return 0, 1, None
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD
