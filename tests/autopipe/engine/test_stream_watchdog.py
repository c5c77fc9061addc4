"""Prove that a stream's waits have a limit, that an excess is said once, and that no thread stays.

Marks, the clock and the abort are the test's: no GPU is needed.
"""

from __future__ import annotations

import logging
import threading

import pytest

from autodp import PeerError
from autopipe.engine import stream_watchdog
from autopipe.engine.stream_watchdog import Milestone, Watchdog
from tests.helpers.stand_in_gpu import MarkedStream

PATIENCE_S = 30.0
FIRST, SECOND = "rank 1 waited for the activations of rank 0", "rank 1 waited for its gradients"


class HandMark:
    """Be reached when the test says so."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.error: str | None = None
        stream.marks.append(self)
        self.reached = threading.Event()

    def is_reached(self) -> bool:
        self._stream.looked.set()
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.reached.is_set()

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S)


class Stream:
    """Stand for a GPU's stream, a clock, and the links' groups."""

    def __init__(self) -> None:
        self.marks: list[HandMark] = []
        self.looked = threading.Event()
        self.now_s = 100.0
        self.num_aborts = 0
        self.watchdog = Watchdog(
            self.abort, error=PeerError, mark=lambda: HandMark(self), clock=lambda: self.now_s
        )

    def abort(self) -> None:
        """Let the stream go on, as NCCL's kernels do when they are told to end."""
        self.num_aborts += 1
        for mark in self.marks:
            mark.reached.set()

    def wait_for_a_look(self) -> None:
        """Return when the thread has looked again."""
        self.looked.clear()
        assert self.looked.wait(PATIENCE_S)


def end_of_thread(stream: Stream) -> None:
    """Wait for the end of the thread, once its watchdog is gone."""
    thread = stream.watchdog._thread
    del stream.watchdog
    if thread is not None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def unwatched(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Return a stream whose watchdog looks only when the test calls it."""
    monkeypatch.setattr(stream_watchdog, "_look_always", lambda watchdog: None)
    return Stream()


def test_a_wait_within_its_limit_is_forgotten_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = unwatched(monkeypatch)
    stream.watchdog.watch(FIRST, 5.0)
    stream.now_s += 4.9
    stream.watchdog.look()
    stream.marks[0].reached.set()
    stream.now_s += 60.0
    stream.watchdog.look()
    stream.watchdog.check()
    assert stream.num_aborts == 0


def test_a_wait_that_exceeds_its_limit_is_logged_once_and_raised_at_every_next_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = unwatched(monkeypatch)
    stream.watchdog.watch(FIRST, 5.0)
    stream.watchdog.watch(SECOND, 5.0)
    stream.now_s += 5.0
    with caplog.at_level(logging.ERROR):
        stream.watchdog.look()
        stream.watchdog.look()
    said = f"{FIRST} (limit 5 s): the links have been aborted"
    assert [record.message for record in caplog.records] == [said]
    assert stream.num_aborts == 1
    for call in (
        stream.watchdog.check,
        stream.watchdog.settle,
        lambda: stream.watchdog.watch(SECOND, 5.0),
    ):
        with pytest.raises(PeerError, match=r"^rank 1 waited for the activations .*limit 5 s"):
            call()
    assert len(stream.marks) == 2, "nothing is watched after a failure"


def test_a_wait_s_time_begins_when_the_one_before_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = unwatched(monkeypatch)
    stream.watchdog.watch(FIRST, 5.0)
    stream.watchdog.watch(SECOND, 5.0)  # Launched ahead: the stream is not there yet.
    stream.now_s += 4.0
    stream.marks[0].reached.set()
    stream.watchdog.look()
    stream.now_s += 4.9
    stream.watchdog.look()
    stream.watchdog.check()
    stream.now_s += 0.1
    stream.watchdog.look()
    with pytest.raises(PeerError, match="waited for its gradients"):
        stream.watchdog.check()


def test_a_pause_without_waits_counts_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = unwatched(monkeypatch)
    stream.watchdog.watch(FIRST, 5.0)
    stream.marks[0].reached.set()
    stream.watchdog.settle()
    stream.now_s += 60.0  # An evaluation, a checkpoint.
    stream.watchdog.watch(SECOND, 5.0)
    stream.now_s += 4.9
    stream.watchdog.look()
    stream.watchdog.check()


def test_a_device_that_fails_is_a_failed_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = unwatched(monkeypatch)
    stream.watchdog.watch(FIRST, 5.0)
    stream.marks[0].error = "illegal memory access"
    stream.watchdog.look()
    with pytest.raises(PeerError, match="rank 0: the device has failed: illegal memory access"):
        stream.watchdog.check()
    assert stream.num_aborts == 1


def test_one_thread_looks_from_the_first_wait_on_until_the_watchdog_is_gone() -> None:
    # Each step's first wait started a thread, which ended with the step.
    before = threading.active_count()
    stream, threads = Stream(), set[threading.Thread | None]()
    assert threading.active_count() == before
    for _ in range(3):
        for _ in range(3):
            stream.watchdog.watch(FIRST, 5.0)
        threads.add(stream.watchdog._thread)
        stream.wait_for_a_look()
        for mark in stream.marks:
            mark.reached.set()
        stream.watchdog.settle()
        assert threading.active_count() == before + 1
    assert len(threads) == 1 and None not in threads
    stream.watchdog.watch(FIRST, 5.0)  # An exception ends the step: nobody settles.
    end_of_thread(stream)
    assert threading.active_count() == before


def test_a_host_that_sits_in_a_synchronisation_is_freed_by_the_abort_and_told_why() -> None:
    stream = Stream()
    stream.watchdog.watch(FIRST, 5.0)
    stream.watchdog.watch(SECOND, 5.0)
    stream.wait_for_a_look()
    stream.now_s += 5.0
    with pytest.raises(PeerError, match=r"activations of rank 0 \(limit 5 s\)"):
        stream.watchdog.settle()  # Returns from the marks only because the thread aborts.
    assert stream.num_aborts == 1
    end_of_thread(stream)


def test_a_mark_is_asked_for_on_its_own_device_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = MarkedStream(monkeypatch, device=3)
    mark = Milestone()
    stream.current = 0  # With which a thread begins.
    assert mark.is_reached()
    mark.wait()
    assert stream.calls == ["query on 3", "synchronize on 3"] and stream.current == 0
