"""The page of a run holds the records' numbers, and is harmless."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from plotly import graph_objects
from torch import nn

from autopipe.trace import as_bytes
from freeze import FreezeSchedule, PaperRule
from freeze.signals import gram, svcca
from pipetransformer import Trainer
from pipetransformer.cli import main
from pipetransformer.durable_files import replace_tensors
from pipetransformer.elastic import PROBE_FOLDER
from pipetransformer.report import RECORDS_FILE, latest_branch, read_records
from pipetransformer.report.page import run_is_over, write_page
from pipetransformer.report.records import Record
from pipetransformer.report.sections import sections_of
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer

EVIL = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title=1\">&"
TITLES = [
    "Learning",
    "Frozen layers",
    "Where the time went",
    "Cache",
    "Decisions",
    "What the policy saw of each layer",
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four epochs of four steps; layers freeze, rows are read."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    with Trainer(
        tiny_model(),
        tiny_data(num_samples=32),
        eval_dataset=tiny_data(num_samples=6),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=PaperRule(0.5),
        epochs=4,
        global_batch_size=8,
        folder=folder,
        progress=False,
    ) as trainer:
        trainer.fit()
    write_page(folder)
    return folder


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text()


def figures_in(page: str) -> list[dict[str, Any]]:
    """Return the figures that a page draws."""
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return list(json.loads(data).values())


def traces_in(page: str) -> dict[str, dict[str, Any]]:
    """Return what a page draws, by its name in the legend."""
    return {trace["name"]: trace for figure in figures_in(page) for trace in figure["data"]}


def points(trace: dict[str, Any]) -> list[tuple[float, float]]:
    return list(zip(trace["x"], trace["y"], strict=True))


def of_kind(folder: Path, kind: str) -> list[Record]:
    return [one for one in read_records(folder / RECORDS_FILE) if one["kind"] == kind]


def write(folder: Path, *records: Record) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / RECORDS_FILE).write_text(text)


def step_of(step: int, **fields: Any) -> Record:
    """Make the record of a step as the first versions wrote them."""
    shape = {"epoch": 0, "loss": 1.0, "frozen": 0, "length": 1, "replicas": 1, "samples": 8}
    return {"kind": "step", "step": step, "elapsed_s": step + 1.0, **shape, **fields}


def decision_of(step: int, **fields: Any) -> Record:
    plain = {"max_steps": 4, "frozen_before": 0, "frozen": 0, "reason": "keep", "signals": {}}
    return {"kind": "decision", "step": step, "elapsed_s": float(step), **plain, **fields}


def test_losses_and_metrics_are_those_of_the_records(run_folder: Path) -> None:
    drawn = traces_in(page_of(run_folder))
    expected = {
        "each step": ("step", "loss"),
        "training, mean of an epoch": ("epoch", "loss"),
        "evaluation": ("evaluation", "loss"),
        "accuracy": ("evaluation", "accuracy"),
        "Learning rate": ("step", "learning_rate"),
        "Gradient norm": ("step", "gradient_norm"),
    }
    for name, (kind, field) in expected.items():
        assert points(drawn[name]) == [(o["step"], o[field]) for o in of_kind(run_folder, kind)]
    assert len(drawn["each step"]["x"]) == 16 and len(drawn["accuracy"]["x"]) == 4


def test_one_process_has_no_word_of_pipelines(run_folder: Path) -> None:
    page = page_of(run_folder).split('<script type="application/json"')
    drawn = traces_in(page_of(run_folder))
    assert not re.search(r"K x R|<th>K<|<th>R<|micro-batch|pipeline", page[0])
    assert not {"stages (K)", "replicas (R)", "bubble", "all-reduce"} & drawn.keys()


def test_frozen_layers_stages_and_replicas_hold_at_every_step(tmp_path: Path) -> None:
    run_folder = tmp_path
    write(
        run_folder,
        *(step_of(i, length=2) for i in range(3)),
        *(step_of(i, frozen=1, replicas=2) for i in range(3, 6)),
    )
    write_page(run_folder)
    drawn = traces_in(page_of(run_folder))
    assert "<dt>K x R</dt><dd>1 x 2</dd>" in page_of(run_folder)
    fields = {"frozen layers": "frozen", "stages (K)": "length", "replicas (R)": "replicas"}
    for name, field in fields.items():
        assert drawn[name]["line"]["shape"] == "hv"
        for step in of_kind(run_folder, "step"):
            # What is drawn at a moment is the last point before it.
            value = [y for x, y in points(drawn[name]) if x <= step["elapsed_s"]][-1]
            assert value == step[field]
    assert len(set(drawn["frozen layers"]["y"])) > 1


def test_parts_of_each_epoch_are_those_of_the_records(run_folder: Path) -> None:
    drawn, epochs = traces_in(page_of(run_folder)), of_kind(run_folder, "epoch")
    for name in epochs[0]["breakdown"]:
        if name in ("bubble", "all_reduce"):
            continue
        bars = points(drawn[name.replace("_", "-")])
        alone = ("bubble", "all_reduce", "other") if name == "other" else (name,)
        sums = [(e["epoch"], sum(e["breakdown"][part] for part in alone)) for e in epochs]
        assert bars == [(epoch, pytest.approx(seconds)) for epoch, seconds in sums]
    rates = points(drawn["samples per second"])
    assert rates == [(one["epoch"], one["samples_per_s"]) for one in epochs]


def test_looked_up_samples_and_bytes_are_those_of_the_records(run_folder: Path) -> None:
    drawn, steps = traces_in(page_of(run_folder)), of_kind(run_folder, "step")
    found = dict.fromkeys(range(1, 5), (0, 0, 0))
    for one in steps:
        hits, misses, upgrades = (one[f"cache_{n}"] for n in ("hits", "misses", "upgrades"))
        before, more = found[one["epoch"] + 1], (hits, upgrades, misses - upgrades)
        found[one["epoch"] + 1] = tuple(map(sum, zip(before, more, strict=True)))
    for index, name in enumerate(("read", "read, newly frozen layers run", "computed")):
        assert points(drawn[name]) == [(epoch, one[index]) for epoch, one in found.items()]
    assert sum(drawn["read"]["y"]) > 0
    most = of_kind(run_folder, "epoch")[-1]["cache_bytes"]
    assert most > 0 and f"It took at most {as_bytes(most)}" in page_of(run_folder)


def test_signals_of_each_layer_are_those_of_the_decisions(run_folder: Path) -> None:
    drawn, decisions = traces_in(page_of(run_folder)), of_kind(run_folder, "decision")
    seen = [one for one in decisions if one["signals"]]
    assert len(seen) > 1
    num_layers = len(seen[0]["signals"]["gradient_norm"])
    assert num_layers > 3
    for layer in range(num_layers):
        values = [(one["step"], one["signals"]["gradient_norm"][layer]) for one in seen]
        assert points(drawn[f"layer {layer}"]) == values


def test_each_layer_is_compared_with_its_last_look_also_where_there_are_more_than_ten(
    tmp_path: Path,
) -> None:
    # In the files layer 10 comes before layer 2, and layer 0, always frozen, is in none.
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 12, 6, 3, generator=generator, dtype=torch.float64)
    (tmp_path / PROBE_FOLDER).mkdir()
    for step, own in enumerate(outputs):
        grams = {str(layer): gram(own[layer]) for layer in range(1, 12)}
        replace_tensors(tmp_path / PROBE_FOLDER / f"step-{step:08d}.safetensors", grams)
    write(tmp_path, *(decision_of(step, look_seconds=0.5) for step in range(2)))
    write_page(tmp_path)
    drawn = traces_in(page_of(tmp_path))
    assert points(drawn["layer 0"]) == [(0, None), (1, None)]
    for layer in range(1, 12):
        first, last = outputs[:, layer]
        similar = pytest.approx(svcca(gram(first), gram(last), most=max(1, len(last) // 4)))
        assert points(drawn[f"layer {layer}"]) == [(0, similar), (1, pytest.approx(1.0))]
    assert "2 looks at the probe batch took 1 s." in page_of(tmp_path)


def test_tables_hold_all_transitions_and_reasons(run_folder: Path) -> None:
    records = latest_branch(read_records(run_folder / RECORDS_FILE))
    tables = {one.title: one.table for one in sections_of(records, run_folder)}
    transitions = of_kind(run_folder, "transition")
    assert [row[:2] for row in tables["Frozen layers"][1:]] == [
        (str(one["step"]), str(one["frozen"])) for one in transitions
    ]
    reasons = {row[-1] for row in tables["Decisions"][1:]}
    assert {one["reason"] for one in transitions} <= reasons


def test_plotly_accepts_every_figure(run_folder: Path) -> None:
    figures = figures_in(page_of(run_folder))
    assert len(figures) == 9
    for figure in figures:
        graph_objects.Figure(figure)  # Raises on a name or a value that it does not know.


class Elements(HTMLParser):
    """Count a page's elements, and collect addresses that they load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_the_page_loads_nothing(run_folder: Path) -> None:
    page = page_of(run_folder)
    found = Elements(page)
    assert found.loaded == [] and "link" not in found.tags
    assert found.tags.count("script") == 3 and found.tags.count("h2") == len(TITLES)
    assert "default-src 'none'" in page


