"""Hold skip connections: alone, and between the partitions of a GPipe module."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopipe.engine.links import Payload
from autopipe.schedule import Op
from autopipe.skip.routes import Namespace
from autopipe.skip.skip_layers import pop, skippable, stash
from autopipe.threads.thread_link import Crossing
from tests.helpers.pipes import (
    CLOSE,
    Call,
    assert_same_gradients,
    assert_transparent,
    every_mode,
    on_cpu,
    ramp,
)

Commands = Generator[Any, Tensor | None, Any]


class Base(nn.Module):
    """Compute tanh of a linear layer, alike on every call."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.linear = nn.Linear(3, 3).double()

    def compute(self, input: Tensor) -> Tensor:
        return self.linear(input).tanh()


class Middle(Base):
    """Know nothing of skips."""

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(input)


@skippable(stash=["skip"])
class Encoder(Base):
    """Stash the input."""

    def forward(self, input: Tensor) -> Commands:
        yield stash("skip", input)
        return self.compute(input)


class PlainDecoder(Base):
    """Pop a skip and add it."""

    def forward(self, input: Tensor) -> Commands:
        skip = yield pop("skip")
        return self.compute(input) + (0 if skip is None else skip)


Decoder: Any = skippable(pop=["skip"])(PlainDecoder)


@skippable(stash=["alice", "bob"], pop=["carol"])
class StashStashPop(Base):
    """Stash two skips and pop a third."""

    def forward(self, input: Tensor) -> Commands:
        yield stash("alice", input * 2)
        yield stash("bob", input * 3)
        carol = yield pop("carol")
        return self.compute(input) + carol


@skippable(stash=["carol"])
class StashCarol(Base):
    """Stash the skip that StashStashPop pops."""

    def forward(self, input: Tensor) -> Commands:
        yield stash("carol", input)
        return self.compute(input)


@skippable(pop=["alice", "bob"])
class PopPop(Base):
    """Pop two skips in the other order."""

    def forward(self, input: Tensor) -> Commands:
        bob = yield pop("bob")
        alice = yield pop("alice")
        return self.compute(input) + alice * bob


class UNet(Base):
    """Compute by hand what three pairs of encoders and decoders do."""

    def forward(self, input: Tensor) -> Tensor:
        kept = []
        for _ in range(3):
            kept.append(input)
            input = self.compute(input)
        input = self.compute(input)
        for skip in reversed(kept):
            input = self.compute(input) + skip
        return input


def u_net() -> nn.Sequential:
    """Return three nested pairs of encoder and decoder around a bottleneck."""
    spaces = [Namespace() for _ in range(3)]
    encoders: list[nn.Module] = [Encoder().isolate(ns) for ns in spaces]
    decoders = [Decoder().isolate(ns) for ns in reversed(spaces)]
    return nn.Sequential(*encoders, Middle(), *decoders)


def made(function: Callable[[Any], Any], **names: list[str]) -> nn.Module:
    """Return a skippable layer that runs a function or generator function."""

    class Layer(nn.Module):
        def forward(self, input: Any) -> Any:
            return function(input)

    layer: Any = skippable(**names)(Layer)
    return layer()


@every_mode
@pytest.mark.parametrize("balance", [[7], [2, 1, 1, 3], [1] * 7])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_u_net_of_isolated_pairs_equals_the_plain_one_for_any_balance(
    balance: list[int], chunks: int, mode: str
) -> None:
    input = ramp(5, 3).requires_grad_()
    assert_transparent(u_net(), balance, input, chunks=chunks, checkpoint=mode)


def test_unwrapped_and_wrapped_skips_equal_the_same_net_by_hand() -> None:
    torch.testing.assert_close(u_net()(ramp(5, 3)), UNet()(ramp(5, 3)), **CLOSE)
    piped = on_cpu(u_net(), [2, 3, 2], chunks=2)
    torch.testing.assert_close(piped(ramp(5, 3)), UNet()(ramp(5, 3)), **CLOSE)


@every_mode
@pytest.mark.parametrize("balance", [[4], [1, 1, 1, 1], [1, 3], [2, 2]])
def test_a_layer_may_stash_and_pop_several_skips(balance: list[int], mode: str) -> None:
    layers = nn.Sequential(StashCarol(), StashStashPop(), Middle(), PopPop())
    assert_transparent(layers, balance, ramp(5, 3).requires_grad_(), chunks=2, checkpoint=mode)


