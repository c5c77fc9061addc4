"""Prove what the census says of a class, and that its page is made of what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.census.__main__ import main
from experiments.census.judge import Outcome, judge
from experiments.census.part_judge import judge_part
from experiments.census.subjects import Subject

GPT2 = Subject("GPT2LMHeadModel", "causal", "gpt2")


def test_a_decoder_trains_as_in_a_plain_loop() -> None:
    assert judge(GPT2, with_pipeline=False) == Outcome("trains", "K=1", "recorded float64")


@pytest.mark.parametrize(
    ("subject", "part"),
    [
        (Subject("T5ForConditionalGeneration", "seq2seq", "t5"), "encoder"),
        (Subject("LlavaForConditionalGeneration", "image-text", "llava"), "model.vision_tower"),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_frozen_part_is_served(subject: Subject, part: str) -> None:
    assert judge_part(subject) == Outcome("served", part, "float64")


def test_what_is_no_class_with_a_part_is_not_built() -> None:
    found = judge_part(Subject("Mistral4ForCausalLM", "image-text", "mistral4"))
    assert (found.kind, found.reason) == (
        "not built",
        "LookupError: it has no tower, encoder or backbone",
    )


@pytest.mark.slow
def test_the_page_of_parts_counts_what_was_served(tmp_path: Path) -> None:
    results, page = tmp_path / "parts.jsonl", tmp_path / "page.md"
    page.write_text("<!-- census -->\n<!-- /census -->\n")
    asked = ["--parts", "--results", str(results)]
    assert main([*asked, "--only", "squeezenet1_1", "--workers", "1"]) == 0
    assert main([*asked, "--write", str(page)]) == 0
    assert (
        "| a head on timm's or torchvision's | 1 | 0 | 0 | 0 | 0 | 0 | 100% |" in page.read_text()
    )


@pytest.mark.slow
def test_one_class_of_each_family_is_neither_wrong_nor_crashes(tmp_path: Path) -> None:
    results = tmp_path / "census.jsonl"
    assert main(["--quick", "--results", str(results)]) == 0
    kinds = [json.loads(line)["outcome"]["kind"] for line in results.read_text().splitlines()]
    built = [kind for kind in kinds if kind != "not built"]
    assert built.count("trains") >= 0.85 * len(built)
