"""Test the benchmark beside a plain loop: what it prints and proves, but no speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from experiments.benchmarks import rivals
from experiments.benchmarks.measuring.timed_loop import RivalTask, Sentences, sentences_task

WORDS = ("a", "fine", "film", "not", "so", "dull")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Write a tiny BERT with a tokenizer, and sentences of unequal lengths."""
    model, sst2 = tmp_path / "model", tmp_path / "SST-2"
    model.mkdir()
    sst2.mkdir()
    vocabulary = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(model / "vocab.txt")).save_pretrained(model)
    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=16, **sizes)
    BertForSequenceClassification(config).save_pretrained(model)
    rows = [f"{' '.join((WORDS * 2)[n % 5 : 6 + n % 7])}\t{n % 2}" for n in range(24)]
    (sst2 / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
    return str(model), str(sst2)


def in_this_process(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Stand for processes."""
    return function(*arguments)


@pytest.mark.slow
def test_rivals_pad_batch_by_batch_and_read_through_workers_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]
) -> None:
    asked = Sentences(*folders, padding="longest", num_workers=2)

    def tasks(sentences: Sentences) -> tuple[RivalTask, ...]:
        assert sentences == asked
        return (replace(sentences_task(sentences), batch_size=4),)

    monkeypatch.setattr(rivals, "tasks", tasks)
    monkeypatch.setattr(rivals, "found_by", in_this_process)
    (task,) = tasks(asked)
    assert task.num_workers == 2 and task.collate_fn is not None
    lengths = {
        task.collate_fn([task.dataset[n] for n in batch])["input_ids"].shape[1]
        for batch in torch.arange(24).split(4)
    }
    assert len(lengths) > 1
    found = json.loads(json.dumps(rivals.compare(asked)))
    assert found["losses_differ_by"]["MiniLM on SST-2"] <= 1e-4
    assert (found["padding"], found["workers"]) == ("longest", 2)
    assert all(found[name] > 0 for name in rivals.BARS.least)
