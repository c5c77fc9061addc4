"""Before the first step a model is run a few times, however large it is: a run begins soon."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.utils.data import DataLoader

from pipetransformer import Callback, Trainer, attach
from tests.helpers.any_models import BATCH_SIZE, KINDS, build, data, sgd
from tests.helpers.marks import slow


@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """Stand in a model's forward, and count its calls."""
    kind, calls = type(model), list[int]()
    plain: Any = kind.forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is model:  # And no skeleton, in which blocks do not run.
            calls.append(1)
        return plain(self, *args, **kwargs)

    with mock.patch.object(kind, "forward", forward):
        yield calls


class AtBegin(Callback):
    """Note how often a model was called when training begins."""

    def __init__(self, calls: list[int]) -> None:
        self.calls, self.noted = calls, -1

    def on_train_begin(self, trainer: Trainer) -> None:
        self.noted = len(self.calls)


@pytest.mark.parametrize("name", ["gpt2", "eva", *map(slow, sorted({*KINDS} - {"gpt2", "eva"}))])
def test_a_recorded_model_s_forward_is_called_at_most_3_times_before_the_first_step(
    name: str,
) -> None:
    # It was called up to seven times, and a tied decoder's up to eight.
    kind = KINDS[name]
    model = build(kind)
    with counting(model) as calls:
        callback = AtBegin(calls)
        with Trainer(
            model, data(kind), optimizer=sgd, epochs=1, global_batch_size=BATCH_SIZE,
            progress=False, tied_weights="freeze", freeze=1, callbacks=[callback],
        ) as trainer:  # fmt: skip
            trainer.fit()
    assert 1 <= callback.noted <= 3


@pytest.mark.parametrize(
    ("name", "most"), [("gpt2_classifier", 13), slow("mpnet", 12), slow("eva", 11)]
)
def test_a_loop_s_model_is_called_at_most_as_often_as_its_rows_are_looked_at(
    name: str, most: int
) -> None:
    # Up to 14 times. Three show the model, the others look whether rows may take its place.
    kind = KINDS[name]
    model = build(kind)
    with counting(model) as calls, attach(model, freeze=1) as cached:
        next(iter(cached.epoch(DataLoader(data(kind), batch_size=BATCH_SIZE))))
        assert 1 <= len(calls) <= most
