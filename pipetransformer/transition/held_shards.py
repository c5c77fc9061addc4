"""Keep what a rank holds: the weights in its model, and optimizer state that no optimizer has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autodp import Holders, Shard, ShardStore
from pipetransformer.job import Task, trained_parameters
from pipetransformer.optimizer import put_state, take_state
from pipetransformer.transition.ownership import OPTIMIZER, WEIGHTS, shard_name, split_shard_name


@final
class HeldShards(ShardStore):
    """Read, place and drop this rank's shards.

    The state of an optimizer is here from when a stage is left until the next one takes it over,
    and in host memory for as long as its sublayer is frozen.

    Args:
        task: whose model holds the weights.
        rank: this one.
        device: this rank's slot.
    """

    def __init__(self, task: Task, rank: int, device: torch.device) -> None:
        self._task = task
        self._model = task.model
        self._rank = rank
        self._device = device
        self._index_of = {sublayer.name: i for i, sublayer in enumerate(task.model.sublayers)}
        self._weights_device = device
        self._parked_indices: Collection[int] = ()
        self.states: dict[str, Shard] = {}

    def read(self, shard: str) -> Shard:
        sublayer, kind = split_shard_name(shard)
        if kind == OPTIMIZER:
            return dict(self.states.get(sublayer, {}))
        tensors = self._model.tensors(self._index_of[sublayer])
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def put(self, shard: str, tensors: Shard) -> None:
        sublayer, kind = split_shard_name(shard)
        index = self._index_of[sublayer]
        if kind == WEIGHTS:
            self._model.replace(index, {k: t.to(self._weights_device) for k, t in tensors.items()})
            return
        if index in self._parked_indices:
            tensors = _in_host_memory(tensors)
        self.states.setdefault(sublayer, {}).update(tensors)

    def drop(self, shard: str, names: Sequence[str]) -> None:
        sublayer, kind = split_shard_name(shard)
        if kind == WEIGHTS:
            self._model.replace(self._index_of[sublayer], dict.fromkeys(names))
            return
        state = self.states.get(sublayer, {})
        for name in names:
            del state[name]
        if not state:
            self.states.pop(sublayer, None)

    def release_others(self, holders: Holders) -> None:
        """Free the weights that are no shards of this rank: initial or gathered ones."""
        for name, index in self._index_of.items():
            if self._rank not in holders[shard_name(name, WEIGHTS)]:
                tensors = self._model.tensors(index)
                if not all(tensor.is_meta for tensor in tensors.values()):
                    self._model.release(index)

    @contextmanager
    def receiving_on(self, device: torch.device) -> Iterator[None]:
        """Put the weights that arrive meanwhile on a device."""
        self._weights_device = device
        try:
            yield
        finally:
            self._weights_device = self._device

    def settle(self, indices: Collection[int]) -> None:
        """Bring the weights of sublayers that this rank held from the start to its device."""
        for index in indices:
            elsewhere = {
                name: tensor.to(self._device)
                for name, tensor in self._model.tensors(index).items()
                if tensor.device != self._device
            }
            if elsewhere:
                self._model.replace(index, elsewhere)

    def park(self, indices: Collection[int]) -> None:
        """Keep the optimizer state of these sublayers in host memory from now on."""
        self._parked_indices = indices
        for name, state in self.states.items():
            if self._index_of[name] in indices:
                self.states[name] = _in_host_memory(state)

    def take_from(self, optimizer: Optimizer | None, indices: Collection[int]) -> None:
        """Keep an optimizer's state of sublayers; the optimizer itself may go."""
        for name, index in self._index_of.items():
            if index in indices:
                self.states[name] = self.state_of(optimizer, name)

    def give_to(self, optimizer: Optimizer | None, indices: Collection[int]) -> None:
        """Hand the state of sublayers over to the optimizer that trains them from now on."""
        for name, index in self._index_of.items():
            if index in indices:
                state = self.states.pop(name, {})
                if optimizer is not None:
                    placed = {key: self._placed(tensor) for key, tensor in state.items()}
                    put_state(optimizer, self._parameters(name), placed)

    def state_of(self, optimizer: Optimizer | None, sublayer: str) -> Shard:
        """Return an optimizer's state of a sublayer: its own tensors."""
        return take_state(optimizer, self._parameters(sublayer))

    def _parameters(self, sublayer: str) -> dict[str, nn.Parameter]:
        index = self._index_of[sublayer]
        return trained_parameters(self._task, range(index, index + 1))

    def _placed(self, tensor: Tensor) -> Tensor:
        """Bring a moment to the device; a step count stays where the optimizer had it."""
        return tensor.to(self._device) if tensor.ndim else tensor


def _in_host_memory(tensors: Shard) -> Shard:
    return {name: tensor.cpu() for name, tensor in tensors.items()}
