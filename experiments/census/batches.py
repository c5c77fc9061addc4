"""Make four samples for a task, of which one is padded at its right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.census.exceptions import IMAGE_SIZES
from experiments.census.subjects import Subject
from experiments.census.timm_models import MODELS

NUM_SAMPLES, LENGTH, NUM_TOKENS = 4, 12, 100
NUM_CLASSES = 3
EOS = 2


def batch_for(subject: Subject) -> dict[str, Tensor]:
    """Return a batch's entries; labels are right for the task."""
    generator = torch.Generator().manual_seed(0)
    task, family = subject.task, subject.family
    if subject.task == "timm":
        side = MODELS[family][1].get("img_size", 64)
        pixels = torch.randn(NUM_SAMPLES, 3, side, side, generator=generator)
        return {"x": pixels, "y": _CLASSES}
    if task == "image" and family != "imagegpt":
        side = IMAGE_SIZES.get(family, 32)
        pixels = torch.randn(NUM_SAMPLES, 3, side, side, generator=generator)
        return _joined({"pixel_values": pixels, "labels": _CLASSES}, _further(subject, pixels))
    ids = torch.randint(3, NUM_TOKENS, (NUM_SAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 3 :] = 0
    # Encoder-decoders classify by the state at the last end of a sentence.
    ids = ids.where(torch.arange(LENGTH) < mask.sum(1, keepdim=True) - 1, EOS) * mask
    batch = {"input_ids": ids, "attention_mask": mask, **_targets(task, ids, mask)}
    return _joined(batch, _further(subject, ids))


def _joined(batch: dict[str, Tensor], further: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Replace and add entries; None takes one away."""
    return {name: entry for name, entry in {**batch, **further}.items() if entry is not None}


_CLASSES = torch.arange(NUM_SAMPLES) % NUM_CLASSES


def _targets(task: str, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    if task == "question":
        starts = torch.arange(NUM_SAMPLES)
        return {"start_positions": starts, "end_positions": starts + 4}
    if task in ("sequence", "image"):
        return {"labels": _CLASSES}
    labels = ids % NUM_CLASSES if task == "token" else ids
    return {"labels": labels.masked_fill(mask == 0, -100)}


def _further(subject: Subject, main: Tensor) -> dict[str, Tensor | None]:
    """Return entries that a family's forward needs beside those of its task, or instead."""
    family = subject.family
    if family == "bros":
        return {"bbox": torch.rand(NUM_SAMPLES, LENGTH, 4)}
    if family == "git":
        return {"pixel_values": torch.randn(NUM_SAMPLES, 3, 32, 32)}
    if family == "lxmert":  # Its answers are classes, not spans.
        feats, places = torch.rand(NUM_SAMPLES, 5, 2048), torch.rand(NUM_SAMPLES, 5, 4)
        answers = {"labels": _CLASSES, "start_positions": None, "end_positions": None}
        return {"visual_feats": feats, "visual_pos": places, **answers}
    if family.startswith("musicgen"):
        return {"labels": main.unsqueeze(-1)}
    if (
        family == "longformer" and subject.task == "question"
    ):  # A question ends where a text begins.
        ids = main.clone()
        ids[:, 3:5] = EOS
        return {"input_ids": ids}
    if family == "perceiver":
        return {"inputs": main, "input_ids": None, "pixel_values": None}
    if family == "siglip2":
        patches = main.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).flatten(3)
        return {
            "pixel_values": patches.flatten(1, 2),
            "pixel_attention_mask": torch.ones(NUM_SAMPLES, 16, dtype=torch.int64),
            "spatial_shapes": torch.full((NUM_SAMPLES, 2), 4),
        }
    return {}


def samples_of(batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return a batch as a data set of its samples."""
    size = len(next(iter(batch.values())))
    return [{name: entry[i] for name, entry in batch.items()} for i in range(size)]
