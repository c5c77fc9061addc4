"""Test the benchmark of the host's time: that both sides learn alike, but no speed."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import host
from tests.helpers.marks import slow


@pytest.mark.parametrize("name", [slow("bert_warm"), "attach_vit_filling"])
def test_a_pair_learns_alike_and_the_last_line_has_all_figures(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "NUM_STEPS", 2)
    host.main(["--only", name, "--pairs", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*found] == [name]
    assert {*found[name]} == {"wall", "main", "process", "by_hand_ms", "spread", "missed"}
    assert all(found[name][clock] > 0 for clock in host.CLOCKS)
