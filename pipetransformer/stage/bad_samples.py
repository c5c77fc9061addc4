"""Name the sample that a model or its loss cannot take, such as a text too long.

torch does not say whose a failure is, so samples are tried one by one; the run ends anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipetransformer.feed import SampleError, part_of


def name_sample(
    error: Exception,
    what: str,
    compute: Callable[[Any], Any],
    given: Mapping[str, Any],
    ids: Tensor,
) -> Exception:
    """Return an error that names a sample which fails by itself, where others do not.

    Args:
        error: what all samples together failed with; returned where no sample is to blame.
        what: could not take them: "the model".
        compute: takes some samples of what is given.
        given: entries by name, (N, ...) each, or mappings of such.
        ids: (N,) int64, the samples.
    """
    # After an error on a GPU nothing can be tried there any more.
    if isinstance(error, torch.OutOfMemoryError) or torch.cuda.is_initialized():
        return error
    causes: list[tuple[int, Exception]] = []
    for place in range(len(ids)):
        try:
            with torch.no_grad():
                compute(part_of(dict(given), slice(place, place + 1)))
        except Exception as raised:
            causes.append((place, raised))
    if not 0 < len(causes) < len(ids):
        return error
    place, cause = causes[0]
    shown = _shown(part_of(dict(given), slice(place, place + 1)))
    others = f" (as it cannot {len(causes) - 1} others of its batch)" if len(causes) > 1 else ""
    return SampleError(f"{what} cannot take sample {int(ids[place])}{others}: {cause}; {shown}")


def _shown(entries: Mapping[str, Any]) -> str:
    """Say the shapes, dtypes and ranges of one sample's entries."""
    texts = []
    for name, entry in entries.items():
        if isinstance(entry, Mapping):
            texts.append(_shown(entry))
            continue
        dtype = str(entry.dtype).removeprefix("torch.")
        text = f"{name} is {tuple(entry.shape[1:])} {dtype}"
        if entry.numel() and not entry.is_complex():
            text += f" from {entry.min().item():g} to {entry.max().item():g}"
        texts.append(text)
    return ", ".join(texts)
