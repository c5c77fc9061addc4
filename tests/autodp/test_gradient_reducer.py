"""Prove that replicas end a step with the sum of their gradients, sent while they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp.gradient_reducer import GradientReducer
from tests.helpers.gradients import (
    BUCKET_BYTES,
    EVERYBODY,
    WORLD,
    backward,
    factor,
    make_parameters,
    reducing,
    world,
    wrong_sums,
)
from tests.helpers.pool import Pool


@contextmanager
def recording() -> Iterator[list[str]]:
    """Note every all-reduce, in order with what the caller notes."""
    events: list[str] = []
    original = dist.all_reduce

    def noted(*arguments: Any, **options: Any) -> Any:
        events.append("send")
        return original(*arguments, **options)

    dist.all_reduce = noted
    try:
        yield events
    finally:
        dist.all_reduce = original


def reduce_with_users(users: list[list[int]], silent: list[int], bucket_bytes: int) -> list[str]:
    """Use parameter k on replicas users[k]; silent replicas run no backward and do not arm."""
    parameters, rank = make_parameters(), dist.get_rank()
    with reducing(parameters, bucket_bytes) as reducer:
        if rank not in silent:
            reducer.arm()
            backward(parameters, [k for k, replicas in enumerate(users) if rank in replicas])
        reducer.finish()
        return wrong_sums(parameters, users)


MIXED = [[0, 1, 2, 3], [2], [], [0, 3], [1], [], [], [3], [0, 1, 2]]


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_gradients_become_the_sum_over_the_replicas(four_ranks: Pool, bucket_bytes: int) -> None:
    assert four_ranks.run(reduce_with_users, EVERYBODY, [], bucket_bytes) == [[]] * WORLD


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_a_parameter_gets_the_users_sum_everywhere_and_none_where_nobody_used_it(
    four_ranks: Pool, bucket_bytes: int
) -> None:
    assert four_ranks.run(reduce_with_users, MIXED, [], bucket_bytes) == [[]] * WORLD


@pytest.mark.parametrize("silent", [[0], [1, 3], [0, 1, 2, 3]])
def test_a_replica_without_backward_contributes_zeros(four_ranks: Pool, silent: list[int]) -> None:
    users = [[r for r in range(WORLD) if r not in silent]] * 9
    for bucket_bytes in BUCKET_BYTES:
        assert four_ranks.run(reduce_with_users, users, silent, bucket_bytes) == [[]] * WORLD


def reduce_noise(bucket_bytes: int) -> list[bytes]:
    """Return the reduced gradients' bytes, of random numbers whose sum depends on the order."""
    parameters = [*make_parameters(), nn.Parameter(torch.zeros(10_007))]
    with reducing(parameters, bucket_bytes) as reducer:
        reducer.arm()
        backward(parameters, range(len(parameters)), whole=False)
        reducer.finish()
        gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for g in gradients]


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_replicas_hold_the_same_bits_and_a_repetition_does_too(
    four_ranks: Pool, bucket_bytes: int
) -> None:
    first = four_ranks.run(reduce_noise, bucket_bytes)
    assert len(first[0]) == 10
    assert first == [first[0]] * WORLD
    assert four_ranks.run(reduce_noise, bucket_bytes) == first


def accumulate(num_micro_batches: int, num_steps: int) -> tuple[list[int], list[str]]:
    """Arm before the last of several backwards; count the messages sent by each backward's end."""
    parameters, sent, wrong = make_parameters(), list[int](), list[str]()
    used = range(len(parameters))
    with reducing(parameters, 1) as reducer, recording() as events:
        for _ in range(num_steps):
            for micro_batch in range(num_micro_batches):
                if micro_batch == num_micro_batches - 1:
                    reducer.arm()
                backward(parameters, used, micro_batch)
                sent.append(len(events))
            reducer.finish()
            wrong += wrong_sums(parameters, EVERYBODY, num_micro_batches)
            for parameter in parameters:
                parameter.grad = None
            events.clear()
    return sent, wrong


def test_only_the_armed_backward_sends_and_it_sends_the_sum_of_all(four_ranks: Pool) -> None:
    for sent, wrong in four_ranks.run(accumulate, 3, 2):
        assert wrong == []
        assert sent == [0, 0, 9, 0, 0, 9], "each of nine parameters has a bucket of its own"


def only_early_micro_batch_uses_some() -> list[str]:
    """Leave parameters out of the armed backward that an earlier one used."""
    parameters = make_parameters()
    with reducing(parameters, 64) as reducer:
        backward(parameters, [0, 3, 6])
        reducer.arm()
        backward(parameters, [1, 2, 4, 5, 7, 8])
        reducer.finish()
        return wrong_sums(parameters, EVERYBODY)


