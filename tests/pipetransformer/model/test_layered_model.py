"""A LayeredModel shares its model's tensors, and refuses what it cannot split without harm."""

from __future__ import annotations

import operator
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.loss import Loss
from pipetransformer.config import TrainConfig
from pipetransformer.model import (
    LayeredModel,
    Sublayer,
    Task,
    adamw,
    adapt,
    register_adapter,
    set_frozen,
)
from tests.helpers.marks import slow
from tests.helpers.models import Block, sequential, tiny_data, tiny_model


def test_sequential_children_are_layers_even_where_a_module_is_used_twice() -> None:
    layered = adapt(sequential())
    assert [(sub.name, sub.layer) for sub in layered.sublayers] == [
        ("0", 0),
        ("1", 1),
        ("2", 2),
        ("3", 3),
        ("4", 4),
    ]
    assert (layered.inputs, layered.targets, layered.loss_fn) == (("x",), ("y",), None)


def test_impossible_ranges_and_inputs_are_refused() -> None:
    layered = adapt(sequential())
    hidden = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="num_frozen is 5, but the model has 4 layers"):
        layered.first_active(5)
    with pytest.raises(ValueError, match="give 0 <= first < last"):
        layered.run({}, first=3, last=3, hidden=hidden)
    with pytest.raises(TypeError, match="sublayer 1 .* got a dict; give it the hidden state"):
        layered.run({}, first=1)
    with pytest.raises(TypeError, match="sublayer 0 .* got a Tensor; give it the batch"):
        layered.run({}, hidden=hidden)
    with pytest.raises(ValueError, match=r"the batch has entries \['image'\].*takes 'x'"):
        layered.run({"image": hidden})
    with pytest.raises(TypeError, match="sublayer 0 .* got a Tensor; give it the batch"):
        layered.call(0, hidden, sides={})
    with pytest.raises(TypeError, match="sublayer 1 .* got a dict; give it the hidden state"):
        layered.call(1, {"x": hidden}, sides={})


def test_a_sublayer_that_returns_a_tuple_is_refused() -> None:
    layered = adapt(nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 2)))
    with pytest.raises(TypeError, match="sublayer '0' returned a tuple"):
        layered.run({"x": torch.zeros(1, 2, 4)})


def test_materialize_leaves_held_tensors_alone() -> None:
    layered = adapt(sequential())
    held = layered.tensors(0)
    layered.materialize(0, "cpu")
    assert all(tensor is held[name] for name, tensor in layered.tensors(0).items())


def test_replacement_that_does_not_fit_changes_nothing() -> None:
    layered = adapt(sequential())
    before = layered.tensors(0)
    with pytest.raises(ValueError, match="'4.bias' is no tensor of sublayer '0'"):
        layered.replace(0, {"4.bias": None})
    with pytest.raises(ValueError, match=r"cannot be replaced by \(7,\) torch.float32"):
        layered.replace(0, {"0.weight": None, "0.bias": torch.zeros(7)})
    with pytest.raises(ValueError, match="cannot be replaced by .* torch.float64"):
        layered.replace(0, {"0.bias": torch.zeros(8, dtype=torch.float64)})
    assert all(tensor is before[name] for name, tensor in layered.tensors(0).items())


class Tied(nn.Module):
    """A language model with the usual tie between its embedding and its last linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.classifier = nn.Linear(4, 7)
        self.classifier.weight = self.embedding.weight

    def sublayers(self) -> list[Sublayer]:
        return [Sublayer("words", 0, self.embedding), Sublayer("head", 1, self.classifier)]


def test_a_tied_tensor_belongs_to_its_first_sublayer() -> None:
    model = Tied()
    layered = LayeredModel(model, model.sublayers(), inputs=["x"], targets=["y"])
    assert layered.owners["embedding.weight"] == 0
    last = len(layered.sublayers) - 1
    assert "embedding.weight" in layered.tensors(last)
    assert layered.shared_above(1) == {"embedding.weight"}
    layered.replace(last, {"embedding.weight": torch.ones(7, 4)})
    assert model.classifier.weight is model.embedding.weight
    assert layered.run({"x": torch.zeros(2, 3, dtype=torch.long)}).shape == (2, 3, 7)


def test_tensors_tied_within_a_sublayer_stay_tied() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    block[2].weight = block[0].weight
    block[0].alias = block[0].weight
    layered = adapt(nn.Sequential(block, nn.Linear(4, 2)))
    assert list(layered.tensors(0)) == ["0.0.weight", "0.0.bias", "0.2.bias"]
    layered.replace(0, {"0.0.weight": torch.zeros(4, 4)})
    assert block[2].weight is block[0].weight is block[0].alias


class Functional(nn.Module):
    """Reads the weight of a child that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.convolution.weight)


