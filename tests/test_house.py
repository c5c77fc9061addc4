"""Hold the rules by which the house is furnished: rooms have faces, and nobody goes past one."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipetransformer", "freeze", "autopipe", "autodp", "autocache")


def modules(folder: Path) -> list[Path]:
    """Return a folder's own modules, without its face."""
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def rooms() -> list[Path]:
    """Return every package, and every room within one."""
    packages = [ROOT / name for name in PACKAGES]
    inner = [path.parent for package in packages for path in package.glob("*/__init__.py")]
    return [*packages, *inner]


def name_of(path: Path) -> str:
    """Return a module's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def all_modules() -> list[Path]:
    """Return all modules of the packages, without faces."""
    return [path for room in rooms() for path in modules(room)]


@pytest.mark.parametrize("room", rooms(), ids=name_of)
def test_a_room_has_a_face_that_says_its_job(room: Path) -> None:
    face = room / "__init__.py"
    assert ast.get_docstring(ast.parse(face.read_text()))


@pytest.mark.parametrize("room", rooms(), ids=name_of)
def test_a_face_shows_each_name_once(room: Path) -> None:
    names = Counter(importlib.import_module(name_of(room / "__init__.py")).__all__)
    assert [name for name, count in names.items() if count > 1] == []


def definitions(path: Path) -> Iterator[ast.stmt]:
    """Yield a module's public functions and classes."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


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
