"""Prove that `pipetransformer plan` answers for described clusters and for the machine at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.plan.explanation import runners_up
from autopipe.plan.request import PipelinePlan
from autopipe.plan.search import plan_pipeline
from autopipe.profile.profile import Profile
from pipetransformer.cli import main
from pipetransformer.cli import places as plan_machine
from pipetransformer.cli import plan_command as plan_command
from pipetransformer.cli.named_model import ModelChoice, build_named
from pipetransformer.cli.places import Place, described_place, make_request
from pipetransformer.cli.plan_answer import find_plan
from tests.helpers import costs
from tests.helpers.models import tiny_data, tiny_model

HERE = "tests.pipetransformer.cli.test_command"
CLUSTER = """
name = "ours"
nodes = 2
slots_per_node = 2
memory_bytes = 1073741824
memory_bytes_per_s = 1e9
flops_per_s = {float32 = 10e6, bfloat16 = 20e6}
link = {latency_s = 0, bytes_per_s = 1e6}
node_link = {latency_s = 0, bytes_per_s = 1e6}
"""


def own_model() -> tuple[nn.Module, dict[str, Tensor]]:
    x, y = tiny_data(dtype=torch.float32).tensors
    return tiny_model(dtype=torch.float32), {"x": x, "y": y}


def shapes_only() -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model of four layers and a head without looking at a value."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    return model, {"x": torch.zeros(2, 8), "y": torch.zeros(2, dtype=torch.int64)}


def without_targets() -> tuple[nn.Module, dict[str, Tensor]]:
    return shapes_only()[0], {"x": torch.zeros(2, 8)}


def curious() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = shapes_only()
    return model, {**batch, "x": batch["x"] * model[0].weight.sum().item()}


class Looking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if (x == x).all() else x


def looking() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(Looking(8, 8), nn.Linear(8, 3)), shapes_only()[1]


def model_alone() -> nn.Module:
    return shapes_only()[0]


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "ours.toml"
    path.write_text(CLUSTER)
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command; return what it printed."""
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_answer_names_the_choice_its_stages_and_why_others_lost(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    text = plan(capsys, f"{HERE}:shapes_only", "--cluster", cluster, "--batch", "64")
    lines = text.splitlines()
    assert lines[0].startswith(f"{HERE}:shapes_only in float32: 5 sublayers, 1.2 KiB of par")
    assert lines[1] == "ours: 4 slots of 1.0 GiB, 64 samples a step"
    assert lines[3].startswith("choice: K = 1, R = 4, M = 1, 1f1b: step ")
    assert "compute " in lines[4] and "all-reduce " in lines[4]
    assert lines[7].split()[:4] == ["0", "0", "..", "4"]
    others = {line.split()[0]: line for line in lines[11:] if line.split()[0].isdigit()}
    assert "x the time: " in others["2"] and "x the time: " in others["4"]
    assert lines[-2].split()[:2] == ["published", "rules"]
    assert lines[-1].split()[0] == "PipeDream"


def test_an_answer_says_that_a_forward_looked_at_a_mask(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    text = plan(capsys, f"{HERE}:looking", "--cluster", cluster)
    assert text.splitlines()[1] == "  assumed: each mask that its forward looks at is true"


def test_json_holds_what_the_planner_returns_and_its_parts_sum_up(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    choice = ModelChoice(f"{HERE}:shapes_only")
    place = described_place(choice, cluster)
    values = json.loads(plan(capsys, choice.name, "--cluster", cluster, "--json"))
    assert (values["place"], values["num_slots"], values["global_batch"]) == ("ours", 4, 128)
    (answer,) = values["answers"]
    request = make_request(
        place, global_batch=128, num_frozen=0, memory_limit_bytes=None, cached=False
    )
    assert request.memory_limit_bytes == 1 << 30
    expected = plan_pipeline(place.profile, request)
    assert {key: answer["chosen"][key] for key in expected.to_json()} == json.loads(
        json.dumps(expected.to_json())
    )
    for found in (answer["chosen"], *answer["others"], answer["published"]):
        parts = [found[f"{part}_s"] for part in (
            "compute", "bubble", "transfer", "all_reduce", "update", "overhead")]  # fmt: skip
        assert sum(parts) == pytest.approx(found["predicted_step_s"], rel=1e-9)
        assert min(parts) > -1e-12
        for busy_s, idle_s in zip(found["busy_s"], found["idle_s"], strict=True):
            assert busy_s + idle_s == pytest.approx(sum(parts[:3]), rel=1e-9)


def test_several_frozen_give_a_row_each_with_the_published_rules_beside(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    name = f"{HERE}:shapes_only"
    text = plan(capsys, name, "--cluster", cluster, "--frozen", "0, 2,4")
    table, cache = text.split("\n\n")[1:]
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows] == ["frozen", "0", "2", "4"]
    assert [line.split(":")[0] for line in cache.splitlines()] == [
        f"cache behind {num} frozen layers" for num in (2, 4)
    ]
    values = json.loads(plan(capsys, name, "--cluster", cluster, "--frozen", "0,2,4", "--json"))
    for row, answer in zip(rows[1:], values["answers"], strict=True):
        assert int(row[1]) == answer["chosen"]["length"]
        ratio = answer["published"]["predicted_step_s"] / answer["chosen"]["predicted_step_s"]
        assert float(row[row.index("x") - 1]) == pytest.approx(ratio, abs=0.006)


def test_what_does_not_fit_says_where_and_by_how_much(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    arguments = ["plan", f"{HERE}:shapes_only", "--cluster", cluster, "--memory-limit"]
    assert main([*arguments, "3000"]) == 0
    text = capsys.readouterr().out
    assert "choice: K = 4, R = 1" in text
    assert "does not fit: stage 0 needs " in text and " of 2.9 KiB, at best (M = " in text
    assert "published rules: the published rules give 2 stages, which need " in text
    assert main([*arguments, "1 kB"]) == 1
    assert "no plan: no plan fits memory_limit_bytes = 1000" in capsys.readouterr().out


def test_activations_are_recomputed_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    arguments = (f"{HERE}:shapes_only", "--cluster", cluster, "--batch", "64")
    always = plan(capsys, *arguments, "--activation-checkpointing", "always")
    assert ", 1f1b, recomputed: step " in always and ", recompute " in always
    never = plan(capsys, *arguments, "--activation-checkpointing", "never")
    assert never == plan(capsys, *arguments) and "recompute" not in never


def test_lengths_that_batch_or_layers_exclude_are_explained(cluster: str) -> None:
    place = described_place(ModelChoice(f"{HERE}:shapes_only"), cluster)
    request = make_request(
        place, global_batch=2, num_frozen=2, memory_limit_bytes=None, cached=False
    )
    refusals = {r.length: r.reason for r in find_plan(place, request).refusals}
    assert refusals == {
        1: "2 samples leave some of 4 replicas without one",
        4: "3 active sublayers cannot fill 4 stages",
    }


def test_cached_prefix_is_read_where_that_is_faster(tmp_path: Path) -> None:
    def step_s(rate: float, *, cached: bool) -> float:
        path = tmp_path / "cached.toml"
        path.write_text(f"cache_bytes_per_s = {rate}\n{CLUSTER}")
        place = described_place(ModelChoice(f"{HERE}:shapes_only"), str(path))
        request = make_request(
            place, global_batch=64, num_frozen=3, memory_limit_bytes=None, cached=cached
        )
        return plan_pipeline(place.profile, request).predicted_step_s

    computed = step_s(1e9, cached=False)
    assert step_s(1e9, cached=True) < computed
    # A slower cache is hidden behind what trains, as on a GPU, until it takes longer than that.
    assert step_s(1e9, cached=True) == step_s(1e8, cached=True)
    assert step_s(1.0, cached=True) == computed


def test_dtype_halves_bytes_and_takes_its_own_rate(cluster: str) -> None:
    half, full = (
        described_place(ModelChoice(f"{HERE}:shapes_only", dtype=dtype), cluster).profile
        for dtype in ("bfloat16", "float32")
    )
    for small, large in zip(half.sublayers, full.sublayers, strict=True):
        assert 2 * small.parameter_bytes == large.parameter_bytes
        # At these rates arithmetic takes longer than memory.
        assert [2 * seconds for seconds in small.forward_s] == pytest.approx(large.forward_s)


def test_traces_are_written_one_for_each_number_of_frozen_layers(
    capsys: pytest.CaptureFixture[str], cluster: str, tmp_path: Path
) -> None:
    name, trace = f"{HERE}:shapes_only", tmp_path / "plan.json"
    text = plan(capsys, name, "--cluster", cluster, "--trace", str(trace))
    assert text.endswith(f"\n{trace}\n")
    plan(capsys, name, "--cluster", cluster, "--frozen", "0,2", "--trace", str(trace))
    for path in (trace, tmp_path / "plan-frozen0.json", tmp_path / "plan-frozen2.json"):
        events = json.loads(path.read_text())["traceEvents"]
        assert {e["cat"] for e in events if e["ph"] == "X"} >= {"forward", "backward"}


@pytest.mark.slow
def test_machine_at_hand_is_measured_by_a_process_for_each_slot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = plan(capsys, f"{HERE}:own_model", "--slots", "2", "--batch", "8", "--json")
    values = json.loads(text)
    assert values["place"].startswith("this machine, a C") and values["num_slots"] == 2
    (answer,) = values["answers"]
    lengths = {found["length"] for found in (answer["chosen"], *answer["others"])}
    assert lengths == {1, 2}
    assert answer["chosen"]["compute_s"] > 0 and answer["chosen"]["update_s"] > 0
    two = next(f for f in (answer["chosen"], *answer["others"]) if f["length"] == 2)
    assert two["transfer_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit_base_patch16"], "no model is called 'vit_base_patch16'; give bert-base, bert-larg"),
        (["vit_base_patch16"], "a model of timm (such as "),
        (["nosuch"], "a model of timm (such as vit_base_patch16_224), a folder or file with"),
        (["nosuch"], "A name of the hub is looked for in its cache alone (/"),
        (["vgg11"], "this VGG has no row of blocks at which it could be cut"),
        (["vgg11", "--image-size", "32"], "vgg11 takes no image_size ("),
        (["vgg11", "--seq-length", "8"], "seq_length does not apply to vgg11; leave it out"),
        (["bert-base", "--image-size", "32"], "image_size does not apply to bert-base; leave it"),
        (["bert-base", "--seq-length", "0"], "seq_length is 0; give at least 1"),
        (["bert-base", "--seq-length", "513"], "seq_length is 513; bert-base takes up to 512"),
        (["no_module:f"], "'no_module:f' names a module that cannot be imported: No module name"),
        ([f"{HERE}:nothing"], "has no function 'nothing'; give module:function"),
        ([f"{HERE}:model_alone"], "model_alone returned Sequential; it must return (model, batc"),
        ([f"{HERE}:curious"], "curious failed: Tensor.item() cannot be called on meta tensors; f"),
        ([f"{HERE}:shapes_only", "--frozen", "5"], "5 layers cannot be frozen; the model has 4 b"),
        ([f"{HERE}:shapes_only", "--frozen", "1,x"], "--frozen is '1,x'; give numbers, sep"),
        ([f"{HERE}:shapes_only", "--frozen", "²"], "--frozen is '²'; give numbers, sep"),
        ([f"{HERE}:shapes_only", "--batch", "0"], "--batch is 0; give at least 1"),
        ([f"{HERE}:shapes_only", "--slots", "2"], "--slots is for the machine at hand; leave it"),
        ([f"{HERE}:shapes_only", "--cached"], "ours does not say how fast a cache is read; add"),
        ([f"{HERE}:shapes_only", "--memory-limit", "4 x"], "'4 x' is no size; give bytes as a n"),
        ([f"{HERE}:shapes_only", "--trace", "/no/folder/p.json"], "in a folder that does not e"),
        ([f"{HERE}:shapes_only", "--dtype", "float16"], "'ours' states no flops_per_s.float16, o"),
    ],
)
def test_a_question_without_an_answer_ends_with_the_reason(
    capsys: pytest.CaptureFixture[str], cluster: str, arguments: list[str], message: str
) -> None:
    assert main(["plan", *arguments, "--cluster", cluster]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_targets_are_needed_only_where_a_loss_is_measured(
    capsys: pytest.CaptureFixture[str], cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(capsys, f"{HERE}:without_targets", "--cluster", cluster)

    def run_here(
        entry: Callable[..., None], arguments: tuple[Any, ...], *, num_slots: int
    ) -> None:
        entry(*arguments)

    monkeypatch.setattr(plan_machine, "launch", run_here)
    assert main(["plan", f"{HERE}:without_targets", "--slots", "1"]) == 1
    assert "the sample batch has x, but lacks the targets y; give" in capsys.readouterr().err


def test_bert_is_built_with_its_tokens_and_timm_with_its_pixels() -> None:
    bert = build_named(ModelChoice("bert-large", seq_length=64), device="meta")
    assert bert.sample["input_ids"].shape == (1, 64)
    # 24 layers of attention and MLP, embedding and head; a pooler has no part in an answer.
    assert len(bert.model.sublayers) == 50
    assert sum(p.numel() for p in bert.model.model.parameters()) == 334_094_338
    vit = build_named(ModelChoice("vit_tiny_patch16_224", image_size=32), device="meta")
    assert vit.batch(3)["x"].shape == (3, 3, 32, 32)


def made(length: int, count: int, step_s: float, schedule: str = "1f1b") -> PipelinePlan:
    return PipelinePlan(length, tuple(range(length + 1)), count, schedule, step_s, (1,) * length)


def test_runners_up_are_the_best_of_each_length_and_the_next_of_all() -> None:
    plans = [
        made(2, 4, 1.0), made(2, 4, 1.1, "gpipe"), made(2, 8, 1.2), made(2, 2, 1.3),
        made(2, 1, 1.4), made(2, 6, 1.5), made(4, 4, 2.0), made(4, 8, 2.1), made(1, 1, 3.0),
    ]  # fmt: skip
    found: Any = runners_up(plans, plans[0])
    assert found == [plans[2], plans[3], plans[4], plans[6], plans[8]]


@pytest.fixture
def unsure(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Have the machine at hand cost K = 1 106 s, K = 2 102 s, with quartiles 5 % off."""
    layers = [costs.sublayer(layer, spread=(0.95, 1.05)) for layer in range(4)]
    profile = costs.profile(*layers, all_reduce=costs.sums(10.0))
    place = Place("made up", profile, 2, 2, None, None)
    monkeypatch.setattr(plan_command, "place_at_hand", lambda *_, **__: place)
    return profile


def test_what_cannot_be_told_apart_is_said_with_the_measured_range(
    capsys: pytest.CaptureFixture[str], unsure: Profile
) -> None:
    arguments = (f"{HERE}:shapes_only", "--slots", "2", "--batch", "16")
    text = plan(capsys, *arguments)
    lines = [line.strip() for line in text.splitlines()]
    assert lines[3].startswith("choice: K = 1, R = 2, M = 1, 1f1b: step 106000 ms")
    assert lines[5] == "a step takes 101200 ms to 110800 ms by the quartiles of what was measured"
    assert lines[6].startswith("K = 1, M = 1 (106000 ms) and K = 2, M = ")
    assert lines[6].endswith("cannot be told apart: K = 1 is taken, the shortest pipeline")
    others = {line.split()[0]: line for line in lines if line.endswith("but a longer pipeline")}
    assert "cannot be told apart" in others["2"]
    (answer,) = json.loads(plan(capsys, *arguments, "--json"))["answers"]
    assert answer["range_s"] == [pytest.approx(101.2), pytest.approx(110.8)]
    assert [one["length"] for one in answer["near"]] == [1, 2]
    several = plan(capsys, *arguments, "--frozen", "0,1").split("\n\n")[2].splitlines()
    assert [line.split(": a step takes ")[0] for line in several] == ["0 frozen", "1 frozen"]


def test_whoever_reads_the_answer_may_stop_reading(cluster: str) -> None:
    command = [sys.executable, "-m", "pipetransformer", "plan", f"{HERE}:shapes_only"]
    with subprocess.Popen(
        [*command, "--cluster", cluster], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr is not None and process.stderr.read() == ""
