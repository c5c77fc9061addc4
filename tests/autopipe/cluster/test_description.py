"""Prove that a cluster's file is read, and refused with its key and file named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from autopipe.cluster.description import Cluster, load_cluster, parse_bytes
from autopipe.profile.network import LinkCost, Ring, RingCost

VALUES = {
    "nodes": "2",
    "slots_per_node": "4",
    "memory_bytes": "16e9",
    "memory_bytes_per_s": "400e9",
    "flops_per_s": "{float32 = 10e12}",
    "link": "{latency_s = 500e-3, bytes_per_s = 10e9}",
    "node_link": "{latency_s = 0.001, bytes_per_s = 12.5e9}",
}


def write(folder: Path, **changes: str | None) -> Path:
    """Write a cluster's file, some values changed and those of None left out."""
    values = {**VALUES, **changes}
    path = folder / "cluster.toml"
    path.write_text("\n".join(f"{k} = {v}" for k, v in values.items() if v is not None))
    return path


def test_numbers_are_in_the_unit_of_their_key(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, name='"ours"', read_s="2e-3", cache_bytes_per_s="7e9"))
    assert cluster == Cluster(
        "ours", 2, 4, 16_000_000_000, 400e9, {"float32": 10e12}, LinkCost(0.5, 10e9),
        LinkCost(1e-3, 12.5e9), read_s=2e-3, cache_bytes_per_s=7e9,
    )  # fmt: skip
    assert cluster.num_slots == 8
    assert type(cluster.memory_bytes) is int


def test_efficiency_scales_the_peak_of_every_dtype(tmp_path: Path) -> None:
    rates = "{float32 = 67e12, bfloat16 = 989e12}"
    cluster = load_cluster(write(tmp_path, flops_per_s=rates, efficiency="0.5"))
    assert cluster.flops_per_s == pytest.approx({"float32": 33.5e12, "bfloat16": 494.5e12})


def test_links_that_do_not_exist_need_no_description(tmp_path: Path) -> None:
    alone = load_cluster(write(tmp_path, nodes="1", slots_per_node="1", link=None, node_link=None))
    assert alone.link == alone.node_link == LinkCost(0.0, math.inf)
    node = load_cluster(write(tmp_path, nodes="1", node_link=None))
    assert node.node_link == node.link == LinkCost(0.5, 10e9)


def test_infinite_rates_are_allowed(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, memory_bytes_per_s="inf"))
    assert cluster.memory_bytes_per_s == math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node": "3"}, r"cluster\.toml has unknown key\(s\) node; allowed are name, nodes, "),
        ({"nodes": None}, r"cluster\.toml lacks nodes; give a whole number, at least 1"),
        ({"nodes": "0"}, r"nodes in .*cluster\.toml is 0; give a whole number, at least 1"),
        ({"nodes": "2.0"}, r"nodes in .* is 2\.0; give a whole number"),
        ({"nodes": "true"}, r"nodes in .* is True; give a whole number"),
        ({"name": "3"}, r"name in .* is 3; give a text"),
        (
            {"memory_bytes": None},
            "lacks memory_bytes; give a number of at least 1, without a unit",
        ),
        (
            {"memory_bytes": '"16 GB"'},
            "memory_bytes in .* is '16 GB'; give a number of .* 16e9 or",
        ),
        ({"memory_bytes": "inf"}, "memory_bytes in .* is inf; give a number of at least 1, "),
        ({"memory_bytes": "-1"}, "memory_bytes in .* is -1; give a number of at least 1, "),
        ({"memory_bytes_per_s": "nan"}, "memory_bytes_per_s in .* is nan; give a number of at l"),
        (
            {"kernel_overhead_s": "-1"},
            "kernel_overhead_s in .* is -1; give a number of at least 0",
        ),
        (
            {"step_overhead_s": "true"},
            "step_overhead_s in .* is True; give a number of at least 0",
        ),
        ({"efficiency": "70"}, "efficiency in .* is 70; give the share of the peaks"),
        ({"efficiency": "0"}, "efficiency in .* is 0; give the share of the peaks"),
        ({"flops_per_s": "1e12"}, r"flops_per_s in .* give a table \[flops_per_s\] with keys out"),
        ({"flops_per_s": "{}"}, "flops_per_s in .* is empty; give at least one of float32, bflo"),
        ({"flops_per_s": "{int8 = 1e12}"}, r"unknown key\(s\) flops_per_s.int8; allowed are flop"),
        (
            {"flops_per_s": '{float32 = "1"}'},
            "flops_per_s.float32 in .* is '1'; give a number of ",
        ),
        ({"link": None}, r"lacks link; give a table \[link\] with keys out of latency_s, bytes_"),
        ({"node_link": None}, r"lacks node_link; give a table \[node_link\]"),
        ({"link": "{latency_s = 1}"}, "lacks link.bytes_per_s; give a number of at"),
        ({"link": "{latency_s = inf, bytes_per_s = 1}"}, "link.latency_s in .* is inf; give a nu"),
        # Of one node; nothing uses it, and a mistake in it is a mistake.
        (
            {"nodes": "1", "node_link": "{latency_s = 1, bandwith = 1}"},
            r"unknown key\(s\) node_link.bandwith; allowed are node_link.latency_s",
        ),
        ({"nodes": "= 2"}, r"cluster\.toml is not TOML: "),
    ],
)
def test_a_bad_file_is_refused_by_key_file_and_what_is_allowed(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_cluster(write(tmp_path, **changes))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="file cannot be read: .*No such file.*none.toml"):
        load_cluster(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "number"), [("65536", 65536), ("16GiB", 16 << 30), ("1.5 MB", 1_500_000)]
)
def test_a_size_on_the_command_line_may_have_a_unit(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "0", "GiB", "-3 GB", "16 GB/s", "1e999 GB x", "1e999 GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; give bytes as a number, or with one of B,"):
        parse_bytes(text)


SUMS = RingCost(LinkCost(1, 8), LinkCost(2, 4))


def test_a_sum_within_a_node_is_the_ring_s() -> None:
    # 2 (R - 1) messages of 1 / R of the bytes, at 1 s and 8 bytes/s.
    assert SUMS.seconds(Ring(4), 800) == 6 * (1 + 200 / 8)
    assert SUMS.seconds(Ring(2), 800) == 2 * (1 + 400 / 8)


def test_a_sum_over_nodes_shares_their_link_with_those_of_the_other_stages() -> None:
    # One ring has the link of 4 bytes/s to itself, two rings halve it, four of 2 ...
    assert SUMS.seconds(Ring(8, 1), 800) == 14 * (2 + 100 / 4)
    assert SUMS.seconds(Ring(4, 2), 800) == 6 * (2 + 200 / 2)
    assert SUMS.seconds(Ring(2, 4), 800) == 2 * (2 + 400 / 1)


def test_a_ring_over_fast_nodes_is_as_slow_as_the_link_within() -> None:
    sums = RingCost(LinkCost(1, 8), LinkCost(0.5, 1000))
    assert sums.seconds(Ring(8, 1), 800) == 14 * (1 + 100 / 8)


def test_example_files_describe_as_many_slots_as_their_names_say() -> None:
    paths = sorted((Path(__file__).parents[3] / "docs/clusters").glob("*.toml"))
    assert {path.stem: load_cluster(path).num_slots for path in paths} == {
        "2x8-rtx5000": 16,
        "8x8-h100": 64,
    }
