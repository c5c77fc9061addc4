"""Build tiny models with peft's adapters, and train them in a loop of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import SGD

from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.model import unwrapped
from tests.helpers.adapted import hf_vit, text_model, timm_vit
from tests.helpers.inspection import stage_of
from tests.helpers.measured import measuring, never

NUM_SAMPLES, LENGTH = 8, 6
FROZEN = (0, 1, 1, 2, 0)
"""Frozen layers by epoch: the cache is filled, read, deepened, and left at a thaw."""

_WORDS = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_LLAMA = {
    **_WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_GPT2 = {
    **_WORDS,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 16,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_LLAMA, **options}))


def llama_classifier() -> Any:
    config = transformers.LlamaConfig(**_LLAMA, num_labels=3)
    return transformers.LlamaForSequenceClassification(config)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2))


def bert() -> Any:
    kind = transformers.BertForSequenceClassification
    return text_model(kind, num_labels=3, num_hidden_layers=3)


def vit() -> Any:
    return hf_vit(num_hidden_layers=3)


def timm() -> Any:
    return timm_vit(depth=3)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "lora_alpha": 4, **options})


CAUSAL, CLASSES = {"task_type": "CAUSAL_LM"}, {"task_type": "SEQ_CLS"}


def with_adapter(build: Callable[[], Any], config: Any) -> Any:
    """Build a peft model in float64 whose adapters already do something."""
    torch.manual_seed(0)
    return moved(get_peft_model(build(), config))


def moved(model: Any) -> Any:
    """Move what trains, as adapters begin with a matrix of zeros."""
    generator = torch.Generator().manual_seed(1)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += 0.1 * noise
    return model


def two_adapters() -> Any:
    """Build a model with two adapters, of which the second is active."""
    torch.manual_seed(0)
    model = get_peft_model(llama(), lora(**CAUSAL), adapter_name="first")
    model.add_adapter("second", lora(r=3, target_modules=["q_proj", "down_proj"], **CAUSAL))
    model.set_adapter("second")
    return moved(model)


def mixed() -> Any:
    torch.manual_seed(0)
    return moved(get_peft_model(llama(), lora(**CAUSAL), mixed=True))


def injected() -> Any:
    """Put adapters into a BERT, as its `add_adapter` does; its class stays as it was."""
    torch.manual_seed(0)
    config = lora(target_modules=["query", "value"], modules_to_save=["classifier"])
    return moved(peft.inject_adapter_in_model(config, bert()))


MODELS: dict[str, Callable[[], Any]] = {
    "lora of GPT-2": lambda: with_adapter(
        gpt2, lora(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, **CAUSAL)
    ),
    "lora of GPT-2's tied words": lambda: with_adapter(
        gpt2, lora(target_modules=["wte", "c_attn"], fan_in_fan_out=True, **CAUSAL)
    ),
    "tokens of GPT-2's tied words": lambda: with_adapter(
        gpt2,
        lora(
            target_modules=["c_attn"],
            fan_in_fan_out=True,
            trainable_token_indices={"wte": [3, 4]},
            **CAUSAL,
        ),
    ),
    "lora of Llama": lambda: with_adapter(llama, lora(**CAUSAL)),
    "lora of words and head": lambda: with_adapter(
        llama, lora(target_modules=["embed_tokens", "q_proj", "lm_head"], **CAUSAL)
    ),
    "whole words and head": lambda: with_adapter(
        llama, lora(modules_to_save=["embed_tokens", "lm_head"], **CAUSAL)
    ),
    "dora": lambda: with_adapter(llama, lora(use_dora=True, **CAUSAL)),
    "rslora": lambda: with_adapter(llama, lora(use_rslora=True, **CAUSAL)),
    "ia3": lambda: with_adapter(llama, peft.IA3Config(**CAUSAL)),
    "vera": lambda: with_adapter(
        llama, peft.VeraConfig(r=2, target_modules=["q_proj", "v_proj"], **CAUSAL)
    ),
    "two adapters": two_adapters,
    "mixed model": mixed,
    "lora of Llama's last token": lambda: with_adapter(llama_classifier, lora(**CLASSES)),
    "upper layers": lambda: with_adapter(llama, lora(layers_to_transform=[2], **CAUSAL)),
    "lora of BERT": lambda: with_adapter(bert, lora(**CLASSES)),
    "lora of BERT and biases": lambda: with_adapter(bert, lora(bias="all", **CLASSES)),
    "lora in BERT": injected,
    "prompt of BERT": lambda: with_adapter(
        bert, PromptTuningConfig(num_virtual_tokens=2, **CLASSES)
    ),
    "lora of ViT": lambda: with_adapter(
        vit, lora(target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    ),
    "lora of timm": lambda: with_adapter(
        timm, lora(target_modules=["qkv"], modules_to_save=["head"])
    ),
    "prompt": lambda: with_adapter(llama, PromptTuningConfig(num_virtual_tokens=2, **CAUSAL)),
    "p-tuning": lambda: with_adapter(
        llama, PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=8, **CAUSAL)
    ),
}


def samples_for(model: nn.Module) -> list[dict[str, Tensor]]:
    """Make texts of which some are padded, or images, with labels of the model's task."""
    generator = torch.Generator().manual_seed(2)
    classes = torch.arange(NUM_SAMPLES) % 3
    inner = unwrapped(model)
    main = getattr(inner, "main_input_name", "x")
    if main != "input_ids":
        images = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
        labels = "y" if main == "x" else "labels"
        return [{main: one, labels: label} for one, label in zip(images, classes, strict=True)]
    ids = torch.randint(2, 20, (NUM_SAMPLES, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < LENGTH - torch.arange(NUM_SAMPLES)[:, None] % 3).long()
    is_causal = type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    targets = ids.masked_fill(mask == 0, -100) if is_causal else classes
    rows = zip(ids * mask, mask, targets, strict=True)
    return [{"input_ids": i, "attention_mask": m, "labels": t} for i, m, t in rows]


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    """Make one batch of all samples."""
    samples = samples_for(model)
    return {key: torch.stack([one[key] for one in samples]) for key in samples[0]}


@dataclass(frozen=True)
class Outcome:
    """Hold a run's losses, all of its last weights, and which parameters an optimizer had."""

    losses: list[float]
    weights: dict[str, Tensor]
    trained: set[str]


def make_trainer(model: Any, frozen: tuple[int, ...] = FROZEN, **settings: Any) -> Trainer:
    """Build a Trainer that takes all samples in each step, one an epoch."""
    options = {
        "freeze": FreezeSchedule(frozen),
        "optimizer": sgd,
        "epochs": len(frozen),
        "global_batch_size": NUM_SAMPLES,
        "micro_batches": 2,
        "tied_weights": "freeze",
        "progress": False,
    }
    return Trainer(model, samples_for(model), **{**options, **settings})


@measuring(never)
def train(name: str, frozen: tuple[int, ...] = FROZEN, length: int = 1) -> Outcome:
    """Train in pipelines of a length; on other ranks than 0 the weights are {}."""
    with make_trainer(MODELS[name](), frozen, pipeline_length=length) as trainer:
        losses, trained = [], set[str]()
        while not trainer.is_over:
            losses.append(trainer.step().loss)
            trained |= stage_of(trainer).trained.parameters.keys()
        return Outcome(losses, trainer.state_dict(), trained)


def sgd(named: Any) -> SGD:
    return SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)


def loop(name: str, frozen: tuple[int, ...] = FROZEN) -> Outcome:
    """Train all samples at a time, freezing parameters by their names."""
    model = MODELS[name]()
    batch = batch_of(model)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = sgd(list(named.items()))
    losses = []
    for num_frozen in frozen:
        for parameter_name, parameter in named.items():
            parameter.requires_grad_(layer_of(parameter_name) >= num_frozen)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model.train(), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Outcome(losses, model.state_dict(), set(named))


def layer_of(name: str) -> int:
    """Return the layer with which a parameter freezes."""
    if found := re.search(r"\.(?:layers|layer|h|blocks)\.(\d+)\.", name):
        return int(found[1])
    return 3 if re.search(r"lm_head|classifier|pooler|score|\bhead\b", name) else 0


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's loss in float64; transformers computes that of tokens in float32."""
    if "x" in batch:
        return F.cross_entropy(model(batch["x"]), batch["y"])
    answer = model(**batch)
    logits, labels = answer.logits, batch["labels"]
    if logits.ndim == 2:
        return answer.loss
    # A prompt's virtual tokens come before the text, and have no targets.
    labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=-100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
