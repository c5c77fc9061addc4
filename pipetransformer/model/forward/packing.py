"""Put what parts return for samples into rows, whatever it is, and take it out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class UnlikeAnswerError(ValueError):
    """Say that a part returns something else for some samples than for others."""


@final
@dataclass(frozen=True)
class PartAnswer:
    """Say what a part returned: tensors' shapes, without samples, and all that is no tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]

    def blank(self, num_samples: int, device: torch.device) -> Any:
        """Return the like of it for samples, of NaN, or of zeros where these are no floats."""
        tensors = (
            torch.full(
                (), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device
            ).expand(num_samples, *shape)
            for shape, dtype in self.shapes
        )
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@final
@dataclass(frozen=True)
class Packing:
    """Put what parts return for samples into one tensor, (N, ...), and take it out again.

    A single tensor stays what it is. Several become bytes, (N, B), in the order of the parts; of
    padded texts (N, S, B), so that a row is as long as its text.
    Where a sample has any number of entries, such as one for each of its images, its bytes begin
    with these numbers, int64, one for each tensor; a sample of too many has -1, and no row.

    Args:
        answers: one for each part.
        names: of the parts, for errors.
        most_bytes: that a sample's entries may take; None where each has one entry.
        num_leading: dimensions that all tensors share: 1, of samples, or 2, of positions, too.
    """

    answers: tuple[PartAnswer, ...]
    names: tuple[str, ...]
    most_bytes: int | None = None
    num_leading: int = 1

    @classmethod
    def of(cls, flat: Mapping[str, Flat], num_samples: int) -> Packing:
        """Return that of answers, which `tree_flatten` has taken apart, by parts' names.

        Raises:
            UnlikeAnswerError: a part does not return one entry a sample.
        """
        answers = (answer_of(name, *one, num_samples) for name, one in flat.items())
        return cls(tuple(answers), tuple(flat))

    @classmethod
    def counting(cls, alone: Sequence[Mapping[str, Flat]]) -> Packing:
        """Return that of answers for samples that ran alone, with any number of entries each."""
        answers = tuple(answer_of(name, *one, None) for name, one in alone[0].items())
        sizes = [sum(tensor.nbytes for tensor in tensors_of(flat)) for flat in alone]
        return cls(answers, tuple(alone[0]), max(sizes))

    @property
    def is_single(self) -> bool:
        """Return whether a row is one tensor of the parts' own dtype."""
        return self.most_bytes is None and len(self._shapes) == 1

    @property
    def _shapes(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Return shapes behind what all tensors share, and dtypes."""
        return [shape for answer in self.answers for shape in self._behind(answer)]

    def _behind(self, answer: PartAnswer) -> list[tuple[torch.Size, torch.dtype]]:
        return [(shape[self.num_leading - 1 :], dtype) for shape, dtype in answer.shapes]

    def lacks(self, rows: Tensor) -> bool:
        """Return whether one of the rows is none, as its sample has too many entries."""
        return self.most_bytes is not None and -1 in self.counts(rows)[0]

    def counts(self, rows: Tensor) -> list[list[int]]:
        """Return the numbers of entries, by tensors, of each row, where they are counted."""
        head = _copied(rows[:, : 8 * len(self._shapes)]).view(torch.int64)
        counts: list[list[int]] = head.T.tolist()
        return counts

    def packed(self, answers: Sequence[Any], num_samples: int) -> Tensor:
        """Return a row for each sample; only of one where its entries are counted.

        Raises:
            UnlikeAnswerError: a part has returned something else than for the first samples.
        """
        tensors: list[Tensor] = []
        for known, name, answer in zip(self.answers, self.names, answers, strict=True):
            leaves, spec = tree_flatten(answer)
            refuse_unknown(name, leaves)
            num = num_samples if self.most_bytes is None else None
            found = answer_of(name, leaves, spec, num)
            is_alike = self.is_single or self._behind(found) == self._behind(known)
            if spec != known.spec or not is_alike or not _are_same(found.leaves, known.leaves):
                raise UnlikeAnswerError(
                    f"{name!r} returns {_spelled(found)} for some samples, and "
                    f"{_spelled(known)} for others; give all samples one shape, or leave it out "
                    "of parts="
                )
            tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return self.joined(
            tensors if self.most_bytes is not None else of_each(tensors, num_samples)
        )

    def of_none(self, device: torch.device) -> Tensor:
        """Return the row of a sample that has no entry, where entries are counted."""
        shapes = self._shapes
        return self.joined([torch.empty((0, *one), dtype=d, device=device) for one, d in shapes])

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return rows of the tensors of all answers."""
        if self.is_single:
            return tensors[0]
        if self.most_bytes is not None:
            return self._counted(tensors, self.most_bytes)
        leading = self.num_leading
        flat = [_copied(one.detach().reshape(*one.shape[:leading], -1)) for one in tensors]
        return torch.cat([one.view(torch.uint8) for one in flat], dim=-1)

    def _counted(self, tensors: Sequence[Tensor], most_bytes: int) -> Tensor:
        counts = torch.tensor([len(one) for one in tensors], device=tensors[0].device)
        data = torch.cat([_copied(one.detach()).flatten().view(torch.uint8) for one in tensors])
        if len(data) > most_bytes:
            counts, data = torch.full_like(counts, -1), data[:0]
        row = torch.cat([counts.view(torch.uint8), data])
        return nn.functional.pad(row, (0, most_bytes - len(data)))[None]

    def _uncounted(self, rows: Tensor) -> list[Tensor]:
        shapes, counts = self._shapes, self.counts(rows)
        sizes = [
            [num * shape.numel() * dtype.itemsize for num in own]
            for own, (shape, dtype) in zip(counts, shapes, strict=True)
        ]
        head, pieces = 8 * len(shapes), list[tuple[Tensor, ...]]()
        for row, own in zip(rows, zip(*sizes, strict=True), strict=True):
            pieces.append(row[head : head + sum(own)].split(own))
        return [
            torch.cat(own).view(dtype).view(sum(nums), *shape)
            for own, nums, (shape, dtype) in zip(
                zip(*pieces, strict=True), counts, shapes, strict=True
            )
        ]

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors of all answers, from their rows."""
        if self.is_single:
            return [rows]
        if self.most_bytes is not None:
            return self._uncounted(rows)
        shapes = self._shapes
        leading = rows.shape[: self.num_leading]
        pieces = rows.split([shape.numel() * dtype.itemsize for shape, dtype in shapes], dim=-1)
        return [
            _copied(piece).view(dtype).view(*leading, *shape)
            if shape.numel()
            else rows.new_empty((*leading, *shape), dtype=dtype)
            for piece, (shape, dtype) in zip(pieces, shapes, strict=True)
        ]

    def unpacked(self, part: int, rows: Tensor) -> Any:
        """Return what a part has returned for samples, from their rows."""
        answer = self.answers[part]
        first = sum(len(one.shapes) for one in self.answers[:part])
        own = iter(self.tensors(rows)[first:])
        leaves = [next(own) if leaf is _TENSOR else leaf for leaf in answer.leaves]
        return tree_unflatten(leaves, answer.spec)


Flat: TypeAlias = tuple[list[Any], TreeSpec]
"""What a part has returned, taken apart."""


@final
class _TENSOR:
    """Stand where an answer has a tensor; a class, which copies of a model share."""


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _copied(one: Tensor) -> Tensor:
    # Not `contiguous`: a single row counts as such, wherever it begins, and has no other dtype.
    return one.clone(memory_format=torch.contiguous_format)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(
        a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b) for a, b in pairs
    )


def _spelled(answer: PartAnswer) -> str:
    tensors = [f"{('N', *shape)} {dtype}" for shape, dtype in answer.shapes]
    return ", ".join([*tensors, *(repr(one) for one in answer.leaves if one is not _TENSOR)])


def refuse_unknown(name: str, leaves: list[Any]) -> None:
    odd = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN, type(None)))]
    if odd:
        raise UnlikeAnswerError(
            f"{name!r} returns a {type(odd[0]).__name__}, and what is in it is not known; have it "
            "return tensors, in tuples, lists, dicts or a ModelOutput, and a decoder no cache of "
            "its own (config.use_cache = False)"
        )


def tensors_of(flat: Mapping[str, Flat]) -> list[Tensor]:
    return [leaf for leaves, _ in flat.values() for leaf in leaves if isinstance(leaf, Tensor)]


def of_each(tensors: Sequence[Tensor], num_samples: int) -> list[Tensor]:
    """Return tensors with an entry a sample, where some have one for all."""
    return [one.expand(num_samples, *one.shape[1:]) if len(one) == 1 else one for one in tensors]


def answer_of(name: str, leaves: list[Any], spec: TreeSpec, num_samples: int | None) -> PartAnswer:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        refuse_unknown(name, leaves)
        raise UnlikeAnswerError(f"{name!r} returns no tensor, and so nothing to keep in rows")
    sizes = {num_samples}
    if any(one.shape[:1] == (num_samples,) for one in tensors):
        sizes.add(1)  # Beside others: a position bias is one for all samples.
    for one in tensors:
        if not one.ndim or num_samples is not None and len(one) not in sizes:
            raise UnlikeAnswerError(
                f"{name!r} returns a tensor of shape {tuple(one.shape)} for {num_samples} "
                "samples; rows need one entry a sample in its first dimension"
            )
    plain = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return PartAnswer(spec, plain, tuple((one.shape[1:], one.dtype) for one in tensors))
