"""Prove the gradient signals against plain norms, computed one tensor at a time."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from freeze.signals import GradientSignals, IntervalSignals, layer_values

NAMES = ("embed", "attention", "mlp")
Parameters = dict[str, list[nn.Parameter]]


def make_parameters(dtype: torch.dtype = torch.float64, device: str = "cpu") -> Parameters:
    """Build three sublayers of two parameters each, without gradients."""
    torch.manual_seed(0)
    shapes = [(4, 3), (3,)]
    return {
        name: [nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in shapes]
        for name in NAMES
    }


def means(signals: GradientSignals) -> dict[str, float]:
    """Return each sublayer's mean square over the interval's steps."""
    state = signals.state()
    steps = state["num_steps"]
    return {name: one / steps for name, one in state["squared_sums"].items()} if steps else {}


def set_gradients(parameters: Parameters, seed: int) -> dict[str, float]:
    """Give every parameter a seeded gradient; return each sublayer's squared norm."""
    generator = torch.Generator().manual_seed(seed)
    squares = dict.fromkeys(parameters, 0.0)
    for name, own in parameters.items():
        for parameter in own:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = values.to(parameter)
            squares[name] += parameter.grad.double().square().sum().item()
    return squares


def test_mean_squares_and_total_equal_norms_of_each_step() -> None:
    parameters = make_parameters()
    signals = GradientSignals(parameters)
    steps = []
    for seed in range(3):
        steps.append(set_gradients(parameters, seed))
        total = signals.squared_norm()
        assert total.shape == () and total.dtype == torch.float64
        assert total.item() == pytest.approx(sum(steps[-1].values()), rel=1e-12)
    for name, mean in means(signals).items():
        assert mean == pytest.approx(sum(step[name] for step in steps) / 3, rel=1e-12)


def test_total_equals_the_norm_that_clipping_uses() -> None:
    parameters = make_parameters()
    set_gradients(parameters, 0)
    flat = [parameter for own in parameters.values() for parameter in own]
    clipped = nn.utils.clip_grad_norm_(flat, float("inf"))
    assert GradientSignals(parameters).squared_norm().sqrt().item() == pytest.approx(
        clipped.item()
    )


def test_missing_gradients_count_zero() -> None:
    parameters = make_parameters()
    signals = GradientSignals(parameters)
    assert signals.squared_norm().item() == 0.0
    expected = set_gradients(parameters, 0)
    for parameter in parameters["attention"]:
        parameter.grad = None
    total = signals.squared_norm().item()
    assert total == pytest.approx(expected["embed"] + expected["mlp"])
    assert means(signals)["attention"] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_that_is_not_finite_shows_in_the_total_and_leaves_the_mean_alone(bad: float) -> None:
    parameters = make_parameters()
    signals = GradientSignals(parameters)
    expected = set_gradients(parameters, 0)
    signals.squared_norm()
    parameters["mlp"][1].grad = torch.tensor([1.0, bad, 1.0], dtype=torch.float64)
    assert not math.isfinite(signals.squared_norm().item())
    assert means(signals) == pytest.approx(expected)


def test_step_that_is_not_finite_on_another_stage_is_left_out_here() -> None:
    parameters = make_parameters()
    signals = GradientSignals(parameters)
    expected = set_gradients(parameters, 0)
    measured = signals.measure()
    assert measured.sums[-1].item() == pytest.approx(sum(expected.values()))
    signals.add(measured)
    signals.measure()  # Of a step that is not finite there, and is not added.
    assert means(signals) == pytest.approx(expected)
    signals.reset()
    signals.add(measured, scale=torch.tensor(0.5, dtype=torch.float64))
    assert means(signals) == pytest.approx({name: one / 4 for name, one in expected.items()})


def test_interval_without_finite_steps_has_no_means() -> None:
    parameters = make_parameters()
    signals = GradientSignals(parameters)
    assert means(signals) == {}
    set_gradients(parameters, 0)
    next(iter(parameters.values()))[0].grad.fill_(math.nan)
    signals.squared_norm()
    assert means(signals) == {}


def test_reset_starts_a_new_interval() -> None:
    parameters = make_parameters()
    signals = GradientSignals(parameters)
    set_gradients(parameters, 0)
    signals.squared_norm()
    signals.reset()
    assert means(signals) == {}
    expected = set_gradients(parameters, 1)
    signals.squared_norm()
    assert means(signals) == pytest.approx(expected)


