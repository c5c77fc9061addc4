"""Adapters run the original model's own computation and share its very tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
)

from pipetransformer.adapters.base import LayeredModel
from pipetransformer.adapters.registry import adapt
from pipetransformer.adapters.transformers_bert import span_loss

Batch = dict[str, Tensor]
NUM_SAMPLES, LENGTH = 4, 6


def sequential() -> nn.Module:
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Linear(5, 8),
        relu,
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        relu,
        nn.Linear(8, 3),
    )


def timm_vit(**options: Any) -> Any:
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, **options
    )


def bert_config(**options: Any) -> BertConfig:
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertConfig(**{**sizes, **options})


def classifier(**options: Any) -> Any:
    return BertForSequenceClassification(bert_config(**{"num_labels": 3, **options}))


def answerer() -> Any:
    return BertForQuestionAnswering(bert_config())


def hf_vit(**options: Any) -> Any:
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **{"num_labels": 3, **options},
        )
    )


MODELS: dict[str, Callable[[], Any]] = {
    "sequential": sequential,
    "timm": timm_vit,
    "timm_registers_average": lambda: timm_vit(
        global_pool="avg", reg_tokens=2, init_values=0.1, no_embed_class=True, pre_norm=True
    ),
    "timm_attention_pool": lambda: timm_vit(
        global_pool="map", class_token=False, qk_norm=True, dynamic_img_size=True
    ),
    "bert_sdpa": classifier,
    "bert_eager": lambda: classifier(attn_implementation="eager"),
    "bert_answers": answerer,
    "vit": hf_vit,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Spare these tiny models the cost of waking threads, a hundred times theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    built: nn.Module = MODELS[request.param]()
    # Zeros at the start (position embeddings, layer scales, biases) would hide what is left out.
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return built


def batch_for(model: nn.Module, *, seed: int = 1) -> Batch:
    """Make inputs; texts of 6, 5, 4 and 3 tokens, padded, in two segments."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    if isinstance(model, nn.Sequential):
        return {"x": torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=dtype)}
    if isinstance(model, BertForSequenceClassification | BertForQuestionAnswering):
        tokens = torch.arange(LENGTH)
        return {
            "input_ids": torch.randint(1, 20, (NUM_SAMPLES, LENGTH), generator=generator),
            "attention_mask": (tokens < LENGTH - torch.arange(NUM_SAMPLES)[:, None]).long(),
            "token_type_ids": (tokens > 2).long().expand(NUM_SAMPLES, -1),
            "position_ids": tokens.flip(0).expand(NUM_SAMPLES, -1),
        }
    images = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator, dtype=dtype)
    return {"pixel_values" if isinstance(model, ViTForImageClassification) else "x": images}


def own_forward(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["x"]) if "x" in batch else model(**batch)
    if isinstance(output, Tensor):
        return output
    if "start_logits" in output:
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: Tensor = output.logits
    return logits


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sample_does_not_depend_on_the_padding_of_its_neighbours(attention: str) -> None:
    bert = classifier(attn_implementation=attention).eval()
    layered, batch = adapt(bert), batch_for(bert)
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    # The model takes another kernel where nothing is padded, so its last bits differ from ours.
    torch.testing.assert_close(layered.run(full), own_forward(bert, full), rtol=0, atol=1e-6)
    assert torch.equal(layered.run(full)[0], layered.run(batch)[0])


def test_attention_mask_of_another_rank_is_refused() -> None:
    bert = classifier()
    batch = batch_for(bert)
    mask = batch["attention_mask"][:, None, None, :]
    with pytest.raises(ValueError, match="give \\(samples, tokens\\)"):
        adapt(bert).run({**batch, "attention_mask": mask})


# --- layers, names, entries ---


@pytest.mark.parametrize("build", [timm_vit, classifier, answerer, hf_vit])
def test_transformers_are_cut_between_attention_and_mlp(build: Callable[[], nn.Module]) -> None:
    layered = adapt(build())
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
    assert sorted(name for name, _ in found) == sorted(own)
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


def test_bert_is_saved_by_its_own_method_after_refilling(tmp_path: Any) -> None:
    bert = classifier()
    layered, kept = adapt(bert), state(bert)
    for index in range(len(layered.sublayers)):
        layered.release(index)
        layered.replace(index, {name: kept[name] for name in layered.tensors(index)})
    bert.save_pretrained(tmp_path)
    assert_equal(state(BertForSequenceClassification.from_pretrained(tmp_path)), kept)


# --- losses ---


def mean_in_parts(layered: LayeredModel, output: Tensor, target: Any) -> Tensor:
    """Combine the losses of samples 0 and 1..3 as the trainer does."""
    total, count = torch.zeros(()), torch.zeros(())
    assert layered.loss_fn is not None
    for rows in (slice(0, 1), slice(1, None)):
        part = (
            {name: entry[rows] for name, entry in target.items()}
            if isinstance(target, dict)
            else target[rows]
        )
        value = layered.loss_fn(output[rows], part)
        size = len(output[rows])
        value, number = value if isinstance(value, tuple) else (value * size, size)
        total, count = total + value, count + number
    return total / count


@pytest.mark.parametrize("build", [classifier, hf_vit])
@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, torch.tensor([2, -100, 0, 1])),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ({"problem_type": "regression"}, torch.randn(NUM_SAMPLES, 3)),
        ({}, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])),
    ],
    ids=["classes", "one value", "values", "many labels"],
)
def test_classification_loss_is_the_models_own_in_any_split(
    build: Callable[..., Any], options: dict[str, Any], labels: Tensor
) -> None:
    model = build(**options).eval()
    layered, batch = adapt(model), batch_for(model)
    ours = mean_in_parts(layered, layered.run(batch), labels)
    assert layered.targets == ("labels",)
    torch.testing.assert_close(ours, model(**batch, labels=labels).loss)


@pytest.mark.parametrize("starts", [[0, 3, 5, 2], [-1, 3, 9, LENGTH]])
def test_answer_loss_is_the_models_own_in_any_split(starts: list[int]) -> None:
    bert = answerer().eval()
    layered, batch = adapt(bert), batch_for(bert)
    positions = {
        "start_positions": torch.tensor(starts),
        "end_positions": torch.tensor(starts)[:, None],
    }
    ours = mean_in_parts(layered, layered.run(batch), positions)
    torch.testing.assert_close(ours, bert(**batch, **positions).loss)


def test_answers_cut_off_at_their_end_weigh_all_positions_alike() -> None:
    positions = {
        "start_positions": torch.tensor([1, 2]),
        "end_positions": torch.tensor([2, LENGTH]),
    }
    total, count = span_loss(torch.zeros(2, LENGTH, 2), positions)
    assert count == 3
    torch.testing.assert_close(total, 3 * torch.tensor(float(LENGTH)).log())


def test_timm_loss_takes_classes_and_probabilities() -> None:
    layered = adapt(timm_vit())
    output, classes = torch.randn(NUM_SAMPLES, 3), torch.tensor([2, 0, 1, 1])
    expected = nn.functional.cross_entropy(output, classes)
    torch.testing.assert_close(mean_in_parts(layered, output, classes), expected)
    torch.testing.assert_close(mean_in_parts(layered, output, torch.eye(3)[classes]), expected)


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
