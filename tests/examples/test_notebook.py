"""Prove that the notebook runs, and prints what is stored in it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.examples import notebook

PATH = Path(__file__).parents[2] / "examples/freeze_and_cache.ipynb"
TIMES = re.compile(r"^(with.* rows): .*", re.MULTILINE)


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """Return what a cell printed, without seconds."""
    return [TIMES.sub(r"\1", "".join(one["text"])) for one in outputs]


@pytest.mark.slow
def test_the_notebook_prints_what_is_stored_in_it() -> None:
    held = notebook.read(PATH)
    stored = [cell["outputs"] for cell in held["cells"] if cell["cell_type"] == "code"]
    assert [texts(one) for one in notebook.run(held)] == [texts(one) for one in stored]
    said = "".join(line for one in stored for line in texts(one))
    assert "32 of 32 losses are equal in every bit" in said
    assert said.count("128 of 128 rows were there") == 2
    assert said.count("64 of 64 images from rows") == 2


def test_the_notebook_needs_only_what_the_wheel_brings() -> None:
    code = "\n".join(notebook.codes(notebook.read(PATH)))
    imported = {*re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)}
    standard = {"glob", "importlib", "logging", "subprocess", "sys", "tempfile", "time"}
    assert imported == {*standard, "torch", "freeze", "pipetransformer"}


def test_its_first_cell_installs_the_wheel_that_was_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[str]]()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    monkeypatch.chdir(tmp_path)
    first = notebook.codes(notebook.read(PATH))[0]
    with pytest.raises(SystemExit, match="upload pipetransformer"):
        exec(first, {})
    Path("pipetransformer-0.2.0-py3-none-any.whl").touch()
    exec(first, {})
    assert [command[1:] for command in asked] == [
        ["-m", "pip", "install", "-q", "pipetransformer-0.2.0-py3-none-any.whl"]
    ]


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
