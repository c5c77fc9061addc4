"""Make six samples that a class takes: what its forward names, in the shapes it goes through with.

Shapes are found by trial. A batch is tried after the other, and where a forward says how many
features it has for how many tokens, texts get so many.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from experiments.census.batches import EOS, NUM_CLASSES, NUM_TOKENS
from experiments.census.part_subjects import SIDE
from experiments.census.subjects import Subject

NUM_SAMPLES, LENGTH = 6, 12

Batch = dict[str, Any]

_WIDTH = 32
"""Of hidden states, in `tiny.py`."""

_MOST_TOKENS = 600
"""Of an image or a sound, in a text."""


def part_batch(model: nn.Module, subject: Subject) -> Batch:
    """Return a batch's entries; lists have one for each sample, others a sample's share of them.

    Raises:
        Exception: of the first batch tried, where the model's forward has taken none.
    """
    errors: list[Exception] = []
    for make in _kinds(model, subject):
        nums = [1]
        for num_tokens in nums:
            torch.manual_seed(0)
            batch = make(num_tokens)
            try:
                loss_of(model, batch)
            except Exception as raised:  # Any: another batch is tried.
                errors.append(raised)
                if num_tokens == 1:
                    nums += _features_in(str(raised))
            else:
                return batch
    raise errors[0]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return a model's own loss; where it has none, the mean square of what it returns.

    Raises:
        ValueError: the loss is no number, or nothing learns by it.
    """
    if "x" in batch:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    answer = model(
        **{n: one.clone() if isinstance(one, Tensor) else one for n, one in batch.items()}
    )
    loss: Tensor | None = getattr(answer, "loss", None)
    if loss is None:
        outputs = [one for one in tree_leaves(dict(answer)) if isinstance(one, Tensor)]
        loss = sum(one.square().mean() for one in outputs if one.requires_grad)  # type: ignore
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError("nothing in what its own forward returns needs a gradient")
    if loss.ndim:
        loss = loss.mean()
    if not math.isfinite(float(loss.detach())):
        raise ValueError(f"its own loss is {float(loss.detach())}")
    return loss


