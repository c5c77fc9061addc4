"""Let mkdocstrings read our docstrings, whose sections follow each other without an empty line."""

from __future__ import annotations

import re
from typing import Any

import griffe

_TITLE = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Raises|Returns|Yields):\n|Source: )")


def separated(text: str) -> str:
    """Return a docstring with an empty line before each section."""
    return _TITLE.sub("\n\n", text)


class SeparateSections(griffe.Extension):
    """Separate the sections of every docstring that is read."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = separated(obj.docstring.value)
