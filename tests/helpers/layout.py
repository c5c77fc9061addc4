"""List the packages, their modules and what these define."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

PACKAGES = ("pipetransformer", "freeze", "autopipe", "autodp", "autocache")


def modules(folder: Path) -> list[Path]:
    """Return a folder's own modules, without its `__init__`."""
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def all_packages() -> list[Path]:
    """Return every package, and every package within one."""
    packages = [ROOT / name for name in PACKAGES]
    inner = [path.parent for package in packages for path in package.glob("*/__init__.py")]
    return [*packages, *inner]


def name_of(path: Path) -> str:
    """Return a module's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def all_modules() -> list[Path]:
    """Return all modules of the packages, without `__init__`."""
    return [path for package in all_packages() for path in modules(package)]


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
