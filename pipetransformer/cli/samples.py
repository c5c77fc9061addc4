"""Make up samples for a model of transformers, in host memory: texts or images, and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.model import entry_names

_NUM_SAMPLES = 4


def draw_texts(model: nn.Module, config: Any, length: int) -> dict[str, Tensor]:
    """Draw (4, length) texts of ordinary tokens; a mask makes the second one shorter."""
    text, takes = config.get_text_config(), entry_names(model).inputs
    special = {
        name: number
        for part in (config, text)
        for name, number in part.to_dict().items()
        if name.endswith("token_id") and isinstance(number, int) and number >= 0
    }
    ordinary = [n for n in range(1, min(text.vocab_size, 1000)) if n not in special.values()]
    tokens = torch.tensor(ordinary, device="cpu")[_drawn(len(ordinary), (_NUM_SAMPLES, length))]
    end = special.get("eos_token_id")
    if end is not None:
        tokens[:, -1] = end  # BART reads its classes off there.
    batch = {"input_ids": tokens}
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = tokens.clone()
    elif "attention_mask" in takes:
        mask = batch["attention_mask"] = torch.ones_like(tokens)
        mask[1, -(length // 3) :] = 0 if length >= 3 else 1
        tokens[mask == 0] = special.get("pad_token_id", ordinary[0])
    return batch


def draw_images(config: Any, name: str) -> Tensor:
    """Draw (4, C, H, W) images of a configuration's size; `name` is its model's, for errors."""
    seen = image_config(config)
    sides = getattr(seen, "image_size", None)
    if sides is None:
        raise ValueError(f"the configuration of {name} has no image_size; add it there")
    both = (sides, sides) if isinstance(sides, int) else tuple(sides)
    return drawn_images(getattr(seen, "num_channels", 3), *both)


def image_config(config: Any) -> Any:
    """Return the configuration's part that is of images."""
    return getattr(config, "vision_config", None) or config


def draw_targets(
    model: nn.Module, config: Any, batch: Mapping[str, Tensor], task: str | None
) -> dict[str, Tensor]:
    names, main = entry_names(model).targets, next(iter(batch.values()))
    if names != ("labels",):
        return {name: _drawn(main.shape[1], (_NUM_SAMPLES,)) for name in names}
    if task in ("sequence-classification", "image-classification"):
        labels = _drawn(max(2, config.num_labels), (_NUM_SAMPLES,))
        return {"labels": labels.float() if config.num_labels == 1 else labels}
    is_of_words = task in ("causal", "masked", None)
    labels = main.clone() if is_of_words else _drawn(config.num_labels, tuple(main.shape))
    if "attention_mask" in batch:
        labels[batch["attention_mask"] == 0] = -100
    return {"labels": labels}


def _drawn(bound: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(bound, shape, generator=generator, device="cpu")


def drawn_images(*shape: int) -> Tensor:
    """Draw (4, C, H, W) images."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(_NUM_SAMPLES, *shape, generator=generator, device="cpu")
