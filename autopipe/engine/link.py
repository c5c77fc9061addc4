"""Say how a stage reaches its neighbours, whatever lies between: processes or threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from autopipe.schedule import StageProgram

Gradients = tuple[Tensor | None, ...]
"""One entry a tensor of the payload that went the other way; None where it gets no gradient."""


@dataclass(frozen=True)
class Payload:
    """Hold what crosses a boundary for one micro-batch.

    Args:
        tensors: the hidden state's tensors, then the skip tensors, which may be None.
        is_bare: whether the hidden state is one tensor by itself rather than a tuple of tensors.
    """

    tensors: tuple[Tensor | None, ...]
    is_bare: bool = True


class Link(ABC):
    """Connect a stage to a neighbour: activations go up, the gradients of their tensors down."""

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:  # noqa: B027 - optional
        """Prepare a step of this program with micro-batches of these sizes."""

    def reserve(self, micro_batch: int) -> None:  # noqa: B027 - optional
        """Wait until the stage above has room for one more micro-batch."""

    @abstractmethod
    def send(self, micro_batch: int, payload: Payload) -> None:
        """Send what the neighbour gets of a micro-batch."""

    @abstractmethod
    def receive(self, micro_batch: int) -> Payload:
        """Wait for it; activations are leaves that say whether they need a gradient."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Wait until everything sent has been taken over."""


class RoutedLink(Link):
    """Connect with each worker of a stage: they take micro-batches in turn, in this order."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:
        for number, link in enumerate(self.links):
            own = (ins for ins in program if ins.micro_batch % len(self.links) == number)
            link.begin(tuple(own), sizes)

    def reserve(self, micro_batch: int) -> None:
        self._to(micro_batch).reserve(micro_batch)

    def send(self, micro_batch: int, payload: Payload) -> None:
        self._to(micro_batch).send(micro_batch, payload)

    def receive(self, micro_batch: int) -> Payload:
        return self._to(micro_batch).receive(micro_batch)

    def flush(self) -> None:
        for link in self.links:
            link.flush()

    def _to(self, micro_batch: int) -> Link:
        return self.links[micro_batch % len(self.links)]