def test_the_tuple_way_and_the_skippable_way_give_the_same() -> None:
    class First(Base):
        def forward(self, input: Tensor) -> Any:
            return self.compute(input), input

    class Second(Base):
        def forward(self, pair: Any) -> Any:
            return self.compute(pair[0]), pair[1]

    class Third(Base):
        def forward(self, pair: Any) -> Any:
            return self.compute(pair[0]) + pair[1]

    tuples = nn.Sequential(First(), Second(), Third())
    skips = nn.Sequential(Encoder(), Middle(), Decoder())
    models = [on_cpu(layers, [1, 1, 1], chunks=2) for layers in (tuples, skips)]
    for model in models:
        model(ramp(5, 3)).square().sum().backward()
    assert_same_gradients(models[1], models[0])


@every_mode
@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]])
def test_none_may_stand_for_a_skip(balance: list[int], mode: str) -> None:
    def maybe(input: Tensor) -> Commands:
        yield stash("skip", input if input.sum() > 0 else None)
        return input

    layers = nn.Sequential(made(maybe, stash=["skip"]), Middle(), Decoder())
    for sign in (1, -1):
        input = (ramp(6, 3).abs() * sign).requires_grad_()
        assert_transparent(layers, balance, input, chunks=3, checkpoint=mode)
    # One micro-batch stashes a tensor and the other None.
    model = on_cpu(copy.deepcopy(layers), balance, chunks=2, checkpoint=mode)
    mixed = torch.cat([ramp(2, 3).abs(), -ramp(2, 3).abs()])
    expected = torch.cat([layers(part) for part in mixed.split(2)])
    found = model(mixed)
    torch.testing.assert_close(found, expected, **CLOSE)
    for output in (found, expected):
        output.sum().backward()
    assert_same_gradients(model, layers)


@every_mode
@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]])
def test_integers_and_tensors_without_gradient_may_be_skips(balance: list[int], mode: str) -> None:
    def give(input: Tensor) -> Commands:
        yield stash("places", input.argsort(dim=1))
        yield stash("mask", input.detach() > 0)
        yield stash("constant", input.detach())
        return input * 2

    def take(input: Tensor) -> Commands:
        places = yield pop("places")
        mask = yield pop("mask")
        constant = yield pop("constant")
        assert places is not None and mask is not None and constant is not None
        return input.gather(1, places) * mask + constant

    names = ["places", "mask", "constant"]
    layers = nn.Sequential(made(give, stash=names), Middle(), made(take, pop=names))
    assert_transparent(layers, balance, ramp(5, 3).requires_grad_(), chunks=2, checkpoint=mode)


@every_mode
def test_a_popped_skip_that_no_gradient_comes_back_for_is_no_error(mode: str) -> None:
    def ignore(input: Tensor) -> Commands:
        yield pop("skip")
        return input

    for last in (ignore, lambda input: (yield pop("skip"))):
        layers = nn.Sequential(Encoder(), Middle(), made(last, pop=["skip"]))
        assert_transparent(
            layers, [1, 1, 1], ramp(4, 3).requires_grad_(), chunks=2, checkpoint=mode
        )


@every_mode
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_skips_work_in_a_step(schedule: str, mode: str) -> None:
    plain, model = u_net(), on_cpu(u_net(), [2, 3, 2], chunks=4, checkpoint=mode)
    nn.functional.mse_loss(plain(ramp(7, 3)), ramp(7, 3)).backward()
    model.step(ramp(7, 3), ramp(7, 3), nn.functional.mse_loss, schedule=schedule)
    assert_same_gradients(model, plain)


def parallel_branches() -> tuple[nn.Sequential, list[str]]:
    """Return two encoders that read one input, and a layer that adds what both give.

    Source: the parallel branches of torchgpipe's paper, section 3.3.
    """
    calls: list[str] = []

    def split(input: Tensor) -> Commands:
        calls.append("split")
        yield stash("left", input)
        yield stash("right", input)
        return input

    def branch(side: str) -> nn.Module:
        def run(_: Tensor) -> Commands:
            input = yield pop(side)
            assert input is not None
            yield stash(f"{side} out", input.exp() if side == "left" else input.sin())
            return _

        return made(run, stash=[f"{side} out"], pop=[side])

    def join(_: Tensor) -> Commands:
        left = yield pop("left out")
        right = yield pop("right out")
        assert left is not None and right is not None
        return left * right

    return nn.Sequential(
        made(split, stash=["left", "right"]),
        branch("left"),
        branch("right"),
        made(join, pop=["left out", "right out"]),
    ), calls