def _features_in(text: str) -> list[int]:
    """Return how many features a sample may have, by the error of a forward."""
    found = re.search(r"tokens\D{0,30}\d+\D{0,60}features\D{0,30}(\d+)", text)
    num = int(found[1]) // NUM_SAMPLES if found else 0
    # Some count numbers, and not vectors.
    return [one for one in (num, num // _WIDTH) if 1 < one <= _MOST_TOKENS]


def _kinds(model: nn.Module, subject: Subject) -> Iterator[Callable[[int], Batch]]:
    names = tuple(inspect.signature(type(model).forward).parameters)
    if subject.task == "backbone":
        images = torch.randn(NUM_SAMPLES, 3, SIDE, SIDE)
        yield lambda _: {"x": images, "y": torch.arange(NUM_SAMPLES) % NUM_CLASSES}
        return
    config: Any = model.config
    texts = partial(_texts, config, names)
    for pieces in _sources(config, names):
        if subject.task in ("image-text", "speech", "seq2seq"):
            yield lambda num, pieces=pieces: {**texts(num), **pieces}  # type: ignore[misc]
        else:
            for targets in _targets(subject.task, names, pieces):
                words = texts(1) if "input_ids" in names else {}
                words.pop("labels", None)
                yield lambda _, all={**words, **pieces, **targets}: all  # type: ignore[misc]


def _texts(config: Any, names: tuple[str, ...], num_tokens: int) -> Batch:
    """Return texts with a row of an image's or a sound's tokens, and one padded at its right."""
    draw = partial(torch.randint, 3, NUM_TOKENS)
    labels = {"labels": draw((NUM_SAMPLES, LENGTH - 4))}
    if "input_ids" not in names:
        return labels
    token = next((value for name in _MEDIA if (value := getattr(config, name, None))), None)
    length = LENGTH + (num_tokens if token is not None else 0)
    ids, mask = draw((NUM_SAMPLES, length)), torch.ones(NUM_SAMPLES, length, dtype=torch.int64)
    mask[1, length - 3 :] = 0
    ids = ids.where(torch.arange(length) < mask.sum(1, keepdim=True) - 1, EOS) * mask
    if token is not None:
        ids[:, 2 : 2 + num_tokens] = token
    batch = {"input_ids": ids, "attention_mask": mask}
    of_media = ids == (-1 if token is None else token)
    batch |= {"mm_token_type_ids": of_media.long(), "token_type_ids": of_media.long()}
    batch |= {"qformer_input_ids": ids, "qformer_attention_mask": mask}
    if not config.is_encoder_decoder:
        labels = {"labels": ids.masked_fill((mask == 0) | of_media, -100)}
    return {n: one for n, one in {**batch, **labels}.items() if n in names}


_MEDIA = (
    "image_token_id", "image_token_index", "audio_token_id", "audio_token_index",
    "speech_token_id", "media_token_id", "image_patch_id",
)  # fmt: skip


def _sources(config: Any, names: tuple[str, ...]) -> Iterator[Batch]:
    """Yield what there is beside texts: nothing, images in several shapes, or sounds."""
    if "pixel_values" in names:
        yield from _images(config, names)
    elif "flattened_patches" in names:
        for side in (8, 16):
            places = torch.stack([torch.arange(16) // 4, torch.arange(16) % 4], dim=1) + 1.0
            patches = torch.randn(NUM_SAMPLES, 16, 3 * side * side)
            yield {
                "flattened_patches": torch.cat(
                    [places.to(patches).expand(NUM_SAMPLES, 16, 2), patches], dim=2
                )
            }
    elif "input_features" in names or "input_values" in names:
        yield from _sounds(config, names)
    else:
        yield {}


def _images(config: Any, names: tuple[str, ...]) -> Iterator[Batch]:
    side = _first(config, "image_size") or 64
    side = max(side) if isinstance(side, (list, tuple)) else side
    if "image_grid_thw" in names or "grid_thw" in names:
        yield from _patches(config, "image_grid_thw" if "image_grid_thw" in names else "grid_thw")
    for size in dict.fromkeys((side, 64, 128)):
        for tiles in ((), (1,), (2,)):
            if tiles and size != side:
                continue
            batch = {"pixel_values": torch.randn(NUM_SAMPLES, *tiles, 3, size, size)}
            yield batch
            further = {
                "image_sizes": torch.full((NUM_SAMPLES, 2), size),
                "batch_num_images": torch.ones(NUM_SAMPLES, dtype=torch.int64),
                "aspect_ratio_ids": torch.ones(NUM_SAMPLES, 1, dtype=torch.int64),
                "aspect_ratio_mask": torch.ones(NUM_SAMPLES, 1, *tiles, dtype=torch.int64),
                "prompt_depth": torch.rand(NUM_SAMPLES, 1, size // 4, size // 4),
            }
            if own := {name: one for name, one in further.items() if name in names}:
                yield {**batch, **own}


def _patches(config: Any, grid: str) -> Iterator[Batch]:
    """Yield all patches of all images in a row, 4 x 4 of each, flat and not."""
    vision = config.vision_config
    channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    side, frames = getattr(vision, "patch_size", 8), getattr(vision, "temporal_patch_size", 1)
    grids, num = torch.tensor([[1, 4, 4]]).repeat(NUM_SAMPLES, 1), NUM_SAMPLES * 16
    for shape in ((channels * side * side * frames,), (channels, side, side)):
        yield {"pixel_values": torch.randn(num, *shape), grid: grids}


def _sounds(config: Any, names: tuple[str, ...]) -> Iterator[Batch]:
    if "input_values" in names:
        yield {"input_values": torch.randn(NUM_SAMPLES, 3200)}
        yield {"input_values": torch.randn(NUM_SAMPLES, 1, 3200)}
    name = "input_features" if "input_features" in names else "input_values"
    fields = (
        "num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel", "input_dim",
        "feature_projection_input_dim", "d_model",
    )  # fmt: skip
    bins = next((num for field in fields if isinstance(num := _first(config, field), int)), 80)
    length = 2 * (_first(config, "max_source_positions") or 24)
    for shape in dict.fromkeys(
        ((bins, length), (length, bins), (length, 160), (200, 16), (80, length))
    ):
        masks: list[Batch] = [{}]
        for mask in ("input_features_mask", "feature_attention_mask"):
            if mask in names:
                masks.insert(0, {mask: torch.ones(NUM_SAMPLES, length, dtype=torch.int64)})
        for further in masks:
            yield {name: torch.randn(NUM_SAMPLES, *shape), **further}


def _targets(task: str, names: tuple[str, ...], pieces: Batch) -> Iterator[Batch]:
    """Yield targets in the shapes that are used; nothing comes last."""
    size = next(iter(pieces.values())).shape[-2:] if pieces else (32, 32)
    classes = torch.arange(NUM_SAMPLES) % NUM_CLASSES
    boxes = [torch.rand(1 + i % 2, 4) * 0.3 + 0.3 for i in range(NUM_SAMPLES)]
    masks = [torch.rand(1 + i % 2, *size).round() for i in range(NUM_SAMPLES)]
    kinds = [torch.arange(1 + i % 2) for i in range(NUM_SAMPLES)]
    if "mask_labels" in names:
        yield {"mask_labels": masks, "class_labels": kinds}
    elif task in ("detection", "instance", "zero-shot", "universal"):
        yield {
            "labels": [
                {"class_labels": k, "boxes": b, "masks": m}
                for k, b, m in zip(kinds, boxes, masks, strict=True)
            ]
        }
    elif task == "semantic":
        yield {"labels": torch.randint(0, NUM_CLASSES, (NUM_SAMPLES, *size))}
    elif task == "depth":
        yield {"labels": torch.rand(NUM_SAMPLES, *size)}
    elif task == "ctc":
        yield {"labels": torch.randint(3, NUM_TOKENS, (NUM_SAMPLES, 3))}
    elif task == "audio":
        yield {"labels": classes}
    yield {}


def _first(config: Any, name: str) -> Any:
    """Return a field of a configuration, or of one within it; None where there is none."""
    found = getattr(config, name, None)
    if found is not None:
        return found
    for inner in vars(config).values():
        if hasattr(inner, "model_type") and (found := _first(inner, name)) is not None:
            return found
    return None


def part_samples(batch: Batch) -> list[Batch]:
    """Return a batch as a data set of its samples."""
    return [
        {
            name: entry[i] if len(entry) == NUM_SAMPLES else entry.chunk(NUM_SAMPLES)[i]
            for name, entry in batch.items()
        }
        for i in range(NUM_SAMPLES)
    ]


def joined(bundled: frozenset[str], items: list[Batch]) -> Batch:
    """Join samples to a batch: entries that have many a sample in a row, dicts in a list."""
    batch: Batch = {}
    for name in items[0]:
        own = [item[name] for item in items]
        is_alike = all(isinstance(one, Tensor) and one.shape == own[0].shape for one in own)
        if name in bundled:
            batch[name] = torch.cat(own)
        else:
            batch[name] = torch.stack(own) if is_alike and name not in _LISTS else own
    return batch


_LISTS = ("mask_labels", "class_labels")
