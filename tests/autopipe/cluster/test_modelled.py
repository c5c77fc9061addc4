"""Prove that counted FLOPs and bytes are those of real runs, and that plans obey closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from autopipe.cluster.description import BATCH_SIZES, Cluster, modelled_profile
from autopipe.cluster.kernel_counts import Kernel, count_bytes, count_kernels
from autopipe.plan.explanation import explain
from autopipe.plan.request import PlanRequest
from autopipe.plan.search import least_memory_plan, plan_pipeline, predict
from autopipe.profile.chain import ProfiledSublayer, chain_bytes
from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile
from pipetransformer.cli.named_model import ModelChoice, build_named
from pipetransformer.cli.places import profiled

FREE = LinkCost(0.0, math.inf)
FLASH = "_scaled_dot_product_flash_attention"
Builder = Callable[[], nn.Module]


def call(module: nn.Module, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
    output = module(batch["x"] if hidden is None else hidden)
    assert isinstance(output, Tensor)
    return output


def chain(*builders: Builder, device: str = "meta") -> list[ProfiledSublayer]:
    with torch.device(device):
        modules = [build() for build in builders]
    return [
        ProfiledSublayer(f"layer{n}", n, module, partial(call, module))
        for n, module in enumerate(modules)
    ]


def linear() -> nn.Module:
    return nn.Linear(16, 16, bias=False)


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def patches() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), nn.GELU(), nn.Linear(4, 16))


def meta(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.empty(shape, device="meta")}


def make_cluster(**changes: Any) -> Cluster:
    values: dict[str, Any] = {
        "name": "test", "nodes": 1, "slots_per_node": 1, "memory_bytes": 1 << 40, "link": FREE,
        "memory_bytes_per_s": math.inf, "flops_per_s": {"float32": 1e6}, "node_link": FREE,
    }  # fmt: skip
    return Cluster(**{**values, **changes})


def flops(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.flops for kernel in kernels)


def test_vit_base_counts_the_published_parameters_and_flops() -> None:
    named = build_named(ModelChoice("vit_base_patch16_224"), device="meta")
    sublayers = profiled(named)
    counts, sizes = (
        count_kernels(sublayers, named.batch(2)),
        count_bytes(sublayers, named.batch(2)),
    )
    assert sum(own["parameter_bytes"] for own in sizes) == 4 * 86_567_656
    forward = sum(flops(count.forward) for count in counts) / 2
    # 17.56 billion multiply-adds, two FLOPs each.
    assert forward == pytest.approx(35.1e9, rel=0.01)
    # Each matrix product has two in the backward, but no pixel gets a gradient; fused attention
    # computes its scores once more, which is half of its forward again.
    embedding = flops(counts[0].forward) / 2
    scores = 12 * 2 * 197 * 197 * 768
    backward = sum(flops(count.backward) for count in counts) / 2
    assert backward == pytest.approx(2 * forward - embedding + scores, rel=1e-9)


@pytest.mark.parametrize(
    ("builders", "shape"),
    [
        ((linear, linear), (2, 16)),
        ((attention, attention), (2, 5, 16)),
        ((patches,), (2, 3, 8, 8)),
    ],
)
def test_flops_are_those_that_torch_counts_on_a_real_run(
    builders: tuple[Builder, ...], shape: tuple[int, ...]
) -> None:
    counts = count_kernels(chain(*builders), meta(*shape))
    model = nn.Sequential(*(build() for build in builders))
    # torch before 2.15 does not count attention on a CPU.
    attention = {
        getattr(torch.ops.aten, f"{FLASH}_for_cpu{way}"): flop_registry[
            getattr(torch.ops.aten, f"{FLASH}{way}")
        ].__wrapped__
        for way in ("", "_backward")
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        output = model(torch.randn(shape))
        assert sum(flops(count.forward) for count in counts) == counter.get_total_flops()
        output.sum().backward()
    total = sum(flops(count.forward) + flops(count.backward) for count in counts)
    assert total == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("builders", "shape"), [((linear, linear), (4, 16)), ((patches, attention), (4, 3, 8, 8))]
)
def test_bytes_are_those_that_a_real_run_keeps(
    builders: tuple[Builder, ...], shape: tuple[int, ...]
) -> None:
    profile = modelled_profile(chain(*builders), meta(*shape), make_cluster())
    real = chain(*builders, device="cpu")
    measured = chain_bytes(real, {"x": torch.randn(shape)})
    for cost, sizes in zip(profile.sublayers, measured, strict=True):
        assert {name: getattr(cost, name) for name in sizes} == sizes


def test_optimizer_state_is_adamw_s() -> None:
    cost = modelled_profile(chain(attention), meta(2, 5, 16), make_cluster()).sublayers[0]
    model = attention()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5, 16)).sum().backward()
    optimizer.step()
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    assert cost.optimizer_bytes == sum(tensor.nbytes for tensor in state)


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    sublayers = chain(linear, linear)
    sublayers[1].module.requires_grad_(False)
    first, second = modelled_profile(sublayers, meta(2, 16), make_cluster()).sublayers
    assert first.gradient_bytes == first.parameter_bytes == second.parameter_bytes == 4 * 16 * 16
    assert second.gradient_bytes == second.optimizer_bytes == 0
    assert second.weight_backward_s == (0.0,) * len(BATCH_SIZES)


def test_arithmetic_takes_its_flops_and_memory_its_bytes_and_both_the_longer() -> None:
    sublayers, sample = chain(linear, linear), meta(2, 16)
    # A product of B rows has 2 x 16 x 16 B FLOPs, and touches twice B rows of 16 and 16 more.
    for index, batch in enumerate(BATCH_SIZES):
        arithmetic_s, memory_s = 512 * batch / 1e6, 4 * (2 * 16 * batch + 256) / 4e5
        for rate, forward_s in ((math.inf, arithmetic_s), (4e5, max(arithmetic_s, memory_s))):
            cluster = make_cluster(memory_bytes_per_s=rate, kernel_overhead_s=1.0)
            cost = modelled_profile(sublayers, sample, cluster).sublayers[1]
            assert cost.forward_s[index] == pytest.approx(1.0 + forward_s, rel=1e-12)
            assert cost.frozen_s[index] == cost.forward_s[index]


def test_backward_is_divided_between_input_and_weights() -> None:
    first, second = modelled_profile(chain(linear, linear), meta(2, 16), make_cluster()).sublayers
    assert first.input_backward_s == (0.0,) * len(BATCH_SIZES)
    assert first.weight_backward_s == second.weight_backward_s == second.input_backward_s
    assert second.input_backward_s == second.forward_s


def test_any_number_of_samples_costs_what_counting_it_gives() -> None:
    cluster = make_cluster(memory_bytes_per_s=1e6)
    sublayers = chain(patches, attention)
    profile = modelled_profile(sublayers, meta(1, 3, 8, 8), cluster)
    for index, batch in enumerate(BATCH_SIZES[1:6], start=1):
        counts = count_kernels(sublayers, meta(batch, 3, 8, 8))
        for cost, count in zip(profile.sublayers, counts, strict=True):
            for seconds, kernels in (
                (cost.forward_s, count.forward),
                (cost.frozen_s, count.frozen),
                (cost.input_backward_s, count.input_backward),
                (cost.backward_s, count.backward),
            ):
                expected = sum(max(k.flops, k.num_bytes) / 1e6 for k in kernels)
                assert seconds[index] == pytest.approx(expected, rel=1e-9)


def test_an_embedding_reads_only_the_rows_it_returns() -> None:
    with torch.device("meta"):
        table = nn.Embedding(1_000_000, 4)
        batch = {"x": torch.zeros(3, dtype=torch.int64)}
    (count,) = count_kernels([ProfiledSublayer("table", 0, table, partial(call, table))], batch)
    assert [k.num_bytes for k in count.forward] == [3 * 8 + 2 * 3 * 4 * 4]


class Attending(nn.Module):
    """Attend with dropout, and drop out of what comes out."""

    def forward(self, hidden: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(
            hidden, hidden, hidden, dropout_p=0.5 if self.training else 0.0
        )
        return F.dropout(attended, 0.5, self.training)


def test_attention_and_dropout_keep_what_they_keep_on_a_gpu() -> None:
    tokens, width = 64, 4
    cost = modelled_profile(
        chain(lambda: nn.Linear(width, width), Attending),
        meta(1, 1, tokens, width),
        make_cluster(),
    ).sublayers[1]
    # The input, once though it is passed thrice; the output; a sum a token; a byte a value of the
    # mask. Not a probability for each of 64 x 64 pairs of tokens.
    assert cost.saved_bytes == 2 * 4 * tokens * width + 4 * tokens + tokens * width


class Grouped(nn.Module):
    """Attend with two heads that share their keys and values."""

    def forward(self, hidden: Tensor) -> Tensor:
        shared = hidden[:, :1]
        return F.scaled_dot_product_attention(hidden, shared, shared, enable_gqa=True)


def test_heads_that_share_keys_are_attended_by_one_kernel_as_on_a_gpu() -> None:
    sublayers = chain(lambda: nn.Linear(4, 4), Grouped)
    count = count_kernels(sublayers, meta(2, 2, 8, 4))[1]
    assert [kernel.flops for kernel in count.forward] == [2 * 2 * (2 * 2 * 8 * 8 * 4)]
    assert flops(count.backward) == 5 * 2 * (2 * 2 * 8 * 8 * 4)
    # The query, whose storage has the keys and values, the output, and a sum a token and head.
    sizes = count_bytes(sublayers, meta(2, 2, 8, 4))[1]
    assert sizes["saved_bytes"] == 4 * 2 * (2 * 8 * 4 + 8)


def test_attention_that_no_fused_kernel_takes_is_counted_taken_apart() -> None:
    (count,) = count_kernels(chain(WideValues), meta(2, 2, 8, 4))
    assert flops(count.forward) == 2 * (2 * 2 * 8 * 8 * (4 + 12))
    assert len(count.forward) > 2


class WideValues(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        values = torch.cat([hidden] * 3, dim=-1)
        return F.scaled_dot_product_attention(hidden, hidden, values)[..., :4]


class Peeking(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * hidden.sum().item()


class Branching(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.exp() if len(hidden) > 2 else hidden.exp().exp()


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="sublayer 'layer1' cannot be counted without data: Tens"):
        count_kernels(chain(linear, Peeking), meta(2, 16))
    with pytest.raises(ValueError, match="forward of sublayer 'layer1' starts 2 kernels for 2 sa"):
        modelled_profile(chain(linear, Branching), meta(2, 16), make_cluster())
    with pytest.raises(ValueError, match="'test' states no flops_per_s.bfloat16, only float32; a"):
        modelled_profile(chain(lambda: linear().bfloat16()), meta(2, 16), make_cluster())
    with pytest.raises(ValueError, match="the sublayers have no parameters; there is nothing to"):
        modelled_profile(chain(nn.Identity), meta(2, 16), make_cluster())


def test_counting_leaves_the_modules_as_they_were() -> None:
    sublayers = chain(attention, linear)
    sublayers[0].module.eval()
    sublayers[1].module.requires_grad_(False)
    count_kernels(sublayers, meta(2, 5, 16))
    assert not sublayers[0].module.training and sublayers[1].module.training
    for sublayer, trained in zip(sublayers, (True, False), strict=True):
        for parameter in sublayer.module.parameters():
            assert parameter.requires_grad is trained and parameter.grad is None


def equal_layers(cluster: Cluster, num_layers: int = 16) -> Profile:
    """Model layers of one cost; the first has no input gradient, so that it is left out."""
    profile = modelled_profile(chain(*[linear] * (num_layers + 1)), meta(1, 16), cluster)
    layers = tuple(replace(cost, layer=n) for n, cost in enumerate(profile.sublayers[1:]))
    return replace(profile, sublayers=layers)


def request(cluster: Cluster, **changes: Any) -> PlanRequest:
    values: dict[str, Any] = {"global_batch": 64 * cluster.num_slots, "num_frozen": 0}
    return PlanRequest(cluster.num_slots, cluster.slots_per_node, **{**values, **changes})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("length", "count"), [(2, 2), (4, 32), (8, 16)])
def test_equal_layers_have_the_bubble_of_the_formula(
    schedule: str, length: int, count: int
) -> None:
    cluster = make_cluster(slots_per_node=8)
    profile, wanted = equal_layers(cluster), request(cluster)
    cuts = tuple(range(0, 17, 16 // length))
    plan = predict(profile, wanted, boundaries=cuts, num_micro_batches=count, schedule=schedule)
    parts = explain(profile, wanted, plan).parts
    # Neither links nor sums nor updates cost anything here.
    assert parts.bubble_s / plan.predicted_step_s == pytest.approx(
        (length - 1) / (count + length - 1)
    )
    assert sum(asdict(parts).values()) == pytest.approx(plan.predicted_step_s, rel=1e-12)


def test_free_communication_and_room_for_all_make_one_stage_the_best() -> None:
    cluster = make_cluster(nodes=2, slots_per_node=8)
    assert plan_pipeline(equal_layers(cluster), request(cluster)).length == 1


def test_too_little_memory_forces_a_pipeline() -> None:
    cluster = make_cluster(slots_per_node=8)
    profile = equal_layers(cluster)
    whole = predict(profile, request(cluster), boundaries=(0, 16), num_micro_batches=8,
                    schedule="1f1b").peak_bytes[0]  # fmt: skip
    assert plan_pipeline(profile, request(cluster, memory_limit_bytes=whole)).length == 1
    tight = request(cluster, memory_limit_bytes=whole // 3)
    plan = plan_pipeline(profile, tight)
    assert plan.length > 1 and max(plan.peak_bytes) <= whole // 3
    alone = least_memory_plan(profile, replace(tight, lengths=(1,)))
    assert max(alone.peak_bytes) > whole // 3


def test_one_stage_is_kept_where_ever_more_micro_batches_make_it_fit() -> None:
    cluster = make_cluster(slots_per_node=8)
    profile = equal_layers(cluster)
    smallest = predict(profile, request(cluster), boundaries=(0, 16), num_micro_batches=64,
                       schedule="1f1b").peak_bytes[0]  # fmt: skip
    plan = plan_pipeline(profile, request(cluster, memory_limit_bytes=smallest))
    assert (plan.length, plan.num_micro_batches) == (1, 64)


def test_update_reads_and_writes_every_trained_byte_eight_times() -> None:
    cluster = make_cluster(memory_bytes_per_s=4.0)
    assert modelled_profile(chain(linear), meta(1, 16), cluster).optimizer_s_per_byte == 2.0


def two_nodes(node_bytes_per_s: float, *, parameter_bytes: int, output_bytes: float) -> Profile:
    """Model 16 equal layers on 2 x 4 slots, of which each holds a quarter of the layers."""
    cluster = make_cluster(
        nodes=2,
        slots_per_node=4,
        link=LinkCost(0.0, 1e12),
        node_link=LinkCost(0.0, node_bytes_per_s),
    )
    profile = equal_layers(cluster)
    layers = tuple(
        replace(
            cost, parameter_bytes=parameter_bytes, gradient_bytes=parameter_bytes,
            optimizer_bytes=0, saved_bytes=0.0, output_bytes=output_bytes,
        )
        for cost in profile.sublayers
    )  # fmt: skip
    return replace(profile, sublayers=layers)


@pytest.mark.parametrize(
    ("parameter_bytes", "output_bytes", "length"), [(100, 1e4, 4), (1_000_000, 0.0, 8)]
)
def test_a_slow_link_between_nodes_carries_what_is_smaller(
    parameter_bytes: int, output_bytes: float, length: int
) -> None:
    # Activations far larger than gradients keep pipelines inside nodes; far smaller ones make a
    # pipeline span the nodes, so that no gradient has to cross.
    sizes: dict[str, Any] = {"parameter_bytes": parameter_bytes, "output_bytes": output_bytes}
    cluster = make_cluster(nodes=2, slots_per_node=4)
    wanted = request(cluster, lengths=(4, 8), global_batch=64)
    slow = plan_pipeline(two_nodes(1e5, **sizes), wanted)
    assert slow.length == length
    # With a fast link both are nearly free, and the shorter pipeline has the smaller bubble.
    assert plan_pipeline(two_nodes(1e12, **sizes), wanted).length == 4
