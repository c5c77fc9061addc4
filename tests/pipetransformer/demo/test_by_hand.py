"""Prove that what the demo sets beside the elastic run trains the same model rightly."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer.demo import DemoSettings, build_model, loops, runs
from pipetransformer.demo.digits import BATCH_SIZE
from pipetransformer.demo.results import Result
from pipetransformer.demo.runs import MAX_GRAD_NORM, PlainLoop

FROZEN = (0, 3, 6)
SIZE = 8


def scans() -> tuple[Tensor, Tensor]:
    """Return two batches of random images and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2 * SIZE, 1, 32, 32, generator=generator)
    return images, torch.randint(10, (2 * SIZE,), generator=generator)


class Noted(PlainLoop):
    """Note what is asked of the loop, and compute nothing."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        super().__init__(model, images, labels)
        self.frozen: list[int] = []
        self.batches: list[list[int]] = []

    def freeze(self, num_frozen: int) -> None:
        self.frozen.append(num_frozen)

    def set_gradients(self, ids: list[int]) -> None:
        self.batches.append(ids)


def trained(loop: PlainLoop) -> dict[str, Tensor]:
    """Take two steps at each depth; return the gradients and the weights, by name."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    for num_frozen in FROZEN:
        loop.freeze(num_frozen)
        for start in (0, SIZE):
            optimizer.zero_grad()
            loop.set_gradients(list(range(start, start + SIZE)))
            optimizer.step()
        for name, parameter in loop.model.named_parameters():
            if parameter.grad is not None:
                found[f"{num_frozen} {name}"] = parameter.grad.clone()
    return found | {name: p.detach().clone() for name, p in loop.model.named_parameters()}


def as_anyone_would() -> dict[str, Tensor]:
    """Train timm's own model alike."""
    model: Any = build_model(10, seed=0)
    (images, labels), found = scans(), dict[str, Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for num_frozen in FROZEN:
        if num_frozen:
            model.patch_embed.requires_grad_(False)
            model.pos_embed.requires_grad_(False)
        model.blocks[:num_frozen].requires_grad_(False)
        for start in (0, SIZE):
            optimizer.zero_grad()
            one = slice(start, start + SIZE)
            nn.functional.cross_entropy(model(images[one]), labels[one]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{num_frozen} {name}"] = parameter.grad.clone()
    return found | {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return as_anyone_would()


def test_the_loop_with_kept_rows_trains_as_timm_s_own_model(expected: dict[str, Tensor]) -> None:
    found = trained(PlainLoop(build_model(10, seed=0), *scans()))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # Rows are computed in other sizes than a batch's, which rounds differently.
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_loop_takes_the_trainer_s_samples_and_freezes_as_it_does(tmp_path: Path) -> None:
    settings = DemoSettings(folder=str(tmp_path), epochs=20, seed=3)
    loop = Noted(build_model(10, seed=0), *scans())
    # Two steps an epoch, of which the second has fewer samples.
    runs._train(loop, settings, BATCH_SIZE + 4)
    policy = runs.trainer_settings(settings, "elastic")["freeze"]
    assert loop.frozen == [policy.at(epoch) for epoch in range(20)]
    assert [len(ids) for ids in loop.batches[:2]] == [BATCH_SIZE, 4]
    epochs = [sum(loop.batches[start : start + 2], []) for start in range(0, 40, 2)]
    assert all(sorted(ids) == list(range(BATCH_SIZE + 4)) for ids in epochs)
    assert epochs[0] != epochs[1]


def test_the_loops_train_alike_and_the_later_one_reads_kept_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = DemoSettings(folder=str(tmp_path / "demo"))
    donor = {n: t for n, t in build_model(5, seed=1).state_dict().items() if "head" not in n}
    save_file(donor, settings.donor)
    data = TensorDataset(*scans())
    monkeypatch.setattr(loops, "load_digits_split", lambda: (data, data))
    monkeypatch.setattr(loops, "NUM_EPOCHS", 2)
    monkeypatch.setattr(loops, "BATCH_SIZE", SIZE)
    loops.train_in_loops(settings)
    plain, rows, kept = (Result.read(settings.folder_of(run)) for run in loops.RATES)
    assert plain.differ == 0 and rows.differ < 1e-6 < kept.differ
    assert rows.accuracy == plain.accuracy
    lines = [one for one in caplog.messages if "training took" in one]
    assert [re.sub(".*; ", "", one) for one in lines] == [
        "16 rows read, 16 computed", "32 rows read (16 of other runs), 0 computed",
    ]  # fmt: skip
