"""Prove which skips a model declares, that misfits are named, and who owes whom which of them."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
from torch import nn

from autopipe.skip.routes import Namespace, SkipEdge, SkipKey, skip_edges, verify_skippables
from autopipe.skip.skip_layers import skippable


def declaring(*, stash: tuple[str, ...] = (), pop: tuple[str, ...] = ()) -> Any:
    """Return a layer that declares skips; it is never run here."""
    return skippable(stash=stash, pop=pop)(nn.Identity)()


def stashing(*names: str) -> Any:
    return declaring(stash=names)


def popping(*names: str) -> Any:
    return declaring(pop=names)


def key(name: str, namespace: Namespace | None = None) -> SkipKey:
    return SkipKey(namespace, name)


def test_namespaces_differ_and_their_copies_are_equal() -> None:
    one, other = Namespace(), Namespace()
    assert one != other and len({one, other}) == 2
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin == one and hash(twin) == hash(one) and twin != other


def test_only_isolates_the_names_it_lists() -> None:
    alice, bob = Namespace(), Namespace()
    stasher = stashing("alice", "bob")
    assert stasher.isolate(alice, only=["alice"]).isolate(bob, only=["bob"]) is stasher
    assert stasher.stashable() == (key("alice", alice), key("bob", bob))
    assert popping("alice", "bob").isolate(bob, only=["bob"]).poppable() == (
        key("alice"),
        key("bob", bob),
    )
    assert stashing("alice").isolate(bob, only=[]).stashable() == (key("alice"),)


@pytest.mark.parametrize("names", ["skip", b"skip", 3, None, nn.Linear], ids=repr)
def test_names_must_be_an_iterable_of_strings(names: Any) -> None:
    with pytest.raises(TypeError, match="stash must"):
        skippable(stash=names)
    with pytest.raises(TypeError, match="pop must"):
        skippable(pop=names)


def test_wrong_arguments_of_isolate_are_refused() -> None:
    encoder = stashing("skip")
    with pytest.raises(TypeError, match="only must be an iterable of names, not 'skip'"):
        encoder.isolate(Namespace(), only="skip")
    with pytest.raises(TypeError, match="isolate takes a Namespace, not <class"):
        encoder.isolate(Namespace)
    with pytest.raises(ValueError, match=r"Identity .* cannot isolate \['other'\]"):
        encoder.isolate(Namespace(), only=["skip", "other"])
    assert encoder.stashable() == (key("skip"),)


def test_edges_join_the_partitions_that_exchange_skips() -> None:
    inner = Namespace()
    # a and c go from 0 to 2, the isolated skip from inside a layer of 0 to 1, b stays within 1.
    nested = nn.Sequential(nn.Identity(), stashing("skip").isolate(inner))
    partitions = [
        [stashing("a"), nested, stashing("c")],
        nn.Sequential(stashing("b"), popping("b"), popping("skip").isolate(inner)),
        [popping("c"), nn.Sequential(popping("a"))],
    ]
    assert skip_edges(partitions) == (
        SkipEdge(0, 1, (key("skip", inner),)),
        SkipEdge(0, 2, (key("a"), key("c"))),
    )
    verify_skippables(nn.Sequential(*(layer for layers in partitions for layer in layers)))
    assert skip_edges([nn.Sequential(nn.ReLU())]) == ()


def test_edges_are_sorted_by_source_and_then_by_target() -> None:
    partitions = [[stashing("x", "y")], [stashing("z")], [popping("z", "y")], [popping("x")]]
    assert skip_edges(partitions) == (
        SkipEdge(0, 2, (key("y"),)),
        SkipEdge(0, 3, (key("x"),)),
        SkipEdge(1, 2, (key("z"),)),
    )


FAILURES = {
    "no module declared 'foo' as poppable but stashed": lambda: [stashing("foo")],
    "'2' declared 'foo' as poppable but it was not stashed": lambda: [
        nn.ReLU(),
        nn.ReLU(),
        popping("foo"),
    ],
    "'1' redeclared 'foo' as stashable but not isolated by namespace": lambda: [
        stashing("foo"),
        stashing("foo"),
        popping("foo"),
    ],
    "'3' redeclared 'foo' as poppable but not isolated by namespace": lambda: [
        stashing("foo"),
        nn.ReLU(),
        popping("foo"),
        popping("foo"),
    ],
    "'0' declared 'foo' both as stashable and as poppable": lambda: [
        declaring(stash=("foo",), pop=("foo",))
    ],
    "'0' declared 'bar' as poppable but it was not stashed": lambda: [
        popping("bar"),
        stashing("bar"),
    ],
    "'1.0' declared 'foo' as poppable but it was not stashed": lambda: [
        stashing("foo").isolate(Namespace()),
        nn.Sequential(popping("foo")),
    ],
}


@pytest.mark.parametrize("message", FAILURES)
def test_verify_names_the_layer_whose_stash_or_pop_has_no_partner(message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        verify_skippables(nn.Sequential(*FAILURES[message]()))


def test_verify_lists_every_failure() -> None:
    net = nn.Sequential(popping("x"), stashing("y"), stashing("z"), popping("z"), popping("z"))
    with pytest.raises(TypeError, match="some stash and pop do not match:") as caught:
        verify_skippables(net)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "* '0' declared 'x' as poppable but it was not stashed",
        "* '4' redeclared 'z' as poppable but not isolated by namespace",
        "* no module declared 'y' as poppable but stashed",
    ]


def test_verify_accepts_pairs_in_namespaces_and_inside_a_layer_in_either_order() -> None:
    verify_skippables(nn.Sequential())
    outer, inner = Namespace(), Namespace()
    isolated = [stashing("a").isolate(outer), stashing("a").isolate(inner), stashing("a")]
    poppers = [popping("a"), popping("a").isolate(inner), popping("a").isolate(outer)]
    verify_skippables(nn.Sequential(*isolated, *poppers))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs_last, self.runs_first = popping("a"), stashing("a")

    verify_skippables(nn.Sequential(Block()))


def test_verify_sees_a_layer_that_stands_in_two_places() -> None:
    shared = stashing("a")
    with pytest.raises(TypeError, match="'1' redeclared 'a' as stashable but not isolated"):
        verify_skippables(nn.Sequential(shared, shared, popping("a")))


def test_verify_refuses_anything_but_a_sequential() -> None:
    with pytest.raises(TypeError, match="checks an nn.Sequential, not ModuleList"):
        verify_skippables(nn.ModuleList([stashing("a")]))  # type: ignore[arg-type]
