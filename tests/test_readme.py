"""Prove that the programs of the README and of the pages beside it run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import BertConfig, BertForSequenceClassification

ROOT = Path(__file__).parents[1]


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def tiny_bert(*arguments: Any, **options: Any) -> Any:
    """Stand for a pretrained model that would be downloaded."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 9, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=100, intermediate_size=16, **sizes, **options)
    )


def tiny_tokenizer(name: str) -> Any:
    """Stand for its tokenizer: a letter is a token."""

    def tokenize(text: str, *, padding: str, truncation: bool, max_length: int) -> dict[str, Any]:
        ids = [ord(letter) % 90 for letter in text[:max_length]]
        gap = [0] * (max_length - len(ids))
        return {"input_ids": ids + gap, "attention_mask": [1] * len(ids) + gap}

    return tokenize


def tiny_glue(*names: str) -> dict[str, Dataset]:
    """Stand for a data set of the hub."""
    rows = {"sentence": ["fine", "dull"] * 20, "label": [1, 0] * 20, "idx": list(range(40))}
    return DatasetDict({split: Dataset.from_dict(rows) for split in ("train", "validation")})


@pytest.mark.parametrize("program", programs("README.md"), ids=["bert", "sequential"])
def test_a_program_of_the_readme_runs_in_at_most_twenty_lines(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Nothing is downloaded; the program itself is the page's.
    monkeypatch.setattr("datasets.load_dataset", tiny_glue)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", tiny_tokenizer)
    monkeypatch.setattr(
        "transformers.AutoModelForSequenceClassification.from_pretrained", tiny_bert
    )
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert len([line for line in program.splitlines() if line.strip()]) <= 20


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    "program", programs("docs/gpipe.md"), ids=["gpipe", "step", "skips", "trace"]
)
def test_a_program_of_the_page_on_gpipe_runs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "gpipe.md", "exec"), {"__name__": "__main__"})
