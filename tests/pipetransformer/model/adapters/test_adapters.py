"""Adapters run the original model's own computation and share its very tensors."""

from __future__ import annotations

import copy
import io
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn
from transformers import BertModel

from pipetransformer.model import adapt
from tests.helpers.adapted import MODELS, answerer, batch_for, classifier, own_forward, timm_vit
from tests.helpers.marks import slow

_KNOWN_HEADS = {
    *("roberta_tokens", "roberta_answers", "camembert_tokens", "camembert_answers"),
    *("distilbert_tokens", "distilbert_answers", "electra_tokens", "electra_answers"),
    "modernbert_answers",
}
"""Heads that BERT or ModernBERT shows, on bodies that others show."""


@pytest.fixture(params=[slow(name) if name in _KNOWN_HEADS else name for name in MODELS])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    built: nn.Module = MODELS[request.param]()
    # Zeros at the start (position embeddings, layer scales, biases) would hide what is left out.
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return built


def state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


# --- the same computation ---


def test_output_is_bitwise_the_models_own(model: nn.Module) -> None:
    model.eval()
    batch = batch_for(model)
    with torch.no_grad():
        assert torch.equal(adapt(model).run(batch), own_forward(model, batch))


def test_gradients_equal_the_models_own_for_every_parameter(model: nn.Module) -> None:
    model.double().train()
    reference, batch = copy.deepcopy(model), batch_for(model)
    own_forward(reference, batch).square().sum().backward()
    adapt(model).run(batch).square().sum().backward()
    gradients = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None and gradients[name].grad is not None, name
        # Sums may be taken in another order; float64 leaves no more than this.
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-9, atol=1e-12)
    assert_equal(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_running_in_parts_equals_running_at_once(model: nn.Module) -> None:
    layered, batch = adapt(model.eval()), batch_for(model)
    whole = layered.run(batch)
    for cut in range(1, len(layered.sublayers)):
        hidden = layered.run(batch, last=cut)
        assert torch.equal(layered.run(batch, first=cut, hidden=hidden), whole)


@pytest.mark.parametrize(
    "name", ["bert_sdpa", "roberta", "xlm_roberta", "camembert", "distilbert"]
)
def test_texts_without_positions_and_segments_are_the_models_own_however_far_they_are_padded(
    name: str,
) -> None:
    model = MODELS[name]().double().eval()
    layered, batch = adapt(model), batch_for(model)
    batch = {entry: batch[entry] for entry in ("input_ids", "attention_mask")}
    # Where it counts positions itself, a model knows padding by its token.
    batch["input_ids"] = batch["input_ids"].where(batch["attention_mask"] == 1, pad_token(model))
    longer = {
        "input_ids": F.pad(batch["input_ids"], (0, 2), value=pad_token(model)),
        "attention_mask": F.pad(batch["attention_mask"], (0, 2)),
    }
    assert layered.padding_mask == "attention_mask"
    assert torch.equal(layered.run(batch), own_forward(model, batch))
    torch.testing.assert_close(layered.run(longer), layered.run(batch), rtol=1e-12, atol=1e-12)


def pad_token(model: nn.Module) -> int:
    token: int = model.config.pad_token_id  # type: ignore[union-attr, assignment]
    return token


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_token_under_padding_does_not_change_the_logits(attention: str) -> None:
    bert = classifier(attn_implementation=attention).eval()
    layered, batch = adapt(bert), batch_for(bert)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][batch["attention_mask"] == 0] = 19
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    assert torch.equal(layered.run(batch), layered.run(other))
    unmasked = {name: entry for name, entry in other.items() if name != "attention_mask"}
    assert not torch.allclose(layered.run(batch), layered.run(unmasked))
    assert torch.equal(layered.run(unmasked), own_forward(bert, unmasked))


def test_attention_mask_of_another_rank_is_refused() -> None:
    bert = classifier()
    batch = batch_for(bert)
    mask = batch["attention_mask"][:, None, None, :]
    with pytest.raises(ValueError, match="give \\(samples, tokens\\)"):
        adapt(bert).run({**batch, "attention_mask": mask})


# --- layers, names, entries ---


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sequential"])
def test_transformers_are_cut_between_attention_and_mlp(name: str) -> None:
    layered = adapt(MODELS[name]())
    assert [(sub.name, sub.layer) for sub in layered.sublayers] == [
        ("embedding", 0),
        ("blocks.0.attention", 0),
        ("blocks.0.mlp", 0),
        ("blocks.1.attention", 1),
        ("blocks.1.mlp", 1),
        ("head", 2),
    ]
    assert layered.num_layers == 2
    assert [layered.first_active(frozen) for frozen in range(3)] == [0, 3, 5]


def test_sides_are_those_of_the_sublayers_in_the_range() -> None:
    layered = adapt(classifier())
    assert layered.sides_of(0, 6) == ("attention_mask",)
    assert layered.sides_of(2, 3) == ()
    assert layered.inputs == ("input_ids", "token_type_ids", "position_ids")


