"""Hold the layout's rules: packages have interfaces, and nobody imports past one."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.layout import (
    PACKAGES,
    ROOT,
    all_modules,
    all_packages,
    imports_of,
    interface_of,
    name_of,
)


@pytest.mark.parametrize("package", all_packages(), ids=name_of)
def test_a_package_says_its_job(package: Path) -> None:
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


@pytest.mark.parametrize("package", all_packages(), ids=name_of)
def test_a_package_exports_each_name_once(package: Path) -> None:
    names = Counter(importlib.import_module(name_of(package / "__init__.py")).__all__)
    assert [name for name, count in names.items() if count > 1] == []


def test_nobody_imports_past_an_interface() -> None:
    """A package has an `__init__`; a module beside packages may offer names by `__all__`."""
    modules = {name_of(path): path for path in all_modules()}
    # Behind the interface of an inner package there may be more packages.
    deep = [path for path in all_packages() if len(path.relative_to(ROOT).parts) > 2]
    inside = {name_of(path): name_of(path.parent) for path in (*modules.values(), *deep)}
    past = [
        f"{name_of(path)} -> {imported}"
        for folder in (*PACKAGES, "experiments", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for imported, names in imports_of(path)
        if imported in inside and not f"{name_of(path)}.".startswith(f"{inside[imported]}.")
        if imported not in modules or names - interface_of(modules[imported])
    ]
    assert past == []
