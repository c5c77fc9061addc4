"""The adapters' example trains the same with rows as without, and goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import adapters_above
from tests.helpers.marks import slow


def arguments(folder: Path, **settings: object) -> list[str]:
    """Return what asks for a tiny decoder and few samples."""
    text = folder / "text.txt"
    text.write_text("".join(f"sentence {number} of this text. " for number in range(60)))
    tiny = {
        "folder": folder / "run", "first_text": text, "text": text, "layers": 3, "width": 64,
        "length": 16, "samples": 16, "first_steps": 2, "batch_size": 8, "epochs": 3, "repeats": 1,
        **settings,
    }  # fmt: skip
    return [word for name, value in tiny.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize(("name", "blocks"), [slow("lora", 2), ("above", 3)])
def test_adapters_train_the_same_with_rows_of_all_blocks_below_them(
    tmp_path: Path, name: str, blocks: int
) -> None:
    asked = adapters_above.arguments(arguments(tmp_path))
    asked.folder.mkdir()
    adapters_above.train_first(asked)
    plain, rows = (adapters_above.run(asked, name, way) for way in adapters_above.WAYS)
    assert rows["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert rows["losses"][-1] < rows["losses"][0]
    assert (plain["hits"], rows["hits"]) == ([0, 0, 0], [0, 16, 16])
    assert plain["blocks"] == rows["blocks"] == blocks
    [line] = adapters_above.table([plain, rows])
    assert line.startswith(f"{name}: {blocks} blocks as rows") and "memory" in line
