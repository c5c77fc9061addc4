"""Cut models that no adapter knows: parts run the model's own forward, and change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetransformer import LayeredModel
from pipetransformer.model import EntryNames, names_of, present
from tests.helpers.any_models import KINDS, Kind, build, data, mean_loss


def presented(kind: Kind) -> tuple[LayeredModel, dict[str, Tensor]]:
    batch = {name: t[:4] for name, t in data(kind).tensors.items()}
    return present(build(kind), batch), batch


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def layered_loss(layered: LayeredModel, batch: dict[str, Tensor]) -> Tensor:
    assert layered.loss_fn is not None
    value = layered.loss_fn(layered.run(batch), layered.targets_of(batch))
    return value[0] / value[1] if isinstance(value, tuple) else value


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        allowed = 1e-9 + 1e-7 * float(theirs[name].abs().max())
        assert float((tensor - theirs[name]).abs().max()) <= allowed, name


@pytest.mark.parametrize("name", KINDS)
def test_parts_give_the_loss_and_every_gradient_of_the_own_forward(name: str) -> None:
    kind = KINDS[name]
    layered, batch = presented(kind)
    model = layered.model
    own = mean_loss(kind, model, batch)
    theirs = gradients(model, own)
    loss = layered_loss(layered, batch)
    assert_close(gradients(model, loss), theirs)
    torch.testing.assert_close(loss, own, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "mpnet", "deberta", "beit", "swin"])
def test_a_part_runs_where_the_others_weights_are_not(name: str) -> None:
    kind = KINDS[name]
    layered, batch = presented(kind)
    hidden = layered.run(batch, last=2)
    expected = layered.run(batch, first=2, hidden=hidden)
    held = {n for i in range(2, len(layered.sublayers)) for n in layered.tensors(i)}
    for index in (0, 1):
        layered.replace(index, dict.fromkeys(set(layered.tensors(index)) - held))
    assert torch.equal(layered.run(batch, first=2, hidden=hidden), expected)
    own = layered.sublayers[1].module.own
    own.forget()  # Also where no earlier call has kept what blocks are given.
    assert torch.equal(layered.run(batch, first=2, hidden=hidden), expected)


def test_a_model_is_as_it_was_behind_a_presentation() -> None:
    kind = KINDS["gpt2"]
    model = build(kind).train()
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.h[0].eval()
    modes = {module: module.training for module in model.modules()}
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    calls = []
    model.transformer.h[1].register_forward_hook(lambda *_: calls.append(1))
    layered = present(model, {n: t[:2] for n, t in data(kind).tensors.items()})
    calls.clear()
    layered.run({n: t[:2] for n, t in data(kind).tensors.items()})
    assert calls == [1]  # A block's hook runs where the block does, and nowhere else.
    assert torch.equal(torch.get_rng_state(), state)
    assert {module: module.training for module in model.modules()} == modes
    assert not model.transformer.wpe.weight.requires_grad
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def test_left_padding_positions_and_packed_texts_reach_the_blocks() -> None:
    kind = KINDS["llama"]
    ids = data(kind).tensors["input_ids"][:2].clamp(min=3)
    left = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)
    for more in ({"attention_mask": left}, {"position_ids": packed}):
        batch = {"input_ids": ids, **more, "labels": ids}
        model = build(kind)
        model.config.use_cache = False
        layered = present(model, batch)
        expected = model(**{n: t for n, t in batch.items() if n != "labels"}).logits
        assert torch.equal(layered.run(batch), expected)


def test_a_cache_that_changes_the_answer_is_refused() -> None:
    ids = data(KINDS["llama"]).tensors["input_ids"][:2]
    batch = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)}
    with pytest.raises(ValueError, match="other outputs with use_cache=False, .*config.use_cache"):
        present(build(KINDS["llama"]), batch)


def test_images_are_needed_below_the_blocks_alone() -> None:
    texts, _ = presented(KINDS["gpt2"])
    assert texts.sides_of(1, len(texts.sublayers)) == ("input_ids", "attention_mask")
    layered, batch = presented(KINDS["beit"])
    assert layered.sides_of(1, len(layered.sublayers)) == ()
    larger = torch.zeros(2, 3, 12, 12, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'pixel_values' has shape \(2, 3, 12, 12\), but .* one"):
        layered.run({**batch, "pixel_values": larger})


class Between(nn.Module):
    """Does something between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 2
        return x


class Twice(Between):
    """Runs its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class Handed(nn.Module):
    """Hands a block what the first one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers[0](x, x)
        return self.layers[1](made, made + 1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Linear(4, 3), "holds no list of two blocks"),
        (Between(), "layers: something happens between its modules 0 and 1"),
        (Twice(), r"layers: its modules run in the order 0, 1, 2, 0, 1, 2"),
        (Handed(), "layers: block 1 takes what a block before it made"),
    ],
)
def test_a_model_without_a_row_of_blocks_is_refused_with_the_ways_out(
    model: nn.Module, why: str
) -> None:
    name = "input" if isinstance(model, nn.Linear) else "x"
    with pytest.raises(ValueError, match=f"this {type(model).__name__} has no row of blocks"):
        present(model, {name: torch.zeros(2, 4)})
    with pytest.raises(ValueError, match=why):
        present(model, {name: torch.zeros(2, 4)})
    with pytest.raises(ValueError, match=r"docs/models\.md says what trains"):
        present(model, {name: torch.zeros(2, 4)})


def test_a_forward_that_fails_says_so() -> None:
    kind = KINDS["gpt2"]
    with pytest.raises(ValueError, match="the forward of this GPT2LMHeadModel fails for two"):
        present(build(kind), {"input_ids": torch.full((2, 3), 10_000)})


def test_blocks_that_are_left_out_at_random_are_refused() -> None:
    kind = KINDS["opt"]
    options = Kind(kind.name, kind.blocks, kind.bottom, {**kind.options, "layerdrop": 0.1})
    batch = {name: t[:2] for name, t in data(kind).tensors.items()}
    with pytest.raises(ValueError, match="layerdrop of a OPTDecoder is 0.1: .* set it to 0"):
        present(build(options), batch)


def test_a_loss_that_adds_something_is_refused_by_name() -> None:
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
    llama = KINDS["llama"]
    kind = Kind("MixtralForCausalLM", llama.blocks, llama.bottom, {**llama.options, **options})
    batch = {name: t[:2] for name, t in data(kind).tensors.items()}
    with pytest.raises(ValueError, match=r"MixtralForCausalLM .* \(it adds aux_loss\): switch"):
        present(build(kind).float(), batch)


def test_the_entries_of_a_forward_are_read_from_its_signature() -> None:
    names = EntryNames(("input_ids", "attention_mask"), ("labels",))
    found = names_of(build(KINDS["llama"]))
    assert found.inputs[:2] == names.inputs and found.targets == names.targets
    assert names_of(Between()) == EntryNames(("x",), ("y",))
