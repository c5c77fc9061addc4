"""Hold the layout's rules: packages have interfaces, and nobody imports past one."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.layout import ROOT, all_modules, all_packages, imports_of, name_of


@pytest.mark.parametrize("package", all_packages(), ids=name_of)
def test_a_package_says_its_job(package: Path) -> None:
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


@pytest.mark.parametrize("package", all_packages(), ids=name_of)
def test_a_package_exports_each_name_once(package: Path) -> None:
    names = Counter(importlib.import_module(name_of(package / "__init__.py")).__all__)
    assert [name for name, count in names.items() if count > 1] == []


def test_nobody_imports_past_an_interface() -> None:
    owner = {name_of(path): name_of(path.parent) for path in all_modules()}
    leaves = {name_of(one) for one in all_packages() if not any(one.glob("*/__init__.py"))}
    past = [
        f"{name_of(path)} -> {imported}"
        for path in (*all_modules(), *(ROOT / "experiments").rglob("*.py"))
        for imported in imports_of(path)
        if owner.get(imported) in leaves and owner[imported] != name_of(path.parent)
    ]
    assert past == []
