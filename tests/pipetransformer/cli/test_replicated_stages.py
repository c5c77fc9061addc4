"""Prove what `pipetransformer plan` says of stages that several slots share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.pipedream import question_of
from autopipe.plan import ExplainedPlan, PlanRequest
from pipetransformer.cli import main
from pipetransformer.cli.places import Place
from pipetransformer.cli.plan_answer import find_plan, replicate
from tests.helpers.costs import uniform
from tests.pipetransformer.cli.test_command import CLUSTER, HERE


@pytest.mark.parametrize("frozen", ["0", "2"])
def test_a_model_gets_pipedream_s_choice_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], frozen: str
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    asked = ["plan", f"{HERE}:shapes_only", "--cluster", str(cluster), "--frozen", frozen]
    assert main([*asked, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    names = [name for stage in answer["pipedream"]["stage_nodes"] for name in stage]
    assert len(names) == 5 - int(frozen)
    assert main(asked) == 0
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  PipeDream")
    ]
    replicas = {replicas for _, _, replicas in answer["pipedream"]["inner_stages"]}
    is_unequal = len(replicas) > 1
    assert ("stages of unequal replicas, never" in row) == is_unequal and "never flushed" in row
    assert answer["pipedream"]["name"] in row


def test_more_slots_than_are_simulated_in_time_are_refused() -> None:
    request = PlanRequest(72, 8, 144, 0)
    with pytest.raises(ValueError, match="72 slots are too many to simulate; at most 64 are"):
        replicate(uniform(4), request)


@pytest.mark.parametrize(
    ("cached_s", "ahead", "bottom_s"),
    [
        (None, False, 8 * (3.0 + 2 * 0.5)),
        (0.125, False, 25.0),
        (0.125, True, 24.0),
        (7.0, True, 24.0 + 8 * 7 - 2 * 24),
    ],
)
def test_frozen_layers_are_read_from_the_cache_where_ours_are(
    cached_s: float | None, ahead: bool, bottom_s: float
) -> None:
    # 8 samples a slot: a layer takes 3 s a sample, a frozen one 1/2 s, a row of the cache 1/8 s.
    request = PlanRequest(2, 2, 16, 2, prefix_cached_s=cached_s, prefix_read_ahead=ahead)
    states = question_of(uniform(4), request).states
    assert [state.compute_s for state in states] == [bottom_s, bottom_s + 24.0]
    # Sums are free, so that both slots do half of all the work.
    assert replicate(uniform(4), request).plan.seconds == pytest.approx((bottom_s + 24.0) / 2)


def test_stages_with_workers_of_their_own_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    asked = ["plan", f"{HERE}:shapes_only", "--cluster", str(cluster), "--stage-workers"]
    assert main([*asked, "3,1"]) == 0
    text = capsys.readouterr().out
    assert "choice: K = 2, R = 3-1, M = " in text
    assert {"1", "4"} <= {line.split()[0] for line in text.splitlines() if line.strip()}
    assert main([*asked, "3,1", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["chosen"]["workers"] == [3, 1]
    assert len(answer["chosen"]["busy_s"]) == 4
    assert main([*asked, "2,1"]) == 1
    assert "all 4 ranks together" in capsys.readouterr().err


def test_workers_asked_for_change_nothing_of_the_published_rules_answer() -> None:
    place = Place("here", uniform(4), 4, 4, None, None)
    request = PlanRequest(4, 4, 16, 2)
    bare, asked = (
        find_plan(place, replace(request, stage_workers=workers)) for workers in (None, (3, 1))
    )
    assert isinstance(asked.published, ExplainedPlan) and asked.published == bare.published
