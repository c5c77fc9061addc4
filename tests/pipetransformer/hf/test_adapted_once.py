"""Prove that evaluations adapt a model once, and another model anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipetransformer.hf import evaluations
from tests.pipetransformer.hf.test_hf_trainer import made, rows
from tests.texts import tiny_bert


def test_evaluations_adapt_a_model_once_whatever_their_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted, adapt = list[Any](), evaluations.adapt

    def noting(model: Any) -> Any:
        adapted.append(model)
        return adapt(model)

    monkeypatch.setattr(evaluations, "adapt", noting)
    bare = [{name: value for name, value in row.items() if "label" not in name} for row in rows(4)]
    with made(tmp_path, compute_metrics=None) as trainer:
        losses = ["eval_loss" in trainer.evaluate(one) for one in (rows(9), bare, rows(9))]
        assert losses == [True, False, True]
        assert adapted == [trainer.model]
        trainer.model = other = tiny_bert().float()
        assert trainer._is_labelled(rows(4)) and not trainer._is_labelled(bare)
        assert adapted[1:] == [other]
