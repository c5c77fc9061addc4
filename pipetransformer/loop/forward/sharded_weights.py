"""Run a model whose weights `fully_shard` (FSDP2) has spread over ranks, as rows have it run.

                              units of frozen blocks         other units
    a look at the model       whole copies on each rank, no hook of FSDP's
    rows are computed         whole copies on each rank, no hook of FSDP's, and not run
    a forward from rows       not gathered, not run          as ever
    any other forward         as ever                        as ever

Ranks compute rows for unequal numbers of samples. So they do it on copies of their own, where
nobody waits for anybody. All ranks copy together; see `RowBatches`. Whether a forward has rows
all ranks agree on, as those that run a unit wait for each other.

What is private in torch's `fully_shard` is known here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autocache import fingerprint
from autodp import waiting_for

Place = tuple[dict[str, Any], str]
"""A module's table of parameters or buffers, and a name in it."""


class NotHereError(LookupError):
    """Say that frozen blocks were to run where no whole copy of their weights lies."""


@final
@dataclass(frozen=True, eq=False)
class _Shard:
    """Be a parameter of a unit, its dtype where it is gathered, and its places in the model."""

    own: Any
    dtype: torch.dtype | None
    places: tuple[Place, ...]

    @property
    def parameter(self) -> Any:
        """Return this rank's part, a DTensor, which the optimizer has."""
        return self.own.sharded_param

    @property
    def local(self) -> Tensor:
        local: Tensor = self.parameter.to_local()
        return local.detach()

    def whole(self) -> Tensor:
        """Return all of it. Collective."""
        with torch.inference_mode(False), torch.no_grad():
            full: Tensor = self.parameter.full_tensor()
            if self.dtype is not None and full.is_floating_point():
                full = full.to(self.dtype)
        return full


@final
class ShardedWeights:
    """Know the units of a model that `fully_shard` has parted.

    Raises:
        ValueError: weights lie elsewhere than their device, or are no plain tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._units: dict[Any, list[_Shard]] = {}
        for unit in (m for m in model.modules() if _is_unit(m)):
            state: Any = unit._get_fsdp_state()  # type: ignore[operator]
            if state not in self._units:
                self._units[state] = [*_shards_of(state)]
        self._shards = [one for shards in self._units.values() for one in shards]
        for one in self._shards:
            _refuse_odd(one)
        self._at = {(id(table), n): one for one in self._shards for table, n in one.places}
        # Always the same objects, as looks at the model may note them. Without memory, where they
        # are not held.
        self._copies = {one: nn.Parameter(torch.empty(0), False) for one in self._shards}
        self._here = set[_Shard]()
        self._user: object = None
        self._idle: frozenset[Any] = frozenset()
        self._num_apart = 0
        self._prefetched = {state: _prefetched_by(state) for state in self._units}
        self._hooks = [*self._take_hooks()]

    @classmethod
    def of(cls, model: nn.Module) -> ShardedWeights | None:
        """Return what knows a model's units; None where it has none."""
        return cls(model) if any(map(_is_unit, model.modules())) else None

    @property
    def is_apart(self) -> bool:
        """Return whether this rank runs the model alone."""
        return self._num_apart > 0

    def holds(self, user: object) -> bool:
        """Return whether copies are held for a user."""
        return user is self._user

    def hold(self, user: object, places: Iterable[Place]) -> None:
        """Keep whole copies of what lies there until another user's, or `let_go`. Collective."""
        self._copy(user, [*dict.fromkeys(self._in(places))])

    def let_go(self, user: object) -> None:
        """Free a user's copies."""
        if user is not self._user:
            return
        for one in self._here:
            self._copies[one].data = torch.empty(0)
        self._here, self._user = set(), None

    def let_others_go(self, user: object) -> None:
        """Free the copies of all but one."""
        if user is not self._user and not self.is_apart:
            self.let_go(self._user)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have the model be whole on each rank within the block. Collective."""
        own = object()
        try:
            self._copy(own, self._shards)
            with self.apart():
                yield
        finally:
            self.let_go(own)

    @contextmanager
    def apart(self, places: Iterable[Place] = ()) -> Iterator[None]:
        """Run this rank alone within the block, on the copies that it has.

        Raises:
            NotHereError: there is no copy of what lies in one of the places.
        """
        if any(one not in self._here for one in self._in(places)):
            raise NotHereError("weights of frozen blocks are not on this rank")
        copies = {one: self._copies[one] for one in self._shards if one in self._here}
        for one, copy in copies.items():
            copy.requires_grad_(one.parameter.requires_grad)
        kinds = [(module, type(module)) for state in self._units for module in state._modules]
        self._num_apart += 1
        try:
            for module, kind in kinds:
                if _is_unit(module):  # Nobody can make another of its class.
                    module.__class__ = kind.__mro__[_unit_at(kind) + 1]
            with _in_place(copies):
                yield
        finally:
            self._num_apart -= 1
            for module, kind in kinds:
                module.__class__ = kind

    def versions(self, places: Iterable[Place]) -> list[tuple[int, ...]]:
        """Return what tells whether somebody has written into what lies there."""
        found = [self._at.get((id(table), name)) or table[name] for table, name in places]
        return [
            # What is written through `to_local` counts for that alone.
            (one.local.data_ptr(), one.local._version, one.parameter._version)
            if isinstance(one, _Shard)
            else (one.data_ptr(), one._version)
            for one in found
        ]

    def values(self, places: Iterable[Place]) -> int:
        """Return a hash of this rank's part of what lies there."""
        found = [self._at.get((id(table), name)) or table[name] for table, name in places]
        return fingerprint(one.local if isinstance(one, _Shard) else one for one in found)

    def serve(self, modules: Iterable[nn.Module]) -> None:
        """Gather no unit from now on whose modules are all among these, which do not run."""
        if self.is_apart:
            return
        inner = {part for module in modules for part in module.modules()}
        idle = frozenset(one for one in self._units if inner.issuperset(one._modules))
        if idle == self._idle:
            return
        self._idle = idle
        for state, prefetched in self._prefetched.items():
            for name, states in prefetched.items():
                setattr(state, name, [one for one in states if one not in idle])

    def runs_apart(self, state: Any) -> bool:
        """Return whether a unit is to do nothing but cast."""
        return self.is_apart or state in self._idle

    def close(self) -> None:
        """Give units their hooks back."""
        self.serve(())
        self.let_go(self._user)
        for table, key, hook in self._hooks:
            if isinstance(table.get(key), _UnitHook):
                table[key] = hook
        self._hooks = []

    def _copy(self, user: object, shards: Iterable[_Shard]) -> None:
        # Those of another user may be older than the weights, as blocks have thawed since.
        self.let_go(self._user)
        self._user = user
        for one in shards:
            self._copies[one].data = one.whole()
            self._here.add(one)

    def _in(self, places: Iterable[Place]) -> Iterator[_Shard]:
        found = (self._at.get((id(table), name)) for table, name in places)
        return (one for one in found if one is not None)

    def _take_hooks(self) -> Iterator[tuple[dict[int, Any], int, Any]]:
        for state in self._units:
            policy = state._mp_policy
            given = policy.param_dtype if policy.cast_forward_inputs else None
            for module in state._modules:
                pairs = ((module._forward_pre_hooks, given), (module._forward_hooks, None))
                for table, dtype in pairs:
                    is_before = table is module._forward_pre_hooks
                    dtype = dtype if is_before else policy.output_dtype
                    for key, hook in [*table.items()]:
                        if _is_method_of(state, hook):
                            table[key] = _UnitHook(self, state, hook, is_before, dtype)
                            yield table, key, hook


