"""Write what a script for transformers reads: a tiny model with its tokenizer, and small files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertTokenizer,
)

ADJECTIVES = {"good": 1, "warm": 1, "witty": 1, "dull": 0, "cold": 0, "flat": 0}
NOUNS = ["film", "plot", "cast", "score", "scene", "actor"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*ADJECTIVES, *NOUNS, *"the is a and what . ? ,".split()]


def write_model(folder: Path, kind: Any) -> str:
    """Write a model without dropout, and a tokenizer whose tokens are words."""
    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    BertTokenizer(str(vocabulary)).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(
            BertConfig(
                vocab_size=len(SPECIAL) + len(WORDS),
                hidden_size=16,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.2,
            )
        )
    model.save_pretrained(folder)
    return str(folder)


def classifier(folder: Path) -> str:
    """Write a model for classes."""
    return write_model(folder, BertForSequenceClassification)


def answerer(folder: Path) -> str:
    """Write a model for answers."""
    return write_model(folder, BertForQuestionAnswering)


def sentence(numbers: random.Random) -> tuple[str, int]:
    """Return a sentence of 4 to 19 tokens, and whether it praises."""
    adjective = numbers.choice(list(ADJECTIVES))
    clauses = [f"the {numbers.choice(NOUNS)} is {adjective}"] * numbers.randint(1, 4)
    return " and ".join(clauses), ADJECTIVES[adjective]


def write_sst2(path: Path, num: int, *, labelled: bool = True) -> str:
    """Write a file as those of SST-2."""
    numbers = random.Random(num)
    rows = [sentence(numbers) for _ in range(num)]
    lines = (
        [f"{text}\t{label}" for text, label in rows]
        if labelled
        else [f"{index}\t{text}" for index, (text, _) in enumerate(rows)]
    )
    header = "sentence\tlabel" if labelled else "index\tsentence"
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path)


def write_mrpc(path: Path, num: int) -> str:
    """Write a file as those of MRPC, whose sentences hold quotation marks; the second tells."""
    numbers = random.Random(num)
    lines = []
    for index in range(num):
        (first, _), (second, label) = sentence(numbers), sentence(numbers)
        lines.append(f'{label}\t{index}\t{index}\t" {first}\t{second}')
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path)


def write_squad(path: Path, num: int) -> str:
    """Write a file as those of SQuAD 1.1: what is which noun, two questions a text."""
    numbers = random.Random(num)
    paragraphs = []
    for index in range(0, num, 2):
        nouns = numbers.sample(NOUNS, numbers.randint(2, 5))
        said = {noun: numbers.choice(list(ADJECTIVES)) for noun in nouns}
        context = " ".join(f"the {noun} is {adjective} ." for noun, adjective in said.items())
        asked = [
            {
                "id": f"{index}-{noun}",
                "question": f" what is the {noun} ?",
                "answers": [{"text": said[noun], "answer_start": _place(context, noun)}],
            }
            for noun in nouns[:2]
        ]
        paragraphs.append({"context": context, "qas": asked})
    content = {"version": "1.1", "data": [{"title": "Films", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(content))
    return str(path)


def _place(context: str, noun: str) -> int:
    before = f"the {noun} is "
    return context.index(before) + len(before)
