"""Bring attention masks and targets from stage 0, which reads them, to the stages that need them.

A micro-batch's entries travel as one message: each sample's bytes side by side. A header once a
step names the entries, their dtypes and shapes. They travel through host memory, also between
GPUs: they are small, come from the dataset or the cache there, and so wait for no computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopipe.engine import Receiver, Sender, TensorSpec


class SideSender:
    """Send the entries one other stage needs."""

    def __init__(self, sender: Sender, names: Sequence[str]) -> None:
        self._sender = sender
        self._names = names
        self._announced: dict[str, TensorSpec] | None = None

    def send(self, batch: Mapping[str, Tensor]) -> None:
        """Send a micro-batch's entries; those the dataset does not give are left out.

        Raises:
            ValueError: the entries or their shapes are not those of the step's first micro-batch.
        """
        entries = {name: batch[name] for name in self._names if name in batch}
        specs = {name: TensorSpec.of(tensor) for name, tensor in entries.items()}
        if self._announced is None:
            self._sender.send_header(specs)
            self._announced = specs
        elif specs != self._announced:
            raise ValueError(
                f"a micro-batch has the side inputs {specs}, the step's first one "
                f"{self._announced}; samples of one step need the same entries of "
                "one shape: pad them"
            )
        if entries:
            # From a GPU that waits until it has done all that it was given before.
            self._sender.send(torch.cat([_as_bytes(t.cpu()) for t in entries.values()], dim=1))

    def finish_step(self) -> None:
        """Wait until all has left; the next step announces itself anew."""
        self._sender.flush()
        self._announced = None


class SideRoutes:
    """Send each micro-batch's entries to that worker of another stage that takes it."""

    def __init__(self, senders: Sequence[SideSender]) -> None:
        self._senders = senders

    def send(self, micro_batch: int, batch: Mapping[str, Tensor]) -> None:
        """Send a micro-batch's entries; as `SideSender` does."""
        self._senders[micro_batch % len(self._senders)].send(batch)

    def finish_step(self) -> None:
        """Wait until all has left."""
        for sender in self._senders:
            sender.finish_step()


class SideSources:
    """Receive the entries this stage needs from the workers of stage 0."""

    def __init__(self, receivers: Sequence[SideReceiver]) -> None:
        self._receivers = receivers

    def begin(self, sizes: Sequence[int], own: Sequence[int]) -> None:
        """Prepare a step; see `SideReceiver`.

        Args:
            sizes: of all micro-batches.
            own: those that this worker takes.
        """
        for number, receiver in enumerate(self._receivers):
            receiver.begin(sizes, [i for i in own if i % len(self._receivers) == number])

    def receive(self, micro_batch: int) -> dict[str, Tensor]:
        """Return a micro-batch's entries."""
        return self._receivers[micro_batch % len(self._receivers)].receive(micro_batch)


class SideReceiver:
    """Receive the entries this stage needs, in the order of the forwards."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._specs: dict[str, TensorSpec] = {}

    def begin(self, sizes: Sequence[int], order: Sequence[int]) -> None:
        """Prepare a step of micro-batches of the given sizes: wait for the header.

        It comes before the first activations do. A message that is not asked for before it is
        needed waits for a thread of the sender's, which by then computes: 3 ms on a busy core.
        """
        self._receiver.begin(order, sizes)
        self._specs = {}
        if not order:
            return
        self._specs = self._receiver.receive_header()
        if self._specs:
            width = sum(_row_bytes(spec) for spec in self._specs.values())
            self._receiver.spec = TensorSpec((width,), "uint8")
            self._receiver.post()

    def receive(self, micro_batch: int) -> dict[str, Tensor]:
        """Return a micro-batch's entries."""
        if not self._specs:
            return {}
        rows, entries = self._receiver.receive(micro_batch), {}
        parts = rows.split([_row_bytes(spec) for spec in self._specs.values()], dim=1)
        for (name, spec), part in zip(self._specs.items(), parts, strict=True):
            # A copy starts at an aligned address; a slice of one row would stay where it is.
            part = part.clone(memory_format=torch.contiguous_format)
            entries[name] = part.view(getattr(torch, spec.dtype)).view(len(rows), *spec.shape)
        return entries


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(len(tensor), -1).view(torch.uint8)


def _row_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
