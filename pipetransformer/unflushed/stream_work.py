"""Say what a stage computes on the micro-batches of several steps in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from autopipe.engine import Payload, StageWork
from pipetransformer.stage import SideRoutes, SideSources, StageLayers, TrainWork


class _StepRoutes(SideRoutes):
    """Send a step's side inputs as a part of the stream's."""

    def __init__(self, whole: SideRoutes, first: int) -> None:
        self._whole, self._first = whole, first

    def send(self, micro_batch: int, batch: Mapping[str, Tensor]) -> None:
        self._whole.send(self._first + micro_batch, batch)

    def finish_step(self) -> None:
        """Leave that to the end of the stream."""


class _StepSources(SideSources):
    """Receive a step's side inputs as a part of the stream's."""

    def __init__(self, whole: SideSources, first: int) -> None:
        self._whole, self._first = whole, first

    def begin(self, sizes: Sequence[int], own: Sequence[int]) -> None:
        """Leave that to the beginning of the stream."""

    def receive(self, micro_batch: int) -> dict[str, Tensor]:
        return self._whole.receive(self._first + micro_batch)


def layers_of_step(layers: StageLayers, first: int) -> StageLayers:
    """Return a stage's layers, with the side inputs of a step of a stream.

    Args:
        layers: the stream's.
        first: the step's first micro-batch in the stream.
    """
    return replace(
        layers,
        side_out=tuple(_StepRoutes(routes, first) for routes in layers.side_out),
        side_in=None if layers.side_in is None else _StepSources(layers.side_in, first),
    )


class StreamWork(StageWork):
    """Give each micro-batch of a stream to its step's work, which begins with its first one.

    Args:
        work_of: returns a step's work, by its place in the stream; called once each, in order.
        num_micro_batches: of a step.
    """

    def __init__(self, work_of: Callable[[int], TrainWork], num_micro_batches: int) -> None:
        self._work_of, self._num_micro_batches = work_of, num_micro_batches
        self._under_way: dict[int, TrainWork] = {}

    def first_input(self, micro_batch: int) -> Payload:
        work, own = self._of(micro_batch)
        return work.first_input(own)

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        work, own = self._of(micro_batch)
        return work.forward(own, inputs)

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor:
        work, own = self._of(micro_batch)
        return work.finish(own, outputs)

    def take(self, number: int) -> TrainWork:
        """Hand over the work of a step that is done."""
        return self._under_way.pop(number)

    def _of(self, micro_batch: int) -> tuple[TrainWork, int]:
        number, own = divmod(micro_batch, self._num_micro_batches)
        if number not in self._under_way:
            self._under_way[number] = self._work_of(number)
        return self._under_way[number], own
