"""Test the transition's benchmark: what it prints and proves, but no speed."""

from __future__ import annotations

import json
from dataclasses import asdict
from unittest.mock import patch

import pytest
import torch

from experiments.benchmarks import transition
from experiments.benchmarks.transition_run import (
    StateChangedError,
    TransitionSetting,
    TransitionTimes,
    measure_on_this_rank,
)
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.deployment import Deployment
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


@pytest.mark.parametrize(
    ("change_s", "status"), [((0.8, 0.9), 0), ((0.8, 1.5), 1)], ids=["within", "beyond"]
)
def test_it_fails_where_the_median_of_the_launches_is_beyond_the_limits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change_s: tuple[float, float],
    status: int,
) -> None:
    runs = iter([TransitionTimes(1, 1.0, 0.05, change, 0.4, 1.0, 1.0, 1) for change in change_s])
    monkeypatch.setattr(transition, "measure", lambda workload: next(runs))
    assert transition.main(["--launches", "2"]) == status
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["transition_steps"] == (
        pytest.approx(sum(change_s) / 2 + 0.05)
    )


def spoil(kind: str) -> str:
    """Change one value of rank 1 during the transition; return what this rank is told."""
    change = Deployment.change

    def spoiling(self: Deployment, decision: Decision) -> int:
        num_bytes = change(self, decision)
        if self._world.rank == 1 and decision.plan.length == 1:
            shard = next(s for name, s in self.held_shards().items() if name.endswith(kind))
            with torch.no_grad():
                next(iter(shard.values())).view(-1)[0] += 1
        return num_bytes

    with patch.object(Deployment, "change", spoiling), pytest.raises(StateChangedError) as raised:
        measure_on_this_rank(TINY_VIT)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
@pytest.mark.slow
def test_a_single_changed_value_is_found_by_all_ranks(two_ranks: Pool, kind: str) -> None:
    for told in two_ranks.run(spoil, kind):
        assert told.startswith("1 of ") and "tensors of rank 1 are not what" in told
        assert f"/{kind}/" in told


def test_a_run_without_a_step_that_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps is 1; give at least 2"):
        TransitionSetting(num_steps=1)