def evil_run(folder: Path) -> Path:
    """Write a run whose names and reasons are all meant to break the page."""
    breakdown = {EVIL: 1.0, "compute": 1.0}
    write(
        folder,
        decision_of(0, reason=EVIL, epoch=EVIL, signals={EVIL: [1.0, 2.0]}, resting_before=[EVIL]),
        {"kind": "transition", "step": 0, "elapsed_s": 0.5, "frozen": EVIL, "reason": EVIL},
        *(step_of(step, cache_hits=8) for step in range(4)),
        {"kind": "epoch", "step": 4, "elapsed_s": 4.0, "epoch": 1, "breakdown": breakdown},
        {"kind": "evaluation", "step": 4, "elapsed_s": 5.0, EVIL: 0.5},
        {"kind": "end", "step": 4, "elapsed_s": 5.0},
    )
    return folder


def test_names_and_reasons_are_text_and_no_elements(tmp_path: Path) -> None:
    folder = evil_run(tmp_path / "<b>run")
    write_page(folder)
    page = page_of(folder)
    found = Elements(page)
    assert found.tags.count("script") == 3 and "img" not in found.tags and "b" not in found.tags
    assert EVIL not in page and page.count("&lt;/script&gt;&lt;script&gt;") > 3
    # Plotly, too, takes names for HTML.
    assert not [name for name in traces_in(page) if "<" in name]


