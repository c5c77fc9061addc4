"""Prove that the rows of an ablation, simulated or real, differ in the parts they name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autopipe.plan.published import throughput_table
from experiments.ablation.__main__ import draw_rates, main, table
from experiments.ablation.parts import ABLATION, Parts, PartsRow, product_of_parts, runs_of_equals
from experiments.ablation.simulated import (
    SimulatedTraining,
    frozen_by_epoch,
    simulate,
    simulate_parts,
    sweep,
)
from experiments.ablation.simulated import total_s as simulated_s
from experiments.ablation.trained import options_of
from experiments.published import ablation
from experiments.published.runs import ABLATION as PUBLISHED_PARTS
from experiments.published.runs import (
    BASELINE,
    START,
    PublishedSystem,
    frozen_in_place,
    ours,
    published_system,
    total_s,
)
from experiments.published.setting import (
    FORWARD_S,
    LENGTHS,
    NUM_LAYERS,
    SPEED_UPS,
    THROUGHPUTS,
    published_frozen,
    published_profile,
)
from pipetransformer.cli import Place
from tests.helpers.costs import sums
from tests.helpers.smoke_runs import frozen_from
from tests.pipetransformer.elastic.test_planners import profile

MACHINES = Place("made up", profile(8, all_reduce=sums()), 8, 4, None, 1e12)
"""Two nodes of four devices, and a cache that costs next to nothing."""


TRAINING = SimulatedTraining(num_samples=800, global_batch=80, frozen=(0, 4, 6))


def test_rows_keep_their_pipelines_and_replicas_where_parts_are_out() -> None:
    found = {
        name: [
            (epoch.plan.length, epoch.replicas) for epoch in simulate(MACHINES, TRAINING, parts)
        ]
        for name, parts in ABLATION.items()
    }
    assert found["nothing frozen"] == found["freeze only"][:1] * 3 == [(4, 2)] * 3
    assert found["freeze only"] == [(4, 2), (4, 2), (2, 2)]  # Two layers fill no four stages.
    assert {replicas for _, replicas in found["+ AutoPipe"]} == {2}
    assert max(replicas for _, replicas in found["all four"]) > 2


def test_a_part_more_is_never_slower_here() -> None:
    seconds = {row.name: row.seconds[0] for row in simulate_parts(MACHINES, TRAINING)}
    assert seconds["+ AutoPipe + AutoCache"] < seconds["+ AutoPipe"] <= seconds["freeze only"]
    assert seconds["all four"] < seconds["+ AutoPipe + AutoDP"] < seconds["+ AutoPipe"]
    assert seconds["all four"] < seconds["nothing frozen"]


def test_a_growing_batch_takes_fewer_steps_of_more_samples() -> None:
    grows = SimulatedTraining(800, 40, (0, 4, 6), scale_batch=True)
    for fixed, grown in zip(
        simulate(MACHINES, TRAINING, ABLATION["all four"]),
        simulate(MACHINES, grows, ABLATION["all four"]),
        strict=True,
    ):
        assert fixed.batch == 80 and grown.batch == 40 * grown.replicas
    first = simulate_parts(MACHINES, TRAINING)[0]  # One pipeline a node: the very same batch.
    assert first.grown == pytest.approx(first.seconds)


def test_a_cache_holds_what_its_node_has_seen() -> None:
    frozen = (4, 4, 4, 4)
    whole = dataclasses.replace(MACHINES, slots_per_node=8)
    training, parts = SimulatedTraining(800, 80, frozen), ABLATION["all four"]
    one, two = (simulate(machines, training, parts) for machines in (whole, MACHINES))
    assert [epoch.seconds for epoch in one[1:]] == [one[1].seconds] * 3
    lost = [epoch.seconds - one[1].seconds for epoch in two[1:]]
    assert [seconds / lost[0] for seconds in lost] == pytest.approx([1, 1 / 2, 1 / 4])
    # What the first one writes, which the others read, is charged where it is written.
    slower = dataclasses.replace(whole, cache_bytes_per_s=10.0)
    row_bytes, (first, *_) = MACHINES.profile.prefix_bytes(4), simulate(slower, training, parts)
    of_a_replica = training.num_samples / first.replicas
    assert first.seconds - one[0].seconds == pytest.approx(of_a_replica * row_bytes / 10.0)
    heavy = tuple(dataclasses.replace(c, output_bytes=9.0) for c in MACHINES.profile.sublayers)
    costly = dataclasses.replace(MACHINES.profile, sublayers=heavy)
    slow = dataclasses.replace(whole, profile=costly, cache_bytes_per_s=1.0)
    assert (
        simulate(slow, training, parts)[1].seconds
        == simulate(slow, training, ABLATION["+ AutoPipe + AutoDP"])[1].seconds
    )


def test_sweeps_vary_one_thing() -> None:
    rows = {row.name: row.seconds[0] for row in sweep(MACHINES, TRAINING, "alpha", ("1/4", "1/2"))}
    assert list(rows) == ["nothing frozen", "alpha = 1/4", "alpha = 1/2"]
    assert rows["alpha = 1/2"] < rows["alpha = 1/4"] < rows["nothing frozen"]
    names = [row.name for row in sweep(MACHINES, TRAINING, "micro_batches", ())]
    assert names == [f"M = {count}" for count in (4, 8, 12, 16, 20, 24)]
    cached = [row.seconds[0] for row in sweep(MACHINES, TRAINING, "cached_from", ())][1:]
    assert len(cached) == 6 and cached == sorted(cached)
    assert frozen_by_epoch(1 / 3, 12, 4) == (0, 4, 7, 9)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("nothing frozen", "--cache False --freeze none --pipeline_length 4 --max_replicas 1"),
        ("freeze only", "--cache False --pipeline_length 4 --max_replicas 1"),
        ("+ AutoPipe + AutoCache", "--cache True --max_replicas 1"),
        ("+ AutoPipe + AutoDP", "--cache False"),
        ("all four", "--cache True"),
    ],
)
def test_a_trained_row_leaves_out_what_it_does_not_name(row: str, options: str) -> None:
    assert options_of(ABLATION[row], 4) == ["--processes", "4", *options.split()]


def test_the_table_is_in_the_published_layout(tmp_path: Path) -> None:
    rows = [
        PartsRow(
            "nothing frozen", (10.0, 12.0), (11.0, 11.0), (80.0, 82.0), ("2x1",) * 3, (5.0, 5.0)
        ),
        PartsRow(
            "all four", (5.0, 6.0), (4.0, 4.0), (80.0, 81.0), ("2x1", "1x2", "1x2"), (5.0, 9.0)
        ),
    ]
    text = table(rows, {"all four": 2.83})
    assert "| all four | 6 ± 1 | 2.00 | 2.75 | 80.5 ± 0.7 | 2.83 | 2x1 1x2 (2) |" in text
    draw_rates(rows, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").exists()
    assert runs_of_equals(["1x2"]) == "1x2"


def test_the_parts_product_is_what_rows_gain_over_each_other() -> None:
    speed_ups = dict(zip(ABLATION, (1.0, 0.9, 1.2, 1.5, 1.8, 2.9), strict=True))
    assert product_of_parts(speed_ups).endswith("= 2.25; all four together 2.90")


@pytest.mark.slow
def test_the_published_machines_stand_beside_the_published_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["simulate", "docs/clusters/2x8-rtx5000.toml"])
    text, rows = capsys.readouterr().out, []
    assert "| published |" in text and "parts: " in text
    rows = json.loads(text.splitlines()[-1])
    assert [row["name"] for row in rows] == list(ABLATION)


@pytest.mark.slow
def test_trained_rows_freeze_the_same_at_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text('task = "sst2"\nfreeze = "schedule:0,2"\nnum_train_epochs = 2\n')
    given = ["train", "--script", "bert", "--recipe", str(recipe), "--folder", str(tmp_path)]
    main([*given, "--seeds", "0", "--scale_batch", "--", "--smoke"])
    assert "| all four | " in capsys.readouterr().out
    expected = frozen_from(tmp_path / "freeze-only-seed0")
    assert expected[0] == 0 and 2 in expected.values()
    for name in ("+-AutoPipe", "+-AutoPipe-+-AutoDP", "all-four"):
        assert frozen_from(tmp_path / f"{name}-seed0") == expected


@pytest.fixture(scope="module")
def system() -> PublishedSystem:
    return published_system(published_profile())


@pytest.fixture(scope="module")
def predicted(system: PublishedSystem) -> dict[str, float]:
    return ablation.speed_ups(system)


def test_the_ablation_is_ranked_as_published(predicted: dict[str, float]) -> None:
    found = [
        predicted[name]
        for name in ("freeze only", "+ AutoPipe + AutoCache", "+ AutoPipe + AutoDP", "all four")
    ]
    assert found == sorted(found) and len(set(found)) == 4
    assert found[0] < 1 < found[1]
    assert ablation.ranked_as_published(predicted)
    assert not ablation.ranked_as_published({**predicted, "all four": predicted["freeze only"]})


def test_every_prediction_is_within_a_third_of_what_was_published(
    predicted: dict[str, float],
) -> None:
    # The text says how far each is off: 0.69 to 0.90 of it. This catches a model that went astray.
    for name, published in SPEED_UPS.items():
        assert 2 / 3 <= predicted[name] / published <= 3 / 2, name


def test_the_baseline_is_one(system: PublishedSystem) -> None:
    nothing_frozen = system.run(Parts(auto_pipe=True, auto_dp=True), frozen=[0] * 10)
    assert total_s(system.run(BASELINE)) / total_s(nothing_frozen) == 1.0
    assert {(epoch.length, epoch.replicas) for epoch in nothing_frozen} == {(8, 2)}


def test_the_device_s_rate_is_the_published_forward_s(system: PublishedSystem) -> None:
    for batch, seconds in FORWARD_S.items():
        modelled = system.profile.prefix_s(NUM_LAYERS, batch)
        assert modelled == pytest.approx(seconds, rel=0.03)


def test_the_pipeline_s_throughput_is_near_the_published_one_where_that_is_best(
    system: PublishedSystem,
) -> None:
    # Nothing of it went into the model; beyond M = 16 the published one falls, see the text.
    table = throughput_table(system.profile, START, 8)
    for count in (8, 16, 24):
        assert table[count] == pytest.approx(THROUGHPUTS[count], rel=0.15)


def test_lengths_by_epoch_are_the_published_ones(system: PublishedSystem) -> None:
    run = system.run(PUBLISHED_PARTS["all four"])
    assert tuple(epoch.length for epoch in run)[: len(LENGTHS)] == LENGTHS
    assert published_frozen() == (0, 4, 7, 9, 10, 11, 11, 12, 12, 12)
    assert [epoch.replicas for epoch in run] == [16 // epoch.length for epoch in run]
    alone = system.run(PUBLISHED_PARTS["+ AutoPipe + AutoCache"])
    assert {epoch.replicas for epoch in alone} == {2}


def test_a_cache_reads_the_epoch_before_and_computes_what_froze_since(
    system: PublishedSystem,
) -> None:
    cached, computed = (
        system.run(Parts(auto_pipe=True, auto_dp=True, auto_cache=on)) for on in (True, False)
    )
    read_s = system.profile.prefix_s(3, 400)
    for before, now, plain in zip(cached, cached[1:], computed[1:], strict=False):
        fresh_s = system.profile.prefix_s(now.num_frozen, 400, above=before.num_frozen)
        expected = read_s + fresh_s if before.num_frozen >= 3 else plain.prefix_s
        assert now.prefix_s == pytest.approx(min(expected, plain.prefix_s))
        assert plain.prefix_s == pytest.approx(system.profile.prefix_s(now.num_frozen, 400))


def test_transitions_are_charged_where_something_froze(system: PublishedSystem) -> None:
    run = system.run(PUBLISHED_PARTS["all four"])
    for before, now in zip(run, run[1:], strict=False):
        assert (now.transition_s > 0) == (now.num_frozen != before.num_frozen)
    assert sum(epoch.transition_s for epoch in run) < 0.02 * total_s(run)


def test_layers_frozen_in_place_keep_their_forward_alone(system: PublishedSystem) -> None:
    stay = frozen_in_place(system.profile, 4)
    for index, cost in enumerate(system.profile.sublayers):
        if cost.layer < 4:
            assert stay.backward_s(index, 8) == 0 < stay.forward_s(index, 8)
        else:
            assert stay.sublayers[index] == cost


def test_our_rules_take_one_stage_and_beat_the_published_ones(
    system: PublishedSystem, predicted: dict[str, float]
) -> None:
    baseline_s = total_s(system.run(BASELINE))
    epochs = ours(system.profile, grow=False, cache=True)
    assert {epoch.plan.length for epoch in epochs} == {1}
    assert baseline_s / simulated_s(epochs) > predicted["all four"]


@pytest.mark.slow
def test_the_program_prints_its_tables_and_reasons_and_last_a_json_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    system: PublishedSystem,
    predicted: dict[str, float],
) -> None:
    monkeypatch.setattr("sys.argv", ["published_ablation"])
    monkeypatch.setattr(ablation, "published_profile", lambda: system.profile)
    ablation.main()
    text = capsys.readouterr().out
    assert "why it differs" in text and "published at K = 8: 368, 410" in text
    assert max(map(len, text.splitlines()[:-1])) < 140
    summary = json.loads(text.splitlines()[-1])
    assert summary["ranked_as_published"] is True
    # Also with the rules as the paper's text has them, lambda = 1/6.
    assert list(summary["read_otherwise_ranked"].values()) == [True, True, True]
    assert summary["predicted"] == predicted
