"""Prove that gradients which are no numbers, or which grow late, are noticed on every replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.gradients import BUCKET_BYTES, backward, make_parameters, reducing, wrong_sums
from tests.helpers.pool import Pool


def poison(culprits: dict[int, int], value: float) -> list[list[int]]:
    """Let replica r's gradient of parameter culprits[r] hold a bad value, then none.

    Return by step of which parameters this replica's own gradients are not finite.
    """
    parameters, rank, found = make_parameters(), dist.get_rank(), []
    with reducing(parameters, 1) as reducer:
        for bad in (culprits.get(rank), None):
            handle = parameters[bad].register_hook(lambda g: g.fill_(value)) if bad else None
            reducer.arm()
            backward(parameters, range(len(parameters)))
            reducer.finish()
            own = reducer.own_gradients
            found.append([i for i, p in enumerate(parameters) if not is_finite(own[p])])
            if handle is not None:
                handle.remove()
            for parameter in parameters:
                parameter.grad = None
    return found


def is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_replica_knows_what_it_brought_itself(four_ranks: Pool, value: float) -> None:
    found = four_ranks.run(poison, {1: 3, 0: 8, 3: 8}, value)
    assert found == [[[8], []], [[3], []], [[], []], [[8], []]]


def large_sums() -> tuple[bool, bool]:
    """Bring finite float16 gradients whose sum no float16 holds; tell which of both is finite."""
    parameters = [nn.Parameter(torch.zeros(64, dtype=torch.float16))]
    with reducing(parameters, 64) as reducer:
        reducer.arm()
        (parameters[0] * 40_000.0).sum().backward()
        reducer.finish()
        (parameter,) = parameters
        return is_finite(reducer.own_gradients[parameter]), is_finite(parameter.grad)


def test_a_sum_that_is_too_large_is_nobody_s_own(two_ranks: Pool) -> None:
    assert two_ranks.run(large_sums) == [(True, False)] * 2


def reduce_in_two_backwards(bucket_bytes: int) -> list[Any]:
    """Let the armed backward be two, on odd replicas alone; return what was seen and is wrong."""
    parameters = make_parameters()
    with reducing(parameters, bucket_bytes) as reducer:
        found: list[Any] = []
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            reducer.arm()
            backward(parameters, range(9))
            if dist.get_rank() % 2:
                backward(parameters, range(9))
            early = torch.tensor(int(reducer.was_early))
            found.append(bool(early))
            dist.all_reduce(early)
            reducer.finish()
            if early:
                reducer.repeat()
            # The second backward adds the same once more.
            twice = [[0, 1, 1, 2, 3, 3]] * 9
            found.append(wrong_sums(parameters, twice))
        return found


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_a_gradient_that_grows_after_it_was_sent_is_sent_anew(
    four_ranks: Pool, bucket_bytes: int
) -> None:
    for rank, found in enumerate(four_ranks.run(reduce_in_two_backwards, bucket_bytes)):
        # From the second time on all wait for the end of the backward.
        assert found == [bool(rank % 2), [], False, []]


def refuse_to_lose() -> str:
    """Go on as if nothing had come late."""
    parameters = make_parameters()
    with reducing(parameters, 1) as reducer:
        reducer.arm()
        backward(parameters, range(9))
        backward(parameters, range(9))
        reducer.finish()
        with pytest.raises(RuntimeError, match="a gradient grew after it was sent") as caught:
            reducer.arm()
        reducer.repeat()
        return str(caught.value)


def test_a_gradient_that_grew_is_never_lost_silently(four_ranks: Pool) -> None:
    assert len(set(four_ranks.run(refuse_to_lose))) == 1
