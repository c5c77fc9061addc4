"""A loss that does not join from parts is found; one that does is let be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopipe.loss import Loss, SplitProbe

NUM_SAMPLES, NUM_CLASSES = 12, 5
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1], dtype=torch.float64)


def finds(loss_fn: Any, output: Tensor, target: Any, sizes: tuple[int, ...]) -> bool:
    """Probe one step with micro-batches of the given sizes."""
    probe = SplitProbe(loss_fn if isinstance(loss_fn, Loss) else Loss(loss_fn))
    watch_step(probe, output, target, sizes)
    return probe.finds_difference()


def watch_step(
    probe: SplitProbe, output: Tensor, target: Any, sizes: tuple[int, ...], **where: bool
) -> None:
    probe.begin_step(**where)
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        part = (
            {name: one[rows] for name, one in target.items()}
            if isinstance(target, Mapping)
            else target[rows]
        )
        probe.watch(output[rows], part)
        first += size


def ignoring_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def weighted_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=WEIGHTS.to(output))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.mT, torch.arange(len(output)))


def mean_and_one(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target), 1


def plain_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def focal(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def weighted_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weight = WEIGHTS.to(output)
    return F.cross_entropy(output, target, weight=weight, reduction="sum"), weight[target].sum()


def written_over(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mul_(0.5), target.clamp_(max=3))


PROBED_SPLITS = [(12,), (2,), (6, 6), (1, 1), (5, 3, 4), (1,) * 12, (3,)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", PROBED_SPLITS, ids=str)
def test_a_loss_that_does_not_join_is_found_and_one_that_does_is_not(
    dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(3)
    output = torch.randn(NUM_SAMPLES, NUM_CLASSES).to(dtype)
    target = torch.tensor([4, 1, 3, 2, 0, 1, 4, 4, 2, 3, 1, 0])
    ignored = target.where(torch.arange(NUM_SAMPLES) != 1, -100)
    for right in (focal, weighted_pair, written_over, nn.CrossEntropyLoss()):
        assert not finds(right, output.clone(), target.clone(), sizes), right
    for wrong in (weighted_mean, contrastive, mean_and_one, plain_sum):
        assert finds(wrong, output, target, sizes), wrong
    assert finds(ignoring_mean, output, ignored, sizes)


def test_a_loss_in_half_precision_alone_is_probed_so() -> None:
    weight = WEIGHTS.bfloat16()

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weight)

    output, target = torch.randn(4, NUM_CLASSES).bfloat16(), torch.tensor([0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="BFloat16"):
        weighted(output.float(), target)
    assert finds(weighted, output, target, (2, 2))
    assert not finds(lambda x, y: F.l1_loss(x, x.bfloat16() / 3), output, target, (2, 2))


def test_outputs_that_are_not_finite_are_not_blamed_on_the_loss() -> None:
    output = torch.randn(4, NUM_CLASSES)
    output[2] = float("nan")
    assert not finds(focal, output, torch.zeros(4, dtype=torch.int64), (2, 2))


def test_targets_of_several_names_are_cut_and_joined() -> None:
    torch.manual_seed(4)
    output, y = torch.randn(6, NUM_CLASSES), torch.tensor([0, 1, 2, 3, 4, 1])
    target = {"y": y, "weight": torch.rand(6)}

    def each(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, target["y"], reduction="none") * target["weight"]

    def mean(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        return each(output, target).sum() / target["weight"].sum()

    def pair(output: Tensor, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return each(output, target).sum(), target["weight"].sum()

    for sizes in ((6,), (1, 2, 3), (1,) * 6):
        assert finds(mean, output, target, sizes)
        assert not finds(pair, output, target, sizes)


def test_samples_of_different_shapes_are_not_joined() -> None:
    calls = []

    def note(output: Tensor, target: Tensor) -> Tensor:
        calls.append(tuple(output.shape))
        return F.mse_loss(output, target)

    probe = SplitProbe(Loss(note))
    probe.begin_step()
    for length in (3, 4, 3):
        probe.watch(torch.zeros(1, length), torch.zeros(1, length))
    assert not probe.finds_difference()
    assert calls == [(2, 3), (1, 3), (1, 3)]


def test_the_first_epoch_is_probed_and_each_later_epoch_s_first_step() -> None:
    calls: list[int] = []

    def note(output: Tensor, target: Tensor) -> Tensor:
        calls.append(int(target[0, 0]))
        return F.mse_loss(output, target)

    probe, exact = SplitProbe(Loss(note)), SplitProbe(Loss(note, is_exact=True))
    for step in range(100):
        for one in (probe, exact):
            output = torch.zeros(4, 2, requires_grad=True)
            target = torch.full((4, 2), float(step))
            # An epoch of 25 steps.
            where = {"in_first_epoch": step < 25, "starts_epoch": step % 25 == 0}
            watch_step(one, output, target, (4,), **where)
            assert not one.finds_difference()
    assert sorted(set(calls)) == [*range(8), 8, 16, 24, 25, 50, 75]
    # The whole and two parts; the exact loss is not called at all.
    assert len(calls) == 3 * 14


def test_what_is_kept_is_bounded_but_two_samples() -> None:
    sizes = []

    def note(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(output))
        return output.mean()

    def watched(num_elements: int) -> list[int]:
        sizes.clear()
        # A view of one number: as large as it says, without the memory.
        output = torch.zeros(()).expand(3, num_elements)
        assert not finds(note, output.repeat(2, 1), torch.zeros(6), (3, 3))
        return list(sizes)

    assert watched(1 << 20) == [4, 3, 1]
    assert watched(3 << 20) == [2, 1, 1]


def test_a_loss_that_draws_is_let_be_with_a_warning_and_random_numbers_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output + torch.randn_like(output), target)

    probe = SplitProbe(Loss(noisy))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, logger="pipetransformer"):
        for _ in range(3):
            watch_step(probe, torch.zeros(4, 2), torch.zeros(4, 2), (2, 2))
            assert not probe.finds_difference()
    assert torch.equal(torch.get_rng_state(), before)
    (record,) = caplog.records
    assert "noisy' draws random numbers" in record.getMessage()


def test_the_refusal_names_the_loss_the_numbers_and_the_way_out() -> None:
    probe = SplitProbe(Loss(plain_sum))
    watch_step(probe, torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), (1, 3))
    assert probe.finds_difference()
    with pytest.raises(
        ValueError,
        match=r"the loss 'plain_sum' depends on .*: it is 2\.77\d* over 4 samples, but 1\.73\d* "
        r"when joined from parts of 1, 3\. .* return \(sum, count\): .* "
        r"pipetransformer\.Loss\(function, is_exact",
    ):
        probe.refuse()
