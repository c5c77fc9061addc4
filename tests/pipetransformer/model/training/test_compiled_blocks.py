"""Prove that compiled blocks compute what eager ones do, with few graphs, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

from pipetransformer import LayeredModel
from pipetransformer.model import adapt
from pipetransformer.model.training.compiled_blocks import CompiledBlocks, num_frames
from tests.helpers.models import NUM_FEATURES, tiny_model
from tests.helpers.texts import tiny_bert

SIZES = ((4, 12), (3, 9), (6, 17), (4, 5), (2, 20), (5, 7))
"""Samples and lengths; some of them equal a head's or the hidden state's width."""


def texts(num: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 50, (num, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def bert() -> LayeredModel:
    """Present a model of 12 blocks by its hand-written adapter."""
    return adapt(tiny_bert(num_layers=12))


def gpt2() -> LayeredModel:
    """Present a model of 12 blocks by its own forward."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 12, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **drops)).double()
    return adapt(model, lambda names: {**texts(4, 12), "labels": texts(4, 12)["input_ids"]})


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def gradients(layered: LayeredModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the output and each parameter's gradient, by its name."""
    named = {n: p for n, p in layered.model.named_parameters() if p.requires_grad}
    output = layered.run(batch)
    found = torch.autograd.grad(output.square().mean(), list(named.values()), allow_unused=True)
    held = {name: one for name, one in zip(named, found, strict=True) if one is not None}
    return {"": output.detach(), **held}


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare all; in float64, rounding is far below these limits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def compiled(layered: LayeredModel, backend: str = "aot_eager") -> CompiledBlocks:
    return CompiledBlocks(layered, backend=backend, mode=None)


@pytest.mark.parametrize(
    ("build", "backend", "num_kinds"),
    [(bert, "eager", 2), (gpt2, "aot_eager", 1)],
    ids=["bert", "gpt2"],
)
@pytest.mark.slow
def test_twelve_equal_blocks_share_one_graph_for_six_lengths_and_equal_eager_ones(
    build: Callable[[], LayeredModel], backend: str, num_kinds: int
) -> None:
    layered = build()
    layered.model.train()
    context, before = compiled(layered, backend).of(range(len(layered.sublayers))), num_graphs()
    for num, length in SIZES:
        expected = gradients(layered, texts(num, length))
        with context():
            assert_close(gradients(layered, texts(num, length)), expected)
    # BERT's blocks are two sublayers each.
    assert num_graphs() - before == num_kinds


def test_a_block_that_freezes_or_thaws_has_the_gradients_of_its_flags_without_a_reset() -> None:
    layered = adapt(tiny_model())
    model: Any = layered.model
    batch = {"x": torch.randn(5, NUM_FEATURES, dtype=torch.float64)}
    blocks, before = compiled(layered), num_graphs()
    states: list[list[nn.Module]] = [[], [model[1]], [model[2].norm, model[3].inner]]
    for frozen in [*states, *states]:
        model.requires_grad_(True)
        for module in frozen:
            module.requires_grad_(False)
        expected = gradients(layered, batch)
        with blocks.of(range(6))():
            assert_close(gradients(layered, batch), expected)
    # All train, none do, and two kinds of blocks train in part.
    assert num_graphs() - before == 4


def test_the_model_is_as_it_was_between_two_steps_and_keeps_its_names_within() -> None:
    layered = adapt(tiny_model())
    names, own = list(layered.model.state_dict()), [dict(vars(m)) for m in layered.model.modules()]
    with compiled(layered, "eager").of(range(6))():
        layered.run({"x": torch.ones(2, NUM_FEATURES, dtype=torch.float64)})
        assert list(layered.model.state_dict()) == names
    assert [dict(vars(module)) for module in layered.model.modules()] == own


def test_no_block_runs_compiled_but_those_asked_for_and_neither_embedding_nor_head() -> None:
    layered = adapt(tiny_model())
    with compiled(layered, "eager").of((0, 2, 5))():
        parts = [sublayer.module for sublayer in layered.sublayers]
        assert ["forward" in vars(part) for part in parts] == [False, False, True, *[False] * 3]


def test_frames_of_blocks_are_told_from_others_by_their_number() -> None:
    layered = adapt(tiny_model())
    blocks, others = compiled(layered, "eager"), num_frames() - CompiledBlocks.num_frames
    with blocks.of((1,))(), blocks.of((2, 3, 4))():
        layered.run({"x": torch.ones(2, NUM_FEATURES, dtype=torch.float64)})
    assert num_frames() - CompiledBlocks.num_frames == others
    torch.compile(tiny_model()[1], backend="eager")(torch.ones(2, 8, dtype=torch.float64))
    assert num_frames() - CompiledBlocks.num_frames > others


def test_hooks_of_a_block_run_though_they_came_after_its_graph() -> None:
    layered = adapt(tiny_model())
    block, seen = layered.sublayers[2].module, list[nn.Module]()
    context = compiled(layered, "eager").of(range(6))
    batch = {"x": torch.ones(2, NUM_FEATURES, dtype=torch.float64)}
    with context():
        layered.run(batch)
        block.register_forward_hook(lambda module, *_: seen.append(module))
        layered.run(batch)
    assert seen == [block]


def test_a_block_that_runs_many_times_is_compiled_once() -> None:
    shared = tiny_model()
    layered, before = adapt(nn.Sequential(shared[0], *[shared[1]] * 3, shared[-1])), num_graphs()
    batch = {"x": torch.ones(2, NUM_FEATURES, dtype=torch.float64)}
    expected, context = gradients(layered, batch), compiled(layered, "eager").of(range(5))
    for _ in range(2):
        with context():
            assert_close(gradients(layered, batch), expected)
    assert num_graphs() - before == 1


def test_an_unknown_backend_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"is 'induktor'.* choose one of .*inductor"):
        compiled(adapt(tiny_model()), "induktor")


def test_a_forward_that_was_replaced_is_refused_by_the_sublayers_name() -> None:
    layered = adapt(tiny_model())
    block: Any = layered.sublayers[2].module
    block.forward = MethodType(type(block).forward, block)
    with pytest.raises(ValueError, match=r"sublayer '2' runs a Block whose forward is no method"):
        compiled(layered)
