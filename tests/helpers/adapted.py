"""Build tiny models of every kind that has an adapter, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    CamembertForQuestionAnswering,
    CamembertForSequenceClassification,
    CamembertForTokenClassification,
    DeiTForImageClassification,
    Dinov2ForImageClassification,
    Dinov2WithRegistersForImageClassification,
    DistilBertConfig,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    ElectraConfig,
    ElectraForQuestionAnswering,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    ModernBertConfig,
    ModernBertForQuestionAnswering,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    PreTrainedModel,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    ViTForImageClassification,
    XLMRobertaForSequenceClassification,
)

from tests.helpers.models import sequential

Batch = dict[str, Tensor]
NUM_SAMPLES, LENGTH = 4, 6


def timm_vit(**options: Any) -> Any:
    sizes = {
        "img_size": 8,
        "patch_size": 4,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
    }
    return VisionTransformer(**{**sizes, **options})


BERT_SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Positions are counted from the one behind the padding's, which is 1.
ROBERTA_SIZES = {**BERT_SIZES, "max_position_embeddings": 10, "type_vocab_size": 2}
DISTILBERT_SIZES = {
    "vocab_size": 20,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 8,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "qa_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}


# A token attends to its neighbours alone; the first block's attention is to all.
MODERNBERT_SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "local_attention": 2,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}


def bert_config(**options: Any) -> BertConfig:
    return BertConfig(**{**BERT_SIZES, **options})


def text_model(kind: type[PreTrainedModel], **options: Any) -> Any:
    """Build a tiny encoder of one of transformers' classes, without dropout."""
    sizes = {
        BertConfig: BERT_SIZES,
        DistilBertConfig: DISTILBERT_SIZES,
        ElectraConfig: {**BERT_SIZES, "embedding_size": 12},
        ModernBertConfig: MODERNBERT_SIZES,
    }
    config = kind.config_class
    return kind(config(**{**sizes.get(config, ROBERTA_SIZES), **options}))


def classifier(**options: Any) -> Any:
    return BertForSequenceClassification(bert_config(**{"num_labels": 3, **options}))


def answerer(**options: Any) -> Any:
    return BertForQuestionAnswering(bert_config(**options))


def hf_vit(kind: type[PreTrainedModel] = ViTForImageClassification, **options: Any) -> Any:
    sizes = {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 3,
    }
    return kind(kind.config_class(**{**sizes, **options}))


def without_mask_token(dino: Any) -> Any:
    """Take out the token for hidden patches, which classification never reads."""
    getattr(dino, dino.base_model_prefix).embeddings.mask_token = None
    return dino


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
    "bert_tokens": lambda: text_model(BertForTokenClassification, num_labels=3),
    "roberta": lambda: text_model(RobertaForSequenceClassification, num_labels=3),
    "roberta_tokens": lambda: text_model(RobertaForTokenClassification, num_labels=3),
    "roberta_answers": lambda: text_model(RobertaForQuestionAnswering),
    "xlm_roberta": lambda: text_model(XLMRobertaForSequenceClassification, num_labels=3),
    "camembert": lambda: text_model(CamembertForSequenceClassification, num_labels=3),
    "camembert_tokens": lambda: text_model(CamembertForTokenClassification, num_labels=3),
    "camembert_answers": lambda: text_model(CamembertForQuestionAnswering),
    "distilbert": lambda: text_model(DistilBertForSequenceClassification, num_labels=3),
    "distilbert_tokens": lambda: text_model(DistilBertForTokenClassification, num_labels=3),
    "distilbert_answers": lambda: text_model(DistilBertForQuestionAnswering),
    "electra": lambda: text_model(ElectraForSequenceClassification, num_labels=3),
    "electra_tokens": lambda: text_model(ElectraForTokenClassification, num_labels=3),
    "electra_answers": lambda: text_model(ElectraForQuestionAnswering, embedding_size=16),
    "modernbert": lambda: text_model(ModernBertForSequenceClassification, num_labels=3),
    "modernbert_mean": lambda: text_model(
        ModernBertForSequenceClassification,
        num_labels=3,
        classifier_pooling="mean",
        attn_implementation="eager",
        local_attention=6,
    ),
    "modernbert_tokens": lambda: text_model(ModernBertForTokenClassification, num_labels=3),
    "modernbert_answers": lambda: text_model(ModernBertForQuestionAnswering),
    "vit": hf_vit,
    "deit": lambda: hf_vit(DeiTForImageClassification),
    "dinov2": lambda: without_mask_token(hf_vit(Dinov2ForImageClassification)),
    "dinov2_with_registers": lambda: without_mask_token(
        hf_vit(Dinov2WithRegistersForImageClassification, num_register_tokens=2)
    ),
}


def batch_for(model: nn.Module, *, seed: int = 1) -> Batch:
    """Make inputs; texts of 6, 5, 4 and 3 tokens, padded, in two segments."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    if isinstance(model, nn.Sequential):
        return {"x": torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=dtype)}
    if isinstance(model, PreTrainedModel) and model.main_input_name == "input_ids":
        tokens = torch.arange(LENGTH)
        batch = {
            "input_ids": torch.randint(2, 20, (NUM_SAMPLES, LENGTH), generator=generator),
            "attention_mask": (tokens < LENGTH - torch.arange(NUM_SAMPLES)[:, None]).long(),
            "token_type_ids": (tokens > 2).long().expand(NUM_SAMPLES, -1),
            "position_ids": tokens.flip(0).expand(NUM_SAMPLES, -1),
        }
        if isinstance(model.config, (DistilBertConfig, ModernBertConfig)):
            del batch["token_type_ids"]
        return batch
    images = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator, dtype=dtype)
    return {"pixel_values" if isinstance(model, PreTrainedModel) else "x": images}


def targets_for(model: nn.Module) -> Batch:
    """Make targets of a batch for the model's own loss."""
    classes = torch.arange(NUM_SAMPLES) % 3
    if type(model).__name__.endswith("ForQuestionAnswering"):
        return {"start_positions": classes, "end_positions": classes + 1}
    if type(model).__name__.endswith("ForTokenClassification"):
        classes = (classes[:, None] + torch.arange(LENGTH)) % 3
    return {"labels" if isinstance(model, PreTrainedModel) else "y": classes}


def own_forward(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["x"]) if "x" in batch else model(**batch)
    if isinstance(output, Tensor):
        return output
    if "start_logits" in output:
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: Tensor = output.logits
    return logits
