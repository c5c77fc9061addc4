"""Prove that kept rows are named by all that a frozen module computes with, and no more."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from pipetransformer.feed.row_origin import settings_of
from pipetransformer.model import adapt


@dataclass(slots=True)
class Slots:
    factor: float = 1.0
    inner: list[int] = field(default_factory=lambda: [1])


class Settings:
    def __init__(self) -> None:
        self.factor, self._private = 1.0, {3, 4}


class Named(dict[str, Any]):
    def __repr__(self) -> str:
        return "names"


CONSTANT, CONSTANTS, NOTES = 2, {"factor": 2}, [1]


def doubled(hidden: Tensor) -> Tensor:
    NOTES.append(len(hidden))
    return CONSTANT * CONSTANTS["factor"] * hidden


class Base(nn.Module):
    shared = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        return doubled(hidden) * self.factor() * self.share

    def factor(self, *, of: float = 1.0) -> float:
        return of * self.shared

    @property
    def share(self) -> float:
        return 1.0


class Block(Base):
    """Hold a setting of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number, self._number = 1, 1
        self.several, self._several = {"a", "b"}, frozenset({1, 2})
        self.array, self._array = np.arange(3), np.arange(3.0)
        self.slots, self._slots = Slots(), [Slots()]
        self.settings, self._settings = Settings(), {"of": Settings()}
        self.tensor, self._tensors = torch.arange(3), (torch.arange(3),)
        self.function: Callable[[float], float] = partial(pow, 2)
        self._functions, self.memo = [lambda x: x + 1], lru_cache(lambda: 1)
        self.scalar, self.range, self.queue = np.float32(1), range(3), deque([1])
        self.dict, self.logger, self.library = Named(a=1), logging.getLogger("rows"), np


def begun() -> Callable[[], int]:
    """Return a function that names what is not there yet."""

    def wait() -> int:
        return later

    for _ in range(0):
        later = 1
    return wait


def name_of(change: Callable[[Any], object] = lambda _: None) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 2))
    change(model[0])
    return settings_of(adapt(model))


def sets(name: str, value: Any) -> Callable[[Any], object]:
    return lambda block: setattr(block, name, value)


@pytest.mark.parametrize(
    "change",
    [
        sets("number", 2), sets("_number", 2), sets("several", {"a", "c"}),
        sets("_several", frozenset({1, 3})), sets("array", np.arange(1, 4)),
        sets("array", np.arange(3, dtype=np.int16)), sets("_array", np.zeros(3)),
        sets("slots", Slots(2.0)), lambda b: b.slots.inner.append(2),
        lambda b: setattr(b._slots[0], "factor", 2.0),
        lambda b: setattr(b.settings, "factor", 2.0),
        lambda b: b.settings._private.add(5), lambda b: b._settings["of"]._private.add(5),
        lambda b: b.tensor.add_(1), lambda b: b._tensors[0].add_(1),
        sets("function", partial(pow, 3)), sets("_functions", [lambda x: x + 2]),
        sets("memo", lru_cache(lambda: 2)), sets("scalar", np.float32(2)),
        sets("function", begun()), sets("range", range(4)), sets("queue", deque([2])),
        sets("dict", Named(a=2)),
    ],
)  # fmt: skip
def test_a_setting_that_differs_names_other_rows(change: Callable[[Any], object]) -> None:
    usual = name_of()
    assert name_of(change)[0] != usual[0] and name_of(change)[1:] == usual[1:]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Base, "shared", 2.0),
        (Base, "share", property(lambda self: 2.0)),
        (Base, "forward", lambda self, hidden: hidden),
        (Base.factor, "__kwdefaults__", {"of": 2.0}),
        (nn.Linear, "forward", lambda self, hidden: hidden),
        (sys.modules[__name__], "CONSTANT", 3),
        (sys.modules[__name__], "CONSTANTS", {"factor": 3}),
        (sys.modules[__name__], "doubled", lambda hidden: 3 * hidden),
    ],
)
def test_code_that_was_exchanged_in_this_process_names_other_rows(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = name_of()
    monkeypatch.setattr(owner, name, value)
    assert name_of()[0] != usual[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.eval(),
        lambda block: NOTES.append(1),
        # A logger knows all others of the process.
        lambda block: [logging.getLogger("of another program")],
        sets("_gradient_checkpointing_func", partial(pow, 5)),
        # It holds a hash of the process: rows of language models with LoRA were never found again.
        sets("generation_config", Settings()),
        lambda block: block.requires_grad_(False),
        sets("several", {"b", "a"}),
    ],
)
def test_what_changes_no_number_names_the_same_rows(change: Callable[[Any], object]) -> None:
    assert name_of(change) == name_of()


def test_code_that_is_inherited_from_the_user_s_own_class_is_part_of_the_name() -> None:
    usual = name_of()

    class Base(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return 3 * hidden

    class Other(Base):
        pass

    def exchange(block: Any) -> None:
        block.__class__ = Other

    assert name_of(exchange) != usual


def bert(kind: type[BertForSequenceClassification]) -> list[str]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
    )  # fmt: skip
    ids = torch.randint(0, 20, (2, 5))
    return settings_of(adapt(kind(config), read=lambda *_, **__: {"input_ids": ids}))


class Scaled(BertForSequenceClassification):
    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        return super().forward(input_ids // 2, **others)


class ScaledMore(BertForSequenceClassification):
    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        return super().forward(input_ids // 3, **others)


def test_the_forward_of_a_subclass_of_a_library_s_model_is_part_of_the_name() -> None:
    names = {tuple(bert(kind)) for kind in (BertForSequenceClassification, Scaled, ScaledMore)}
    assert len(names) == 3
