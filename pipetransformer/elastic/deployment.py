"""Hold what this rank holds under the current plan, and change it at a transition.

    decision -> topology -> leave the stage -> move shards -> freeze -> groups, optimizer -> cache

The same ranks regroup: nothing is spawned or killed, and a sublayer that stays where it is is not
touched. The old stage's gradients are gone before the first shard comes, and shards are placed and
dropped as they travel: a rank never holds all of what it had and all of what it gets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autocache import fingerprint
from autodp import (
    ROUND_BYTES,
    GroupPool,
    Holders,
    Shard,
    broadcast_tensor,
    gather_json,
    move_shards,
)
from freeze.signals import IntervalSignals
from pipetransformer.config import PIPEDREAM_PLANS
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.shards import (
    WEIGHTS,
    HeldShards,
    Ownership,
    shard_name,
    split_shard_name,
)
from pipetransformer.feed import FrozenPrefix
from pipetransformer.model import LayeredModel, LossScale, Task, set_frozen, state_of
from pipetransformer.processes import World, free_bytes
from pipetransformer.stage import AsynchronousStage, Stage

_LOG = logging.getLogger(__name__)


class Deployment:
    """Hold a rank's sublayers, their optimizer state and its stage."""

    def __init__(self, task: Task, world: World, prefix: FrozenPrefix) -> None:
        self._task, self._world, self._prefix = task, world, prefix
        self._names = tuple(sublayer.name for sublayer in task.model.sublayers)
        self._held = HeldShards(task, world.rank, world.device)
        self._ownership: Ownership | None = None
        self._groups = GroupPool(
            world.rank,
            # PipeDream's stages get their workers when the costs are known.
            ()
            if task.config.plan in PIPEDREAM_PLANS
            else [world.topology(length) for length in world.lengths],
            on_cuda=world.link_device.type == "cuda",
            timeout_s=task.config.setup_timeout_s,
            backend=world.backend,
        )
        # Here and not in a stage, as its history must outlive transitions.
        self.loss_scale = LossScale(is_dynamic=task.config.precision == "fp16")
        self.stage: Stage | None = None

    @property
    def active_stage(self) -> Stage:
        """Return the stage; there is one from the first decision on."""
        assert self.stage is not None
        return self.stage

    @property
    def rebuild_s(self) -> float:
        """Return what new groups for another pipeline length take; see `GroupPool`."""
        return self._groups.rebuild_s

    def change(self, decision: Decision) -> int:
        """Carry out a decision; every rank of the world calls it at the same step.

        Feeds must then follow the prefix.

        Returns:
            bytes of the shards this rank received.
        Raises:
            ValueError: see `refuse_partial_edits`.
        """
        self.refuse_partial_edits()
        after = self._place(decision)
        holders = after.shards()
        before = self._ownership.shards() if self._ownership else self._holders_at_first(after)
        signals = self._unfinished_signals(decision)
        # First: gradients and buckets of the old stage would lie beside the shards that arrive.
        self._leave_stage()
        self._held.release_others(before)
        self._held.park(after.parked_by(self._world.rank))
        self._held.keep(after.held_by(self._world.rank))
        num_bytes = self._move(before, holders)
        self._adopt(decision, after)
        if signals is not None:
            self.active_stage.trained.signals.load(signals)
        return num_bytes

    def freeze(self, decision: Decision) -> None:
        """Let the model's parameters need gradients as a decision says."""
        set_frozen(self._task, decision.num_frozen, decision.resting)

    def refuse_partial_edits(self) -> None:
        """Refuse weights that a script has changed on some of their ranks alone. Collective.

        Ranks that hold a layer hold it alike after every step, bit by bit. They are compared where
        all ranks meet anyway: before a transition, an epoch and an evaluation, and at the end.

        Raises:
            ValueError: on every rank: it names the first tensor that differs, and the ranks.
        """
        if self._ownership is not None and self._world.group is not None:
            held = self._ownership.held_by(self._world.rank)
            _refuse_differing(self._task.model, held, self._world)

    def needed_shards(self, decision: Decision) -> tuple[str, ...]:
        """Name the shards that this rank holds under a decision."""
        return self._place(decision).shards_of(self._world.rank)

    def restore(self, decision: Decision, shards: dict[str, Shard]) -> None:
        """Start with the shards that `needed_shards` named; every rank of the world calls it."""
        after = self._place(decision)
        self._held.release_others(after.shards())
        self._held.park(after.parked_by(self._world.rank))
        for name, tensors in shards.items():
            self._held.put(name, tensors)
        self._adopt(decision, after)

    def held_shards(self) -> dict[str, Shard]:
        """Return the shards that this rank holds; tensors are the live ones."""
        assert self._ownership is not None
        names = self._ownership.shards_of(self._world.rank)
        return {name: self._held.read(name) for name in names}

    def held_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer state on this rank's device."""
        if self.stage is None:
            return 0
        tensors = [t for shard in self.held_shards().values() for t in shard.values()]
        tensors += [p.grad for p in self.stage.trained.parameters.values() if p.grad is not None]
        return sum(t.nbytes for t in tensors if t.device == self._world.device)

    def owned_shards(self) -> dict[str, Shard]:
        """Return the shards that this rank owns, to be saved; tensors are the live ones."""
        assert self._ownership is not None
        rank, ranks_of = self._world.rank, self._ownership.shards()
        return {name: self._held.read(name) for name in ranks_of if min(ranks_of[name]) == rank}

    def gather_weights(self, device: torch.device) -> None:
        """Bring all weights to rank 0's model, on a device if it lacks them. Collective."""
        assert self._ownership is not None
        before = {
            shard: ranks
            for shard, ranks in self._ownership.shards().items()
            if split_shard_name(shard)[1] == WEIGHTS
        }
        after = {shard: ranks | {0} for shard, ranks in before.items()}
        self._move(before, after, weights_device=device)

    def copy_weights(self, *, movable: bool = False) -> dict[str, Tensor]:
        """Return copies of the model's state in rank 0's host memory, {} elsewhere. Collective.

        Rank 0's model then holds what it held before, as the other layers train on elsewhere.

        Args:
            movable: whether to leave out opaque weights, and what their modules add to the state.
        """
        assert self._ownership is not None
        model, state = self._task.model, dict[str, Tensor]()
        held = {id(t) for i in self._ownership.held_by(0) for t in model.tensors(i).values()}
        with self.whole_on_rank_0():
            if self._world.is_main:
                for name, tensor in state_of(model.model, movable=movable).items():
                    state[name] = tensor.detach().to("cpu", copy=id(tensor) in held)
        return state

    def put_weights(self, state: Mapping[str, Tensor]) -> None:
        """Give rank 0's values of the model's state to all holders, in place. Collective.

        Args:
            state: by the model's own names; used on rank 0 alone.
        """
        main, group = self._world.is_main, self._world.group
        with torch.no_grad():
            for name, held in state_of(self._task.model.model, movable=True).items():
                value = state[name] if main else torch.empty(held.shape, dtype=held.dtype)
                broadcast_tensor(value, 0, group=group, what="the best weights")
                # A frozen layer that is not written keeps its rows in the cache.
                if not held.is_meta and not torch.equal(held.cpu(), value):
                    held.copy_(value)

    def fill_released(self) -> None:
        """Bring layers from rank 0 that an earlier run has taken from this one. Collective.

        Raises:
            ValueError: on every rank: rank 0 lacks something itself.
        """
        model = self._task.model
        released = [
            name
            for index, name in enumerate(self._names)
            if any(tensor.is_meta for tensor in model.tensors(index).values())
        ]
        missing = gather_json(released, group=self._world.group)
        if missing[0]:
            raise ValueError(
                f"the model's sublayers {missing[0]} have no weights on rank 0 (they are meta "
                "tensors); give weights to the model, or let the run end that had it before"
            )
        lacking = {
            name: {r for r, one in enumerate(missing) if name in one} for name in sum(missing, [])
        }
        before = {shard_name(name, WEIGHTS): frozenset([0]) for name in lacking}
        after = {shard_name(name, WEIGHTS): frozenset({0, *lacking[name]}) for name in lacking}
        # Models are in host memory before a run.
        self._move(before, after, weights_device=torch.device("cpu"))

    @contextmanager
    def whole_on_rank_0(self) -> Iterator[None]:
        """Hold the whole model on rank 0 within the block; extra layers are in host memory.

        Collective, at both ends.
        """
        if self._ownership is None:  # Every rank still has all of its own.
            yield
            return
        self.gather_weights(torch.device("cpu"))
        try:
            yield
        finally:
            self._held.release_others(self._ownership.shards())

    def roomy_device(self) -> torch.device:
        """Return this rank's device if the whole model fits there; else the CPU.

        Rank 0, whose alone matters, warns.
        """
        model, device = self._task.model, self._world.device
        tensors = [t for i in range(len(self._names)) for t in model.tensors(i).values()]
        lacking = sum(t.nbytes for t in tensors if t.device != device)
        free = free_bytes(self._world)
        if free is None or lacking + ROUND_BYTES <= free:
            return device
        if self._world.is_main:
            _LOG.warning(
                f"the model does not fit on {device}, which has {free} bytes left for layers of "
                f"{lacking} bytes: they are in host memory; model.cpu() brings the others there"
            )
        return torch.device("cpu")

    def close(self) -> None:
        """Let go of the stage, and destroy the groups."""
        self._leave_stage()
        self._held.states.clear()
        self._groups.close()

    def _place(self, decision: Decision) -> Ownership:
        plan = decision.plan
        return Ownership(self._names, self._world.topology(plan.length), plan.boundaries)

    def _holders_at_first(self, after: Ownership) -> dict[str, frozenset[int]]:
        """Return who holds what at the start, when rank 0's weights win. Collective.

        To move from rank 0 overwrites the others' weights. Ranks whose weights are equal hold them
        already: what they share, as pages of a mapped file, stays shared.
        """
        holders, main = after.shards(), frozenset([0])
        if self._world.group is None:
            return dict.fromkeys(holders, main)
        names = holders if self._world.is_main else after.shards_of(self._world.rank)
        read = {name: self._held.read(name) for name in names if name.endswith(f"/{WEIGHTS}")}
        sums = {
            name: fingerprint(tensors.values())
            for name, tensors in read.items()
            if not any(tensor.is_meta for tensor in tensors.values())
        }
        told = gather_json(sums, group=self._world.group)
        return {
            name: main
            | {r for r, one in enumerate(told) if name in one and one[name] == told[0].get(name)}
            for name in holders
        }

    def _move(
        self, before: Holders, after: Holders, *, weights_device: torch.device | None = None
    ) -> int:
        """Move shards, weights to a device, by default the rank's own. Collective."""
        world = self._world
        self._held.weights_device = weights_device or world.device
        try:
            return move_shards(
                before,
                after,
                self._held,
                group=world.group,
                device=world.device,
                slots_per_node=world.slots_per_node,
            )
        finally:
            self._held.weights_device = world.device

    def _leave_stage(self) -> None:
        """Keep the optimizer's state, and let go of all else: gradients, buckets, links."""
        self._held.take_back()
        if self.stage is not None:
            self.stage.close()
            self.stage = None

    def _unfinished_signals(self, decision: Decision) -> dict[str, Any] | None:
        """Return what all stages measured in an interval that goes on; None for a new one."""
        if self.stage is None or self.stage.plan.boundaries[0] != decision.plan.boundaries[0]:
            return None
        states = gather_json(self.stage.trained.signals.state(), group=self._world.group)
        return IntervalSignals.joined(states) if states[0]["num_steps"] else None

    def _adopt(self, decision: Decision, after: Ownership) -> None:
        """Build the stage of a decision whose shards are there."""
        rank = self._world.rank
        self._held.settle(after.held_by(rank))
        # Before the stage is built: its reducer waits for every parameter that needs a gradient.
        self.freeze(decision)
        self._ownership = after
        limit_s = self._task.config.step_limit_s(decision.plan.predicted_step_s)
        build = Stage if self._task.config.weight_versions is None else AsynchronousStage
        self.stage = build(
            self._task,
            self._world,
            plan=decision.plan,
            topology=after.topology,
            groups=self._groups.open(after.topology, timeout_s=limit_s),
            loss_scale=self.loss_scale,
        )
        part = self.stage.trained
        self._held.give_to(part.optimizer, after.trained_by(rank), part.signals)
        self._prefix.set_depth(
            self._task.prefix_depth(decision.num_frozen),
            on_stage_0=self.stage.index == 0,
            use_cache=decision.use_cache,
        )


