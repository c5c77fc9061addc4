"""What loops put around a model or its optimizer stays as it is, and sees the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipetransformer import attach
from tests.helpers.any_models import KINDS, Kind, build, mean_loss
from tests.pipetransformer.loop.test_foreign_loops import Loop, assert_equal

TEXTS, IMAGES = KINDS["gpt2_classifier"], KINDS["beit"]


def scales_losses(loop: Loop) -> None:
    """Train with a scaler, which skips a step with infinite gradients, and clip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    for epoch in range(3):
        for number, batch in enumerate(loop.cached.epoch(loop.loader)):
            loss = loop.loss(batch) * (float("inf") if (epoch, number) == (1, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(loop.optimizer)
            clip_grad_norm_(loop.model.parameters(), 0.5)
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
        loop.numbers.append(scaler.get_scale())


def averages_weights(loop: Loop) -> None:
    """Keep an average of the weights, and evaluate it within each epoch."""
    averaged = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        for batch in loop.cached.epoch(loop.loader):
            loop.step(batch)
            averaged.update_parameters(loop.model)
            loop.loss(loop.others(3), averaged.module)


@pytest.mark.parametrize(("do", "kind"), [(scales_losses, TEXTS), (averages_weights, IMAGES)])
def test_a_tool_ends_as_without_rows(
    do: Callable[[Loop], None], kind: Kind, tmp_path: Path
) -> None:
    assert_equal(do, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kind"), [("eager", TEXTS), ("aot_eager", IMAGES)], ids=["texts", "images"]
)
def test_a_compiled_model_ends_as_without_rows(backend: str, kind: Kind, tmp_path: Path) -> None:
    def trains_compiled(loop: Loop) -> None:
        compiled: Any = torch.compile(loop.model, backend=backend)
        for depth in (0, 2, 1):
            loop.cached.freeze_bottom(depth)
            for batch in loop.cached.epoch(loop.loader):
                loss = mean_loss(kind, compiled, batch)
                loop.numbers.append(loss.item())
                loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    assert_equal(trains_compiled, kind, tmp_path)


def test_blocks_freeze_where_a_tied_embedding_trains(tmp_path: Path) -> None:
    """A change of depth once had no effect where nothing was cached."""
    model: Any = tied()
    loop = Loop(KINDS["gpt2"], None, None)
    with attach(model, freeze=(0, 2), cache_folder=tmp_path, tied_weights="train") as cached:
        for frozen in (False, True):
            next(cached.epoch(loop.loader))
            weights = [*model.transformer.h[1].parameters()]
            assert all(p.requires_grad != frozen for p in weights)
            assert model.lm_head.weight.requires_grad


def tied() -> nn.Module:
    model: Any = build(KINDS["gpt2"])
    assert model.lm_head.weight is model.transformer.wte.weight
    return model
