"""Let a killed run go on only as it was asked for, and nothing else into its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OPTIONS_FILE = "options.json"
"""What a run of ours was asked for, in its folder from the start on."""
SAVED_LOOP = "loop.safetensors"
"""A plain loop as of the end of an epoch, in a run's folder until that is complete."""


def refuse_another_kind(folder: Path, *, is_plain: bool) -> None:
    """Raise a ValueError where a folder holds a killed run of ours, or of a rival, and now trains
    the other."""
    if is_plain and (folder / OPTIONS_FILE).exists():
        raise ValueError(f"{folder} holds records of ours; give a new --output_dir")
    if not is_plain and (folder / SAVED_LOOP).exists():
        raise ValueError(f"{folder} holds a rival that was killed; give a new --output_dir")


def as_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as a file of JSON gives them back."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def refuse_others(folder: Path, had: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise a ValueError that names what the run in a folder had otherwise than is asked now."""
    if other := sorted(name for name in {**had, **asked} if had.get(name) != asked.get(name)):
        raise ValueError(
            f"{folder} holds a killed run with another {', '.join(other)}; give the same, or "
            "a new --output_dir"
        )
