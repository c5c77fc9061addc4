"""Rows of a smaller dtype train as blocks would whose last rounds what it returns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import freeze as freezing
from autocache import RowContent
from pipetransformer import attach
from tests.helpers.any_models import KINDS, NUM_SAMPLES, Kind, build, data, mean_loss, sgd

FROZEN = 2
TOLD = re.compile(r"cache_dtype='\w+' changes the (loss|outputs) of one batch (.*)\(")


def rounding_hook(dtype: torch.dtype) -> Any:
    """Return a hook on a block that rounds the hidden states as rows do."""
    content = RowContent((), dtype=dtype)

    def rounded(block: nn.Module, given: Any, answer: Any) -> Any:
        hidden = answer[0] if isinstance(answer, tuple) else answer
        hidden = content.decode(content.encode(hidden), hidden.dtype)
        return (hidden, *answer[1:]) if isinstance(answer, tuple) else hidden

    return rounded


def samples(kind: Kind) -> list[dict[str, Tensor]]:
    entries = data(kind).tensors
    return [{name: entry[i] for name, entry in entries.items()} for i in range(NUM_SAMPLES)]


def train(kind: Kind, folder: Path | None, dtype: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train by hand with rows, or with a hook that rounds; return losses and weights."""
    model = build(kind).train()
    optimizer, losses = sgd([*model.named_parameters()]), []
    loader: DataLoader[Any] = DataLoader(samples(kind), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    torch.manual_seed(3)
    cached = None
    if folder is None:
        blocks = [*model.get_submodule(kind.blocks)]
        freezing.apply(model, FROZEN, layers=blocks)
        for name, parameter in model.named_parameters():
            if name.startswith(kind.bottom):
                parameter.requires_grad_(False)
        blocks[FROZEN - 1].register_forward_hook(rounding_hook(getattr(torch, dtype)))
    else:
        cached = attach(model, freeze=FROZEN, cache_folder=folder, cache_dtype=dtype)
    for _ in range(3):
        for batch in iter(loader) if cached is None else cached.epoch(loader):
            loss = mean_loss(kind, model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    losses.append(float(torch.rand(())))  # To compare rows draws no random numbers.
    if cached is not None:
        assert cached.stats.hits == NUM_SAMPLES
        # What was compared in eval mode trains on.
        top = model.get_submodule(kind.blocks)[-1]
        assert model.training and all(module.training for module in top.modules())
        cached.close()
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("eva", "int8")])
def test_a_loop_trains_as_with_blocks_that_round(
    name: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kind = KINDS[name]
    plain, ours = train(kind, None, dtype), train(kind, tmp_path, dtype)
    assert ours[0] == pytest.approx(plain[0], rel=1e-9, abs=0)
    for key, tensor in ours[1].items():
        allowed = 1e-9 + 1e-9 * float(plain[1][key].abs().max())
        assert float((tensor - plain[1][key]).abs().max()) <= allowed, key
    told = [found for message in caplog.messages if (found := TOLD.match(message))]
    assert [found[1] for found in told] == ["outputs" if name == "eva" else "loss"]


def test_the_losses_that_are_told_are_those_with_and_without_a_block_that_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kind = KINDS["gpt2_classifier"]
    model, items = build(kind).train(), samples(kind)
    batch = {name: torch.stack([item[name] for item in items[:5]]) for name in items[0]}
    losses = [model.eval()(**batch).loss.item()]
    block = model.get_submodule(kind.blocks)[FROZEN - 1]
    handle = block.register_forward_hook(rounding_hook(torch.int8))
    losses.append(model(**batch).loss.item())
    handle.remove()
    loader: DataLoader[Any] = DataLoader(items, batch_size=5)  # type: ignore[arg-type]
    with attach(model, freeze=FROZEN, cache_folder=tmp_path, cache_dtype="int8") as cached:
        for _ in range(2):
            list(cached.epoch(loader))
    [told] = [found[2] for message in caplog.messages if (found := TOLD.match(message))]
    assert told == f"from {losses[0]:.6g} to {losses[1]:.6g} "
    assert losses[0] != losses[1]


def test_images_with_their_channels_last_are_served_too(tmp_path: Path) -> None:
    # What stands for images that are not read was made to lie as they do, and could not be marked.
    kind = KINDS["eva"]
    images, targets = data(kind).tensors.values()
    last = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    model, loader = build(kind).eval(), DataLoader(TensorDataset(last, targets), batch_size=5)
    with torch.no_grad(), attach(model, freeze=FROZEN, cache_folder=tmp_path) as cached:
        list(cached.epoch(loader))
        found = torch.cat([model(x) for x, _ in cached.epoch(loader)])
        assert cached.stats.hits == NUM_SAMPLES
    torch.testing.assert_close(found, model(images).detach(), rtol=1e-12, atol=1e-12)


def test_exact_rows_tell_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loader: DataLoader[Any] = DataLoader(samples(KINDS["llama"]), batch_size=5)  # type: ignore[arg-type]
    with attach(build(KINDS["llama"]), freeze=FROZEN, cache_folder=tmp_path) as cached:
        list(cached.epoch(loader))
    assert "cache_dtype" not in caplog.text
