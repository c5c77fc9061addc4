"""Prove that flags of parameters follow what is frozen, in compiled layers too."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopipe.loss import Loss
from pipetransformer.config import TrainConfig
from pipetransformer.model import Task, adamw, adapt, set_frozen
from tests.models import Block, tiny_data, tiny_model


def compiled_task(backend: str) -> tuple[nn.Sequential, Task]:
    """Build a task whose blocks were compiled in place."""
    model = tiny_model()
    for block in model:
        if isinstance(block, Block):
            block.compile(backend=backend)
    names = frozenset(name for name, _ in model.named_parameters())
    return model, Task(adapt(model), Loss(nn.CrossEntropyLoss()), adamw(), TrainConfig(), names)


def with_gradients(model: nn.Sequential) -> set[str]:
    """Run forward and backward; name the parameters that have a gradient then."""
    x, y = tiny_data().tensors
    nn.functional.cross_entropy(model(x), y).backward()
    return {name for name, tensor in model.named_parameters() if tensor.grad is not None}


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_lose_their_gradients_when_they_freeze_and_have_them_when_they_thaw(
    backend: str, first: int
) -> None:
    torch._dynamo.reset()
    model, task = compiled_task(backend)
    for num_frozen in (first, 3 - first, first):
        set_frozen(task, num_frozen)
        expected = {
            name
            for index, sublayer in enumerate(task.model.sublayers)
            if sublayer.layer >= num_frozen
            for name in task.model.tensors(index)
        }
        assert 0 < len(expected) and with_gradients(model) == expected
    torch._dynamo.reset()


def test_what_was_compiled_is_dropped_where_a_flag_changes_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Versions of torch whose guards look at the flags would pass the test above without it.
    drops: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: drops.append(1))
    _, task = compiled_task("eager")
    numbers = []
    for num_frozen in (0, 2, 2, 1, 0, 0):
        set_frozen(task, num_frozen)
        numbers.append(len(drops))
    assert numbers == [0, 1, 1, 2, 3, 3]
    set_frozen(task, 0, resting=[2])
    assert len(drops) == 4


def test_what_was_never_compiled_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reset of a process imports all of the compiler: a freeze took 3 s."""
    monkeypatch.setattr(torch._dynamo.utils, "counters", {"frames": {}})
    monkeypatch.setattr(torch._dynamo, "reset", lambda: pytest.fail("a reset without need"))
    _, compiled = compiled_task("eager")
    task = replace(compiled, model=adapt(tiny_model()))
    set_frozen(task, 2)
    set_frozen(task, 0)


def test_a_process_without_the_compiler_does_not_import_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, task = compiled_task("eager")
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    set_frozen(task, 2)
    assert "torch._dynamo" not in sys.modules
