"""Test the engine's benchmarks: what they print, prove and count, but no speed."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks.engine import __main__ as engine
from experiments.benchmarks.engine.process_pipelines import (
    ProcessResults,
    ProcessRuns,
    measure_on_this_rank,
)
from experiments.benchmarks.engine.table import KEYS
from experiments.benchmarks.engine.workloads import Encoder, UNet
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
