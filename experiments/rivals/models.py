"""Build what each baseline trains."""

from __future__ import annotations

from torch import nn

from experiments.finetune.options import RunOptions
from experiments.tasks.workload import Workload


def build_model(options: RunOptions, workload: Workload) -> nn.Module:
    """Build what a baseline trains."""
    model = workload.build(options.baseline == "small")
    return with_lora(model) if options.baseline == "lora" else model


def with_lora(model: nn.Module) -> nn.Module:
    """Return the model with low-rank updates of its attention, and a head that trains."""
    from peft import LoraConfig, get_peft_model  # Optional.

    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    of_attention = ("query", "key", "value", "qkv", "Wqkv", "q_lin", "k_lin", "v_lin")
    of_head = ("classifier", "pre_classifier", "qa_outputs", "head", "pooler")
    attention, heads = ([n for n in some if n in names] for some in (of_attention, of_head))
    adapted: nn.Module = get_peft_model(
        model,
        LoraConfig(r=8, lora_alpha=16, target_modules=attention, modules_to_save=heads),
    )
    return adapted


def without_lora(model: nn.Module) -> nn.Module:
    """Return the model itself, with the updates in its weights where `with_lora` gave it some."""
    merge = getattr(model, "merge_and_unload", None)
    if merge is None:
        return model
    merged: nn.Module = merge()
    return merged
