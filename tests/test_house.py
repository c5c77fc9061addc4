"""Hold the rules by which the house is furnished: rooms have faces, and nobody goes past one."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.house import ROOT, all_modules, imports_of, name_of, rooms


@pytest.mark.parametrize("room", rooms(), ids=name_of)
def test_a_room_has_a_face_that_says_its_job(room: Path) -> None:
    face = room / "__init__.py"
    assert ast.get_docstring(ast.parse(face.read_text()))


@pytest.mark.parametrize("room", rooms(), ids=name_of)
def test_a_face_shows_each_name_once(room: Path) -> None:
    names = Counter(importlib.import_module(name_of(room / "__init__.py")).__all__)
    assert [name for name, count in names.items() if count > 1] == []


def test_nobody_imports_past_a_face() -> None:
    owner = {name_of(path): name_of(path.parent) for path in all_modules()}
    faced = {name_of(room) for room in rooms() if not any(room.glob("*/__init__.py"))}
    past = [
        f"{name_of(path)} -> {imported}"
        for path in (*all_modules(), *(ROOT / "experiments").rglob("*.py"))
        for imported in imports_of(path)
        if owner.get(imported) in faced and owner[imported] != name_of(path.parent)
    ]
    assert past == []
