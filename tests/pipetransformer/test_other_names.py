"""Prove that the names of other trainers are answered with ours, and with nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from pipetransformer import TrainConfig, Trainer
from pipetransformer.config import make_config
from pipetransformer.config.other_names import _MEANT

TABLE = Path(__file__).parents[2] / "docs" / "from-transformers.md"
FIELDS = {field.name for field in dataclasses.fields(TrainConfig)}
OURS = FIELDS | set(inspect.signature(Trainer).parameters)


def rows() -> list[tuple[list[str], set[str]]]:
    """Return the documentation's names of transformers, and which fields of ours stand beside."""
    found = []
    for line in TABLE.read_text().splitlines():
        if line.startswith("| `"):
            theirs, ours = line.strip("| ").split(" | ")
            names = re.findall(r"`([a-z_0-9]+)`", theirs)
            found.append((names, set(re.findall(r"`([a-z_]+)`", ours)) & OURS))
    return found


def test_each_name_that_the_documentation_translates_is_translated_alike() -> None:
    names = {name: ours for theirs, ours in rows() for name in theirs if ours}
    assert len(names) > 25
    for name, ours in names.items():
        if name not in OURS:
            assert any(re.search(rf"\b{one}\b", _MEANT[name]) for one in ours), name


def test_no_name_of_ours_is_translated_and_what_is_given_exists() -> None:
    assert not OURS & _MEANT.keys()
    for name, meant in _MEANT.items():
        first = re.match(r"[a-z_]+", meant.removeprefix("a larger "))
        assert meant.startswith("nothing here") or (first and first[0] in OURS), name


# lr_scheduler_type was answered with the pipeline's schedule, most others with sixty names.
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("lr_scheduler_type", "learning_rate_schedule, such as"),
        ("max_epochs", "epochs"),
        ("num_train_epochs", "epochs"),
        ("output_dir", "folder"),
        ("bf16", 'precision="bf16" or "fp16"'),
        ("data_collator", "collate_fn"),
        ("gradient_accumulation_steps", "a larger global_batch_size: it is cut"),
        ("tokenizer", "collate_fn, which pads, and save_pretrained"),
        ("args", "nothing here: pipetransformer.hf.Trainer takes it"),
        ("global_batchsize", "global_batch_size"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_what_to_give(name: str, answer: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"for {name!r} give {answer}")) as caught:
        make_config({name: 1})
    assert len(str(caught.value)) < 300
