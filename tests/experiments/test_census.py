"""Prove what the census says of a class, and that its page is made of what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.census.__main__ import main
from experiments.census.judge import Outcome, judge
from experiments.census.subjects import Subject

GPT2 = Subject("GPT2LMHeadModel", "causal", "gpt2")


def test_a_decoder_trains_as_in_a_plain_loop() -> None:
    assert judge(GPT2, with_pipeline=False) == Outcome("trains", "K=1", "recorded float64")


@pytest.mark.slow
def test_one_class_of_each_family_is_neither_wrong_nor_crashes(tmp_path: Path) -> None:
    results = tmp_path / "census.jsonl"
    assert main(["--quick", "--results", str(results)]) == 0
    kinds = [json.loads(line)["outcome"]["kind"] for line in results.read_text().splitlines()]
    built = [kind for kind in kinds if kind != "not built"]
    assert built.count("trains") >= 0.85 * len(built)