def test_a_run_that_has_recorded_nothing_has_a_page_that_says_so(tmp_path: Path) -> None:
    write(tmp_path)
    write_page(tmp_path)
    page = page_of(tmp_path)
    for said in (
        "none yet",
        "No step is recorded yet.",
        "No epoch is over yet",
        "Nothing was looked up",
        "No decision is recorded.",
        "No signal is recorded",
    ):
        assert said in page
    assert figures_in(page) == []


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no records.jsonl; give the folder= of a run"):
        write_page(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_records_of_older_versions_are_drawn_by_what_they_have(tmp_path: Path) -> None:
    epoch = {"kind": "epoch", "step": 2, "elapsed_s": 3.0, "epoch": 1, "loss": 1.0}
    looked_up = {"cache_hits": 3, "cache_misses": 5}
    write(
        tmp_path,
        {"kind": "transition", "step": 0, "elapsed_s": 0.0, "frozen": 0},
        step_of(0, **looked_up),
        step_of(1, **looked_up),
        {**epoch, "breakdown": {"compute": 1.5, "sleep": 0.5}},
    )
    write_page(tmp_path)
    page = page_of(tmp_path)
    drawn = traces_in(page)
    assert points(drawn["sleep"]) == [(1, 0.5)]
    assert points(drawn["read"]) == [(1, 6)] and points(drawn["computed"]) == [(1, 10)]
    assert "No epoch records the bytes that the cache took." in page
    assert "Gradient norm" not in drawn and "Learning rate" not in drawn


def test_a_run_killed_within_a_line_is_drawn_up_to_there(tmp_path: Path) -> None:
    write(tmp_path, decision_of(0), step_of(0), step_of(1, loss=None), step_of(2))
    with (tmp_path / RECORDS_FILE).open("a") as file:
        file.write('{"kind": "step", "st')
    write_page(tmp_path)
    page = page_of(tmp_path)
    assert points(traces_in(page)["each step"]) == [(0, 1.0), (1, None), (2, 1.0)]
    assert "going on, or killed; it last wrote at" in page and "3 of 4" in page


def test_steps_that_a_resume_takes_again_are_drawn_once(tmp_path: Path) -> None:
    write(tmp_path, step_of(0), step_of(1, loss=2.0), step_of(1, loss=3.0))
    write_page(tmp_path)
    assert points(traces_in(page_of(tmp_path))["each step"]) == [(0, 1.0), (1, 3.0)]


def test_a_long_run_keeps_its_peaks_and_its_gaps(tmp_path: Path) -> None:
    steps = [step_of(step, loss=float(step % 7)) for step in range(20_000)]
    steps[12_345]["loss"], steps[777]["loss"] = 1e6, None
    write(tmp_path, *steps)
    write_page(tmp_path)
    drawn = points(traces_in(page_of(tmp_path))["each step"])
    assert len(drawn) <= 4_001
    assert (12_345, 1e6) in drawn and (777, None) in drawn
    assert all(one == (steps[one[0]]["step"], steps[one[0]]["loss"]) for one in drawn)
    assert "Of every 10 steps the lowest and the highest are drawn." in page_of(tmp_path)


def test_a_run_is_over_when_it_says_so_and_has_not_gone_on(tmp_path: Path) -> None:
    def go_on(**settings: Any) -> list[Record]:
        saves = {"checkpoint_every_steps": 1, "resume": "auto", "global_batch_size": 8}
        with tiny_trainer(
            folder=tmp_path, freeze=FreezeSchedule((0, 1)), **saves, **settings
        ) as trainer:
            trainer.step()
            taken = latest_branch(read_records(tmp_path / RECORDS_FILE))
            assert not run_is_over(taken)
            trainer.stop()
            trainer.fit()
        return latest_branch(read_records(tmp_path / RECORDS_FILE))

    for num_steps in (2, 4):
        records = go_on(epochs=3)
        ends = [one["step"] for one in records if one["kind"] == "end"]
        assert run_is_over(records) and ends[-1] == num_steps


def test_the_command_writes_the_page_also_in_the_first_epoch(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, step_of(0))
    for folder in (run_folder, tmp_path):
        (folder / "report.html").unlink(missing_ok=True)
        assert main(["report", str(folder)]) == 0
        assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
        assert "<html" in page_of(folder)


def test_a_page_without_plotly_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, step_of(0))
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "report.html needs the package plotly; install pipetransformer[report]" in said
