"""Hold what stash and pop may not do, and how the mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from autopipe.skip.routes import Namespace, verify_skippables
from autopipe.skip.skip_layers import pop, skippable, stash
from tests.conformance.test_skip import (
    Commands,
    Decoder,
    Encoder,
    Middle,
    PopPop,
    StashCarol,
    StashStashPop,
    made,
)
from tests.helpers.pipes import every_mode, on_cpu, ramp


def test_verification_names_each_mismatch_of_the_manual() -> None:
    layers = {
        "no module declared 'skip' as poppable but stashed": [Encoder(), Middle()],
        r"'1' declared 'skip' as poppable but it was not stashed": [Middle(), Decoder()],
        r"'3' redeclared 'skip' as poppable": [Encoder(), Middle(), Decoder(), Decoder()],
        r"'1' redeclared 'skip' as stashable": [Encoder(), Encoder(), Middle(), Decoder()],
    }
    for message, members in layers.items():
        model = nn.Sequential(*members)
        with pytest.raises(TypeError, match=message):
            verify_skippables(model)
        with pytest.raises(TypeError, match=message):
            on_cpu(model, [len(model)])
    verify_skippables(nn.Sequential(Encoder(), Middle(), Decoder()))


def test_isolation_returns_the_layer_and_keeps_equal_names_apart() -> None:
    encoder, ns = Encoder(), Namespace()
    assert encoder.isolate(ns) is encoder
    verify_skippables(nn.Sequential(encoder, Encoder(), Decoder(), Decoder().isolate(ns)))
    with pytest.raises(TypeError, match="do not match"):
        verify_skippables(nn.Sequential(encoder, Decoder().isolate(Namespace())))


def test_only_isolates_a_subset_and_calls_may_be_chained() -> None:
    alice, bob = Namespace(), Namespace()
    layers = nn.Sequential(
        StashCarol(),
        StashStashPop().isolate(alice, only=["alice"]).isolate(bob, only=["bob"]),
        made(lambda input: (yield stash("bob", input)), stash=["bob"]),
        made(lambda input: (yield pop("bob")), pop=["bob"]),
        PopPop().isolate(alice, only=["alice"]).isolate(bob, only=("bob",)),
    )
    verify_skippables(layers)
    with pytest.raises(TypeError, match="do not match"):
        verify_skippables(nn.Sequential(StashCarol(), StashStashPop(), layers[-1]))


@every_mode
def test_what_was_not_declared_or_is_missing_or_repeated_raises_in_the_forward(mode: str) -> None:
    def none(input: Tensor) -> Tensor:
        return input

    def twice(input: Tensor) -> Commands:
        yield stash("skip", input)
        yield stash("skip", input)

    def other(input: Tensor) -> Commands:
        yield stash("skip", input)
        yield stash("other", input)

    def pops(input: Tensor) -> Commands:
        yield stash("skip", input)
        yield pop("other")

    wrong: list[tuple[Callable[[Any], Any], str]] = [
        (none, "did not stash 'skip'"),
        (twice, "stash 'skip' twice"),
        (other, "tried to stash 'other'"),
        (pops, "tried to pop 'other'"),
    ]
    for function, message in wrong:
        layers = nn.Sequential(made(function, stash=["skip"]), Decoder())
        for model in (layers, on_cpu(layers, [1, 1], checkpoint=mode)):
            with pytest.raises(RuntimeError, match=message):
                model(ramp(4, 3))
    forgets = nn.Sequential(Encoder(), made(none, pop=["skip"]))
    with pytest.raises(RuntimeError, match="did not pop 'skip'"):
        on_cpu(forgets, [1, 1], checkpoint=mode)(ramp(4, 3))


def test_declared_names_are_an_iterable_and_no_string_of_letters() -> None:
    for names in ({"stash": "skip"}, {"pop": "skip"}):
        with pytest.raises(TypeError, match="must be an iterable of names, not 'skip'"):
            skippable(**names)
    assert isinstance(made(lambda input: input, stash=[], pop=[]), nn.Module)
