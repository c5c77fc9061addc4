"""Refuse weights that were changed on one rank alone: its replicas would never be equal again.

Ranks that hold a layer hold it alike after every step, bit by bit. What a script writes into it
between two steps, it must write on all of them. They are compared where all ranks meet anyway:
before a transition, an epoch and an evaluation, and at the run's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autocache import fingerprint
from autodp import gather_json
from pipetransformer.model import LayeredModel
from pipetransformer.processes import World


def refuse_partial_edits(model: LayeredModel, held: Sequence[int], world: World) -> None:
    """Compare layers with those of the other ranks that hold them. Collective.

    Args:
        held: the sublayers that this rank holds.
    Raises:
        ValueError: on every rank: they differ; it names the first tensor that does, and the ranks.
    """
    if world.group is None:
        return
    # Few numbers a rank, and only where they differ those of single tensors.
    # A run after this one may have left a rank without some, whose forward is an error then.
    there = {index: model.tensors(index) for index in held}
    there = {i: own for i, own in there.items() if not any(t.is_meta for t in own.values())}
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
