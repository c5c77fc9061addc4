"""Prove that a run says how much its cache will take, whichever samples were measured."""

from __future__ import annotations

import logging
import re

import pytest
from torch.optim import SGD

from freeze import FreezeSchedule
from pipetransformer import Trainer
from tests.texts import pad_to_longest, sentences, tiny_bert


def test_the_bytes_announced_are_those_of_rows_for_the_longest_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # From the shortest to the longest, as files may be.
    data = sorted(sentences(400), key=lambda row: len(row["input_ids"]))
    with Trainer(
        tiny_bert(),
        data,
        optimizer=lambda named: SGD([p for _, p in named], lr=0.1),
        freeze=FreezeSchedule((1,)),
        epochs=2,
        global_batch_size=4,
        collate_fn=pad_to_longest,
        progress=False,
    ) as trainer:
        with caplog.at_level(logging.INFO):
            trainer.step()
        taken = trainer.report.cache_bytes
    (announced,) = re.findall(r"the cache takes up to about ([\d.]+) KiB", caplog.text)
    # Rows also hold the mask, targets and checks.
    assert 0.75 * taken < 1024 * float(announced) < 1.1 * taken