def _refuse_differing(model: LayeredModel, held: Sequence[int], world: World) -> None:
    """Raise a ValueError if two ranks hold a layer with other values. Collective."""
    # A run after this one may have left meta tensors here, whose forward is an error then.
    there = {index: model.tensors(index) for index in held}
    there = {i: own for i, own in there.items() if not any(t.is_meta for t in own.values())}
    # One number a layer travels; numbers of single tensors only where layers differ.
    own = {str(index): fingerprint(tensors.values()) for index, tensors in there.items()}
    sublayer = _first_differing(gather_json(own, group=world.group))
    if sublayer is None:
        return
    index = int(sublayer)
    own = {name: fingerprint([tensor]) for name, tensor in there.get(index, {}).items()}
    found = gather_json(own, group=world.group)
    name = _first_differing(found)
    assert name is not None
    holders = {rank: one[name] for rank, one in enumerate(found) if name in one}
    first = min(holders)
    others = [rank for rank, value in holders.items() if value != holders[first]]
    raise ValueError(
        f"{name!r} of sublayer {model.sublayers[index].name!r} has other values on "
        f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} than on rank {first}: it "
        "was changed on some of the ranks alone, and their replicas have drifted apart; write "
        "weights on every rank alike"
    )


def _first_differing(found: Sequence[Mapping[str, int]]) -> str | None:
    """Return the first name under which ranks have different numbers, among those that have it."""
    seen: dict[str, int] = {}
    for one in found:
        for name, number in one.items():
            if seen.setdefault(name, number) != number:
                return name
    return None
