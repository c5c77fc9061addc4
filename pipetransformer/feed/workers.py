"""Have worker processes read samples ahead of the steps that need them.

step       t: read ◄─┐   computes ......   t + 1: read ◄─┐   computes ......
worker 0     ... t ──┘  ... t + 2 .....................  │  ... t + 4 ......
worker 1     ... t + 1 ..................................┘  ... t + 3 ......

What steps will need is a function of the position in the run, until something changes who trains
what: then, and whenever another sample is asked for than the one foreseen, the workers begin anew.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from pipetransformer.feed.collation import Batch
from pipetransformer.feed.samples import Samples

_START = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
"""Said, as a process that was itself spawned would spawn: each worker would import torch anew, and
datasets and functions would have to be picklable."""

Request: TypeAlias = tuple[tuple[int, ...], int]
"""The indices of samples that are read together, and their view."""


class ForeseenSamples:
    """Read samples through workers, as far as it is known which come next.

    Args:
        to_come: yields the requests to come, the next one first.
        num_workers: processes that read; 0 reads in this one, when a step needs it.
        prefetch_factor: requests that each has read, or is reading, ahead.
    """

    def __init__(
        self,
        samples: Samples,
        to_come: Callable[[], Iterable[Request]],
        *,
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        timeout_s: float,
    ) -> None:
        self._samples, self._to_come, self._num_workers = samples, to_come, num_workers
        self._prefetch_factor, self._pin_memory = prefetch_factor, pin_memory
        self._timeout_s = timeout_s
        self._loader: DataLoader[Any] | None = None
        self._answers: Iterator[Any] | None = None

    def read(self, ids: Sequence[int], *, view: int) -> Batch:
        """Return samples, as `Samples.read`; where they were not foreseen, read here and now."""
        if self._num_workers == 0:
            return self._samples.read(ids, view=view)
        wanted = (tuple(ids), view)
        for begins in (False, True):
            if begins:
                self._begin()
            if self._answers is not None:
                answered, batch = next(self._answers, (None, {}))
                if answered == wanted:
                    found: Batch = batch
                    return found
        self._answers = None
        return self._samples.read(ids, view=view)

    def forget(self) -> None:
        """Foresee anew, at the next read."""
        self._answers = None

    def close(self) -> None:
        iterator: Any = None if self._loader is None else self._loader._iterator
        self._answers = self._loader = None
        if iterator is not None:
            # Else they end with the last reference, which a traceback may hold for long.
            iterator._shutdown_workers()

    def _begin(self) -> None:
        """Let the workers read what is to come; what they have read so far is dropped."""
        if self._loader is None:
            self._loader = DataLoader(
                _Answers(self._samples),
                sampler=_ToCome(self._to_come),
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=self._num_workers,
                prefetch_factor=self._prefetch_factor,
                pin_memory=self._pin_memory,
                timeout=self._timeout_s,
                persistent_workers=True,
                generator=torch.Generator(),  # Not the default one, from which it would draw.
                multiprocessing_context=_START,
            )
        self._answers = iter(self._loader)


class _ToCome(Iterable[Request]):
    """Begin with the next request whenever it is iterated over."""

    def __init__(self, to_come: Callable[[], Iterable[Request]]) -> None:
        self._to_come = to_come

    def __iter__(self) -> Iterator[Request]:
        return iter(self._to_come())


class _Answers(Dataset[tuple[Request, Batch]]):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, request: Request) -> tuple[Request, Batch]:
        ids, view = request
        return request, self._samples.read(ids, view=view)


def _as_it_is(answer: Any) -> Any:
    return answer