def all_agree(value: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether it is so on every rank of a group with a CPU backend. Collective.

    Raises:
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    if group is None:
        return value
    said = torch.tensor(int(value))
    with waiting_for("whether all ranks have rows", group):
        dist.all_reduce(said, dist.ReduceOp.MIN, group=group)
    return bool(said)


@final
@dataclass(frozen=True)
class _UnitHook:
    """Be a hook of FSDP's, which gathers a unit, or lets it go; or only cast as it does."""

    weights: ShardedWeights
    state: Any
    hook: Callable[..., Any]
    is_before: bool
    dtype: torch.dtype | None

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if not self.weights.runs_apart(self.state):
            return self.hook(module, *given)
        value = given if self.is_before else given[-1]
        return value if self.dtype is None else tree_map_only(Tensor, self._cast, value)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _in_place(parameters: Mapping[_Shard, nn.Parameter]) -> Iterator[None]:
    """Have the model hold these within the block."""
    before = [(place, place[0][place[1]]) for one in parameters for place in one.places]
    try:
        for one, parameter in parameters.items():
            for table, name in one.places:
                table[name] = parameter
        yield
    finally:
        for (table, name), parameter in before:
            table[name] = parameter


def _is_method_of(state: Any, hook: Any) -> bool:
    # A unit of several modules wraps the state's method.
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None


def _is_unit(module: nn.Module) -> bool:
    return _unit_at(type(module)) >= 0


def _unit_at(kind: type) -> int:
    """Return where among a class's bases FSDP's own is; -1 where it is not."""
    # By its name: importing that class takes half as long as importing torch.
    found = (place for place, one in enumerate(kind.__mro__) if one.__name__ == "FSDPModule")
    return next(found, -1)


def _shards_of(state: Any) -> Iterator[_Shard]:
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        for own in group.fsdp_params if group is not None else ():
            info = own._module_info
            modules = (info.module, *info.shared_modules)
            names = (info.param_name, *info.shared_param_names)
            tables = (vars(module)["_parameters"] for module in modules)
            yield _Shard(own, state._mp_policy.param_dtype, (*zip(tables, names, strict=True),))


def _prefetched_by(state: Any) -> dict[str, list[Any]]:
    names = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
    return {name: getattr(state, name) for name in names}


def _refuse_odd(shard: _Shard) -> None:
    name, local = shard.places[0][1], shard.local
    if local.device.type != shard.parameter.device_mesh.device_type:
        raise ValueError(
            f"fully_shard keeps {name!r} in the host's memory (CPUOffloadPolicy), where rows are "
            "not computed: leave offload_policy= out, or freeze without rows by freeze.apply"
        )
    if type(local) is not Tensor:
        raise ValueError(
            f"fully_shard has {name!r} as a {type(local).__name__}, of which no whole copy can be "
            "made: give it plain tensors, or freeze without rows by freeze.apply"
        )
