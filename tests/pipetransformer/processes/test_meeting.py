"""Prove that ranks meet those of their own attempt only, and that a world which cannot train is
refused on every rank with one message."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipetransformer.processes.meeting import Seat, assign_gpus, check_seats, meet


def two_nodes(slots: int = 2) -> list[Seat]:
    """List the seats of two nodes' ranks."""
    return [Seat(local, slots, host) for host in ("a", "b") for local in range(slots)]


def test_ranks_numbered_node_by_node_are_accepted() -> None:
    for slots in (1, 2, 4):
        check_seats(two_nodes(slots))
    # Two launchers on one machine are two nodes.
    check_seats([Seat(local, 2, "a") for _ in range(2) for local in range(2)])


def test_only_a_node_whose_processes_see_one_gpu_each_is_given_these() -> None:
    seats = [replace(seat, only_gpu=name) for seat, name in zip(two_nodes(), "pqrs", strict=True)]
    refused = [replace(seat, refusal="sees 1") for seat in seats]
    assert [seat.device for seat in assign_gpus(refused)] == ["cuda"] * 4
    for last in ("r", ""):  # The last two see the same one, or one of them none or several.
        mixed = [*seats[:3], replace(seats[3], only_gpu=last)]
        with pytest.raises(ValueError, match=r"a uses cuda \(ranks 0, 1\), b uses cpu"):
            assign_gpus(mixed)


def test_nodes_of_different_sizes_are_refused_by_name() -> None:
    uneven = [*two_nodes()[:2], *(Seat(local, 3, "b") for local in range(3))]
    with pytest.raises(
        ValueError,
        match=r"the 5 processes .* a starts 2 \(ranks 0, 1\), "
        r"b starts 3 \(ranks 2, 3, 4\); start as many",
    ):
        check_seats(uneven)
    with pytest.raises(ValueError, match=r"a starts 2 \(ranks 0, 1\), b starts 2 \(ranks 2\)"):
        check_seats(two_nodes()[:3])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 3, 2, 1), (1, 0, 2, 3)])
def test_ranks_not_numbered_node_by_node_are_refused(order: tuple[int, ...]) -> None:
    seats = [two_nodes()[index] for index in order]
    with pytest.raises(
        ValueError,
        match=r"rank \d is process \d of [ab]; with 2 slots a node it "
        r"must be process \d of [ab]: number the ranks node by",
    ):
        check_seats(seats)


def test_different_devices_are_refused() -> None:
    seats = [replace(seat, device="cuda" if seat.host == "a" else "cpu") for seat in two_nodes()]
    with pytest.raises(ValueError, match=r"a uses cuda \(ranks 0, 1\), b uses cpu \(ranks 2, 3"):
        check_seats(seats)


def join(
    store: dist.Store, seats: list[Seat], *, timeout_s: float = 20.0
) -> list[tuple[str, list[Seat]]]:
    """Meet in a thread for each seat."""
    with ThreadPoolExecutor(len(seats)) as threads:
        return list(
            threads.map(
                lambda rank: meet(store, rank, len(seats), seats[rank], timeout_s=timeout_s),
                range(len(seats)),
            )
        )


def test_all_ranks_agree_on_a_name_and_on_each_other_s_places() -> None:
    seats = two_nodes()
    meetings = join(dist.HashStore(), seats)
    assert meetings == [(meetings[0][0], seats)] * 4


def test_a_restarted_world_meets_on_the_store_of_the_dead_one() -> None:
    store, names = dist.HashStore(), set()
    for number in (4, 4, 2, 4):  # Among them a smaller world, which another node's loss left.
        seats = two_nodes(number // 2)
        meetings = join(store, seats)
        assert all(met == seats for _, met in meetings)
        names |= {name for name, _ in meetings}
    assert len(names) == 4


def test_a_rank_that_restarts_while_others_wait_is_met_and_not_its_predecessor() -> None:
    store, seats = dist.HashStore(), two_nodes()
    with ThreadPoolExecutor(4) as threads:
        early = [
            threads.submit(meet, store, rank, 4, seats[rank], timeout_s=20.0) for rank in (0, 1, 3)
        ]
        store.set("hello-2", json.dumps(asdict(seats[2])))  # It dies before it answers.
        store.wait(["ack-0", "ack-1", "ack-3"], timedelta(seconds=20))
        successor = replace(seats[2], word="successor")
        late = threads.submit(meet, store, 2, 4, successor, timeout_s=20.0)
        met = {seat.word for meeting in (late, *early) for seat in meeting.result()[1]}
    assert met == {seats[0].word, seats[1].word, "successor", seats[3].word}


def test_ranks_that_do_not_join_are_named() -> None:
    store, seats = dist.HashStore(), two_nodes()
    store.set("hello-2", json.dumps(asdict(seats[2])))
    with pytest.raises(TimeoutError, match=r"rank 0 on a waited 0 s for rank\(s\) 1, 3 of 4,"):
        meet(store, 0, 4, seats[0], timeout_s=0)
    for rank in (1, 3):
        store.set(f"hello-{rank}", json.dumps(asdict(seats[rank])))
    with pytest.raises(TimeoutError, match=r"rank 0 on a waited 0 s for rank\(s\) 1, 2, 3 of 4,"):
        meet(store, 0, 4, seats[0], timeout_s=0)


def test_ranks_wait_for_rank_0_where_only_its_predecessor_s_keys_are_left() -> None:
    store = dist.HashStore()
    join(store, two_nodes())
    with pytest.raises(TimeoutError, match=r"rank 1 on a waited 0 s for rank\(s\) 0 of 4,"):
        meet(store, 1, 4, two_nodes()[1], timeout_s=0)
