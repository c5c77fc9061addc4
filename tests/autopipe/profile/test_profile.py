"""Prove what is measured, with a clock that only the measured work moves."""

from __future__ import annotations

import gc
import json
import math
import random
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopipe.profile import chain as chain_module
from autopipe.profile.chain import (
    ProfiledSublayer,
    chain_bytes,
    profile_sublayers,
    quartiles,
    uncertainty,
)
from autopipe.profile.network import AllReduceCost, LinkCost, Ring, RingCost
from autopipe.profile.profile import Profile, SublayerCost, fitted, merge
from tests.helpers.clocks import Clock
from tests.helpers.live_bytes import LiveBytes

LINK = LinkCost(1e-3, 1e6)


def cost(name: str = "block", *seconds: float, **changes: Any) -> SublayerCost:
    times = seconds or (1.0, 2.0)
    values = SublayerCost(
        name,
        0,
        times,
        times,
        times,
        times,
        parameter_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=8,
        buffer_bytes=0,
        saved_bytes=8.0,
        output_bytes=2.0,
    )
    return replace(values, **changes)


def profile(*costs: SublayerCost, batch_sizes: tuple[int, ...] = (2, 4)) -> Profile:
    return Profile(
        batch_sizes,
        costs,
        read_s=1e-6,
        optimizer_s_per_byte=1e-9,
        step_overhead_s=0.1,
        link=LINK,
        node_link=LINK,
        all_reduce=(AllReduceCost(2, (1, 9), (0.5, 1.5)),),
    )


class Timed(nn.Module):
    """Take a set time a sample: forward in train mode, backward, forward in eval mode."""

    def __init__(self, clock: Clock, forward_s: float, backward_s: float, frozen_s: float) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s
        self.frozen_s = frozen_s
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden * self.scale
        if output.requires_grad:
            output.register_hook(lambda gradient: self.spend(self.backward_s, len(gradient)))
        self.spend(self.forward_s if self.training else self.frozen_s, len(hidden))
        return output

    def spend(self, seconds: float, num_samples: int) -> None:
        self.clock.now_s += seconds * num_samples


def call(module: nn.Module, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
    output: Tensor = module(batch["x"] if hidden is None else hidden)
    return output


def chain(*modules: nn.Module) -> list[ProfiledSublayer]:
    return [
        ProfiledSublayer(f"sublayer{index}", index, module, partial(call, module))
        for index, module in enumerate(modules)
    ]


def batches(*sizes: int, width: int = 8) -> list[dict[str, Tensor]]:
    return [{"x": torch.linspace(-1, 1, size * width).reshape(size, width)} for size in sizes]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chain_module.time, "perf_counter", clock)
    return clock


def test_each_sublayer_gets_its_own_times_at_each_size(clock: Clock) -> None:
    sublayers = chain(Timed(clock, 1, 2, 0.5), Timed(clock, 3, 5, 2))
    costs = profile_sublayers(sublayers, batches(2, 4)).costs
    assert [c.forward_s for c in costs] == [(2.0, 4.0), (6.0, 12.0)]
    assert [c.backward_s for c in costs] == [(4.0, 8.0), (10.0, 20.0)]
    assert [c.frozen_s for c in costs] == [(1.0, 2.0), (4.0, 8.0)]
    assert [(c.name, c.layer) for c in costs] == [("sublayer0", 0), ("sublayer1", 1)]


def test_a_backward_is_split_into_the_input_s_part_and_the_weights_part(clock: Clock) -> None:
    class Split(Timed):
        """Take half a second more a sample where the weight's gradient is asked for."""

        def forward(self, hidden: Tensor) -> Tensor:
            output = super().forward(hidden)
            if output.requires_grad and self.scale.requires_grad:
                output.register_hook(lambda gradient: self.spend(self.weight_s, len(gradient)))
            return output

    first, second = Split(clock, 1, 2, 0.5), Split(clock, 3, 5, 2)
    first.weight_s, second.weight_s = 6.0, 1.0
    costs = profile_sublayers(chain(Timed(clock, 1, 1, 1), first, second), batches(2, 4)).costs
    assert [c.backward_s for c in costs[1:]] == [(16.0, 32.0), (12.0, 24.0)]
    assert [c.input_backward_s for c in costs[1:]] == [(4.0, 8.0), (10.0, 20.0)]
    assert [c.weight_backward_s for c in costs[1:]] == [(12.0, 24.0), (2.0, 4.0)]


