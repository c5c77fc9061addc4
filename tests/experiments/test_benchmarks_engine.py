"""Test the engine's benchmarks: what they print, prove and count, but no speed."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopipe.gpipe.module import GPipe
from experiments.benchmarks.engine import __main__ as engine
from experiments.benchmarks.engine import components
from experiments.benchmarks.engine.kept_bytes import peak_kept_bytes
from experiments.benchmarks.engine.plain_order import PlainOrder
from experiments.benchmarks.engine.process_pipelines import (
    ProcessResults,
    ProcessRuns,
    measure,
    measure_on_this_rank,
)
from experiments.benchmarks.engine.table import KEYS, verdict
from experiments.benchmarks.engine.threads import peak_of_1f1b
from experiments.benchmarks.engine.workloads import (
    Contestant,
    Encoder,
    UNet,
    plain,
    through_autograd,
    verify_all,
)
from experiments.benchmarks.measuring.rounds import (
    Comparison,
    Ratio,
    ResultsDifferError,
    interleave,
    of_bubble_bound,
)
from tests.helpers.pool import Pool

TINY = Encoder(width=8, hidden=16, sequence=4, batch_size=16)
TINY_UNET = UNet(2, 2, 32, 4)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """Return the JSON line that was printed last."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_engine_prints_every_key_with_median_and_interval_in_its_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], two_ranks: Pool
) -> None:
    pytest.importorskip("torchgpipe", reason="needs the extra `bench`")

    def on_pool(runs: ProcessRuns, num_stages: int) -> ProcessResults:
        assert num_stages == 2
        return two_ranks.run(measure_on_this_rank, runs)[0]

    monkeypatch.setattr(engine, "measure", on_pool)
    monkeypatch.setattr(engine, "num_cores", lambda: 2)
    sizes = {"encoder": (TINY, TINY), "unet": (TINY_UNET, TINY_UNET)}
    monkeypatch.setattr(engine, "SIZES", sizes)
    arguments = ["--quick", "--pairs", "1", "--workloads", "encoder"]
    assert engine.main(arguments) == 0
    line = last_line(capsys)
    bound = line["of_bubble_bound"]
    assert isinstance(bound, dict)
    found = [line[key] for key in KEYS if key != "of_bubble_bound"]
    found += [bound[links][name] for links in ("threads", "processes") for name in bound[links]]
    assert len(found) == 5 + 4
    for entry in found:
        assert isinstance(entry, dict)
        low, high = entry["interval"]
        assert low <= entry["median"] <= high and entry["pairs"] >= 1


def test_engine_says_how_to_get_torchgpipe_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(
        sys.modules, "experiments.benchmarks.engine.peer_torchgpipe", raising=False
    )
    monkeypatch.setitem(sys.modules, "torchgpipe", None)
    assert engine.find_torchgpipe() is None
    assert "torchgpipe is missing" in capsys.readouterr().out


@pytest.mark.slow
def test_components_prints_a_row_for_each_component_in_its_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Timing the layers takes two seconds and tells nothing here.
    monkeypatch.setattr(components, "balance_of", lambda *_: [54, 55])
    components.main(["--quick", "--rounds", "1"])
    rows = last_line(capsys)["rows"]
    assert isinstance(rows, list)
    assert [row["components"] for row in rows if row["applies"]] == [
        components.PLAIN,
        components.ORDERED,
        components.DIRECT,
    ]
    for row in rows:
        if row["applies"]:
            assert row["samples_per_s"] > 0 and row["peak_kept_bytes"] > 0
            assert 0 < row["utilisation"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda gradient: gradient * 1.001, "differs by"),
        (lambda gradient: gradient * float("nan"), "differs by"),
        (lambda gradient: None, "has no gradient"),
    ],
)
def test_a_contestant_with_one_wrong_gradient_is_refused(spoil: object, message: str) -> None:
    batch = TINY.mini_batch()
    model = TINY.build()
    right = through_autograd(model, batch)

    def step() -> Tensor:
        loss = right.step()
        weight = next(model.parameters())
        weight.grad = spoil(weight.grad)  # type: ignore[operator]
        return loss

    base = plain(TINY.build(), batch, 4)
    verify_all({"right": right}, base)
    with pytest.raises(ResultsDifferError, match=f"wrong: .*parameter 0.*{message}"):
        verify_all({"wrong": Contestant(model, step)}, base)


def test_a_contestant_with_a_wrong_loss_is_refused() -> None:
    batch = TINY.mini_batch()
    right = through_autograd(TINY.build(), batch)
    wrong = Contestant(right.module, lambda: right.step() * 1.001)
    with pytest.raises(ResultsDifferError, match="wrong: the loss is"):
        verify_all({"wrong": wrong}, plain(TINY.build(), batch, 4))


