"""Test the transition's benchmark: what it prints and proves, but no speed."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from experiments.benchmarks import transition
from experiments.benchmarks.transition_run import TransitionSetting, measure_on_this_rank
from tests.helpers.pool import Pool

TINY_VIT = TransitionSetting("test_vit", image_size=32, batch_size=4, num_steps=2)
TINY = ["--model", "test_vit", "--image-size", "32", "--batch-size", "4", "--steps", "2"]


def printed(
    arguments: list[str],
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """Run the benchmark on a pool instead of fresh processes; return its lines."""
    monkeypatch.setattr(
        transition, "measure", lambda workload: pool.run(measure_on_this_rank, workload)[0]
    )
    transition.main(arguments)
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_last_line_holds_medians_and_what_was_moved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], two_ranks: Pool
) -> None:
    lines = printed([*TINY, "--launches", "3"], two_ranks, monkeypatch, capsys)
    line = json.loads(lines[-1])
    low, high = line["transition_steps_range"]
    assert 0 < low <= line["transition_steps"] <= high
    low, high = line["transition_over_copy_range"]
    assert 0 < low <= line["transition_over_copy"] <= high
    # Each weight, its two moments and its step count go to the rank that did not train it.
    model = TINY_VIT.build()
    num_tensors = len(list(model.parameters()))
    assert line["parameters"] == sum(p.numel() for p in model.parameters())
    assert line["moved_bytes"] == 3 * 4 * line["parameters"] + 4 * num_tensors
    assert line["launches"] == 3 and len(lines) == 3 + 4
    assert line["workload"] == asdict(TINY_VIT)
