"""The report draws whatever a run recorded, and its tables add up."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest
import torch

from freeze.signals import gram, svcca
from pipetransformer.durable_files import replace_tensors
from pipetransformer.elastic import read_looks
from pipetransformer.report.freeze_pictures import similarities
from pipetransformer.report.pictures import (
    CATEGORY_COLORS,
    _draw_learning,
    breakdown_table,
    draw_report,
    new_figure,
    total_breakdown,
)
from pipetransformer.report.records import Record


def epoch_of(epoch: int, *, compute: float, bubble: float = 0.0) -> Record:
    """Make the record of an epoch that spent its time in two categories."""
    seconds = dict.fromkeys(CATEGORY_COLORS, 0.0) | {"compute": compute, "bubble": bubble}
    return {
        "kind": "epoch",
        "step": 2 * epoch + 2,
        "elapsed_s": 10.0 * epoch + 9.0,
        "epoch": epoch,
        "loss": 1.0 / (epoch + 1),
        "seconds": compute + bubble,
        "samples_per_s": 64 / (compute + bubble),
        "breakdown": seconds,
    }


def run_of(num_epochs: int) -> list[Record]:
    """Make the records of a run of two steps an epoch that freezes one layer in each epoch."""
    records: list[Record] = []
    for epoch in range(num_epochs):
        start = {"step": 2 * epoch, "elapsed_s": 10.0 * epoch}
        shape = {"epoch": epoch, "frozen": epoch, "length": 2, "replicas": 1}
        records += [
            {"kind": "transition", **start, "frozen": epoch},
            {"kind": "step", **start, **shape, "loss": 1.0},
            {"kind": "step", **start, **shape, "loss": None},
            epoch_of(epoch, compute=4.0, bubble=1.0),
            {"kind": "evaluation", **start, "epoch": epoch, "accuracy": 0.9},
        ]
    return records


def assert_drawn(path: Path) -> None:
    """Check that a picture of the promised size is there and is not blank."""
    pixels = matplotlib.image.imread(path)
    assert pixels.shape == (880, 1320, 4)
    assert pixels[..., :3].std() > 0.05


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_epochs", [1, 24])
def test_report_is_drawn_for_all_runs_without_a_warning(tmp_path: Path, num_epochs: int) -> None:
    names = ("without freezing", "published rules", "elastic")
    draw_report({name: run_of(num_epochs) for name in names}, tmp_path / "report.png")
    assert_drawn(tmp_path / "report.png")


@pytest.mark.filterwarnings("error")
def test_report_is_drawn_without_other_runs_steps_and_evaluations(tmp_path: Path) -> None:
    draw_report({"elastic": [epoch_of(0, compute=1.0)]}, tmp_path / "report.png")
    assert_drawn(tmp_path / "report.png")


@pytest.mark.filterwarnings("error")
def test_report_is_drawn_beside_a_baseline_without_a_whole_epoch(tmp_path: Path) -> None:
    draw_report({"baseline": run_of(1)[:2], "elastic": run_of(2)}, tmp_path / "report.png")
    assert_drawn(tmp_path / "report.png")


@pytest.mark.filterwarnings("error")
def test_report_is_drawn_of_a_run_whose_metrics_are_not_accuracy(tmp_path: Path) -> None:
    records = run_of(2)
    for record in records:
        if "accuracy" in record:
            record["error"] = record.pop("accuracy")
    draw_report({"elastic": records}, tmp_path / "report.png")
    assert_drawn(tmp_path / "report.png")


def test_ticks_are_labelled_with_their_values() -> None:
    # 24.5 % was labelled as 24 %.
    figure, ticks = new_figure(4, 3), [0.24, 0.245, 0.25, 0.255, 0.26]
    loss, judged = figure.subplots(2)
    _draw_learning(loss, judged, {"elastic": run_of(2)}, "accuracy")
    judged.set_yticks(ticks)
    judged.set_ylim(0.24, 0.26)
    figure.canvas.draw()
    texts = [label.get_text().removesuffix("%") for label in judged.get_yticklabels()]
    assert [float(text) / 100 for text in texts] == pytest.approx(ticks)


def test_report_of_a_run_without_an_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the 3 records given hold no epoch"):
        draw_report({"elastic": run_of(1)[:3]}, tmp_path / "report.png")


def test_breakdown_counts_an_epoch_repeated_after_a_resume_once() -> None:
    records = [epoch_of(0, compute=4.0), epoch_of(1, compute=9.0), epoch_of(1, compute=2.0)]
    assert total_breakdown(records) == dict.fromkeys(CATEGORY_COLORS, 0.0) | {"compute": 6.0}


def test_breakdown_table_has_a_row_for_each_category_and_the_sum() -> None:
    elastic = [epoch_of(0, compute=4.0, bubble=1.0), epoch_of(1, compute=2.0)]
    baseline = [epoch_of(0, compute=8.0, bubble=2.5)]
    header, *rows = breakdown_table(
        {"without freezing": baseline, "elastic": elastic}
    ).splitlines()
    assert header.split() == ["seconds", "without", "freezing", "elastic"]
    cells = {name: (float(first), float(second)) for name, first, second in map(str.split, rows)}
    assert len(cells) == len(CATEGORY_COLORS) + 1
    assert cells["compute"] == (8.0, 6.0)
    assert cells["bubble"] == (2.5, 1.0)
    assert cells["sum"] == (10.5, 7.0)


def test_each_layer_is_compared_with_itself_also_where_there_are_more_than_ten(
    tmp_path: Path,
) -> None:
    # In the files layer 10 comes before layer 2, and layer 0, always frozen, is in none.
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 12, 6, 3, generator=generator, dtype=torch.float64)
    for step, own in enumerate(outputs):
        grams = {str(layer): gram(own[layer]) for layer in range(1, 12)}
        replace_tensors(tmp_path / f"step-{step:08d}.safetensors", grams)
    found = similarities(read_looks(tmp_path))
    expected = [svcca(gram(a), gram(b)) for a, b in zip(*outputs[:, 1:], strict=True)]
    assert found[0] == [None, *map(pytest.approx, expected)]