def test_torchgpipe_trains_the_same_unet() -> None:
    pytest.importorskip("torchgpipe", reason="needs the extra `bench`")
    peer = importlib.import_module("experiments.benchmarks.engine.peer_torchgpipe")
    batch = TINY_UNET.mini_batch()
    theirs = peer.contestant(TINY_UNET, [50, 59], batch, chunks=2, checkpoint="except_last")
    verify_all({"torchgpipe": theirs}, plain(TINY_UNET.build(), batch, 2))


@pytest.mark.parametrize("num_checkpointed", [0, 1, 2])
def test_the_baseline_in_plain_order_has_the_plain_models_gradients(
    num_checkpointed: int,
) -> None:
    batch, in_tuples = TINY_UNET.mini_batch(), UNet(2, 2, 32, 4, skips="tuple")
    module = PlainOrder(in_tuples.build(), [50, 59], chunks=2, num_checkpointed=num_checkpointed)
    lines = {"plain order": through_autograd(module, batch)}
    verify_all(lines, plain(TINY_UNET.build(), batch, 2))


def test_the_bound_is_the_schedules_formula_times_the_speed_up_of_copies() -> None:
    # Copies reach 2 * 3 / 4 = 1.5 of 2; the schedule allows 16 / 9: together 4 / 3.
    seconds = {"plain": 8.0, "ours": 6.0, "alone": 3.0, "together": 4.0}
    comparison = of_bubble_bound(
        {name: np.array([value]) for name, value in seconds.items()},
        "ours",
        num_stages=2,
        num_micro_batches=8,
        key=(),
        what="",
    )
    assert comparison.ratio.median == pytest.approx(1.0)


def test_every_round_times_each_action_once_and_warm_ups_do_not_count() -> None:
    calls: list[str] = []
    actions = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    seconds = interleave(actions, num_rounds=3, warm_up=1)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = [calls[n : n + 3] for n in range(0, 12, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)


@pytest.mark.parametrize(
    ("key", "low", "high", "expected"),
    [
        ("vs_torch_pipelining", 0.90, 0.97, "MISSES >= 0.98"),
        ("vs_torch_pipelining", 0.90, 0.99, "meets >= 0.98"),
        ("k1_overhead", 1.03, 1.05, "MISSES <= 1.02"),
        ("k1_overhead", 1.01, 1.05, "meets <= 1.02"),
    ],
)
def test_a_bar_is_missed_only_with_the_whole_interval(
    key: str, low: float, high: float, expected: str
) -> None:
    assert verdict(Comparison((key,), "", Ratio((low + high) / 2, low, high), 40)) == expected


def test_kept_bytes_count_each_piece_of_memory_once_while_it_is_alive() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Flatten())
    input = torch.randn(2, 4)
    # 32 bytes each: the linear layer's output, gone after the sigmoid, and the sigmoid's, which
    # flattening shares.
    ignored = [input, *model.parameters()]
    assert peak_kept_bytes(lambda: model(input).sum().backward(), model, ignored) == 64
    assert peak_kept_bytes(lambda: model(input).sum().backward(), model, ignored[1:]) == 96


def test_kept_bytes_see_that_checkpointing_keeps_less() -> None:
    batch = TINY.mini_batch()
    peaks = {}
    for mode in ("never", "always"):
        module = GPipe(TINY.build(), [4, 4], devices=["cpu"] * 2, chunks=8, checkpoint=mode)
        step = through_autograd(module, batch).step
        peaks[mode] = peak_kept_bytes(step, module, [batch.input, *module.parameters()])
    # Two of eight micro-batches have a graph at once, the others four boundaries.
    assert peaks["always"] < peaks["never"] / 2


def test_1f1b_is_counted_with_two_of_sixteen_micro_batches_at_stage_0() -> None:
    comparison = peak_of_1f1b(TINY, 2, num_micro_batches=16)
    assert comparison.facts is not None
    assert comparison.facts["micro_batches"] == {"gpipe": 16, "1f1b": 2}
    # 2/16, and what the forward in progress needs besides.
    assert 0.125 <= comparison.ratio.median < 0.2


@pytest.mark.slow
def test_the_processes_of_a_measurement_are_ended() -> None:
    before = multiprocessing.active_children()
    results = measure(ProcessRuns(TINY, num_micro_batches=4, num_rounds=1), 2)
    assert results.peak_in_flight == {"gpipe": [4, 4], "1f1b": [2, 1]}
    assert set(multiprocessing.active_children()) <= set(before)
