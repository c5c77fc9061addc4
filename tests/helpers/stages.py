"""Build the stages of pipelines that the tests of the engine run on processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp import PeerError
from autopipe.engine.current_micro_batch import is_recomputing
from autopipe.engine.executor import StageLinks, StageWork
from autopipe.engine.links import (
    Payload,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    Sender,
)
from tests.helpers.models import tiny_data, tiny_model

NUM_LAYERS = 8
CPU = torch.device("cpu")


class CountingSender(Sender):
    """Count the messages sent."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.num_sent = 0

    def send(self, tensor: Tensor) -> None:
        self.num_sent += 1
        super().send(tensor)


def place() -> tuple[int, int, dist.ProcessGroup | None]:
    """Return this process's stage, the number of stages, and their group."""
    if not dist.is_initialized():
        return 0, 1, None
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def connect(group: dist.ProcessGroup | None, *, timeout_s: float = 30.0) -> StageLinks:
    """Link this rank to its neighbours in a pipeline of all ranks; alone it has none."""
    return StageLinks() if group is None else connect_chunks(group, 1, timeout_s=timeout_s)[0]


def connect_chunks(
    group: dist.ProcessGroup, num_chunks: int, *, timeout_s: float = 30.0
) -> list[StageLinks]:
    """Link each chunk of this rank, a worker of interleaved stages, to the stages beside it."""
    num_workers = dist.get_world_size()

    def peer(stage: int, boundary: int, name: str) -> Peer:
        # Two ranks of two chunks have three boundaries between them.
        tag = 2 * boundary + (name == "gradients")
        return Peer(stage % num_workers, group, tag, name, timeout_s, error=PeerError)

    def links(stage: int) -> StageLinks:
        found = StageLinks()
        if stage > 0:
            found.below = ProcessLinkBelow(
                Receiver(peer(stage - 1, stage - 1, "activations"), CPU),
                CountingSender(peer(stage - 1, stage - 1, "gradients")),
            )
        if stage < num_workers * num_chunks - 1:
            found.above = ProcessLinkAbove(
                CountingSender(peer(stage + 1, stage, "activations")),
                Receiver(peer(stage + 1, stage, "gradients"), CPU),
            )
        return found

    return [links(chunk * num_workers + dist.get_rank()) for chunk in range(num_chunks)]


def layers_of(model: nn.Sequential, stage: int, length: int) -> nn.Sequential:
    """Return a stage's share of a model's layers."""
    return model[len(model) * stage // length : len(model) * (stage + 1) // length]


def stage_model(*, inplace: bool = False) -> nn.Sequential:
    """Build NUM_LAYERS layers, before each an activation that works in place if asked for."""
    model = tiny_model(num_blocks=NUM_LAYERS - 2)
    if inplace:
        model = nn.Sequential(*[nn.Sequential(nn.SiLU(inplace=True), layer) for layer in model])
    return model


class StackWork(StageWork):
    """Run some layers, and note what runs when and which tensors earlier forwards left alive."""

    def __init__(self, layers: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        self._layers = layers
        x, y = tiny_data(num_samples=sum(sizes)).tensors
        self.x, self.y = x.split(list(sizes)), y.split(list(sizes))
        self.events: list[str] = []
        self.alive: list[str] = []
        self._seen: list[tuple[str, weakref.ref[Tensor]]] = []

    def first_input(self, micro_batch: int) -> Payload:
        return Payload((self.x[micro_batch].clone(),))

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        (hidden,) = inputs.tensors
        self.events.append(f"{'R' if is_recomputing() else 'F'}{micro_batch}")
        self.alive += [name for name, tensor in self._seen if tensor() is not None]
        self._seen.append((f"input {micro_batch}", weakref.ref(hidden)))
        output = self._layers(hidden)
        self._seen.append((f"output {micro_batch}", weakref.ref(output)))
        if output.requires_grad:
            output.register_hook(lambda _: self.events.append(f"B{micro_batch}"))
        return Payload((output,))

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor | None:
        (output,) = outputs.tensors
        return nn.functional.cross_entropy(output, self.y[micro_batch], reduction="sum")