def test_one_disturbed_moment_changes_no_time(clock: Clock) -> None:
    class Disturbed(Timed):
        calls = 0

        def spend(self, seconds: float, num_samples: int) -> None:
            super().spend(seconds, num_samples)
            self.calls += 1
            # The first measured forward; counting bytes and warming up come before it.
            self.clock.now_s += 100.0 if self.calls == 5 else 0.0

    costs = profile_sublayers(chain(Disturbed(clock, 1, 2, 0.5)), batches(2)).costs
    assert (costs[0].forward_s, costs[0].backward_s, costs[0].frozen_s) == ((2.0,), (4.0,), (1.0,))


def test_sublayer_without_parameters_or_input_gradient_has_no_backward_time(clock: Clock) -> None:
    costs = profile_sublayers(chain(nn.Flatten(), Timed(clock, 1, 2, 0.5)), batches(2)).costs
    assert costs[0].backward_s == (0.0,)


def test_saved_bytes_count_each_activation_once_and_no_parameter() -> None:
    costs = profile_sublayers(
        chain(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))), batches(1, 4)
    ).costs
    # The first Linear saves its 8 inputs; ReLU and the second Linear the same 16 values.
    assert costs[0].saved_bytes == 4 * (8 + 16)
    assert costs[0].output_bytes == 4 * 8
    assert costs[0].parameter_bytes == 4 * (8 * 16 + 16 + 16 * 8 + 8)


def test_activations_are_freed_behind_a_measurement() -> None:
    class Watched(nn.Tanh):  # It keeps its output.
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            outputs.append(weakref.ref(output))
            return output

    outputs: list[weakref.ref[Tensor]] = []
    profile_sublayers(chain(nn.Sequential(nn.Linear(8, 8), Watched())), batches(2))
    gc.collect()
    assert outputs and not [one for one in outputs if one() is not None]


def test_weights_that_an_autocast_casts_are_counted_by_themselves_at_any_size() -> None:
    class Low(nn.Sequential):
        def forward(self, hidden: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                return super().forward(hidden)

    # A weight that is not trained is cast, too, as its input needs a gradient.
    module = Low(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8).requires_grad_(False))
    for size in (1, 4):
        cost = profile_sublayers(chain(nn.Linear(8, 8), module), batches(size)).costs[1]
        assert cost.copy_bytes == 2 * (8 * 16 + 16 * 8)
        # 8 inputs, cast, and 16 values behind the ReLU.
        assert cost.saved_bytes == 2 * (8 + 16)
    assert profile_sublayers(chain(nn.Linear(8, 8)), batches(4)).costs[0].copy_bytes == 0


class Repeating(nn.Sequential):
    """Recompute, as a block of transformers does."""

    gradient_checkpointing = False

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.gradient_checkpointing:
            return super().forward(hidden)
        output: Tensor = checkpoint(super().forward, hidden, use_reentrant=False)
        return output


