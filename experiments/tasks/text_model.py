"""Load a text model and its tokenizer, and call the model as a plain loop does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

_BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Models whose positions begin behind the number of the padding token."""


@dataclass(frozen=True)
class TextSource:
    """Say which model and which data.

    Args:
        model: a folder or a name of the hub, with its tokenizer.
        data: a folder with the task's files; None takes the hub's data set.
        max_length: tokens; what is beyond is cut.
        most_train, most_eval: samples; None takes all.
        seed: of the new head.
        held_out: samples of the training file, behind those that train, that are judged, too.
    """

    model: str
    data: str | None
    max_length: int
    most_train: int | None
    most_eval: int | None
    seed: int
    held_out: int = 0


def load_tokenizer(model: str, max_length: int) -> Any:
    """Load the tokenizer of a model.

    Args:
        model: a folder or a name of the hub.
        max_length: tokens of the longest text that it is given.
    Raises:
        ValueError: there is none, or it is another model's, or the model takes shorter texts.
    """
    if model.startswith((".", "/")) and not Path(model).is_dir():
        raise ValueError(f"--model_name_or_path {model}: there is no such folder")
    config = AutoConfig.from_pretrained(model)
    if not hasattr(config, "vocab_size"):
        raise ValueError(
            f"--model_name_or_path {model} is a {config.model_type}, which reads no texts; give "
            "a text model, such as bert-base-uncased"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # What transformers makes of a folder without one.
        raise ValueError(
            f"{model} has no tokenizer: to it all words are unknown; put the pretrained model's "
            "tokenizer files beside the weights"
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {model} has {len(tokenizer)} tokens, and the model "
            f"{config.vocab_size}; give the model its own tokenizer"
        )
    first = config.pad_token_id + 1 if config.model_type in _BEHIND_PADDING else 0
    if max_length > (positions := config.max_position_embeddings - first):
        raise ValueError(
            f"--max_seq_length is {max_length}, but {model} has {positions} positions"
        )
    return tokenizer


def build_text_model(kind: Any, source: TextSource, small: bool, **options: Any) -> nn.Module:
    """Load a model, or the lower half of its layers; a new head follows from the seed."""
    torch.manual_seed(source.seed)
    if small:
        config = kind.from_pretrained(source.model, **options).config
        options["num_hidden_layers"] = (config.num_hidden_layers + 1) // 2
        if hasattr(config, "layer_types"):
            options["layer_types"] = config.layer_types[: options["num_hidden_layers"]]
        torch.manual_seed(source.seed)
    model: nn.Module = kind.from_pretrained(source.model, **options)
    return model


def text_forward(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits of a classifier, or those of starts and ends, (N, S, 2)."""
    output = model(**batch)
    if "logits" in output:
        return output["loss"], output["logits"]
    return output["loss"], torch.stack((output["start_logits"], output["end_logits"]), dim=-1)
