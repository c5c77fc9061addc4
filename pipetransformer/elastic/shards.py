"""Say which ranks hold which sublayer's weights and optimizer state, and keep this rank's.

The unit that is owned, moved and saved is the sublayer. Its owner is the lowest rank that holds
it. A trained sublayer lives, with its optimizer state, on every rank of its stage. A frozen one
lives on every stage 0, which runs the frozen prefix; its optimizer state waits at rank 0 alone.

Signals of an unfinished interval travel, and are saved, as optimizer state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autodp import Holders, Shard, ShardStore, Topology
from freeze.signals import IntervalSignals, is_signal_tensor
from pipetransformer.model import Task, put_state, take_state, trained_parameters

WEIGHTS, OPTIMIZER = "weights", "optimizer"
UNTRAINED = "untrained"
"""The group of a shard's weights that no step of any run changes."""
_TRAINED = "trained"


@dataclass(frozen=True)
class Ownership:
    """Hold the placement of every sublayer.

    Args:
        names: all sublayers, in order.
        topology: which rank is which stage.
        boundaries: K + 1 sublayer indices; stage j trains [boundaries[j], boundaries[j + 1]).
    Raises:
        ValueError: the boundaries, of a user's own planner perhaps, do not give every stage
            sublayers to train.
    """

    names: tuple[str, ...]
    topology: Topology
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds, length = self.boundaries, self.topology.length
        if (
            len(bounds) != length + 1
            or bounds[0] < 0
            or bounds[-1] != len(self.names)
            or any(before >= after for before, after in pairwise(bounds))
        ):
            raise ValueError(
                f"a plan of length {length} has boundaries {bounds}; its planner "
                f"must give {length + 1} that ascend, from 0 or more to "
                f"{len(self.names)}, the number of sublayers"
            )

    def trained_by(self, rank: int) -> range:
        """Return the sublayers a rank trains; a spare has none."""
        if self.topology.is_spare(rank):
            return range(0)
        stage = self.topology.stage_of(rank)
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the sublayers whose weights a rank holds, in order."""
        runs_prefix = self.topology.stage_of(rank) == 0
        return (*range(self.boundaries[0] if runs_prefix else 0), *self.trained_by(rank))

    def parked_by(self, rank: int) -> range:
        """Return the frozen sublayers whose optimizer state waits for a thaw at a rank."""
        return range(self.boundaries[0] if rank == 0 else 0)

    def shards(self) -> dict[str, frozenset[int]]:
        """Return the ranks that hold each shard: a sublayer's weights, or its optimizer state."""
        holders: dict[str, frozenset[int]] = {}
        for index, name in enumerate(self.names):
            # Boundaries begin at stage 0's first sublayer. The prefix below is stage 0's, too.
            stage = max(0, sum(index >= first for first in self.boundaries) - 1)
            ranks = frozenset(self.topology.stage_ranks(stage))
            holders[shard_name(name, WEIGHTS)] = ranks
            is_frozen = index < self.boundaries[0]
            holders[shard_name(name, OPTIMIZER)] = frozenset([0]) if is_frozen else ranks
        return holders

    def shards_of(self, rank: int) -> tuple[str, ...]:
        """Name the shards that a rank holds."""
        return tuple(name for name, ranks in self.shards().items() if rank in ranks)


def shard_name(sublayer: str, kind: str) -> str:
    """Name a shard."""
    return f"{sublayer}/{kind}"


def split_shard_name(shard: str) -> tuple[str, str]:
    """Return a shard's sublayer and kind."""
    sublayer, _, kind = shard.rpartition("/")
    return sublayer, kind


def split_by_change(
    task: Task, shards: Mapping[str, Shard]
) -> tuple[dict[str, Shard], dict[str, Shard]]:
    """Split shards into what steps change, by shard, and what they do not, by "shard/group".

    The groups are weights that never train, frozen ones, and buffers. Apart, so that a layer which
    freezes has only its adapters written, not the base below. The saver looks whether they change.
    What sublayers share has groups that are equal in each, and so are their files: one is written.
    """
    trained: dict[str, Shard] = {}
    frozen: dict[str, Shard] = {}
    for shard, tensors in shards.items():
        kind = split_shard_name(shard)[1]
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group = _group_of(task, _parameter_of(task, name) if kind == OPTIMIZER else name)
            if kind == WEIGHTS and name in task.model.shared and group != _TRAINED:
                group = f"shared_{group}"
            groups.setdefault(group, {})[name] = tensor
        own = groups.pop(_TRAINED, {})
        if own or not groups:
            trained[shard] = own
        frozen |= {f"{shard}/{group}": one for group, one in groups.items()}
    return trained, frozen


def _group_of(task: Task, name: str) -> str:
    tensor = task.model.tensor(name)
    if not isinstance(tensor, nn.Parameter):
        return "buffers"
    if name not in task.trainable:
        return UNTRAINED
    return _TRAINED if tensor.requires_grad else "frozen"


