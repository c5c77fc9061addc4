"""Have worker processes read samples ahead of the steps that need them.

step       t: read ◄─┐   computes ......   t + 1: read ◄─┐   computes ......
worker 0     ... t ──┘  ... t + 2 .....................  │  ... t + 4 ......
worker 1     ... t + 1 ..................................┘  ... t + 3 ......

The position in the run says what steps will need, until a transition gives samples to other
ranks. Then, and whenever a sample is asked for that was not expected, the workers start anew.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from pipetransformer.feed.collation import Batch
from pipetransformer.feed.fetch_forecast import Follower
from pipetransformer.feed.samples import Samples

# A process that was spawned would spawn its workers, too: each would import torch anew, and data
# sets and functions would have to be picklable.
_START = "fork" if "fork" in multiprocessing.get_all_start_methods() else None

Request: TypeAlias = tuple[tuple[int, ...], int]
"""The indices of samples that are read together, and their view."""
_Answer: TypeAlias = tuple[Request, Batch]


class ForeseenSamples:
    """Read samples through workers, as far as it is known which come next.

    Args:
        to_come: yields the requests to come, the next one first.
        num_workers: processes that read; 0 reads in this process, when a step needs a sample.
        prefetch_factor: requests that each worker reads ahead.
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
        self._end_workers: Callable[[], None] | None = None
        self._answers: Follower[_Answer] = Follower(self._begin)

    def read(self, ids: Sequence[int], *, view: int) -> Batch:
        """Return samples as `Samples.read` does; unexpected ones are read here and now."""
        if self._num_workers > 0:
            answer = self._answers.next_one(lambda answer: answer[0] == (tuple(ids), view))
            if answer is not None:
                return answer[1]
        return self._samples.read(ids, view=view)

    def forget(self) -> None:
        """Foresee anew, at the next read."""
        self._answers.forget()

    def close(self) -> None:
        """End the workers."""
        end_workers, self._end_workers = self._end_workers, None
        self.forget()
        self._loader = None
        if end_workers is not None:
            # Else they end with the last reference, which a traceback may hold for long.
            end_workers()

    def _begin(self) -> Iterable[_Answer]:
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
        answers = iter(self._loader)
        self._end_workers = getattr(answers, "_shutdown_workers", None)
        if self._end_workers is None:
            raise RuntimeError(
                f"{type(answers).__name__} of torch {torch.__version__} has no field "
                "'_shutdown_workers', by which workers are ended; set num_workers=0, or install "
                "a torch that has it, such as 2.11"
            )
        return answers


class _ToCome(Iterable[Request]):
    """Begin with the next request whenever it is iterated over."""

    def __init__(self, to_come: Callable[[], Iterable[Request]]) -> None:
        self._to_come = to_come

    def __iter__(self) -> Iterator[Request]:
        return iter(self._to_come())


class _Answers(Dataset[_Answer]):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, request: Request) -> _Answer:
        ids, view = request
        return request, self._samples.read(ids, view=view)


def _as_it_is(answer: Any) -> Any:
    return answer
