"""Hold the conformance list to the tests it names, and the package to the documented names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import autopipe
import pipetransformer

TESTS = Path(__file__).parent
MODULES = {
    "balance": ("balance_by_size", "balance_by_time"),
    "skip": ("Namespace", "pop", "skippable", "stash", "verify_skippables"),
}


def test_every_test_that_the_conformance_list_names_exists() -> None:
    listed = set(re.findall(r"`(test_\w+)`", (TESTS / "manual.md").read_text()))
    texts = (path.read_text() for path in TESTS.parent.rglob("test_*.py"))
    defined = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.M)}
    assert len(listed) > 100
    assert sorted(listed - defined) == []


def test_every_line_of_the_conformance_list_names_a_test_or_says_why_not() -> None:
    text = (TESTS / "manual.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    claims = [row for row in rows if not row.startswith(("| Section", "| ---"))]
    assert len(claims) > 100
    for row in claims:
        assert re.search(r"`test_\w+`", row) or "not tested:" in row, row


def test_documented_names_are_where_the_manual_has_them() -> None:
    for package in (pipetransformer, autopipe):
        for name in ("GPipe", "is_checkpointing", "is_recomputing"):
            assert getattr(package, name) is getattr(autopipe, name)
        for module, names in MODULES.items():
            imported = importlib.import_module(f"{package.__name__}.{module}")
            assert imported is getattr(package, module)
            for name in names:
                assert getattr(imported, name) is getattr(getattr(autopipe, module), name)
