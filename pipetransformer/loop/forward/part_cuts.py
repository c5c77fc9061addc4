"""Know where what a part returns for several samples may be cut between these.

    given     x0, x1, x2   by each sample alone, and x = cat(x0, x1, x2) together, bit by bit
    once      part(x) = cat(part(x0), part(x1), part(x2)): it may be cut behind x0 and behind x1
    from now  part(x) alone, for other x of this structure: nothing flows over these cuts

A structure is all that decides what a part does with floats: their shapes, numbers, and the values
of integers and masks. That no float decides is seen by following them through the part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from pipetransformer.loop.forward.model_watch import ModelWatch
from pipetransformer.model import FollowedFloats

_MOST_MISSES = 4
"""In a row; then chunks run as if nothing was known, until one comes that was."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_Flat: TypeAlias = tuple[list[Any], TreeSpec]
_Cut: TypeAlias = tuple[int, ...]
"""Entries before it, of each tensor."""


class Reached(BaseException):
    """Leave a model's forward; no model's own `except Exception` catches it."""


@final
class PartCuts:
    """Hold the cuts of what a part was given, and of what it returned.

    Its methods that take a part's forward stand in that one's place.

    Attributes:
        is_off: whether no cut can be known.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.is_off = len(parts) > 1
        self._watch = ModelWatch(parts[0].modules())
        self._known: dict[Any, dict[_Cut, _Cut]] = {}
        self._turn, self._misses = 0, 0
        self.begin()

    def begin(self) -> None:
        """Begin with a chunk of samples."""
        self._alone, self._cuts = list[_Flat](), list[_Cut]()
        self._structure: tuple[Any, ...] | None = None

    @property
    def expects(self) -> bool:
        """Return whether the next chunk's cuts may be known."""
        return bool(self._known) and self._misses < _MOST_MISSES

    def next_place(self, num_samples: int) -> int:
        """Return which of a chunk's samples runs alone, too: each in turn."""
        self._turn += 1
        return self._turn % num_samples

    def note(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note what the part is given for a sample alone, and run it."""
        self._look_at_part()
        # The model may go on to write into what it gives.
        self._alone.append(tree_flatten(tree_map_only(Tensor, Tensor.clone, (args, kwargs))))
        return run(*args, **kwargs)

    def stop(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the same, and leave the model's forward."""
        self.note(lambda *_, **__: None, *args, **kwargs)
        raise Reached

    def run_known(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the part on the chunk; leave the forward where its cuts are not known."""
        self._meet(tree_flatten((args, kwargs)))
        if not self._are_known():
            raise Reached
        return run(*args, **kwargs)

    def run_followed(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the part on the chunk, and see whether floats decide what it does."""
        self._meet(tree_flatten((args, kwargs)))
        if self._structure is None:
            return run(*args, **kwargs)
        with FollowedFloats(_floats((args, kwargs))) as followed:
            answer = run(*args, **kwargs)
        # What was not followed to the end may have gone past torch's operators.
        if followed.decide or not all(map(followed.has, _floats(answer))):
            self.is_off, self._structure = True, None
        return answer

    def learn(self, counts: Sequence[Sequence[int]]) -> None:
        """Note that a chunk is what its samples are alone; and their entries, by tensors."""
        if self._structure is None or len(self._cuts) != len(counts[0]):
            return  # Or one of them has nothing for the part.
        self._are_known()
        known = self._known.setdefault(self._structure, {})
        known.update(zip(self._cuts, zip(*map(accumulate, counts), strict=True), strict=True))

    def cut(self, answer: Any) -> list[Any]:
        """Return the answers of a chunk's samples."""
        leaves, spec = tree_flatten(answer)
        known = self._known[self._structure]
        ends = iter(zip(*(known[cut] for cut in self._cuts), strict=True))
        pieces = [
            leaf.split([end - start for start, end in pairwise((0, *next(ends)))])
            if isinstance(leaf, Tensor)
            else [leaf] * len(self._cuts)
            for leaf in leaves
        ]
        return [tree_unflatten(own, spec) for own in zip(*pieces, strict=True)]

    def _are_known(self) -> bool:
        known = self._known.get(self._structure, {})
        are_known = self._structure is not None and all(cut in known for cut in self._cuts)
        self._misses = 0 if are_known else self._misses + 1
        return are_known

    def _look_at_part(self) -> None:
        if self._watch.has_other_attributes():  # A model may tell its part more in this way.
            self._known.clear()
            self._watch.renew()

    def _meet(self, whole: _Flat) -> None:
        self._look_at_part()
        alone, self._alone, self._structure = self._alone, [], None
        if any(spec != whole[1] for _, spec in alone):
            return
        leaves, sizes = list[Any]([str(whole[1])]), list[list[int]]()
        for leaf, *own in zip(whole[0], *(leaves for leaves, _ in alone), strict=True):
            if not isinstance(leaf, Tensor):
                if not all(_is_same(leaf, one) for one in own):
                    return
                leaves.append((type(leaf), leaf))
                continue
            is_shared = all(_is_same(leaf, one) for one in own)
            if not is_shared and not _is_joined(leaf, own):
                return
            value = None if _is_float(leaf) else _digest(leaf)
            leaves.append((leaf.shape, leaf.dtype, is_shared, value))
            if not is_shared:
                sizes.append([len(one) for one in own])
        self._cuts = [*zip(*map(accumulate, sizes), strict=True)]
        self._structure = tuple(leaves) if self._cuts else None


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if _is_float(leaf)]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


def _is_joined(leaf: Tensor, own: Sequence[Tensor]) -> bool:
    kinds = {(one.ndim, one.shape[1:], one.dtype) for one in (leaf, *own)}
    return leaf.ndim > 0 and len(kinds) == 1 and torch.equal(leaf, torch.cat([*own]))


def _digest(leaf: Tensor) -> bytes:
    return hashlib.blake2b(leaf.cpu().numpy().tobytes(), digest_size=16).digest()
