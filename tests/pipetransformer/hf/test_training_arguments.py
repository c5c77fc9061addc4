"""Hold that every field of TrainingArguments is read, said to have no effect, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import TrainingArguments

from freeze import JOURNAL_FILE
from pipetransformer.hf import Trainer
from pipetransformer.hf.training_arguments import refuse_unknown
from tests.helpers.hf_runs import arguments, made

DOCUMENT = Path(__file__).parents[3] / "docs" / "from-transformers.md"
NAMES = [field.name for field in fields(TrainingArguments)]


def table() -> dict[str, str]:
    """Return what the document says of each field that it names, the first row that does."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    said: dict[str, str] = {}
    for cell, text in rows:
        for pattern in re.findall(r"`([^`]+)`", cell):
            matching = [name for name in NAMES if fnmatchcase(name, pattern)]
            assert matching, f"no field is called {pattern}"
            said = dict.fromkeys(matching, text) | said
    return said


UNREAD = {name for name, text in table().items() if re.match("no effect|for .* to read", text)}


class Reading(TrainingArguments):  # type: ignore[misc]
    """Note which fields are read, but by who writes all of them down."""

    def __getattribute__(self, name: str) -> Any:
        super().__getattribute__("__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)

    def to_dict(self) -> dict[str, Any]:
        before = set(self._read)
        values: dict[str, Any] = super().to_dict()
        self._read = before
        return values


def test_every_field_that_is_to_be_honoured_is_read(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    args = arguments(tmp_path, **best, save_strategy="epoch", num_train_epochs=0.5)
    args.__class__ = Reading
    with made(tmp_path, args=args) as trainer:
        trainer.train()
    read = set(args._read) & set(NAMES)
    assert table().keys() - UNREAD - read == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_field_is_documented_or_refused_by_its_name(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path)
    if name in UNREAD:
        setattr(args, name, "another value")
        refuse_unknown(args)
    elif name not in table():
        setattr(args, name, "another value")
        with pytest.raises(ValueError, match=f"TrainingArguments has {name}='another value', wh"):
            refuse_unknown(args)


@pytest.fixture
def verbosity() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.usefixtures("verbosity")
def test_transformers_logs_as_its_arguments_say(tmp_path: Path) -> None:
    with made(tmp_path, options={"log_level": "error"}, kind=Trainer):
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("options", "settings", "recomputes"),
    [
        ({}, {}, False),
        ({"gradient_checkpointing": True}, {}, True),
        ({"activation_checkpointing": True}, {}, True),
        ({"gradient_checkpointing": True}, {"activation_checkpointing": False}, False),
    ],
    ids=str,
)
def test_gradient_checkpointing_recomputes_activations_unless_a_setting_says_other(
    tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], recomputes: bool
) -> None:
    with made(tmp_path, options={**options, "max_steps": 1}, **settings) as trainer:
        trainer.train()
    (line,) = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert json.loads(line)["decision"]["plan"]["recomputes"] is recomputes
