"""Build tiny language models with quantized bases, as people build them for QLoRA.

Each kind quantizes the linear layers of a model on the CPU, by its library's own kernels.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

NUM_BLOCKS, WORDS, LENGTH = 4, 64, 8


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a pretrained Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tempfile.TemporaryDirectory()
    transformers.LlamaForCausalLM(config).save_pretrained(folder.name)
    return folder


def _loaded(quantization: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(_folder().name, quantization_config=quantization)


def _nf4() -> Any:
    pytest.importorskip("bitsandbytes")
    # Scales that are quantized, too, as in the paper.
    return _loaded(
        BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    )


def _int8() -> Any:
    pytest.importorskip("bitsandbytes")
    return _loaded(BitsAndBytesConfig(load_in_8bit=True))


def _torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return _loaded(TorchAoConfig(quantization.Int8WeightOnlyConfig()))


class Halves(Tensor):
    """Keep a weight as float16, and compute with it in float32: any other wrapper subclass."""

    stored: Tensor

    @staticmethod
    def __new__(cls, half: Tensor) -> Halves:
        wrapper: Halves = Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32)
        wrapper.stored = half
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Halves:
        return Halves(inner["stored"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].stored)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].stored.copy_(getattr(args[1], "stored", args[1]))
            return args[0]
        opened = tree_map(lambda one: one.stored.float() if isinstance(one, cls) else one, args)
        return func(*opened, **(kwargs or {}))


def _any_other() -> Any:
    model = AutoModelForCausalLM.from_pretrained(_folder().name)
    for module in model.get_submodule("model.layers").modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Halves(module.weight.detach().half()), False)
    return model


KINDS: dict[str, Callable[[], Any]] = {
    "4 bits": _nf4,
    "8 bits": _int8,
    "torchao": _torchao,
    "any other": _any_other,
}


def adapted(kind: str, *, learns: Sequence[int] = (2, 3)) -> Any:
    """Build a quantized Llama with LoRA in some blocks."""
    model = peft.prepare_model_for_kbit_training(KINDS[kind](), use_gradient_checkpointing=False)
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [*learns]}
    config = peft.LoraConfig(**options, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def texts(num: int = 8) -> list[dict[str, Tensor]]:
    words = torch.randint(0, WORDS, (num, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one} for one in words]


def blocks_of(model: Any) -> Any:
    return model.get_base_model().model.layers


def weight_of(model: Any, block: int = 0) -> Any:
    """Return a quantized weight."""
    return blocks_of(model)[block].mlp.up_proj.weight


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def keep_layout(model: nn.Module) -> None:
    """Have no forward lay 4-bit weights out in another way, which has no gradient."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