def _parameter_of(task: Task, key: str) -> str:
    """Return the parameter of an optimizer's "parameter/entry"; both may have slashes."""
    name = key.rpartition("/")[0]
    while name and name not in task.trainable:
        name = name.rpartition("/")[0]
    return name


@final
class HeldShards(ShardStore):
    """Read, place and drop this rank's shards.

    Attributes:
        states: optimizer state by sublayer, while no stage trains it; a frozen sublayer's is in
            host memory.
        weights_device: where arriving weights go.
    """

    def __init__(self, task: Task, rank: int, device: torch.device) -> None:
        self._task = task
        self._model = task.model
        self._rank = rank
        self._device = device
        self._index_of = {sublayer.name: i for i, sublayer in enumerate(task.model.sublayers)}
        self.weights_device = device
        self._parked: Collection[int] = ()
        self._still_held: Collection[str] = ()
        self._optimizer: Optimizer | None = None
        self._signals: IntervalSignals | None = None
        self._trained = range(0)
        self.states: dict[str, Shard] = {}

    def read(self, shard: str) -> Shard:
        sublayer, kind = split_shard_name(shard)
        index = self._index_of[sublayer]
        if kind == OPTIMIZER:
            if index in self._trained:  # While it trains, the optimizer has the state.
                return self._take(index)
            return dict(self.states.get(sublayer, {}))
        return {name: tensor.detach() for name, tensor in self._model.movable(index).items()}

    def put(self, shard: str, tensors: Shard) -> None:
        sublayer, kind = split_shard_name(shard)
        index = self._index_of[sublayer]
        if kind == WEIGHTS:
            self._model.replace(index, {k: t.to(self.weights_device) for k, t in tensors.items()})
            return
        if index in self._parked:
            tensors = _in_host_memory(tensors)
        # A shard travels in pieces: others of its tensors may be here already.
        self.states.setdefault(sublayer, {}).update(tensors)

    def drop(self, shard: str, names: Sequence[str]) -> None:
        sublayer, kind = split_shard_name(shard)
        if kind == WEIGHTS:
            # None leaves a meta tensor, which takes no memory and keeps the name and the shape.
            free = [name for name in names if name not in self._still_held]
            self._model.replace(self._index_of[sublayer], dict.fromkeys(free))
            return
        state = self.states.get(sublayer, {})
        for name in names:
            del state[name]
        if not state:
            self.states.pop(sublayer, None)

    def release_others(self, holders: Holders) -> None:
        """Free the weights that are no shards of this rank: initial or gathered ones."""
        others = {
            name: index
            for name, index in self._index_of.items()
            if self._rank not in holders[shard_name(name, WEIGHTS)]
        }
        self.keep(set(self._index_of.values()) - set(others.values()))
        for name, index in others.items():
            tensors = self._model.movable(index)
            self.drop(
                shard_name(name, WEIGHTS),
                [tensor for tensor in tensors if not tensors[tensor].is_meta],
            )

    def keep(self, indices: Collection[int]) -> None:
        """Drop no weights from now on that one of these sublayers has, too: tied ones."""
        self._still_held = {name for index in indices for name in self._model.tensors(index)}

    def settle(self, indices: Collection[int]) -> None:
        """Bring sublayers to this rank's device that were built, or gathered, elsewhere."""
        for index in indices:
            elsewhere = {
                name: tensor.to(self._device)
                for name, tensor in self._model.movable(index).items()
                if tensor.device != self._device
            }
            if elsewhere:
                self._model.replace(index, elsewhere)

    def park(self, indices: Collection[int]) -> None:
        """Keep the optimizer state of these sublayers in host memory from now on."""
        self._parked = indices
        for name, state in self.states.items():
            if self._index_of[name] in indices:
                self.states[name] = _in_host_memory(state)

    def give_to(
        self, optimizer: Optimizer | None, indices: range, signals: IntervalSignals
    ) -> None:
        """Hand the state of sublayers over to the optimizer and the signals of a new stage."""
        for index in indices:
            name = self._model.sublayers[index].name
            state = self.states.pop(name, {})
            signals.put_tensors(name, state)
            if optimizer is not None:
                moments = {key: t for key, t in state.items() if not is_signal_tensor(key)}
                put_state(optimizer, self._parameters(index), moments)
        self._optimizer, self._trained, self._signals = optimizer, indices, signals

    def take_back(self) -> None:
        """Keep the state of the optimizer and the signals, which end with their stage."""
        for index in self._trained:
            self.states[self._model.sublayers[index].name] = self._take(index)
        self._optimizer, self._trained, self._signals = None, range(0), None

    def _take(self, index: int) -> Shard:
        """Return a trained sublayer's optimizer state, and its signals' tensors."""
        state = take_state(self._optimizer, self._parameters(index))
        if self._signals is None:
            return state
        return {**state, **self._signals.tensors(self._model.sublayers[index].name)}

    def _parameters(self, index: int) -> dict[str, nn.Parameter]:
        return trained_parameters(self._task, (index,))


def _in_host_memory(tensors: Shard) -> Shard:
    return {name: tensor.cpu() for name, tensor in tensors.items()}
