"""Prove what the census says of a class, and that its page is made of what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm

from experiments.census import pool
from experiments.census.__main__ import main
from experiments.census.judge import Outcome, judge
from experiments.census.page import tables, write_page
from experiments.census.pool import Job, Tried, tried
from experiments.census.subjects import Subject, of_timm, of_transformers

GPT2 = Subject("GPT2LMHeadModel", "causal", "gpt2")


def found(name: str, task: str, family: str, kind: str, reason: str = "") -> Tried:
    return Tried(Subject(name, task, family), Outcome(kind, reason), 1.0)


FOUND = [
    found("ALMHeadModel", "causal", "a", "trains"),
    found("AForSequenceClassification", "sequence", "a", "trains"),
    found("BForCausalLM", "causal", "b", "refused", "ValueError: its blocks | run twice"),
]


def test_a_decoder_trains_as_in_a_plain_loop() -> None:
    assert judge(GPT2, with_pipeline=False) == Outcome("trains", "K=1", "recorded float64")


def test_a_class_that_is_not_there_is_not_built() -> None:
    outcome = judge(Subject("NoSuchModel", "causal", "none"), with_pipeline=False)
    assert outcome.kind == "not built"


@pytest.mark.slow
def test_a_class_that_takes_too_long_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LIMIT_S", 0.0)
    jobs = [Job(Subject(name, "causal", "none"), with_pipeline=False) for name in ("A", "B")]
    outcomes = [one.outcome for one in tried(jobs, 1)]
    assert [one.kind for one in outcomes] == ["crash", "crash"]
    assert all("it took more than 0 s" in one.reason for one in outcomes)


def test_a_known_class_is_not_tried_again(tmp_path: Path) -> None:
    results = tmp_path / "census.jsonl"
    entry = {"subject": vars(GPT2), "outcome": {"kind": "trains"}, "seconds": 1.0}
    results.write_text(json.dumps(entry) + "\n")
    names = {subject.name for subject in of_transformers() if subject.family == "gpt2"}
    assert "GPT2LMHeadModel" in names
    before = results.read_text()
    assert main(["--results", str(results), "--write", str(_page(tmp_path))]) == 0
    assert results.read_text() == before


def test_each_class_is_tried_once_for_each_task() -> None:
    subjects = [*of_transformers(), *of_timm()]
    assert len({(one.name, one.task) for one in subjects}) == len(subjects)


def test_each_model_of_timm_is_of_the_module_that_it_stands_for() -> None:
    for subject in of_timm():
        assert subject.name in timm.list_models(module=subject.family)


def test_tables_join_the_tasks_of_a_family_and_say_why_others_do_not_train() -> None:
    text = tables(FOUND)
    assert "| causal language models | 1 | 1 | 0 | 0 | 0 | 50% |" in text
    assert "| causal language models, classes of texts | a |" in text
    assert r"| b | causal language models | its blocks \| run twice |" in text


def test_a_page_gets_its_tables_between_its_marks(tmp_path: Path) -> None:
    page = _page(tmp_path)
    for _ in range(2):
        write_page(page, FOUND)
        text = page.read_text()
        assert text.startswith("above\n<!-- census -->\n|")
        assert text.endswith("|\n<!-- /census -->\nbelow\n")


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n")
    with pytest.raises(ValueError, match="lacks the lines <!-- census -->"):
        write_page(page, FOUND)


@pytest.mark.slow
def test_one_class_of_each_family_is_neither_wrong_nor_crashes(tmp_path: Path) -> None:
    results = tmp_path / "census.jsonl"
    assert main(["--quick", "--results", str(results)]) == 0
    kinds = [json.loads(line)["outcome"]["kind"] for line in results.read_text().splitlines()]
    built = [kind for kind in kinds if kind != "not built"]
    assert built.count("trains") >= 0.85 * len(built)


def _page(folder: Path) -> Path:
    page = folder / "page.md"
    page.write_text("above\n<!-- census -->\nold\n<!-- /census -->\nbelow\n")
    return page
