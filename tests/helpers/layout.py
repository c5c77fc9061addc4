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
    return [
        path.parent for name in PACKAGES for path in sorted((ROOT / name).rglob("__init__.py"))
    ]


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


def imports_of(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield the modules that a file imports from, and the names that it takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            yield from ((alias.name, {alias.name}) for alias in node.names)


def interface_of(module: Path) -> set[str]:
    """Return the names that a module offers to other packages, by its `__all__`."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()
