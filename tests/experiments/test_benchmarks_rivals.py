"""Test the benchmark beside a plain loop: what it prints and proves, but no speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from experiments.benchmarks import rivals
from experiments.benchmarks.measuring.timed_loop import sentences_task
from experiments.gpu_check.workloads import LoopCase, random_sentences
from experiments.random_models import bert


def tiny_sentences() -> LoopCase:
    """Return six steps of a tiny BERT."""
    build, rows = partial(bert, 16, 6, heads=2, dropout=0.1), random_sentences(24, 8)
    return replace(sentences_task(), build=build, rows=rows, batch_size=4)


def in_this_process(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Stand for processes."""
    return function(*arguments)


@pytest.mark.slow
def test_both_sides_learn_alike_and_every_state_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "TASKS", (tiny_sentences,))
    monkeypatch.setattr(rivals, "found_by", in_this_process)
    found = json.loads(json.dumps(rivals.compare()))
    assert list(found["losses_differ_by"].values())[0] <= 1e-4
    assert all(found[name] > 0 for name in rivals.BARS.least)