@every_mode
def test_parallel_branches_equal_the_function_they_compute(mode: str) -> None:
    layers, calls = parallel_branches()
    input = ramp(5, 3).requires_grad_()
    model = on_cpu(layers, [1, 1, 1, 1], chunks=2, checkpoint=mode)
    output = model(input)
    torch.testing.assert_close(output, input.exp() * input.sin(), **CLOSE)
    (found,) = torch.autograd.grad(output.sum(), input)
    torch.testing.assert_close(found, input.exp() * (input.sin() + input.cos()), **CLOSE)
    assert len(calls) == 2 + {"always": 2, "except_last": 1, "never": 0}[mode]


def test_a_skip_is_freed_once_it_was_popped_for_the_last_time() -> None:
    alive: list[StorageWeakRef] = []
    seen: list[int] = []

    def give(input: Tensor) -> Commands:
        skip = input * 2
        alive.append(StorageWeakRef(skip.untyped_storage()))
        yield stash("skip", skip)
        return input

    def look(input: Tensor) -> Tensor:
        # The thread below hands its output on before it has left the layer that popped.
        deadline = time.monotonic() + 10.0
        while not all(storage.expired() for storage in alive) and time.monotonic() < deadline:
            time.sleep(1e-3)
        seen.append(sum(not storage.expired() for storage in alive))
        return input

    for balance in ([4], [1, 1, 1, 1], [1, 2, 1]):
        layers = nn.Sequential(made(give, stash=["skip"]), nn.Identity(), Decoder(), Call(look))
        with torch.no_grad():
            on_cpu(layers, balance)(ramp(4, 3))
        assert seen.pop() == 0
    layers[3] = nn.Identity()  # While a graph is kept, `look` would wait for its end.
    model = on_cpu(layers, [2, 2], chunks=2, checkpoint="always")
    output = model(ramp(4, 3))
    output.sum().backward()
    del output
    assert all(storage.expired() for storage in alive)


def test_a_skip_and_its_gradient_cross_once_a_micro_batch_past_the_partitions_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[Op, int]] = []
    original = Crossing.send

    def send(self: Crossing, micro_batch: int, payload: Payload) -> None:
        sent.extend((self.op, t.shape[1]) for t in payload.tensors if t is not None)
        original(self, micro_batch, payload)

    monkeypatch.setattr(Crossing, "send", send)

    def give(input: Tensor) -> Commands:
        yield stash("wide", input.repeat(1, 2))
        return input.exp()

    def take(input: Tensor) -> Commands:
        wide = yield pop("wide")
        assert wide is not None
        return input + wide.view(-1, 2, 3).prod(1)

    layers = [made(give, stash=["wide"]), Middle(), Middle(), made(take, pop=["wide"])]
    model = on_cpu(nn.Sequential(*layers), [1, 1, 1, 1], chunks=2, checkpoint="never")
    model(ramp(4, 3).requires_grad_()).sum().backward()
    for op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
        assert (sent.count((op, 6)), sent.count((op, 3))) == (2, 6)


@every_mode
def test_a_misuse_of_a_skip_reaches_the_caller_of_a_forward(mode: str) -> None:
    def twice(input: Tensor) -> Commands:
        yield stash("skip", input)
        yield stash("skip", input)

    layers = nn.Sequential(made(twice, stash=["skip"]), Decoder())
    with pytest.raises(RuntimeError, match="stash 'skip' twice"):
        on_cpu(layers, [1, 1], checkpoint=mode)(ramp(4, 3))
    forgets = nn.Sequential(Encoder(), made(lambda input: input, pop=["skip"]))
    with pytest.raises(RuntimeError, match="did not pop 'skip'"):
        on_cpu(forgets, [1, 1], checkpoint=mode)(ramp(4, 3))
