"""Prove that what is written is what other programs load, at any time of a run."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import BertForSequenceClassification

from pipetransformer import Trainer
from pipetransformer.cli import main
from tests.helpers.adapted import classifier
from tests.helpers.models import tiny_data, tiny_trainer
from tests.helpers.pool import Pool

State = dict[str, Tensor]


class Tokenizer:
    """Stand for a tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 20, (12, 6), generator=generator)
    return TensorDataset(ids, ids[:, 0] % 3)


def copied(trainer: Trainer) -> State:
    return {name: tensor.detach().clone() for name, tensor in trainer.state_dict().items()}


def save_twice(folder: Path) -> tuple[Any, Any, State]:
    """Save a BERT in mid-run and at its end; return its logits then, and its last weights."""
    torch.manual_seed(0)
    settings = {"folder": folder / "run", "checkpoint_every_epochs": 1, "pipeline_length": 2}
    with Trainer(
        classifier(), texts(), global_batch_size=6, progress=False, **settings
    ) as trainer:
        trainer.step()
        trainer.save_pretrained(folder / "middle", processing_class=Tokenizer())
        middle = trainer.predict(texts()).predictions
        trainer.fit()
        trainer.save_pretrained(folder / "end")
        trainer.save_model(folder / "end.safetensors")
        return middle, trainer.predict(texts()).predictions, copied(trainer)


def logits_of(folder: Path) -> Any:
    """Load a folder as users do, and run it."""
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(texts().tensors[0]).logits.numpy()


def tiny_vocabulary(folder: Path) -> str:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    path = folder / "vocab.txt"
    path.write_text("\n".join(words))
    return str(path)


def run_export(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    status = main(["export", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_transformers_loads_what_a_run_saves_and_what_is_exported(
    two_ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (middle, end, state), _ = two_ranks.run(save_twice, tmp_path)
    assert not np.array_equal(middle, end)
    exported = tmp_path / "exported"
    status, text = run_export(capsys, tmp_path / "run", exported)
    assert status == 0, text
    assert (exported / "config.json").read_text() == (tmp_path / "end/config.json").read_text()
    for name, logits in (("middle", middle), ("end", end), ("exported", end)):
        # One batch of 12 against micro-batches: other kernels, other last bits.
        np.testing.assert_allclose(logits_of(tmp_path / name), logits, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "middle" / "tokenizer.json").exists()
    files = [tmp_path / "end.safetensors", exported / "model.safetensors"]
    for path in (*files, tmp_path / "end" / "model.safetensors"):
        written = safetensors.torch.load_file(path)
        assert written.keys() == state.keys()
        for name, tensor in written.items():
            assert torch.equal(tensor, state[name]), name
        umask = os.umask(0)
        os.umask(umask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_timm_creates_the_model_of_an_exported_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 160, 160)
    data = TensorDataset(images, torch.arange(4) % 3)
    with tiny_trainer(
        timm.create_model("test_vit", num_classes=3),
        data,
        folder=tmp_path / "run",
        checkpoint_every_steps=1,
        epochs=1,
    ) as trainer:
        trainer.fit()
        expected = trainer.predict(data).predictions
    assert run_export(capsys, tmp_path / "run", tmp_path / "out")[0] == 0
    loaded = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    with torch.no_grad():
        np.testing.assert_allclose(loaded(images).numpy(), expected, rtol=1e-4, atol=1e-5)


def tiny_run(folder: Path) -> State:
    """Train and save; return the weights."""
    with tiny_trainer(
        data=tiny_data(num_samples=16),
        folder=folder,
        checkpoint_every_steps=1,
        global_batch_size=8,
    ) as trainer:
        trainer.fit()
        return copied(trainer)


def test_any_checkpoint_is_exported_and_none_into_what_has_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    state = tiny_run(run)
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-00000001", "step-00000002"]
    out.mkdir()
    assert run_export(capsys, checkpoints[1], out)[0] == 0
    written = safetensors.torch.load_file(out / "model.safetensors")
    assert written.keys() == state.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, state[name]), name
    before = (out / "model.safetensors").read_bytes()
    status, text = run_export(capsys, checkpoints[0], out)
    assert (status, text) == (
        1, f"pipetransformer: {out} exists and is no empty folder; give a new one\n"
    )  # fmt: skip
    assert (out / "model.safetensors").read_bytes() == before
    assert run_export(capsys, checkpoints[0], tmp_path / "first")[0] == 0
    first = safetensors.torch.load_file(tmp_path / "first" / "model.safetensors")
    assert any(not torch.equal(first[name], tensor) for name, tensor in state.items())


def test_a_folder_without_a_checkpoint_and_a_damaged_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run_export(capsys, tmp_path, tmp_path / "out")
    assert status == 1
    assert "holds no checkpoint; give the folder= of a run that saves" in text
    tiny_run(tmp_path / "run")
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    weights = next(checkpoint.glob("*weights*"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    status, text = run_export(capsys, checkpoint, tmp_path / "out")
    assert (status, "has SHA-256" in text) == (1, True)
    assert not (tmp_path / "out").exists()


def save_where_nothing_can_be(folder: Path) -> str:
    with tiny_trainer() as trainer:
        with pytest.raises(OSError, match="rank 0: .*Not a directory") as caught:
            trainer.save_pretrained(folder / "file" / "model")
    return str(caught.value)


def test_what_rank_0_cannot_write_is_raised_on_all(two_ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = two_ranks.run(save_where_nothing_can_be, tmp_path)
    assert first == second
