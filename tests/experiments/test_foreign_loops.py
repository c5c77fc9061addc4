"""Loops that people write end as they do without rows, and are served or refused as is said."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch

from experiments.foreign_loops import __main__ as table
from experiments.foreign_loops import runner
from experiments.foreign_loops.runner import ForeignLoop, outcome_of
from tests.helpers.marks import slow

QUICK = ("McCormick's BERT tutorial", "timm's ViT, MixUp on the device", "Trainer: run_qa")
NAMED = {loop.name: loop for loop in table.LOOPS}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in NAMED])
def test_a_loop_ends_as_without_rows_and_is_served_as_is_due(name: str) -> None:
    outcome = outcome_of(NAMED[name])
    assert outcome.kind == outcome.loop.due, table.line_of(outcome)
    # What is served in part may do so silently, as a forward that runs where it is asked for more.
    assert outcome.kind == "partly" or bool(outcome.said) != (outcome.kind == "cached")


def test_other_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: ForeignLoop = NAMED["Hugging Face course"]
    before = runner.freeze_next

    @wraps(before)
    def thawed(model: Any) -> None:
        before(model)
        model.classifier.weight.requires_grad_(False)

    monkeypatch.setattr(runner, "freeze_next", thawed)
    outcome = outcome_of(loop)
    assert outcome.kind == "wrong" and outcome.apart > 1e-3


def test_marks_say_what_a_loop_was() -> None:
    was, reference, ours = runner.texts_of(NAMED["evaluation only"].run)
    assert "attach" not in was and "        for batch in loader:" in was.splitlines()
    assert "freeze_next(model)\n        for batch in loader:" in reference
    assert "for batch in cached.epoch(loader):" in ours and "# was" not in ours


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert table.main(["--only", "nanoGPT"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| nanoGPT's batches by hand | 2 |")
    assert torch.get_num_threads() == threads == 1
