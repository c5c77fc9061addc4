"""Hold what this rank holds under the current plan, and change it at a transition.

    decision -> topology -> who sends what -> move shards -> release, freeze -> groups, optimizer
    -> cache

The same ranks regroup: nothing is spawned or killed, and a sublayer that stays where it is is not
touched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autodp import Shard, Topology, broadcast_json, execute_moves, gather_json, plan_moves
from autopipe import PipelinePlan
from pipetransformer.checkpoint import (
    Checkpoint,
    ShardRecord,
    checkpoint_folder,
    publish,
    write_shards,
)
from pipetransformer.frozen_prefix import FrozenPrefix
from pipetransformer.optimizer_state import put_state, take_state
from pipetransformer.ownership import (
    OPTIMIZER,
    WEIGHTS,
    Ownership,
    held_by_rank_0,
    place,
    shard_name,
    split_shard_name,
)
from pipetransformer.stage import Stage, Task, set_frozen, set_training, trained_parameters
from pipetransformer.world import World

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """State what holds from a step on; published by rank 0 and written to the journal first.

    Args:
        step: the first step it holds for.
        num_frozen: frozen layers.
        plan: the pipeline over the others.
        use_cache: whether the prefix's activations are cached.
        reason: in one line.
    """

    step: int
    num_frozen: int
    plan: PipelinePlan
    use_cache: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "plan": self.plan.to_json()}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Decision:
        """Rebuild a decision from `to_json`."""
        return Decision(**{**values, "plan": PipelinePlan.from_json(values["plan"])})

    def changes(self, current: Decision | None) -> bool:
        """Tell whether anything has to be done to go from the current decision to this one."""
        return current is None or self._effect() != current._effect()

    def _effect(self) -> tuple[Any, ...]:
        plan = self.plan
        return (
            self.num_frozen,
            self.use_cache,
            plan.boundaries,
            plan.num_micro_batches,
            plan.schedule,
        )


class Deployment:
    """Hold a rank's sublayers, their optimizer state, its stage and its share of the cache."""

    def __init__(self, task: Task, world: World, prefix: FrozenPrefix) -> None:
        self._task = task
        self._world = world
        self._prefix = prefix
        self._names = tuple(sublayer.name for sublayer in task.model.sublayers)
        self._index_of = {name: index for index, name in enumerate(self._names)}
        self._ownership: Ownership | None = None
        self._parked: dict[str, Shard] = {}
        self.stage: Stage | None = None

    @property
    def active_stage(self) -> Stage:
        """Return the stage; there is one from the first decision on."""
        assert self.stage is not None
        return self.stage

    def change(self, decision: Decision) -> int:
        """Carry out a decision; every rank of the world calls it at the same step.

        Returns:
            bytes of the shards this rank received.
        """
        after = self._place(decision)
        before = (
            held_by_rank_0(self._names) if self._ownership is None else self._ownership.shards()
        )
        moves = plan_moves(before, after.shards(), slots_per_node=self._world.slots_per_node)
        received = execute_moves(
            moves, self._read_shard, group=self._world.group, device=self._world.device
        )
        self._adopt(decision, after, received)
        return sum(tensor.nbytes for shard in received.values() for tensor in shard.values())

    def restore(self, decision: Decision, checkpoint: Checkpoint) -> None:
        """Take this rank's shards from a checkpoint, whatever topology wrote it."""
        after = self._place(decision)
        needed = [name for name, ranks in after.shards().items() if self._world.rank in ranks]
        self._adopt(decision, after, {name: checkpoint.read(name) for name in needed})

    def save(self, directory: Path, step: int, scalars: Mapping[str, Any], *, keep: int) -> int:
        """Write a checkpoint, each sublayer by its owner; return its bytes. Collective."""
        assert self._ownership is not None
        group = self._world.group
        chosen = str(checkpoint_folder(directory, step)) if self._world.is_main else None
        folder = Path(broadcast_json(chosen, group=group))
        owned = [
            name
            for index, name in enumerate(self._names)
            if self._ownership.owner(index) == self._world.rank
        ]
        shards = {
            shard_name(name, kind): self._read_shard(shard_name(name, kind))
            for name in owned
            for kind in (WEIGHTS, OPTIMIZER)
        }
        written: dict[str, ShardRecord] = {}
        failure = ""
        try:
            written = write_shards(folder, shards)
        except (
            OSError
        ) as error:  # A full disk must not end the run, nor leave the other ranks waiting.
            failure = f"rank {self._world.rank}: {error}"
        gathered = gather_json(
            [failure, {name: asdict(r) for name, r in written.items()}], group=group
        )
        if failures := [text for text, _ in gathered if text]:
            if self._world.is_main:
                _LOGGER.warning(
                    "no checkpoint of step %d: %s; training goes on", step, failures[0]
                )
            return 0
        records = {
            name: ShardRecord(**values) for _, one in gathered for name, values in one.items()
        }
        if self._world.is_main:
            publish(directory, step, records, scalars, keep=keep)
        return sum(record.num_bytes for record in records.values())

    def gather_weights(self) -> None:
        """Bring every sublayer's weights to rank 0's model. Collective."""
        assert self._ownership is not None
        before = self._ownership.shards()
        after = {shard_name(name, WEIGHTS): frozenset([0]) for name in self._names}
        moves = plan_moves(before, after, slots_per_node=self._world.slots_per_node)
        received = execute_moves(
            moves, self._read_shard, group=self._world.group, device=self._world.device
        )
        for name, shard in received.items():
            self._task.model.replace(self._index_of[split_shard_name(name)[0]], shard)

    def close(self) -> None:
        """Destroy the plan's groups."""
        if self.stage is not None:
            self.stage.close()
            self.stage = None

    def _place(self, decision: Decision) -> Ownership:
        topology = Topology(self._world.size, self._world.slots_per_node, decision.plan.length)
        return place(self._names, topology, decision.plan)

    def _read_shard(self, name: str) -> Shard:
        """Return a shard this rank holds; tensors are the live ones, not copies."""
        sublayer, kind = split_shard_name(name)
        index = self._index_of[sublayer]
        if kind == WEIGHTS:
            return {
                key: tensor.detach() for key, tensor in self._task.model.tensors(index).items()
            }
        if sublayer in self._parked:
            return self._parked[sublayer]
        if self.stage is None:
            return {}
        return take_state(
            self.stage.optimizer, trained_parameters(self._task, range(index, index + 1))
        )

    def _adopt(self, decision: Decision, after: Ownership, received: dict[str, Shard]) -> None:
        """Become what a decision asks for, with the shards that have arrived."""
        model, rank = self._task.model, self._world.rank
        states = {}
        for name, ranks in after.shards().items():
            sublayer, kind = split_shard_name(name)
            if kind == OPTIMIZER and rank in ranks:
                states[sublayer] = received[name] if name in received else self._read_shard(name)
        if self.stage is not None:
            self.stage.close()
        held = after.held_by(rank)
        for index, name in enumerate(self._names):
            arrived = received.get(shard_name(name, WEIGHTS))
            if index not in held:
                model.release(index)
            else:
                self._hold(index, arrived or {})
        set_frozen(self._task, decision.num_frozen)
        set_training(model, held, num_frozen=decision.num_frozen)
        self._ownership = after
        self.stage = Stage(self._task, self._world, decision.plan, after.topology)
        self._place_states(states)
        self._prefix.set_depth(
            decision.num_frozen, on_stage_0=self.stage.index == 0, use_cache=decision.use_cache
        )

    def _hold(self, index: int, arrived: Shard) -> None:
        """Put what has arrived in place, and everything on this rank's device."""
        device = self._world.device
        tensors = {**self._task.model.tensors(index), **arrived}
        moved = {
            key: t.to(device) for key, t in tensors.items() if key in arrived or t.device != device
        }
        if moved:
            self._task.model.replace(index, moved)

    def _place_states(self, states: Mapping[str, Shard]) -> None:
        """Give trained sublayers' state to the optimizer, and park frozen ones' for a thaw."""
        assert self._ownership is not None
        stage = self.active_stage
        trained = {self._names[i] for i in self._ownership.trained_by(self._world.rank)}
        self._parked = {
            name: {key: t.cpu() for key, t in shard.items()}
            for name, shard in states.items()
            if name not in trained
        }
        for name in trained:
            index = self._index_of[name]
            parameters: dict[str, nn.Parameter] = trained_parameters(
                self._task, range(index, index + 1)
            )
            if stage.optimizer is not None:
                device = self._world.device
                put_state(
                    stage.optimizer,
                    parameters,
                    {
                        key: t.to(device) if t.ndim or device.type == "cpu" else t
                        for key, t in states.get(name, {}).items()
                    },
                )
