"""Prove that rivals on several processes learn what one does, each sample counted once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import vit
from experiments.rivals.frozen_part import FrozenPart
from experiments.rivals.plain_loop import own_part
from tests.helpers.adapted import answerer, batch_for, classifier, targets_for
from tests.helpers.marks import slow
from tests.helpers.smoke_runs import losses, smoke


@pytest.mark.parametrize(("num", "size"), [(32, 2), (5, 4), (3, 4), (1, 3)])
def test_every_sample_of_a_batch_counts_once(num: int, size: int) -> None:
    whole = torch.arange(num) * 10
    parts = [own_part(whole, rank, size) for rank in range(size)]
    counted = [one for part in parts if part.weight for one in part.ids]
    assert counted == whole.tolist()
    assert all(part.ids for part in parts)
    # Each rank takes a mean, and DDP the mean of those.
    of_each = [part.weight / len(part.ids) / size for part in parts if part.weight]
    assert of_each == pytest.approx([1 / num] * len(of_each))


@pytest.mark.parametrize("build", [answerer, classifier])
def test_activations_kept_at_several_depths_go_on_from_there(build: Any) -> None:
    model = build().eval()
    batch = {**batch_for(model), **targets_for(model)}
    part = FrozenPart(model, keeps=True)

    def loss_of(ids: list[int]) -> Tensor:
        # Samples that are all kept need not be read, if the model needs nothing but what is kept.
        held = part.holds(ids)
        own = part.held(ids) if held else {name: entry[ids] for name, entry in batch.items()}
        return part.forward(lambda model, own: model(**own)[:2], model, own, ids, stores=True)

    for num_frozen, ids in ((1, [0, 1]), (2, [0]), (2, [2, 1, 0]), (2, [0, 2, 1])):
        part.freeze(num_frozen)
        expected = model(**{name: entry[ids] for name, entry in batch.items()}).loss
        torch.testing.assert_close(loss_of(ids), expected)
    part.freeze(1)
    assert not part.holds([0])
    torch.testing.assert_close(loss_of([0, 1]), model(**{n: e[:2] for n, e in batch.items()}).loss)


@pytest.mark.parametrize(
    "options", [slow(("--max_grad_norm", "0")), ("--lr_scheduler_type", "polynomial")]
)
def test_a_gradient_unclipped_and_a_rate_that_ends_above_zero_are_ours_in_a_rival(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    fast = ("--learning_rate", "1e-2", "--num_train_epochs", "1")
    smoke(tmp_path / "ours", *fast, *options)
    smoke(tmp_path / "ddp", "--baseline", "ddp", *fast, *options)
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "ours"), abs=2e-4)
    assert len(set(losses(tmp_path / "ddp"))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["ddp", "ddp+freeze", "short"])
def test_two_processes_learn_as_one(tmp_path: Path, baseline: str) -> None:
    options = ("--freeze", "schedule:0,2") if baseline == "ddp+freeze" else ()
    options += ("--budget_s", "1000") if baseline == "short" else ()
    smoke(tmp_path / "one", "--baseline", baseline, *options)
    smoke(tmp_path / "two", "--baseline", baseline, "--processes", "2", *options)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=2e-4)
    found = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("one", "two")]
    assert [one["details"]["processes"] for one in found] == [1, 2]


def test_texts_of_equal_lengths_come_together_in_ours_and_in_a_rival(tmp_path: Path) -> None:
    smoke(tmp_path / "shuffled")
    grouped = ("--group_by_length", "--max_grad_norm", "1000")
    smoke(tmp_path / "ours", *grouped)
    smoke(tmp_path / "ddp", "--baseline", "ddp", *grouped)
    smoke(tmp_path / "short", "--baseline", "short", "--budget_s", "1000", *grouped)
    assert losses(tmp_path / "ours") != losses(tmp_path / "shuffled")
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "ours"), abs=2e-4)
    assert losses(tmp_path / "short") == losses(tmp_path / "ddp")
    with pytest.raises(ValueError, match="samples are equally long, or padded so"):
        smoke(tmp_path / "images", "--group_by_length", script=vit, task="cifar10")
    with pytest.raises(ValueError, match="samples are equally long, or padded so"):
        smoke(tmp_path / "windows", "--group_by_length", task="squad")
