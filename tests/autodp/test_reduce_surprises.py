"""Prove that gradients which are no numbers, or which grow late, are noticed on every replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients import (
    BUCKET_BYTES,
    WORLD,
    backward,
    make_parameters,
    reducing,
    wrong_sums,
)
from tests.pool import Pool


def poison(culprits: dict[int, int], value: float, bucket_bytes: int) -> list[list[list[int]]]:
    """Let replica r's gradient of parameter culprits[r] hold a bad value, then none; return who is
    found to have brought one, by step and parameter."""
    parameters, rank, found = make_parameters(), dist.get_rank(), []
    with reducing(parameters, bucket_bytes) as reducer:
        for bad in (culprits.get(rank), None):
            handle = parameters[bad].register_hook(lambda g: g.fill_(value)) if bad else None
            reducer.arm()
            backward(parameters, range(len(parameters)))
            reducer.finish()
            found.append([reducer.nonfinite_replicas([p]) for p in parameters])
            if handle is not None:
                handle.remove()
            for parameter in parameters:
                parameter.grad = None
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_replica_learns_who_brought_a_bad_number_and_to_which_parameter(
    four_ranks: Pool, value: float
) -> None:
    expected: list[list[int]] = [[] for _ in range(9)]
    expected[3], expected[8] = [1], [0, 3]
    found = four_ranks.run(poison, {1: 3, 0: 8, 3: 8}, value, 1)
    assert found == [[expected, [[]] * 9]] * WORLD


def test_a_bad_number_is_looked_for_in_the_parameter_s_message(four_ranks: Pool) -> None:
    found = four_ranks.run(poison, {2: 8}, float("nan"), 25 << 20)
    # Messages hold neighbours of one dtype: 8 alone, 7, 6, then 5 and 4, ...
    assert found == [[[[]] * 8 + [[2]], [[]] * 9]] * WORLD


def large_sums() -> list[list[int]]:
    """Bring finite float16 gradients whose sum no float16 holds."""
    parameters = [nn.Parameter(torch.zeros(64, dtype=torch.float16))]
    with reducing(parameters, 64) as reducer:
        reducer.arm()
        (parameters[0] * 10_000.0).sum().backward()
        reducer.finish()
        return [reducer.nonfinite_replicas(parameters)]


def test_large_gradients_are_no_bad_numbers(two_ranks: Pool) -> None:
    assert two_ranks.run(large_sums) == [[[]]] * 2


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
            reducer.finish(again=bool(early))
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
    """Finish as if nothing had come late."""
    parameters = make_parameters()
    with reducing(parameters, 1) as reducer:
        reducer.arm()
        backward(parameters, range(9))
        backward(parameters, range(9))
        with pytest.raises(RuntimeError, match="a gradient grew after it was sent") as caught:
            reducer.finish()
        reducer.finish(again=True)
        return str(caught.value)


def test_a_gradient_that_grew_is_never_lost_silently(four_ranks: Pool) -> None:
    assert len(set(four_ranks.run(refuse_to_lose))) == 1