def test_released_weight_of_a_child_that_is_not_called_is_refused_too() -> None:
    layered = adapt(nn.Sequential(Functional(), nn.Flatten()))
    layered.release(0)
    # A convolution with a meta weight would return numbers.
    with pytest.raises(RuntimeError, match="convolution.weight' of this Functional is released"):
        layered.run({"x": torch.zeros(2, 4, 4)})


def test_every_tensor_must_be_in_a_sublayer_or_declared_unused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "extra": nn.BatchNorm1d(2)})
    names = {"a": 0, "b": 1}
    sublayers = [Sublayer(name, layer, model[name]) for name, layer in names.items()]
    extra = [
        name
        for name, _ in chain(model.named_parameters(), model.named_buffers())
        if name.startswith("extra.")
    ]
    with pytest.raises(ValueError, match=r"in no sublayer: \['extra.bias', .*'extra.weight'\]"):
        LayeredModel(model, sublayers, inputs=["x"], targets=["y"])
    with pytest.raises(ValueError, match=r"declared unused but not so: \['a.bias'\]"):
        LayeredModel(model, sublayers, inputs=["x"], targets=["y"], unused=[*extra, "a.bias"])
    layered = LayeredModel(model, sublayers, inputs=["x"], targets=["y"], unused=extra)
    assert layered.unused == tuple(extra)
    alien = [sublayers[0], Sublayer("b", 1, nn.Linear(2, 2))]
    with pytest.raises(ValueError, match="'weight' of sublayer 'b' is not of the model"):
        LayeredModel(model, alien, inputs=["x"], targets=["y"], unused=extra)


@pytest.mark.parametrize(
    ("layers", "names"),
    [([0, 0], "ab"), ([1, 2], "ab"), ([0, 2], "ab"), ([0, 1, 0], "abc"), ([0], "a")],
)
def test_layers_out_of_order_are_refused(layers: list[int], names: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    sublayers = [
        Sublayer(name, layer, model[name]) for name, layer in zip(names, layers, strict=True)
    ]
    with pytest.raises(ValueError, match="layers of the sublayers are"):
        LayeredModel(model, sublayers, inputs=["x"], targets=["y"])


def test_sublayer_names_used_twice_and_missing_inputs_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twice = [Sublayer("a", index, child) for index, child in enumerate(model)]
    with pytest.raises(ValueError, match=r"sublayer names \['a'\] are used twice"):
        LayeredModel(model, twice, inputs=["x"], targets=["y"])
    with pytest.raises(ValueError, match="inputs is empty"):
        LayeredModel(model, adapt(model).sublayers, inputs=[], targets=["y"])
    with pytest.raises(ValueError, match="has 1 children; a pipeline needs at least two"):
        adapt(nn.Sequential(nn.Linear(2, 2)))


def test_unknown_models_are_refused_until_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipetransformer.model.registry._BUILDERS", {nn.Sequential: adapt})
    model = Tied()
    model.classifier.weight = nn.Parameter(torch.zeros(7, 4))
    with pytest.raises(
        TypeError, match="knows a .*Tied without samples: .* or call register_adapter"
    ):
        adapt(model)
    register_adapter(
        Tied, lambda tied: LayeredModel(tied, tied.sublayers(), inputs=["x"], targets=["y"])
    )
    layered = adapt(model)
    assert layered.model is model and adapt(layered) is layered


@pytest.mark.parametrize(
    ("wrap", "path"), [(torch.compile, "_orig_mod"), (nn.DataParallel, "module")]
)
def test_of_a_wrapper_the_model_in_it_is_asked_for(wrap: Any, path: str) -> None:
    model = sequential()
    wrapper = wrap(model)
    with pytest.raises(TypeError, match=rf"give model\.{path}, the Sequential that it wraps"):
        adapt(wrapper)
    assert adapt(operator.attrgetter(path)(wrapper)).model is model
    with pytest.raises(TypeError, match=rf"give model\.{path}, the Tied that it wraps"):
        adapt(wrap(Tied()))


class Doubled(nn.Sequential):
    """A Sequential that is not one."""

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = 2 * super().forward(x)
        return doubled


def test_models_with_a_forward_of_their_own_are_refused() -> None:
    with pytest.raises(TypeError, match="Doubled overrides forward of Sequential"):
        adapt(Doubled(nn.Linear(2, 2), nn.Linear(2, 2)))
    hooked = sequential()
    hooked.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="overrides forward of Sequential"):
        adapt(hooked)


FREEZES = (
    "import sys, freeze; from torch import nn; "
    "model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))); "
    "freeze.apply(model, 1, layers=list(model)); freeze.apply(model, 0, layers=list(model))"
)
"""Freeze and thaw for the first time, which must not import torch's compiler either."""


def test_importing_the_package_imports_nothing_that_takes_seconds_beside_torch() -> None:
    large = {"timm", "transformers", "torch._dynamo", "matplotlib", "pandas"}
    code = f"{FREEZES}; import pipetransformer.cli; assert not {large} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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


@pytest.mark.parametrize(("backend", "first"), [("eager", 3), slow("aot_eager", 0)])
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
