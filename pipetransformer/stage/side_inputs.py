"""Send side inputs from stage 0 to the stages that need them: attention masks and targets.

A micro-batch's entries travel as one message, each sample's bytes side by side. A header once a
step names the entries, their dtypes and shapes. They travel through host memory, also between
GPUs: they are small, and come from the data set or the cache there, so they wait for no
computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopipe.engine import Receiver, Sender, TensorSpec


class SideSender:
    """Send the entries one other stage needs, to its workers by turns.

    Args:
        senders: to each worker, in the order of their turns.
        names: of the entries.
    """

    def __init__(self, senders: Sequence[Sender], names: Sequence[str]) -> None:
        self._senders = senders
        self._names = names
        self._announced: dict[Sender, dict[str, TensorSpec]] = {}

    def send(self, micro_batch: int, batch: Mapping[str, Tensor]) -> None:
        """Send a micro-batch's entries; those the dataset does not give are left out.

        Raises:
            ValueError: the entries or their shapes are not those of the step's first micro-batch.
        """
        sender = self._senders[micro_batch % len(self._senders)]
        entries = {name: batch[name] for name in self._names if name in batch}
        specs = {name: TensorSpec.of(tensor) for name, tensor in entries.items()}
        if sender not in self._announced:
            sender.send_header(specs)
            self._announced[sender] = specs
        elif specs != self._announced[sender]:
            raise ValueError(
                f"a micro-batch has the side inputs {specs}, the first one "
                f"{self._announced[sender]}; samples of a step, with weight_versions= of all "
                "steps between two pauses, need the same entries of one shape: pad them"
            )
        if entries:
            # Entries are in host memory already: from a GPU `cpu()` would wait for all its work.
            sender.send(torch.cat([_as_bytes(t.cpu()) for t in entries.values()], dim=1))

    def finish_step(self) -> None:
        """Wait until all has left; the next step sends a new header."""
        for sender in self._senders:
            sender.flush()
        self._announced.clear()


class SideReceiver:
    """Receive the entries this stage needs, in the order of its forwards.

    Args:
        receivers: from each worker of stage 0, in the order of their turns.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = receivers
        self._specs: list[dict[str, TensorSpec]] = []

    def begin(self, sizes: Sequence[int], order: Sequence[int]) -> None:
        """Prepare a step: wait for the header of every worker that sends something.

        Args:
            sizes: of all micro-batches.
            order: those that this worker takes.
        """
        count, self._specs = len(self._receivers), []
        for number, receiver in enumerate(self._receivers):
            own = [i for i in order if i % count == number]
            receiver.begin(own, sizes)
            specs = receiver.receive_header() if own else {}
            if specs:
                width = sum(_row_bytes(spec) for spec in specs.values())
                receiver.spec = TensorSpec((width,), "uint8")
                # Asked for only when it is needed, a message waits for a thread of the sender,
                # which computes by then: 3 ms on a busy core.
                receiver.post()
            self._specs.append(specs)

    def receive(self, micro_batch: int) -> dict[str, Tensor]:
        """Return a micro-batch's entries."""
        number = micro_batch % len(self._receivers)
        specs = self._specs[number]
        if not specs:
            return {}
        rows, entries = self._receivers[number].receive(micro_batch), {}
        parts = rows.split([_row_bytes(spec) for spec in specs.values()], dim=1)
        for (name, spec), part in zip(specs.items(), parts, strict=True):
            # A slice of `rows` may not be aligned for the entry's dtype; fresh memory is.
            entry = torch.empty(len(rows), *spec.shape, dtype=getattr(torch, spec.dtype))
            if entry.numel():
                _as_bytes(entry).copy_(part)
            entries[name] = entry
        return entries


def _as_bytes(tensor: Tensor) -> Tensor:
    width = math.prod(tensor.shape[1:])
    return tensor.detach().contiguous().view(len(tensor), width).view(torch.uint8)


def _row_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
