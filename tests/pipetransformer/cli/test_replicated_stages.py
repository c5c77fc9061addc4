"""Prove `pipetransformer plan --plan pipedream`, for profiles and for our own models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.plan import ExplainedPlan, PlanRequest
from autopipe.profile import LayerGraph, LayerNode
from pipetransformer.cli import main
from pipetransformer.cli.places import Place
from pipetransformer.cli.plan_answer import find_plan
from pipetransformer.cli.replicated_stages import replicate
from tests.helpers.costs import profile_text, uniform
from tests.pipetransformer.cli.test_command import CLUSTER, HERE

ASKED = ["--machines", "3", "--bandwidth", "1e9", "--plan", "pipedream"]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Write a profile of which the first of two layers takes twice as long."""
    nodes = [
        LayerNode("in", "Input0", 0, 0, (0,), 0),
        LayerNode("low", "Conv2d", 0.5, 1.5, (0,), 0),
        LayerNode("high", "Linear", 0.25, 0.75, (0,), 1e9),
    ]
    path = tmp_path / "graph.txt"
    path.write_text(profile_text(LayerGraph(tuple(nodes), (("in", "low"), ("low", "high")))))
    return path


def test_a_profile_gets_its_stages(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", str(profile), *ASKED]) == 0
    text = capsys.readouterr().out
    assert "choice: 2-1, a minibatch every 1000 ms" in text
    assert "straight" in text and "data parallel" in text


def test_json_has_what_scripts_ask_for(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # What to plan by follows from the profile.
    assert main(["plan", "--profile", str(profile), *ASKED[:4], "--activations", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] == 1.0 and found["stages"] == [[0, 1, 2], [1, 2, 1]]
    assert found["over_data_parallel"] == pytest.approx((3 + 4 * 2 * 1e9 / 3e9) / 3)
    assert found["stage_nodes"] == [["low"], ["high"]] and found["activations"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machines", "4"], "--profile needs --bandwidth"),
        (["--machines", "4,4", "--bandwidth", "1e9"], "2 levels and --bandwidth 1"),
        (["--machines", "four", "--bandwidth", "1e9"], "are lists of numbers"),
        (["--machines", "0", "--bandwidth", "1e9"], "give at least one"),
        (["--machines", "200", "--bandwidth", "1e9"], "at most 128 are planned"),
        ([*ASKED, "--trace", "x.json"], "--trace does not go with --profile; leave it out"),
        ([*ASKED[:4], "--plan", "published"], "plans no --profile; give --plan pipedream"),
        (["bert-base", *ASKED], "a model does not go with --profile; leave it out"),
    ],
)
def test_questions_that_make_no_sense_are_refused(
    profile: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", "--profile", str(profile), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_nodes_that_belong_to_nothing_are_named(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [LayerNode(name, "Linear", 1.0, 1.0, (0,), 0) for name in ("one", "two", "lone")]
    profile.write_text(profile_text(LayerGraph(tuple(nodes), (("one", "two"),))))
    assert main(["plan", "--profile", str(profile), *ASKED]) == 0
    assert "left out, as nothing else has to do with them: lone" in capsys.readouterr().out
    assert main(["plan", "--profile", str(profile), *ASKED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["lone"]


def test_a_file_that_is_no_profile_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("missing.txt", "wrong.txt"):
        (tmp_path / "wrong.txt").write_text("hello\n")
        assert main(["plan", "--profile", str(tmp_path / name), *ASKED]) == 1
        assert "cannot be read as a profile" in capsys.readouterr().err
    assert main(["plan"]) == 1
    assert "name a model, or give a --profile" in capsys.readouterr().err


@pytest.mark.parametrize("frozen", ["0", "2"])
def test_our_own_models_get_one_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], frozen: str
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    asked = ["plan", f"{HERE}:shapes_only", "--cluster", str(cluster), "--frozen", frozen]
    assert main([*asked, "--plan", "pipedream"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"PipeDream's choice behind {frozen} frozen layers: ")
    # Beside ours and the published rules.
    assert {"PipeDream", "published"} <= set(text.split())
    (row,) = [line for line in text.splitlines() if line.startswith("  PipeDream")]
    name = text.split("frozen layers: ")[1].split(",")[0]
    is_unequal = len(set(name.split("-"))) > 1
    assert ("stages of unequal replicas, never" in row) == is_unequal and "never flushed" in row
    assert main([*asked, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    names = [name for stage in answer["pipedream"]["stage_nodes"] for name in stage]
    assert len(names) == 5 - int(frozen)


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
    place = Place("here", uniform(4), 2, 2, None, 1.0)
    request = PlanRequest(2, 2, 16, 2, prefix_cached_s=cached_s, prefix_read_ahead=ahead)
    found = replicate(place, request)
    assert [node.compute_s for node in found.graph.nodes] == [bottom_s, 24.0]
    # Sums are free, so that both slots do half of all the work.
    assert found.plan.seconds == pytest.approx((bottom_s + 24.0) / 2)


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
    assert main([*asked, "3,1", "--plan", "published"]) == 1
    assert "the published rules know no --stage-workers" in capsys.readouterr().err


def test_workers_asked_for_change_nothing_of_the_published_rules_answer() -> None:
    place = Place("here", uniform(4), 4, 4, None, None)
    request = PlanRequest(4, 4, 16, 2)
    bare, asked = (
        find_plan(place, replace(request, stage_workers=workers), plan="fastest")
        for workers in (None, (3, 1))
    )
    assert isinstance(asked.published, ExplainedPlan) and asked.published == bare.published


def test_whoever_reads_the_answer_may_stop_reading(profile: Path) -> None:
    command = [sys.executable, "-m", "pipetransformer", "plan", "--profile", str(profile)]
    with subprocess.Popen(
        [*command, *ASKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr is not None and process.stderr.read() == ""