def test_gradients_from_before_the_armed_backward_count(four_ranks: Pool) -> None:
    assert four_ranks.run(only_early_micro_batch_uses_some) == [[]] * WORLD


def note_order_of_hooks() -> list[str]:
    """Run a chain of layers, a bucket each, and note when a gradient reaches a layer's output."""
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(4)]
    with reducing(parameters, 1) as reducer, recording() as events:
        hidden = torch.ones(2, 4)
        for number, weight in enumerate(parameters):
            hidden = hidden @ weight
            hidden.register_hook(lambda _, n=number: events.append(f"at {n}"))
        reducer.arm()
        hidden.sum().backward()
        events.append("end")
        reducer.finish()
        return list(events)


def test_a_full_bucket_leaves_before_the_backward_goes_on(two_ranks: Pool) -> None:
    expected = ["at 3", "send", "at 2", "send", "at 1", "send", "at 0", "send", "end"]
    for events in two_ranks.run(note_order_of_hooks):
        assert events[: len(expected)] == expected


def finish_in_another_order_on_each_rank() -> list[float]:
    """Let replicas fill their buckets in opposite orders."""
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    with reducing([first, second], 1) as reducer:
        order = [first, second] if dist.get_rank() else [second, first]
        hidden = torch.ones(3)
        for parameter in order:
            hidden = hidden * (1 + parameter)
        reducer.arm()
        (hidden * (dist.get_rank() + 1)).sum().backward()
        reducer.finish()
        assert first.grad is not None and second.grad is not None
        return first.grad.tolist() + second.grad.tolist()


def test_replicas_whose_backwards_end_in_another_order_do_not_mix_buckets(two_ranks: Pool) -> None:
    assert two_ranks.run(finish_in_another_order_on_each_rank) == [[3.0] * 6] * 2


def reuse_after_a_step() -> list[str]:
    """Use another set of parameters in each step; what one step left must not reach the next."""
    parameters, wrong, rank = make_parameters(), list[str](), dist.get_rank()
    with reducing(parameters, 64) as reducer:
        for users in (EVERYBODY, MIXED, MIXED[::-1], EVERYBODY):
            reducer.arm()
            backward(parameters, [k for k, replicas in enumerate(users) if rank in replicas])
            reducer.finish()
            wrong += wrong_sums(parameters, users)
            for parameter in parameters:
                parameter.grad = None
    return wrong


def test_a_step_leaves_nothing_behind_for_the_next(four_ranks: Pool) -> None:
    assert four_ranks.run(reuse_after_a_step) == [[]] * WORLD


def share_one_parameter() -> list[float]:
    """List a parameter under two names, in two buckets."""
    tied, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with reducing([tied, other, tied], 1) as reducer:
        reducer.arm()
        (tied * other * tied).sum().backward()
        reducer.finish()
        assert tied.grad is not None and other.grad is not None
        return tied.grad.tolist() + other.grad.tolist()


def test_a_parameter_listed_twice_is_summed_once(two_ranks: Pool) -> None:
    assert two_ranks.run(share_one_parameter) == [[4.0, 4.0, 2.0, 2.0]] * 2


def backward_after_close() -> tuple[int, bool]:
    parameters = make_parameters()
    reducer = GradientReducer(parameters, world(), bucket_bytes=64)
    reducer.arm()
    reducer.close()
    with recording() as events:
        backward(parameters, range(len(parameters)))
    local = all(
        p.grad is not None and torch.equal(p.grad, factor(k, p, dist.get_rank()))
        for k, p in enumerate(parameters)
    )
    return len(events), local


def test_a_closed_reducer_has_left_no_hook(two_ranks: Pool) -> None:
    assert two_ranks.run(backward_after_close) == [(0, True)] * 2


def strides_of_sums() -> bool:
    """Sum gradients of parameters of unusual strides; tell whether the sums have them."""
    parameters = [
        nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(5, 2).t()),
        nn.Parameter(torch.zeros(4, 6)[:, ::2]),
    ]
    with reducing(parameters, 1 << 20) as reducer:
        reducer.arm()
        sum((p * p.new_ones(p.shape)).sum() for p in parameters).backward()
        own = [p.grad.stride() for p in parameters if p.grad is not None]
        reducer.finish()
        sums = [p.grad.stride() for p in parameters if p.grad is not None]
        return sums == own and sums[:2] == [p.stride() for p in parameters[:2]]


