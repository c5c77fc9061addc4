"""Let a killed run go on only as it was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
