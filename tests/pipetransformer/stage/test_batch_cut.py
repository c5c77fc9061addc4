"""Prove where batches are cut, and that the planner expects what stages do."""

from __future__ import annotations

import pytest

from autopipe.plan.request import PlanRequest
from pipetransformer.stage.batch_cut import BatchCut


@pytest.mark.parametrize("num_samples", range(14))
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [None, 1, 3, 4])
def test_slices_cover_a_batch_and_micro_batches_cover_the_slices(
    num_samples: int, replicas: int, size: int | None
) -> None:
    cut = BatchCut(replicas, 2, size)
    slices = cut.slices(num_samples)
    assert (len(slices), sum(slices)) == (replicas, num_samples)
    assert slices[0] == max(slices) and max(slices) - min(slices) < 2 * (size or 1)
    finer = BatchCut(2 * replicas, 2, size).slices(num_samples)
    assert list(slices) == [sum(pair) for pair in zip(finer[::2], finer[1::2], strict=True)]
    assert [sum(cut.sizes(one)) for one in slices] == list(slices)
    sizes = [one for samples in slices for one in cut.sizes(samples)]
    assert 0 not in sizes
    if size is not None and num_samples:
        whole, rest = divmod(num_samples, size)
        assert sizes == [size] * whole + [rest] * (rest > 0)


@pytest.mark.parametrize("num_samples", range(8, 14))
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_the_planner_expects_the_largest_replica_s_micro_batches(
    num_samples: int, length: int, size: int | None
) -> None:
    request = PlanRequest(4, 4, num_samples, 0, micro_batch_size=size)
    cut = BatchCut(request.replicas_of(length), 2, size)
    largest = cut.slices(num_samples)[0]
    assert request.samples_of(length) == largest
    assert request.sizes_of(length, 2) == cut.sizes(largest)