def test_a_summed_gradient_has_the_strides_of_autograd_s_own(four_ranks: Pool) -> None:
    assert four_ranks.run(strides_of_sums) == [True] * WORLD


def sum_copies() -> list[float]:
    """Sum gradients by way of copies of the buckets, as a GPU's are summed over gloo."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 1.0 + dist.get_rank())
    with (
        patch("autodp.rank_sums.share_memory", lambda group, num_bytes: None),
        patch("autodp.rank_sums._on_link", lambda flat, group: flat.clone()),
    ):
        reducer = GradientReducer([parameter], world())
        reducer.finish()
    reducer.close()
    return parameter.grad.tolist()


def test_sums_of_copies_in_host_memory_come_back_into_the_gradients(two_ranks: Pool) -> None:
    assert two_ranks.run(sum_copies) == [[3.0] * 3] * 2


TABLE = (50, 3)


def table_gradient(rank: int) -> Tensor:
    """Return a gradient of few rows, one of them with nothing but what has no square."""
    gradient = torch.zeros(TABLE)
    gradient[[2 * rank, 7]] = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
    gradient[20 + rank, 1] = 1e-30
    gradient[40] = -0.0 if rank == 0 else 0.0
    gradient[30, :2] = torch.tensor([1.0, -1.0])
    return gradient


def sum_tables(bringing: list[int], on_one_node: bool) -> tuple[Any, Any, int]:
    """Sum a table's gradient beside another's; return the sums and the values that travelled."""
    table, other = nn.Parameter(torch.zeros(TABLE)), nn.Parameter(torch.zeros(2))
    reducer = GradientReducer(
        [table, other], world(), tables=[table], on_one_node=on_one_node, bucket_bytes=64
    )
    num_values = []
    original = dist.all_reduce

    def noted(values: Tensor, **options: Any) -> Any:
        num_values.append(values.numel())
        return original(values, **options)

    with patch.object(dist, "all_reduce", noted):
        for _ in range(2):  # The memory is used again.
            num_values.clear()
            if (rank := dist.get_rank()) in bringing:
                reducer.arm()
                (other.sum() + (table * table_gradient(rank)).sum()).backward()
            reducer.finish()
            found = [None if p.grad is None else p.grad.clone() for p in (table, other)]
            table.grad = other.grad = None
    reducer.close()
    return (*(None if one is None else one.numpy() for one in found), sum(num_values))


@pytest.mark.parametrize("on_one_node", [False, True])
@pytest.mark.parametrize("bringing", [[0, 1], [1], []])
def test_a_table_s_touched_rows_are_summed_as_the_whole_would_be(
    two_ranks: Pool, bringing: list[int], on_one_node: bool
) -> None:
    wanted = sum((table_gradient(rank) for rank in bringing), torch.zeros(TABLE)).numpy()
    for table, other, num_values in two_ranks.run(sum_tables, bringing, on_one_node):
        if not bringing:
            assert table is None and other is None
            continue
        assert table.tobytes() == wanted.tobytes()
        assert other.tolist() == [len(bringing)] * 2
        touched = int((wanted != 0).any(1).sum()) + (0 in bringing)
        # The counts of rows, the rows, and the other's bucket; in shared memory, only words.
        most = 8 if on_one_node else (TABLE[0] + 1) + 3 * touched + 3
        assert num_values <= most < TABLE[0] * TABLE[1]


def test_more_replicas_end_with_the_same_bits(four_ranks: Pool) -> None:
    found = four_ranks.run(sum_tables, [0, 1, 3], True)
    wanted = sum((table_gradient(rank) for rank in (0, 1, 3)), torch.zeros(TABLE))
    assert {table.tobytes() for table, _, _ in found} == {found[0][0].tobytes()}
    torch.testing.assert_close(torch.from_numpy(found[0][0]), wanted)


def bring_nan() -> tuple[bool, bool]:
    """Return whether a NaN of rank 1's table is in the sum, and in what this replica brought."""
    table = nn.Parameter(torch.zeros(TABLE))
    table.grad = table_gradient(dist.get_rank())
    if dist.get_rank() == 1:
        table.grad[40, 2] = torch.nan
    reducer = GradientReducer([table], world(), tables=[table])
    reducer.finish()
    own = reducer.own_gradients[table]
    assert own is not None
    found = bool(table.grad[40].isnan().any()), bool(own.isnan().any())
    reducer.close()
    return found


def test_a_nan_in_a_table_reaches_all_and_is_known_to_be_its_replica_s(two_ranks: Pool) -> None:
    assert two_ranks.run(bring_nan) == [(True, False), (True, True)]
