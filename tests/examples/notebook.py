"""Run a notebook's cells in order, and say what they print and draw; no Jupyter is needed.

    python -m tests.examples.notebook examples/freeze_and_cache.ipynb

writes the outputs into the file, as they are here.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

CODE = "code"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run the cells of code in one namespace; return the outputs of each, as the file has them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    codes = [source_of(cell) for cell in notebook["cells"] if cell["cell_type"] == CODE]
    # A window would wait for somebody to close it.
    with matplotlib.rc_context(), plt.ioff():
        plt.switch_backend("agg")
        return [_outputs(code, f"cell {place}", namespace) for place, code in enumerate(codes, 1)]


def _outputs(code: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    printed = io.StringIO()
    # A notebook shows figures where `show` is called, which here would warn.
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace("plt.show()", ""), name, "exec"), namespace)
    text = printed.getvalue().splitlines(keepends=True)
    outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", metadata={"Software": None})
        plt.close(number)
        data = {
            "image/png": base64.b64encode(picture.getvalue()).decode() + "\n",
            "text/plain": ["<Figure>"],
        }
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def write(path: Path) -> None:
    """Run a notebook, and write its outputs into it."""
    notebook = read(path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == CODE]
    for place, (cell, outputs) in enumerate(zip(cells, run(notebook), strict=True), 1):
        cell["execution_count"], cell["outputs"] = place, outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