def test_a_sublayer_that_recomputes_is_counted_as_it_runs_backward() -> None:
    counted = []
    for asks in (False, True):
        block = Repeating(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        block.gradient_checkpointing = asks
        counted.append(profile_sublayers(chain(block), batches(1, 4)).costs[0])
        assert block.gradient_checkpointing is asks
    assert [cost.recomputes for cost in counted] == [False, True]
    assert counted[1].saved_bytes == counted[0].saved_bytes == 4 * (8 + 16)


def test_dropout_masks_count_although_the_model_came_in_eval_mode() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    plain = profile_sublayers(chain(nn.Linear(8, 8)), batches(4)).costs
    assert profile_sublayers(chain(module), batches(4)).costs[0].saved_bytes > plain[0].saved_bytes


def test_shared_parameter_counts_in_the_first_sublayer_only() -> None:
    shared = nn.Linear(8, 8, bias=False)
    sublayers = chain(shared, nn.Sequential(shared, nn.BatchNorm1d(8)))
    costs = profile_sublayers(sublayers, batches(4)).costs
    assert [c.parameter_bytes for c in costs] == [4 * 64, 4 * 16]
    assert [c.buffer_bytes for c in costs] == [0, 4 * 16 + 8]


def test_layer_in_place_on_its_input_can_be_profiled() -> None:
    costs = profile_sublayers(chain(nn.Linear(8, 8), nn.ReLU(inplace=True)), batches(2)).costs
    assert costs[1].backward_s[0] > 0


def test_modules_and_random_state_are_left_as_found() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    module[1].eval()
    module[0].weight.grad = torch.full((8, 8), 3.0)
    flags = [part.training for part in module.modules()]
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random_state = torch.get_rng_state()
    profile_sublayers(chain(module), batches(2, 4), repeats=1)
    assert [part.training for part in module.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    for name, parameter in module.named_parameters():
        if name == "0.weight":
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.full((8, 8), 3.0))
        else:
            assert parameter.grad is None, name


def test_modules_are_left_as_found_where_a_sublayer_fails() -> None:
    class Failing(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, hidden

    failing = Failing().eval()
    with pytest.raises(TypeError, match="'sublayer0' returned a tuple; it must return one tensor"):
        profile_sublayers(chain(failing), batches(2))
    assert not failing.training


def test_times_are_linear_between_and_beyond_the_measured_sizes() -> None:
    measured = profile(cost("block", 3.0, 5.0))
    assert [measured.forward_s(0, batch) for batch in (1, 2, 3, 4, 8)] == [2.0, 3.0, 4.0, 5.0, 9.0]


def test_one_measured_size_is_scaled_in_proportion() -> None:
    assert profile(cost("block", 3.0), batch_sizes=(2,)).backward_s(0, 8) == 24.0


def test_noise_never_makes_more_samples_cheaper_or_fewer_free() -> None:
    shrinking = profile(cost("block", 3.0, 2.0))
    assert shrinking.frozen_s(0, 100) == 2.0
    assert shrinking.frozen_s(0, 1) == 3.0
    steep = profile(cost("block", 1.0, 9.0))
    assert steep.frozen_s(0, 1) == 0.5


def test_profile_survives_json() -> None:
    measured = profile(cost("a"), cost("b", buffer_bytes=7))
    assert Profile.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    described = replace(measured, all_reduce=RingCost(LINK, LinkCost(0.5, math.inf)))
    assert Profile.from_json(json.loads(json.dumps(described.to_json()))) == described


def test_measured_sums_are_read_as_checkpoints_have_them() -> None:
    written = profile(cost("block")).to_json()
    written["all_reduce"] = [{"num_replicas": 2, "num_bytes": [1, 9], "seconds": [0.5, 1.5]}]
    assert Profile.from_json(written) == profile(cost("block"))


def test_measured_sums_are_told_by_their_ranks_whatever_their_links() -> None:
    measured = profile(cost("block"))
    assert measured.all_reduce_s(Ring(2), 5) == measured.all_reduce_s(Ring(2, 8), 5) == 1.0


def test_merge_takes_the_median_of_every_measurement() -> None:
    ranks = [profile(cost("a", forward, 9.0, saved_bytes=8.0)) for forward in (1.0, 7.0, 2.0)]
    merged = merge(ranks)
    assert merged.sublayers[0].forward_s == (2.0, 9.0)
    assert merged == ranks[2]


def test_merge_refuses_profiles_of_different_models() -> None:
    with pytest.raises(ValueError, match=r"differ in more than measurements.*\['a', 'b'\]"):
        merge([profile(cost("a")), profile(cost("b"))])
    with pytest.raises(ValueError, match="differ in more than measurements"):
        merge([profile(cost("a")), profile(cost("a"), cost("b"))])


def test_profile_with_missing_times_or_unordered_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sublayer 'block' lacks times.*\(2, 4, 8\)"):
        profile(cost(), batch_sizes=(2, 4, 8))
    with pytest.raises(ValueError, match=r"ascending micro-batch sizes from 1 on, got \(4, 2\)"):
        profile(cost(), batch_sizes=(4, 2))


def test_sum_over_replicas_is_linear_between_sizes_and_in_proportion_beyond() -> None:
    measured = profile(cost("block"))
    assert [measured.all_reduce_s(Ring(2), size) for size in (0, 1, 5, 9, 18)] == [
        0.5,
        0.5,
        1.0,
        1.5,
        3.0,
    ]
    assert measured.all_reduce_s(Ring(1), 100) == 0.0
    with pytest.raises(ValueError, match=r"sums over \[2\] replicas, none over 4"):
        measured.all_reduce_s(Ring(4), 100)
    with pytest.raises(ValueError, match="2 or more replicas and ascending sizes, got 1 replicas"):
        AllReduceCost(1, (1,), (0.1,))
    with pytest.raises(ValueError, match="2 sizes have 1 times"):
        AllReduceCost(2, (1, 2), (0.1,))


def test_link_with_negative_latency_or_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="positive rate, got 0.0 s and 0.0 bytes/s"):
        LinkCost(0.0, 0.0)


def test_each_sublayer_keeps_the_quartiles_of_its_rounds_over_the_median(clock: Clock) -> None:
    class Unsteady(Timed):
        """Take what the rounds say: those that count bytes and warm up, and then the measured."""

        def __init__(self, clock: Clock, *seconds: float) -> None:
            super().__init__(clock, 1, 2, 1)
            self.rounds = iter(seconds)

        def forward(self, hidden: Tensor) -> Tensor:
            if self.training:
                self.factor = next(self.rounds, 1.0)
            return super().forward(hidden)

        def spend(self, seconds: float, num_samples: int) -> None:
            super().spend(self.factor * seconds, num_samples)

    rounds = (1.0, 1.0, 4.0, 2.0, 3.0, 5.0, 8.0)
    sublayers = chain(Timed(clock, 1, 2, 1), Unsteady(clock, *rounds))
    steady, unsteady = profile_sublayers(sublayers, batches(2), repeats=5).costs
    assert steady.spread == (1.0, 1.0)
    assert unsteady.spread == (0.75, 1.25)


def test_quartiles_price_computing_messages_and_sums_each_by_its_own_spread() -> None:
    link = LinkCost(2.0, 8.0, 4.0, spread=(0.5, 2.0))
    sums = (AllReduceCost(2, (1, 9), (0.5, 1.5), spread=(1.0, 3.0)),)
    measured = replace(
        profile(cost("a", 4.0, 8.0, spread=(0.75, 1.25)), cost("b", 4.0, 8.0)),
        link=link,
        all_reduce=sums,
    )
    low, high = measured.quartiles()
    assert [one.sublayers[0].forward_s for one in (low, high)] == [
        tuple(share * seconds for seconds in measured.sublayers[0].forward_s)
        for share in (0.75, 1.25)
    ]
    assert low.sublayers[1] == high.sublayers[1] == measured.sublayers[1]
    assert (low.link, high.link) == (LinkCost(1.0, 16.0, 2.0), LinkCost(4.0, 4.0, 8.0))
    assert low.node_link == high.node_link == measured.node_link
    assert high.all_reduce == (AllReduceCost(2, (1, 9), (1.5, 4.5)),)
    assert Profile.from_json(json.loads(json.dumps(measured.to_json()))) == measured


SIZES = (1, 4, 16, 32)


def test_times_on_a_line_stay_as_they_are() -> None:
    times = [3.0 + 2.0 * size for size in SIZES]
    assert fitted(SIZES, times) == pytest.approx(times, rel=1e-12)


def test_one_size_stays_as_it_is() -> None:
    assert fitted((8,), (5.0,)) == (5.0,)


@given(st.lists(st.floats(1e-6, 1e3), min_size=len(SIZES), max_size=len(SIZES)))
def test_more_samples_never_take_less_and_fewer_never_less_than_their_share(
    seconds: list[float],
) -> None:
    found = fitted(SIZES, seconds)
    for (n, less), (m, more) in zip(
        zip(SIZES, found, strict=True), zip(SIZES[1:], found[1:], strict=False), strict=False
    ):
        assert less <= more * (1 + 1e-9)
        assert less / n >= more / m * (1 - 1e-9)


def test_a_fit_is_nearer_to_the_truth_than_noisy_times_are() -> None:
    generator = random.Random(0)
    truth = [0.5 + 1.0 * size for size in SIZES]

    def worst(times: tuple[float, ...]) -> float:
        return max(abs(a / b - 1) for a, b in zip(times, truth, strict=True))

    nearer = 0
    for _ in range(200):
        noisy = tuple(one * generator.uniform(0.8, 1.2) for one in truth)
        nearer += worst(fitted(SIZES, noisy)) < worst(noisy)
    assert nearer > 150


def test_the_median_of_equal_repeats_is_certain_and_of_one_unknown() -> None:
    assert uncertainty([2.0, 2.0, 2.0]) == uncertainty([2.0]) == 0.0
    assert uncertainty([1.0, 2.0, 3.0]) == pytest.approx(1.25 / 3**0.5 / 2)


def test_quartiles_are_shares_of_the_median_and_one_repeat_has_none() -> None:
    assert quartiles([8.0, 2.0, 4.0, 5.0, 3.0]) == (0.75, 1.25)
    assert quartiles([3.0]) == quartiles([0.0, 0.0]) == (1.0, 1.0)


def test_one_sublayers_activations_live_while_bytes_are_counted() -> None:
    def call(module: nn.Module, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = module(batch["x"] if hidden is None else hidden)
        return output

    blocks = [nn.Sequential(nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 4)) for _ in range(8)]
    chain = [ProfiledSublayer(str(i), i, one, partial(call, one)) for i, one in enumerate(blocks)]
    batch = {"x": torch.randn(1000, 4)}
    weights = [tensor for one in blocks for tensor in one.parameters()]
    with LiveBytes([*weights, batch["x"]]) as live:
        before = live.now()
        counted = chain_bytes(chain, batch)
    saved = 1000 * counted[0]["saved_bytes"]
    assert saved >= 1000 * 400 * 4
    # Beside what one keeps: what Tanh is given, and all sublayers' outputs.
    assert live.peak - before <= 2.5 * saved
