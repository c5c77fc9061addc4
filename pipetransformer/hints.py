"""Say which known name an unknown one may stand for."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(names: Iterable[str], known: Iterable[str], most: int = 1) -> str:
    """Return "; did you mean 'epochs'?" for unknown names, or "" where none is like a known one.

    Args:
        most: suggestions for a name.
    """
    known = list(known)
    near = {one: None for name in names for one in get_close_matches(name, known, n=most)}
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
