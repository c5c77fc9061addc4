"""Prove that an ablation's rows differ in the parts they name, and in nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.ablation.__main__ import draw_rates, main, table
from experiments.ablation.parts import ABLATION, PartsRow, product_of_parts, runs_of_equals
from experiments.ablation.simulated import (
    SimulatedTraining,
    frozen_by_epoch,
    simulate,
    simulate_parts,
    sweep,
)
from experiments.ablation.trained import options_of
from pipetransformer.cli import Place
from tests.costs import sums
from tests.experiments.smoke_runs import frozen_from
from tests.pipetransformer.test_planning import profile

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
