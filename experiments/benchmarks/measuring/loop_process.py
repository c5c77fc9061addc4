"""Run the plain loop in a process of its own, as its user would.

A Trainer sets up the allocator of the process that it is in (`pipetransformer.processes`); beside
it, a plain loop would keep freed memory, too, without having asked for it.
"""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from experiments.benchmarks.measuring.rounds import seconds_of
from experiments.benchmarks.measuring.timed_loop import RivalTask, TimedLoop

_PATIENCE_S = 300.0
"""For a step, or for what precedes the first one."""


class LoopProcess:
    """Lead a `TimedLoop` that another process holds; what it is asked for, it times itself.

    Args:
        task, learning_rate, max_grad_norm: as the loop takes them; they travel to it.
        num_threads: that it computes on.
    Raises:
        TimeoutError: it has not answered.
        RuntimeError: it has failed; what it printed says why.
    """

    def __init__(
        self,
        task: RivalTask,
        *,
        learning_rate: float,
        num_threads: int,
        max_grad_norm: float | None = None,
    ) -> None:
        # Fresh: a fork would take the allocator along.
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        settings = {"learning_rate": learning_rate, "max_grad_norm": max_grad_norm}
        self._process = context.Process(target=_serve, args=(other, task, num_threads, settings))
        self._process.start()
        other.close()
        try:
            self._answer()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def freeze(self, num_frozen: int) -> None:
        """Freeze the bottom layers."""
        self._ask("freeze", num_frozen)

    def step(self) -> float:
        """Train on the next batch; return the seconds that it took."""
        return float(self._ask("step"))

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):  # It may have failed.
            # Said, as forks made since, such as a Trainer's workers, keep the pipe open.
            self._pipe.send(("end",))
        self._pipe.close()
        self._process.join(_PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> LoopProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, *request: Any) -> Any:
        with suppress(OSError):  # Where it has failed, there is no answer.
            self._pipe.send(request)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(_PATIENCE_S):
            raise TimeoutError(f"the plain loop has not answered for {_PATIENCE_S:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("the plain loop has failed; see what it printed") from error


def _serve(pipe: Connection, task: RivalTask, num_threads: int, settings: dict[str, Any]) -> None:
    torch.set_num_threads(num_threads)
    loop = TimedLoop(task, **settings)
    pipe.send(None)
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            return
        if what == "end":
            return
        if what == "freeze":
            loop.freeze(*arguments)
            pipe.send(None)
        else:
            pipe.send(seconds_of(loop.step))
