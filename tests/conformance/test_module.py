"""Hold that a GPipe module can be copied, saved, hooked and dropped as the plain one can."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.gpipe.module import GPipe
from tests.helpers.pipes import (
    Call,
    assert_same_gradients,
    every_mode,
    mean_loss,
    on_cpu,
    ramp,
    wrapped,
)


@every_mode
def test_hooks_of_layers_run_once_a_micro_batch(mode: str) -> None:
    model, calls = wrapped(mode)[1], []
    model[2].register_full_backward_hook(lambda *_: calls.append("backward"))
    model.register_forward_hook(lambda *_: calls.append("model"))
    model(ramp(6, 3)).sum().backward()
    assert calls == ["model", *["backward"] * 3]


@every_mode
def test_copies_and_pickles_of_a_used_model_compute_the_same(mode: str) -> None:
    plain, model = wrapped(mode)
    for used in (False, True):
        if used:
            kept = model(ramp(5, 3))
            model.step(ramp(5, 3), ramp(5, 2), mean_loss)
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert duplicate.balance == model.balance and duplicate.checkpoint == mode
            duplicate.zero_grad()
            plain.zero_grad()
            for module in (plain, duplicate):
                module(ramp(5, 3)).square().sum().backward()
            assert_same_gradients(duplicate, plain)
        assert copy.copy(model).partitions is model.partitions
    kept.sum().backward()


def test_state_dict_has_the_wrapped_names_and_loads_both_forms() -> None:
    layers = OrderedDict(stem=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 1))
    plain = nn.Sequential(layers)
    expected = copy.deepcopy(plain.state_dict())
    model = on_cpu(copy.deepcopy(plain), [2, 1])
    assert list(model.state_dict()) == list(expected)
    peer = {
        f"partitions.{int(key.startswith('head'))}.{key}": value for key, value in expected.items()
    }
    for state in (expected, peer, OrderedDict(peer)):
        fresh = on_cpu(nn.Sequential(OrderedDict(
            stem=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 1)
        )), [1, 2] if state is expected else [2, 1])  # fmt: skip
        keys = list(state)
        assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"
        assert list(state) == keys
        for name, value in fresh.state_dict().items():
            assert torch.equal(value, expected[name]), name
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain.load_state_dict(torch.load(buffer))


def test_state_dict_keeps_both_forms_inside_of_another_module() -> None:
    plain = nn.ModuleDict({"pipe": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))})
    outer = nn.ModuleDict({"pipe": on_cpu(copy.deepcopy(plain["pipe"]), [1, 1])})  # type: ignore
    assert list(outer.state_dict()) == list(plain.state_dict())
    peer = {key.replace("pipe.", f"pipe.partitions.{key[5]}."): value + 1
            for key, value in plain.state_dict().items()}  # fmt: skip
    outer.load_state_dict(peer)
    plain.load_state_dict(outer.state_dict())
    for key, value in peer.items():
        assert torch.equal(plain.state_dict()[key.replace(f"partitions.{key[16]}.", "")], value)
    with pytest.raises(RuntimeError, match='Missing key.*"pipe.partitions.1.1.weight"'):
        outer.load_state_dict({key: value for key, value in peer.items() if "1.weight" not in key})
    with pytest.raises(RuntimeError, match="Unexpected key.*extra"):
        outer.load_state_dict({**peer, "pipe.extra": torch.ones(1)})


@every_mode
@pytest.mark.parametrize("use_step", [False, True])
def test_autocast_reaches_the_partitions(mode: str, use_step: bool) -> None:
    seen: list[torch.dtype] = []
    plain = nn.Sequential(
        nn.Linear(16, 16),
        nn.Tanh(),
        Call(lambda x: (seen.append(x.dtype), x)[1]),
        nn.Linear(16, 4),
    )
    model = on_cpu(copy.deepcopy(plain), [1, 3], chunks=2, checkpoint=mode)
    input, target = ramp(8, 16).float(), ramp(8, 4).float()
    outputs = []
    for module in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if use_step and isinstance(module, GPipe):
                module.step(
                    input, target, lambda output, target: F.mse_loss(output.float(), target)
                )
                continue
            outputs.append(module(input))
        assert outputs[-1].dtype == torch.bfloat16
        F.mse_loss(outputs[-1].float(), target).backward()
    assert set(seen) == {torch.bfloat16}
    if not use_step:
        assert torch.equal(*outputs)
    # bfloat16 has 8 bits, and the sums over two micro-batches are rounded apart from each other.
    assert_same_gradients(model, plain, rtol=3e-2, atol=1e-3)


@every_mode
def test_a_dropped_output_frees_every_activation_without_the_collector(mode: str) -> None:
    class Token:
        pass

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor) -> Tensor:
            ctx.token = Token()
            tokens.append(weakref.ref(ctx.token))
            return input.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    tokens: list[weakref.ref[Any]] = []
    model = on_cpu(
        nn.Sequential(
            nn.Linear(3, 3), Call(Keep.apply), nn.Linear(3, 3), Call(Keep.apply)
        ).double(),
        [2, 2],
        chunks=3,
        checkpoint=mode,
    )
    uses: list[Callable[[], Any]] = [
        lambda: model(ramp(6, 3)),
        lambda: model(ramp(6, 3)).sum().backward(),
        lambda: model(ramp(6, 3)).sum().backward(retain_graph=True),
        lambda: model.step(ramp(6, 3), ramp(6, 3), mean_loss),
    ]
    gc.collect()
    gc.disable()
    try:
        for use in uses:
            use()
            assert tokens and not any(token() for token in tokens)
            tokens.clear()
    finally:
        gc.enable()


def test_no_thread_outlives_a_forward_a_backward_or_a_step() -> None:
    before = set(threading.enumerate())
    model = wrapped()[1]
    model(ramp(6, 3)).sum().backward()
    model.step(ramp(6, 3), ramp(6, 2), mean_loss)
    assert set(threading.enumerate()) == before
