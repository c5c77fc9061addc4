"""Prove that the commands on the pages of results and of experiments name scripts here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GONE = "The program is gone since"
PAGES = [
    page
    for page in [
        ROOT / "experiments/README.md",
        *sorted(ROOT.glob("experiments/results/*/README.md")),
    ]
    if GONE not in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_what_a_page_asks_for_is_here(page: Path) -> None:
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    modules = re.findall(r"python -m (\S+)", "".join(blocks))
    assert modules
    for module in modules:
        script = ROOT / module.replace(".", "/")
        assert script.with_suffix(".py").exists() or (script / "__main__.py").exists(), module
