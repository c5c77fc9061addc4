"""Write tables and bytes as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

_NUMBER = re.compile(r"([0-9.]+( ?[A-Za-z%]+)?)?|none")


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns under the names in the first row: words to the left, numbers to the right.

    A number may have a unit; a column whose cells are all empty or "none" counts as one of
    numbers. Rows may lack their last cells.
    """
    columns = [list(column) for column in zip_longest(*rows, fillvalue="")]
    for column in columns:
        width = max(map(len, column))
        is_number = all(map(_NUMBER.fullmatch, column[1:]))
        column[:] = [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def as_bytes(count: float) -> str:
    """Write bytes with the unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
