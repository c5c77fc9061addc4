"""Prove that a user can import what the documentation says is raised or returned."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.layout import PACKAGES, all_modules, definitions

CLASSES = {
    node.name
    for path in all_modules()
    for node in definitions(path)
    if isinstance(node, ast.ClassDef)
}
"""The public classes of the packages' modules, wherever they are."""


def public_parts(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield what a package shows, with the public methods of its classes."""
    for name in module.__all__:
        part = getattr(module, name)
        if inspect.ismodule(part):
            continue
        yield name, part
        if inspect.isclass(part):
            for method, inner in vars(part).items():
                inner = inner.fget if isinstance(inner, property) else inner
                inner = getattr(inner, "__func__", inner)
                if not method.startswith("_") and inspect.isfunction(inner):
                    yield f"{name}.{method}", inner


def section(part: Any, title: str) -> str:
    """Return what stands under a title of a docstring."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)*)", f"{inspect.getdoc(part)}\n", re.MULTILINE)
    return textwrap.dedent(found.group(1)) if found else ""


def raised(part: Any) -> set[str]:
    """Name the exceptions that a docstring says are raised."""
    lines = re.findall(r"^(\w+(?:, \w+)*):", section(part, "Raises"), re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def returned(part: Any) -> set[str]:
    """Name the packages' classes that are returned, by the docstring or the annotation."""
    annotation = part.__annotations__.get("return", "") if inspect.isfunction(part) else ""
    return CLASSES & set(re.findall(r"\w+", f"{section(part, 'Returns')} {annotation}"))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_raised_or_returned_can_be_imported_from_its_package(package: str) -> None:
    module = importlib.import_module(package)
    missing = [
        f"{where}: {name}"
        for where, part in public_parts(module)
        for name in sorted(raised(part) | returned(part))
        if not hasattr(module, name) and not hasattr(builtins, name)
    ]
    assert missing == []


def test_names_are_found_in_docstrings() -> None:
    trainer = importlib.import_module("pipetransformer").Trainer
    assert raised(trainer) == {"TypeError", "ValueError"}
    assert raised(trainer.verify) >= {"VerificationError", "ValueError"}
    assert returned(trainer.step) == {"StepResult"}