def test_resumed_interval_equals_uninterrupted_bitwise() -> None:
    parameters = make_parameters()
    whole, first, second = (GradientSignals(parameters) for _ in range(3))
    for seed in range(5):
        set_gradients(parameters, seed)
        whole.squared_norm()
        (first if seed < 3 else second).squared_norm()
        if seed == 2:
            second.load(json.loads(json.dumps(first.state())))
    assert means(second) == means(whole)


def test_interval_moves_to_stages_cut_elsewhere() -> None:
    parameters = make_parameters()
    set_gradients(parameters, 0)
    low = GradientSignals({"embed": parameters["embed"]})
    high = GradientSignals({name: parameters[name] for name in ("attention", "mlp")})
    low.squared_norm()
    high.squared_norm()
    merged = low.state()
    merged["squared_sums"] |= high.state()["squared_sums"]
    whole = GradientSignals(parameters)
    whole.load(merged)
    assert means(whole) == means(low) | means(high)


def test_tied_parameter_counts_once_in_its_first_sublayer() -> None:
    tied = nn.Parameter(torch.zeros(2))
    tied.grad = torch.tensor([3.0, 4.0])
    signals = GradientSignals({"embed": [tied], "head": [tied]})
    assert signals.squared_norm().item() == 25.0
    assert means(signals) == {"embed": 25.0, "head": 0.0}


def test_large_float32_gradients_are_summed_accurately() -> None:
    # One float32 sum over this many squares is off by 1e-3; BLAS keeps several, and how many
    # depends on the CPU: seen were 1e-7 and 1e-5.
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(1024, 1024))
    parameter.grad = torch.randn(1024, 1024)
    expected = parameter.grad.double().square().sum().item()
    assert GradientSignals({"embed": [parameter]}).squared_norm().item() == pytest.approx(
        expected, rel=5e-5
    )


def test_16_bit_gradients_do_not_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 6e4)
    half = parameter.grad[0].item()
    assert GradientSignals({"mlp": [parameter]}).squared_norm().item() == 4 * half**2


def test_stage_without_parameters_has_a_zero_total() -> None:
    signals = GradientSignals({"activation": []})
    assert signals.squared_norm().item() == 0.0
    assert means(signals) == {"activation": 0.0}
    assert GradientSignals({}).squared_norm().item() == 0.0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_does_not_wait_for_the_gpu(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype, "cuda")
    signals = GradientSignals(parameters)
    expected = set_gradients(parameters, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = signals.squared_norm()
        signals.measure()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The norms are float32 on a GPU.
    assert total.item() == pytest.approx(sum(expected.values()), rel=1e-5)
    assert means(signals) == pytest.approx(expected, rel=1e-5)


def test_layers_combine_sublayers_and_ignore_the_head() -> None:
    layer_of = {"embed": 0, "attention": 0, "mlp": 1, "last": 2, "head": 3}
    squares = {"head": 100.0, "mlp": 4.0, "attention": 16.0, "embed": 9.0}
    sums = {
        "num_steps": 2,
        "squared_sums": {name: 2 * value for name, value in squares.items()},
        "sum": squares,
        "moved": {"embed": 0.0, "attention": 4.0, "mlp": math.nan},
        "size": {"embed": 9.0, "attention": 16.0, "mlp": 1.0},
    }
    values = layer_values(sums, layer_of, 3)
    assert values["gradient_norm"] == (5.0, 2.0, None)
    assert values["accumulated_gradient"] == (25.0, 4.0, None)
    assert values["relative_update"] == (math.sqrt(4 / 25) / 2, None, None)
    assert set(layer_values({"num_steps": 0}, layer_of, 3).values()) == {(None, None, None)}


def test_a_layer_that_moves_without_a_gradient_has_no_update() -> None:
    sums = {
        "num_steps": 1,
        "squared_sums": {"a": 0.0, "b": 4.0},
        "moved": {"a": 1.0, "b": 1.0},
        "size": {"a": 4.0, "b": 4.0},
    }
    values = layer_values(sums, {"a": 0, "b": 1}, 2)
    assert values["relative_update"] == (None, 0.5)


def test_gradients_of_16_bits_add_up_in_32() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    signals = IntervalSignals({"one": {"w": weight}}, frozenset({"accumulated_gradient"}))
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        signals.squared_norm()
        signals.add_gradients()
    assert signals.measured()["sum"]["one"] == 4000


def test_layers_do_not_depend_on_the_order_of_the_stages() -> None:
    squares = {f"s{i}": 10.0 ** (i - 8) / 3 for i in range(16)}
    layer_of = dict.fromkeys(squares, 0)
    turned = dict(reversed(squares.items()))
    one, other = (
        layer_values({"num_steps": 1, "squared_sums": sums}, layer_of, 1)
        for sums in (squares, turned)
    )
    assert one == other
