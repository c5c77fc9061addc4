"""Prove that skips reach the layer that pops them, once, and that every misuse is named."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.skip.routes import Namespace, SkipKey, Skippable, verify_skippables
from autopipe.skip.skip_layers import pop, skippable, stash, using

Commands = Generator[Any, Tensor | None, Tensor]


@skippable(stash=["skip"])
class Encoder(nn.Module):
    """Stash the input, and change it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Commands:
        yield stash("skip", input)
        return self.linear(input).tanh()


class PlainDecoder(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Commands:
        skip = yield pop("skip")
        return self.linear(input) + (0 if skip is None else skip)


Decoder: Any = skippable(pop=["skip"])(PlainDecoder)


class Failing(nn.Module):
    """Raise while `broken` is set."""

    broken = True

    def forward(self, input: Tensor) -> Tensor:
        if self.broken:
            raise ArithmeticError("broken layer")
        return input


def layer(
    forward: Callable[..., Any], *, stash: tuple[str, ...] = (), pop: tuple[str, ...] = ()
) -> Any:
    """Return a skippable layer with the given forward (without self)."""

    class Made(nn.Module):
        # Wrapped by skippable like any other forward; a generator where `forward` is one.
        def forward(self, input: Tensor) -> Any:
            return forward(input)

    return skippable(stash=stash, pop=pop)(Made)()


def stashing(*names: str) -> Any:
    def forward(input: Tensor) -> Commands:
        for number, name in enumerate(names):
            yield stash(name, input + number)
        return input

    return layer(forward, stash=names)


def popping(*names: str) -> Any:
    def forward(input: Tensor) -> Commands:
        for name in names:
            skip = yield pop(name)
            assert skip is not None
            input = input * 2 + skip
        return input

    return layer(forward, pop=names)


def both(*, stashes: str, pops: str) -> Any:
    def forward(input: Tensor) -> Commands:
        skip = yield pop(pops)
        yield stash(stashes, input)
        return input + skip

    return layer(forward, stash=(stashes,), pop=(pops,))


def u_net() -> nn.Sequential:
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Encoder().isolate(outer),
        Encoder().isolate(inner),
        nn.Linear(3, 3),
        Decoder().isolate(inner),
        Decoder().isolate(outer),
    )


def key(name: str) -> SkipKey:
    return SkipKey(None, name)


def test_a_decorated_class_is_a_subclass_with_the_names_of_the_layer() -> None:
    net, plain = Decoder(5), PlainDecoder(5)
    assert isinstance(net, PlainDecoder) and isinstance(net, Skippable)
    assert type(net).__name__ == "PlainDecoder"
    assert Encoder.__doc__ == "Stash the input, and change it."
    assert list(net.state_dict()) == list(plain.state_dict()) == ["linear.weight", "linear.bias"]
    assert net.linear.in_features == 5
    assert inspect.signature(net.forward) == inspect.signature(plain.forward)


def test_repr_shows_the_layer_inside_its_decorator() -> None:
    class Hello(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

    made = skippable(stash=["hello"])(Hello)()
    conv = "Conv2d(1, 1, kernel_size=(1, 1), stride=(1, 1))"
    assert repr(made) == f"@skippable(Hello(\n  (conv): {conv}\n))"


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda net: pickle.loads(pickle.dumps(net)),
        lambda net: pickle.loads(pickle.dumps(net, protocol=2)),
    ],
    ids=["copy", "deepcopy", "pickle", "pickle2"],
)
def test_copies_keep_class_pairs_and_parameters_also_after_a_forward(duplicate: Any) -> None:
    net, x = u_net(), torch.randn(2, 3)
    expected = net(x)
    twin = duplicate(net)
    verify_skippables(twin)
    assert [type(module) for module in twin] == [type(module) for module in net]
    assert torch.equal(twin(x), expected)
    assert twin[0].stashable() == net[0].stashable()
    assert all(map(torch.equal, twin.parameters(), net.parameters()))


def test_a_forward_hook_sees_the_output_and_not_the_generator() -> None:
    seen: list[Any] = []
    stasher = stashing("a")
    stasher.register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.ones(1)
    nn.Sequential(stasher, popping("a"))(x)
    assert seen[0] is x


def test_a_subclass_may_override_forward_but_not_by_a_generator() -> None:
    class Doubling(Decoder):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input) * 2

    torch.manual_seed(0)
    net = nn.Sequential(Encoder(), Doubling())
    verify_skippables(net)
    x = torch.randn(2, 3)
    expected = (net[1].linear(net[0].linear(x).tanh()) + x) * 2
    for twin in (net, copy.deepcopy(net)):
        assert torch.equal(twin(x), expected) and type(twin[1]) is Doubling
    with pytest.raises(TypeError, match="Wrong overrides the forward of a skippable class by a g"):

        class Wrong(Encoder):
            def forward(self, input: Tensor) -> Commands:
                yield stash("skip", input)
                return input