# --- the very same tensors ---


def test_tensors_cover_every_parameter_and_buffer_once(model: nn.Module) -> None:
    layered = adapt(model)
    found = [
        pair for index in range(len(layered.sublayers)) for pair in layered.tensors(index).items()
    ]
    own = dict(chain(model.named_parameters(), model.named_buffers()))
    # Rotations are made in each block, and not by the model's own module.
    rotary = [name for name in layered.unused if ".rotary_emb." in name]
    assert sorted([name for name, _ in found] + rotary) == sorted(own)
    assert all(tensor is own[name] for name, tensor in found)


def test_released_sublayers_are_meta_and_refuse_to_run(model: nn.Module) -> None:
    layered, batch = adapt(model), batch_for(model)
    hidden = [None, *(layered.run(batch, last=i) for i in range(1, len(layered.sublayers)))]
    for index, sublayer in enumerate(layered.sublayers):
        if not layered.tensors(index):
            continue
        layered.release(index)
        assert all(tensor.is_meta for tensor in layered.tensors(index).values())
        assert all(tensor.is_meta for tensor in sublayer.module.parameters())
        with pytest.raises(RuntimeError, match="is released: this rank does not hold it"):
            layered.run(batch, first=index, last=index + 1, hidden=hidden[index])
        with pytest.raises(RuntimeError, match="is released: this rank does not hold it"):
            own_forward(model, batch)
        layered.materialize(index, "cpu")


def test_released_and_refilled_model_is_the_same_in_every_view(model: nn.Module) -> None:
    model.eval()
    next(model.parameters()).requires_grad_(False)
    layered, batch, kept = adapt(model), batch_for(model), state(model)
    names, output = list(model.state_dict()), own_forward(model, batch)
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    for index in range(len(layered.sublayers)):
        layered.release(index)
        layered.materialize(index, "cpu")
        with torch.no_grad():
            for name, tensor in layered.tensors(index).items():
                tensor.copy_(kept[name])
    assert list(model.state_dict()) == names
    assert_equal(state(model), kept)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable
    assert torch.equal(own_forward(model, batch), output)
    assert torch.equal(layered.run(batch), output)
    wrapped = {id(p) for sub in layered.sublayers for p in sub.module.parameters()}
    assert wrapped == {id(p) for p in model.parameters()}


def test_replaced_tensors_are_seen_by_the_model_and_saved(model: nn.Module) -> None:
    layered = adapt(model)
    for index in range(len(layered.sublayers)):
        layered.replace(
            index,
            {name: torch.ones_like(tensor) for name, tensor in layered.tensors(index).items()},
        )
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved and all(bool((tensor == 1).all()) for tensor in saved.values())


def test_hooks_of_the_models_modules_fire() -> None:
    model, calls = timm_vit(), []
    model.blocks[1].attn.register_forward_hook(lambda *_: calls.append("attention"))
    layered = adapt(model)
    layered.release(3)
    layered.materialize(3, "cpu")
    layered.run(batch_for(model))
    assert calls == ["attention"]


# --- refusals ---


def test_pooler_without_a_part_in_answers_is_kept_unused() -> None:
    bert = answerer()
    bert.bert = BertModel(bert.config)
    layered = adapt(bert)
    assert layered.unused == ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    batch = batch_for(bert)
    assert torch.equal(layered.run(batch), own_forward(bert, batch))


class Averaged(VisionTransformer):
    """A VisionTransformer with features of its own."""

    def forward_features(self, *args: Any, **options: Any) -> Tensor:
        return super().forward_features(*args, **options) / 2


def test_timm_models_with_features_or_blocks_of_their_own_are_refused() -> None:
    with pytest.raises(TypeError, match="Averaged overrides forward_features"):
        adapt(Averaged(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2))
    with pytest.raises(TypeError, match="holds a .*ParallelScalingBlock where"):
        adapt(timm_vit(block_fn=ParallelScalingBlock))


def test_a_distilled_timm_model_is_refused_for_its_second_head() -> None:
    distilled = VisionTransformerDistilled(img_size=8, patch_size=4, embed_dim=16, num_heads=2)
    with pytest.raises(ValueError, match="VisionTransformerDistilled has a token and a head for"):
        adapt(distilled)


def test_settings_that_sublayers_would_ignore_are_refused() -> None:
    recomputing = timm_vit()
    recomputing.set_grad_checkpointing()
    with pytest.raises(ValueError, match="checkpointing of this VisionTransformer is on"):
        adapt(recomputing)
    with pytest.raises(ValueError, match="config.is_decoder is True"):
        adapt(classifier(is_decoder=True))
    with pytest.raises(ValueError, match="chunk_size_feed_forward is 2"):
        adapt(classifier(chunk_size_feed_forward=2))
    with pytest.raises(ValueError, match="implementation is 'flex_attention'; load"):
        adapt(classifier(attn_implementation="flex_attention"))
