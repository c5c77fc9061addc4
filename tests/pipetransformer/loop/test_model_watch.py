"""What a user changes of a module by hand is noticed, whatever it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.loop.forward.model_watch import ModelWatch, left_alone


def module() -> Any:
    made: Any = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    made.factor, made.names, made.scales = 2.0, ["a", "b"], {"x": 1.0}
    made.config, made.activation = SimpleNamespace(eps=0.1), torch.relu
    made.bias_like = torch.ones(2)
    return made


EDITS: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "factor", 3.0),
    "a list in place": lambda m: m.names.append("c"),
    "a new list": lambda m: setattr(m, "names", ["a", "c"]),
    "a dict in place": lambda m: m.scales.update(x=2.0),
    "settings in place": lambda m: setattr(m.config, "eps", 0.2),
    "a function": lambda m: setattr(m, "activation", torch.tanh),
    "a new attribute": lambda m: setattr(m[0], "added", 1),
    "a tensor in place": lambda m: m.bias_like.add_(1),
    "a tensor": lambda m: setattr(m, "bias_like", torch.zeros(2)),
    "a part's number": lambda m: setattr(m[1], "eps", 0.5),
    "a forward within": lambda m: setattr(m[0], "forward", lambda x: x),
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: None),
}


NAMES = {
    "a number": "'factor' of Sequential", "a list in place": "'names' of Sequential",
    "a new list": "'names' of Sequential", "a function": "'activation' of Sequential",
    "a new attribute": "'added' of Linear", "a tensor": "'bias_like' of Sequential",
    "a part's number": "'eps' of LayerNorm", "a hook": "attributes or hooks",
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_an_edit_is_named(kind: str) -> None:
    watched = module()
    watch = ModelWatch(watched.modules())
    EDITS[kind](watched)
    assert NAMES[kind] in watch.change()


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_noticed(edit: Callable[[Any], Any]) -> None:
    watched = module()
    watch = ModelWatch(watched.modules())
    assert not watch.changed()
    edit(watched)
    assert watch.changed()
    watch.renew()
    assert not watch.changed()


def test_equal_values_are_no_change() -> None:
    watched = module()
    watch = ModelWatch(watched.modules())
    watched.factor, watched.names = 4.0 / 2, ["a", "b"]
    assert not watch.changed() and not watch.replaced()


def test_what_takes_a_module_s_place_is_noticed() -> None:
    watched = module()
    watch = ModelWatch(watched.modules())
    watched[0] = nn.Linear(2, 2)
    assert watch.replaced()


def test_a_look_s_graph_is_freed() -> None:
    def look() -> weakref.ref[Tensor]:
        output = watched(torch.ones(2, 2)).tanh()  # Its graph keeps it.
        return weakref.ref(output)

    watched = module()
    with left_alone(watched, torch.device("cpu")):
        seen = look()
    gc.collect()
    assert seen() is None


def test_a_look_leaves_no_trace() -> None:
    watched = module()
    watched.register_buffer("count", torch.zeros(()))
    with left_alone(watched, torch.device("cpu")):
        watched.count += 1
        watched.factor, watched.added = 5.0, 1
        watched[0].register_forward_hook(lambda *_: None)
        torch.rand(3)
    assert watched.count == 0 and watched.factor == 2.0 and not hasattr(watched, "added")
    assert not watched[0]._forward_hooks
