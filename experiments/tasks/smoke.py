"""Make tiny files of each task's format, and a tiny model, so that a script runs in a minute."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BertConfig, BertModel, BertTokenizer

from experiments.tasks.glue import TASKS

_WORDS = ("good", "bad", "fine", "dull", "the", "a", "film", "story", "was", "is", "very", "who")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PIXELS = 32


def smoke_folder(output_dir: str) -> Path:
    """Return where this process makes its files: apart from others', which still write theirs."""
    return Path(output_dir, "smoke", os.environ.get("RANK", "0"))


def make_text_model(folder: Path) -> Path:
    """Write a BERT of four layers with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [f"{prefix}{chr(code)}" for code in range(97, 123) for prefix in ("", "##")]
    vocabulary = [*_SPECIAL, *_WORDS, *letters, ".", "?", ","]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,  # So that runs can be compared.
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)  # A head would have one task's classes.
    return folder


def make_glue(name: str, folder: Path) -> Path:
    """Write a task's tsv files, with sentences whose words tell their class."""
    folder.mkdir(parents=True, exist_ok=True)
    task, source = TASKS[name], random.Random(0)
    columns = task.header or (*task.sentences, task.label)
    for file in ("train.tsv", *task.dev.values()):
        lines = [] if task.header else ["\t".join(columns)]
        for _ in range(96 if file == "train.tsv" else 32):
            number = source.randrange(max(2, len(task.classes)))
            label = f"{2.5 * number:.1f}" if not task.classes else task.classes[number]
            row = {
                **dict.fromkeys(columns, "0"),
                **{column: _sentence(source, number) for column in task.sentences},
                task.label: label,
            }
            lines.append("\t".join(row[column] for column in columns))
        (folder / file).write_text("\n".join(lines) + "\n")
    return folder


def make_squad(folder: Path, *, unanswerable: bool = False) -> tuple[Path, Path]:
    """Write questions with their answers in short texts, in SQuAD's format.

    Every third one has no answer if some are to be unanswerable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, paths = random.Random(0), []
    for split, count in (("train", 24), ("dev", 12)):
        paragraphs = []
        for number in range(count):
            context = ". ".join(_sentence(source, n % 2) for n in range(4)) + "."
            answer = source.choice([word for word in context.split() if word.isalpha()])
            gold = {"text": answer, "answer_start": context.index(answer)}
            is_none = unanswerable and number % 3 == 0
            asked: dict[str, Any] = {"id": f"{split}-{number}", "question": "who was it?"}
            asked |= {"answers": [] if is_none else [gold], "is_impossible": is_none}
            paragraphs.append({"context": context, "qas": [asked]})
        data = {"version": "1.1", "data": [{"title": "made", "paragraphs": paragraphs}]}
        paths.append(folder / f"{split}.json")
        paths[-1].write_text(json.dumps(data))
    return paths[0], paths[1]


def make_cifar(path: Path, *, num_classes: int) -> Path:
    """Write an npz file of JPEGs whose colour tells their class."""
    num = max(96, num_classes)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    for split, count in (("train", num), ("test", num // 3)):
        labels = np.arange(count) % num_classes
        parts = [_jpeg(int(label), seed) for seed, label in enumerate(labels)]
        ends = np.cumsum([len(part) for part in parts])
        arrays |= {
            f"{split}_data": np.frombuffer(b"".join(parts), np.uint8),
            f"{split}_offsets": np.concatenate([[0], ends]),
            f"{split}_labels": labels.astype(np.int16),
        }
    np.savez(path, **arrays)
    return path


def make_tree(folder: Path) -> Path:
    """Write train/CLASS/IMAGE and val/CLASS/IMAGE, as ImageNet is laid out."""
    for split, count in (("train", 8), ("val", 4)):
        for label in range(4):
            place = folder / split / f"n{label:08d}"
            place.mkdir(parents=True, exist_ok=True)
            for seed in range(count):
                (place / f"{seed}.JPEG").write_bytes(_jpeg(label, seed))
    return folder


def _sentence(source: random.Random, number: int) -> str:
    words = [source.choice(_WORDS[4:]) for _ in range(source.randint(2, 7))]
    return " ".join((*words, _WORDS[number % 4]))


def _jpeg(label: int, seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 60, (_PIXELS, _PIXELS, 3))
    colour = np.array([(label * 53) % 190, (label * 97) % 190, (label * 139) % 190])
    file = io.BytesIO()
    Image.fromarray((noise + colour).astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()
