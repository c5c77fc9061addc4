"""Give a model LoRA adapters by peft: its own weights are frozen, small factors train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from pipetransformer.extras import require

_TASK_TYPES = {
    "causal": "CAUSAL_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}
"""Tasks of which peft knows what the head is called."""


@dataclass(frozen=True)
class Lora:
    """Ask for LoRA adapters.

    Args:
        rank: of each adapter's two factors.
        targets: names, or ends of names, of linear layers; None is peft's default for the kind of
            model or, where it has none, all linear layers of blocks.
    Raises:
        ValueError: the rank is below 1, or a target has no name.
    """

    rank: int
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"--lora is {self.rank}; give a rank of at least 1")
        if self.targets is not None and not all(self.targets):
            raise ValueError("--lora-targets has an empty name; give names such as q_proj,v_proj")


def add_lora(
    model: nn.Module, lora: Lora, *, task: str | None, head: str | None
) -> tuple[nn.Module, str]:
    """Wrap a model by peft; return it with a sentence of what was assumed.

    Args:
        task: the model's, for which peft may know what head trains in full.
        head: the head's name, where peft does not know it.
    Raises:
        ImportError: peft is not installed.
        ValueError: no layer has a target's name, or peft has no adapter for it.
    """
    require("peft", purpose="--lora")
    # peft takes seconds to import, and only adapters need it.
    from peft import LoraConfig, get_peft_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if lora.targets is not None:
        targets: Any = list(lora.targets)
        why = "as asked"
    elif kind in DEFAULTS:
        targets, why = DEFAULTS[kind], f"peft's default for {kind}"
    else:
        targets, why = _linear_layers(model), "the linear layers of blocks; peft has no default"
    named = _TASK_TYPES.get(task or "")
    adapters = LoraConfig(
        r=lora.rank,
        target_modules=targets,
        task_type=named,
        modules_to_save=[head] if head is not None and named is None else None,
    )
    wrapped: nn.Module = get_peft_model(model, adapters)
    spelled = targets if isinstance(targets, str) else ", ".join(dict.fromkeys(map(_end, targets)))
    return (
        wrapped,
        f"LoRA of rank {lora.rank} on {spelled} ({why}), all else but a new head frozen",
    )


def _linear_layers(model: nn.Module) -> list[str]:
    """Name the linear layers within lists of modules."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))
    ]


def _end(name: str) -> str:
    return name.rpartition(".")[2]
