"""Test the benchmark of compiled blocks: that both kinds train alike, but no speed."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import compiled


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "vit"])
def test_both_have_the_same_losses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layers", "1", "--batch", "2", "--rounds", "2", "--backend", "eager"]
    assert compiled.main(["--model", model, *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"] == model
    assert found["largest_loss_difference"] < 1e-5
    assert found["eager_ms"] > 0 < found["compiled_ms"]
