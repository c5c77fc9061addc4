"""Say what planning for a place needs to know, and get it for a cluster that is described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from autopipe.cluster import load_cluster, modelled_profile
from autopipe.plan import PlanRequest
from autopipe.profile import Profile, ProfiledSublayer
from pipetransformer.adapters import LayeredModel
from pipetransformer.forecast.named_model import ModelChoice, build_named
from pipetransformer.planning import RowRates, complete_request, usual_prefix_chunk


@dataclass(frozen=True)
class Place:
    """Hold what planning for a place needs.

    Args:
        num_slots, slots_per_node: device slots that would train.
        memory_bytes: of a slot; None where it is not known.
        cache_bytes_per_s: at which cached activations are read; None where it is not known.
        reads_ahead: whether they are read while the step before computes, as on a GPU.
    """

    name: str
    profile: Profile
    num_slots: int
    slots_per_node: int
    memory_bytes: int | None
    cache_bytes_per_s: float | None
    reads_ahead: bool = False

    @property
    def nodes(self) -> int:
        """Count the nodes, the last of which may not be full."""
        return -(-self.num_slots // self.slots_per_node)


def described_place(choice: ModelChoice, cluster_file: str) -> Place:
    """Model the costs for a cluster's file.

    Raises:
        ValueError: file or model cannot be read or counted; see `load_cluster`, `build_named` and
            `modelled_profile`.
    """
    cluster = load_cluster(cluster_file)
    named = build_named(choice, device="meta")
    return Place(
        cluster.name,
        modelled_profile(profiled(named.model), named.sample, cluster),
        cluster.num_slots,
        cluster.slots_per_node,
        cluster.memory_bytes,
        cluster.cache_bytes_per_s,
        reads_ahead=True,
    )


def profiled(model: LayeredModel) -> list[ProfiledSublayer]:
    """Present a model's sublayers to be counted, without its loss."""
    return [
        ProfiledSublayer(sub.name, sub.layer, sub.module, partial(_call, model, index))
        for index, sub in enumerate(model.sublayers)
    ]


def _call(
    model: LayeredModel, index: int, hidden: Tensor | None, batch: Mapping[str, Tensor]
) -> Tensor:
    return model.call(index, batch if hidden is None else hidden, sides=batch)


def make_request(
    place: Place,
    *,
    global_batch: int,
    num_frozen: int,
    memory_limit_bytes: int | None,
    cached: bool,
    stage_workers: tuple[int, ...] | None = None,
) -> PlanRequest:
    """State what the Trainer would ask of its planner.

    Args:
        memory_limit_bytes: of a slot; None is what the place has.
        cached: whether the frozen prefix's activations may come from the cache.
        stage_workers: of each stage of one pipeline of all slots, to be considered, too.
    Raises:
        ValueError: a value is out of range, or the place does not say how fast a cache is.
    """
    most = max(cost.layer for cost in place.profile.sublayers)
    if num_frozen > most:
        raise ValueError(
            f"{num_frozen} layers cannot be frozen; the model has {most} beside its "
            f"head, which never freezes: give 0 to {most}"
        )
    if cached and place.cache_bytes_per_s is None:
        raise ValueError(
            f"{place.name} does not say how fast a cache is read; add "
            "cache_bytes_per_s to its file, or leave --cached out"
        )
    request = PlanRequest(
        place.num_slots,
        place.slots_per_node,
        global_batch,
        num_frozen,
        memory_limit_bytes=place.memory_bytes
        if memory_limit_bytes is None
        else memory_limit_bytes,
        prefix_chunk=usual_prefix_chunk(global_batch, place.num_slots),
        stage_workers=stage_workers,
    )
    rate, rows = place.cache_bytes_per_s, None
    if cached and rate is not None:
        # What is read without end pays for any writing.
        rows = RowRates(rate, rate, place.reads_ahead)
    return complete_request(request, place.profile, rows=rows)
