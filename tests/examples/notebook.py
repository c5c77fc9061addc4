"""Run a notebook's cells in order, and say what they print; no Jupyter is needed.

    python -m tests.examples.notebook examples/freeze_and_cache.ipynb

writes the outputs into the file, as they are here.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

CODE = "code"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def codes(notebook: dict[str, Any]) -> list[str]:
    """Return the cells of code."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == CODE]
    return ["".join(cell["source"]) for cell in cells]


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run the cells of code in one namespace; return the outputs of each, as the file has them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [_outputs(code, f"cell {i}", namespace) for i, code in enumerate(codes(notebook), 1)]


def _outputs(code: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    text = printed.getvalue().splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": text}] if text else []


def write(path: Path) -> None:
    """Run a notebook, and write its outputs into it."""
    notebook = read(path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == CODE]
    for place, (cell, outputs) in enumerate(zip(cells, run(notebook), strict=True), 1):
        cell["execution_count"], cell["outputs"] = place, outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
