"""A ViT trains on images by transformers' interface, and freezes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipetransformer import FreezeSchedule
from pipetransformer.hf import Trainer
from tests.adapted import hf_vit
from tests.pipetransformer.hf.test_hf_trainer import accuracy, arguments


def images(num: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(num)
    pixels = torch.randn(num, 3, 8, 8, generator=generator)
    return [{"pixel_values": one, "labels": index % 3} for index, one in enumerate(pixels)]


def trainer_of(kind: Any, folder: Path, **given: Any) -> Any:
    torch.manual_seed(0)
    return kind(
        model=hf_vit(),
        args=arguments(folder, num_train_epochs=3),
        train_dataset=images(30),
        eval_dataset=images(13),
        compute_metrics=accuracy,
        **given,
    )


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_a_vit_trains_as_with_transformers_until_it_freezes_and_then_keeps_what_is_frozen(
    tmp_path: Path,
) -> None:
    theirs = trainer_of(transformers.Trainer, tmp_path / "theirs")
    theirs.train()
    with closing(trainer_of(Trainer, tmp_path / "ours", freeze=FreezeSchedule([0, 1]))) as ours:
        before = {name: p.clone() for name, p in ours.model.named_parameters()}
        kept: dict[str, torch.Tensor] = {}

        class AfterEpoch(transformers.TrainerCallback):  # type: ignore[misc]
            def on_epoch_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
                if state.epoch == 1:
                    kept.update({n: p.clone() for n, p in facts["model"].named_parameters()})

        ours.add_callback(AfterEpoch)
        ours.train()
        after = dict(ours.model.named_parameters())
        hits = ours._trainer.report.cache_hits
    assert len(losses(ours)) == 12
    assert losses(ours)[:4] == pytest.approx(losses(theirs)[:4], abs=1e-5)
    first = {n for n in kept if "embeddings" in n or ".0." in n}
    moving = {n for n in kept if "key.bias" not in n}  # Whose gradients are rounding alone.
    assert {n for n in moving if torch.equal(after[n], kept[n])} == first & moving
    assert not any(torch.equal(before[n], kept[n]) for n in moving)
    assert hits > 0
