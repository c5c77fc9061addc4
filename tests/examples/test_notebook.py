"""Prove that the notebook runs, and prints what is stored in it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.examples import notebook

PATH = Path(__file__).parents[2] / "examples/freeze_and_cache.ipynb"


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """Return what a cell printed; pictures differ between versions of what draws them."""
    return ["".join(one["text"]) for one in outputs if one["output_type"] == "stream"]


def pictures(outputs: list[dict[str, Any]]) -> list[bytes]:
    return [base64.b64decode(one["data"]["image/png"]) for one in outputs if "data" in one]


@pytest.mark.slow
def test_the_notebook_prints_and_draws_what_is_stored_in_it() -> None:
    held = notebook.read(PATH)
    stored = [cell["outputs"] for cell in held["cells"] if cell["cell_type"] == "code"]
    found = notebook.run(held)
    assert [texts(one) for one in found] == [texts(one) for one in stored]
    assert [len(pictures(one)) for one in found] == [len(pictures(one)) for one in stored]
    assert sum(len(pictures(one)) for one in stored) == 1
    said = "".join(line for one in stored for line in texts(one))
    assert "losses of 64 steps are equal" in said
    assert said.count("    0       2        256") == 1  # of the second run


def test_the_notebook_is_small_and_a_notebook() -> None:
    held = notebook.read(PATH)
    assert PATH.stat().st_size < 60_000
    assert (held["nbformat"], held["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in held["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in held["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert ("outputs" in cell) == (cell["cell_type"] == "code")


def test_outputs_are_written_into_a_notebook(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": ["x = 2\n", "print(x * 3)"]}
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": []}, cell]}))
    notebook.write(path)
    (_, written) = notebook.read(path)["cells"]
    assert written["execution_count"] == 1
    assert texts(written["outputs"]) == ["6\n"]