def commands(*issued: Any) -> Callable[[Tensor], Commands]:
    def forward(input: Tensor) -> Commands:
        for command in issued:
            _ = yield command
        return input

    return forward


ONE = torch.ones(1)
TWICE = "twice in one forward; .* it once"
MISUSES = {
    r"Made \(declared stash=\['a'\], pop=\['p'\]\) tried to stash 'b'; add": [stash("b", ONE)],
    "Made .* tried to pop 'a'; add it to": [pop("a")],
    "Made .* did not stash 'a' in its forward": [pop("p")],
    "Made .* did not pop 'p' in its forward": [stash("a", ONE)],
    f"Made .* tried to stash 'a' {TWICE}": [stash("a", ONE), stash("a", ONE)],
    f"Made .* tried to pop 'p' {TWICE}": [pop("p"), pop("p")],
    "Made .* stashed a list as 'a'; stash a tensor or None": [stash("a", [ONE])],  # type: ignore
    r"Made .* yielded a Tensor; yield stash\(name, tensor\) or": [ONE],
}


@pytest.mark.parametrize("message", MISUSES)
def test_a_misuse_names_the_layer_and_the_skip(message: str) -> None:
    wrong = layer(commands(*MISUSES[message]), stash=("a",), pop=("p",))
    net = nn.Sequential(stashing("p"), wrong, popping("a"))
    with pytest.raises((RuntimeError, TypeError), match=message):
        net(torch.zeros(1))
    # The layer that failed leaves nothing to pop.
    with pytest.raises(RuntimeError, match="popped 'a', but no layer before it stashed it"):
        popping("a")(torch.zeros(1))


def test_a_pop_without_a_stash_is_refused_also_after_a_forward_that_had_one() -> None:
    net = nn.Sequential(stashing("x"), popping("x"))
    net(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"Made .*pop=\['x'\]\) popped 'x', but no layer befo"):
        net[1](torch.ones(1))


def test_a_forward_after_a_broken_one_uses_its_own_skips() -> None:
    failing = Failing()
    net = nn.Sequential(stashing("a", "b"), failing, popping("a", "b"))
    with pytest.raises(ArithmeticError, match="broken layer"):
        net(torch.tensor([100.0]))
    failing.broken = False
    x = torch.ones(1)
    assert torch.equal(net(x), (x * 2 + x) * 2 + (x + 1))


def test_what_a_broken_forward_left_is_gone_once_the_next_has_begun() -> None:
    net = nn.Sequential(stashing("a"), stashing("b"), Failing())
    with pytest.raises(ArithmeticError, match="broken layer"):
        net(torch.ones(1))
    net[0](torch.ones(1))  # the next forward, which leaves out the layer that stashes b
    with pytest.raises(RuntimeError, match="popped 'b', but no layer before it stashed it"):
        popping("b")(torch.ones(1))


def test_a_tensor_that_another_layer_left_is_dropped_with_a_warning() -> None:
    net = nn.Sequential(stashing("left"), stashing("left"), popping("left"))
    with pytest.warns(RuntimeWarning, match="stashes 'left', which another layer stashed; no"):
        net(torch.ones(1))


def test_only_classes_of_modules_are_decorated_and_only_once() -> None:
    for wrong in (nn.Linear(1, 1), dict, "Linear"):
        with pytest.raises(TypeError, match="skippable decorates classes of nn.Module, not"):
            skippable()(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Encoder is skippable already; declare all names at"):
        skippable(pop=["more"])(Encoder)


def test_a_store_takes_what_arrives_and_keeps_what_others_will_pop() -> None:
    x = torch.ones(1)
    store = {key("p"): torch.tensor([7.0]), key("none"): None}
    with using(store):
        assert torch.equal(both(stashes="a", pops="p")(x), torch.tensor([8.0]))
        stashing("b")(x)
        with pytest.raises(RuntimeError, match=r"stashed 'b', which another layer stashed bef"):
            stashing("b")(x)
        with pytest.raises(RuntimeError, match="popped 'p', but no layer before it stashed"):
            popping("p")(x)
    assert store == {key("none"): None, key("a"): x, key("b"): x}


def test_stores_do_not_mix_with_the_thread_s_own_or_with_each_other() -> None:
    stashing("a")(torch.tensor([1.0]))
    with using({key("a"): torch.tensor([2.0])}):
        with using({key("a"): torch.tensor([3.0])}):
            assert popping("a")(torch.zeros(1)).item() == 3.0
        assert popping("a")(torch.zeros(1)).item() == 2.0
    assert popping("a")(torch.zeros(1)).item() == 1.0


def test_threads_do_not_see_each_other_s_skips() -> None:
    stashing("a")(torch.ones(1))
    errors: list[str] = []

    def steal() -> None:
        try:
            popping("a")(torch.ones(1))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=steal)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "popped 'a', but no layer" in errors[0]
    popping("a")(torch.ones(1))
