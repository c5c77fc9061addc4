"""The comparison of ways to share a model: equal results where they must be, and its tables."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from autopipe.pipedream import Machines, optimize
from experiments.pipedream.__main__ import main
from experiments.pipedream.clusters import CLUSTERS
from experiments.pipedream.cuts import cut_states, trimmed
from experiments.pipedream.drawn import all_drawn
from experiments.pipedream.layer_graph import LayerGraph, LayerNode, read_graph
from experiments.pipedream.networks import NETWORKS, build
from experiments.pipedream.simulated import predict


def chain(*costs: tuple[float, float]) -> LayerGraph:
    """Return layers of so many seconds and bytes of parameters, a kilobyte between them."""
    nodes = tuple(
        LayerNode(f"node{n}", "layer", seconds / 3, seconds * 2 / 3, (1e3,), num_bytes)
        for n, (seconds, num_bytes) in enumerate(costs)
    )
    return LayerGraph(nodes, tuple(pairwise(node.name for node in nodes)))


def profile_text(graph: LayerGraph) -> str:
    nodes = (
        f"{node.name} -- {node.description} -- forward_compute_time={1000 * node.forward_s}, "
        f"backward_compute_time={1000 * node.backward_s}, "
        f"activation_size={node.output_bytes}, parameter_size={node.parameter_bytes}"
        for node in graph.nodes
    )
    return "\n".join([*nodes, *(f"\t{begin} -- {end}" for begin, end in graph.edges)])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_small_images(name: str) -> None:
    network = build(name, seed=0)
    assert network(torch.zeros(3, 1, 32, 32)).shape == (3, 10)


def test_a_wide_last_layer_is_not_replicated() -> None:
    graph = chain((0.9, 1e3), (0.3, 1e3), (0.1, 4e9))
    rows = {row.name: row for row in predict(graph, [Machines(4, 1e9)], (3, 1))}
    assert rows["one machine"].seconds == pytest.approx(1.3)
    assert rows["data parallel"].seconds == pytest.approx((1.3 + 12.000006) / 4, rel=1e-3)
    assert rows["optimizer's choice"].plan == "3-1"
    # Three workers share 1.2 s a minibatch, whose sums of gradients are small.
    assert rows["optimizer's choice"].seconds == pytest.approx(0.4, rel=1e-3)
    assert rows["paper's rule"].plan == "3-1"
    assert rows["published choice"] == rows["published choice"].__class__(
        "published choice", rows["optimizer's choice"].seconds, "3-1"
    )


def test_no_other_way_is_faster_than_the_fastest() -> None:
    costs = [(0.4, 1e3), (0.9, 1e8), (0.2, 1e9), (0.5, 1e10)]
    *others, fastest = predict(chain(*costs), [Machines(2, 1e10), Machines(2, 1e9)], (1, 3))
    assert fastest.name == "fastest simulated"
    assert {"optimizer's choice", "published choice"} <= {row.name for row in others}
    assert fastest.seconds <= min(row.seconds for row in others)


PROFILES = Path(__file__).parents[3] / "shared" / "data" / "pipedream"


@pytest.mark.skipif(not PROFILES.exists(), reason="needs PipeDream's published profiles")
def test_plans_are_those_of_the_published_program() -> None:
    for case in json.loads((PROFILES / "golden.json").read_text())["cases"]:
        text = (PROFILES / f"{case['profile']}.txt").read_text()
        levels = [
            Machines(*level) for level in zip(case["machines"], case["bandwidth"], strict=True)
        ]
        plan = optimize(
            cut_states(trimmed(read_graph(text))), levels, activations=case["activations"]
        )
        wanted = case.get("stages") or case["outer_stages"]
        # On 16 machines of one level several pipelines are as fast; one of them has idle stages.
        if case["machines"] != [16]:
            assert [stage.to_json() for stage in plan.stages] == wanted
        assert plan.seconds == pytest.approx(case["seconds"], rel=1e-9)
        assert plan.single_machine_s == pytest.approx(case["single_machine_seconds"], rel=1e-9)
        over = plan.data_parallel_s / plan.seconds
        assert over == pytest.approx(case["over_data_parallel"], rel=1e-9)


@pytest.mark.skipif(not PROFILES.exists(), reason="needs PipeDream's published profiles")
def test_vgg16_gets_a_faster_pipeline_than_the_program_s_and_the_published_choice() -> None:
    graph = trimmed(read_graph((PROFILES / "vgg16.txt").read_text()))
    rows = {row.name: row for row in predict(graph, CLUSTERS["A"], (15, 1))}
    for name, plan, milliseconds in (
        ("optimizer's choice", "12-1-2-1", 69.6),
        ("published choice", "15-1", 50.3),
        ("fastest simulated", "12-3-1", 44.6),
    ):
        assert rows[name].plan == plan
        assert 1e3 * rows[name].seconds == pytest.approx(milliseconds, abs=0.1)


def test_a_straight_pipeline_of_equal_layers_reaches_its_formulas() -> None:
    graph = chain(*[(0.3, 8e9)] * 4)
    rows = {row.name: row.seconds for row in predict(graph, [Machines(4, 1e12)])}
    assert rows["model parallel"] == pytest.approx(1.2, rel=1e-3)
    assert rows["GPipe"] == pytest.approx(0.3 * 11 / 8, rel=1e-3)
    assert rows["1F1B"] == pytest.approx(0.3 * 11 / 8, rel=1e-3)
    assert rows["async 1F1B"] == pytest.approx(0.3, rel=1e-3)


def test_simulated_rows_stand_beside_the_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "vgg16.txt"
    profile.write_text(profile_text(chain((0.9, 1e3), (0.3, 1e3), (0.1, 4e9))))
    main(["simulate", str(profile), "--clusters", "A"])
    out = capsys.readouterr().out
    assert "published: 15-1, 5.28 x, 5.28 to the accuracy" in out
    assert "| published choice | 15-1 |" in out
    (found,) = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in found["rows"]][:2] == ["data parallel", "one machine"]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 4), (2, 4), (4, 4), (3, 7)])
def test_drawn_schedules_are_idle_as_the_formulas_say(
    num_stages: int, num_micro_batches: int
) -> None:
    for name, drawn in all_drawn(num_stages, num_micro_batches).items():
        parts = drawn.simulate()
        busy, idle = (sum(sum(getattr(one, of)) for one in parts) for of in ("busy_s", "idle_s"))
        if drawn.idle is not None:
            assert idle / (busy + idle) == pytest.approx(drawn.idle), name


@pytest.mark.slow
def test_schedules_are_drawn_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "schedules.png"
    main(["draw", "--small", "--picture", str(picture)])
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: one["kept"] for name, one in measured.items()} == {
        "model parallel": 1, "GPipe": 4, "1F1B": 2, "async 1F1B": 2,
    }  # fmt: skip
    assert all(one["sent"] == pytest.approx(1.0) for one in measured.values())
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_rules_are_compared_each_at_its_best_rate_and_finished_runs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs.jsonl"
    asked = ["accuracy", "--network", "transformer", "--optimizer", "adamw", "--epochs", "2"]
    asked += ["--warm_up", "1", "--rates", "0.001", "0.003", "--seeds", "0", "1"]
    main([*asked, "--runs", str(runs)])
    *lines, last = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("| flushed", "| stashed", "| vertical")) for line in lines) == 3
    # Two rates with the first seed, and the better one with the other, of three rules.
    assert len(runs.read_text().splitlines()) == 3 * (2 + 1)
    assert all(len(one["accuracies"]) == 2 for one in json.loads(last))
    main([*asked, "--runs", str(runs)])
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert len(runs.read_text().splitlines()) == 3 * (2 + 1)
