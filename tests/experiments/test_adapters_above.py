"""The adapters' example trains the same with rows as without, and goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    asked = adapters_above.arguments(arguments(tmp_path, samples=10_000))
    with pytest.raises(ValueError, match="10000 samples take 160000"):
        adapters_above.samples_of(asked.text, asked.length, asked.samples)


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    asked = adapters_above.arguments(arguments(tmp_path))
    asked.folder.mkdir()
    for _ in range(2):
        adapters_above.refuse_others(asked)
    asked = adapters_above.arguments(arguments(tmp_path, width=128, repeats=7))
    with pytest.raises(ValueError, match="was begun with width 64; ask for that"):
        adapters_above.refuse_others(asked)


def test_texts_of_tasks_are_read_without_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\ngood film\t1\nbad one\t0\n")
    (tmp_path / "a.json").write_text('{"data": [{"paragraphs": [{"context": "good film bad"}]}]}')
    for name in ("a.tsv", "a.json"):
        [sample] = adapters_above.samples_of(tmp_path / name, length=9, num=1)
        assert bytes(sample["input_ids"].to(torch.uint8).tolist()) == b"good film"


@pytest.mark.slow
def test_what_was_stopped_goes_on_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)
    adapters_above.main(given)
    results = tmp_path / "run" / "results.jsonl"
    first = results.read_text().splitlines()
    assert len(first) == 4
    results.write_text("\n".join(first[:3]) + "\n")
    capsys.readouterr()
    adapters_above.main(given)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["above rows", "lora", "above"]
    assert results.read_text().splitlines()[:3] == first[:3]
