"""Scripts in the shape of transformers' examples gain a callback, and lose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pipetransformer import FreezeCallback
from tests.experiments.test_from_transformers import BATCH, TASKS, USUAL


def run(task: str, folder: Path, callback: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Run a script with a callback; return its metrics and the model that it saves."""

    class Frozen(transformers.Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments, callbacks=[callback])

    folder.mkdir()
    main, write = TASKS[task]
    output = folder / "output"
    # Adam takes a key's bias, whose gradient is rounding alone, for one that matters.
    more = ["--trainer", "transformers", "--output_dir", str(output), BATCH, "5", "--optim", "sgd"]
    with patch("transformers.Trainer", Frozen):
        main([*write(folder), *USUAL, *more])
    metrics = {}
    for split in ("train", "eval"):
        found = json.loads((output / f"{split}_results.json").read_text())
        # All else are times.
        metrics |= {n: v for n, v in found.items() if not n.endswith(("runtime", "per_second"))}
    return metrics, load_file(output / "model.safetensors")


@pytest.mark.parametrize(
    "task",
    ["sst2", pytest.param("mrpc", marks=pytest.mark.slow),
     pytest.param("squad", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_script_comes_to_the_same_metrics_and_model(
    task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = run(task, tmp_path / "plain", FreezeCallback([0, 2, 2], cache=False))
    callback = FreezeCallback([0, 2, 2], cache_folder=tmp_path)
    metrics, weights = run(task, tmp_path / "ours", callback)
    assert metrics == pytest.approx(plain[0], rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, plain[1][name], rtol=1e-4, atol=1e-6)
    assert callback.stats.hits > 0
    assert "given other inputs" not in caplog.text
