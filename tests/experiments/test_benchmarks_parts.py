"""Test the benchmark of frozen parts: its loops learn alike; what it says, but no speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments.benchmarks import parts
from experiments.part_cases import TINY, part_cases
from experiments.part_loops import ByHand, Ours, Plain
from tests.helpers.marks import slow

CASES = {case.name: case for case in part_cases(TINY)}


@pytest.mark.parametrize("name", [name if name == "resnet" else slow(name) for name in CASES])
def test_all_loops_learn_alike_and_the_part_runs_in_the_first_epoch_alone(name: str) -> None:
    case = CASES[name]
    plain, by_hand, ours = (
        kind(case.in_dtype(torch.float64), "cpu") for kind in (Plain, ByHand, Ours)
    )
    runs: dict[Any, int] = {}
    for loop in (plain, by_hand, ours):
        deep = [one for one in loop.part.modules() if isinstance(one, nn.Conv1d | nn.Conv2d)]
        _count(deep[0], loop, runs)  # Once: ours notices a forward that is replaced meanwhile.
        for _ in range(2):
            runs[loop] = 0
            loop.epoch()
        losses = torch.stack(loop.losses).tolist()
        assert losses == pytest.approx(torch.stack(plain.losses).tolist(), rel=1e-9)
    ours.close()
    assert [runs[loop] > 0 for loop in (plain, by_hand, ours)] == [True, False, False]
    assert ours.num_read == len(case.rows)


def _count(module: nn.Module, loop: Any, runs: dict[Any, int]) -> None:
    run = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs[loop] += 1
        return run(*args, **kwargs)

    module.forward = counted


def _caching(wrong: bool) -> ModuleType:
    """Stand for the package: it keeps what a module returned, by its input's sum."""

    def decorate(kind: type[nn.Module]) -> type[nn.Module]:
        class Cached(kind):  # type: ignore[misc, valid-type]
            def forward(self, given: torch.Tensor) -> torch.Tensor:
                key = 0.0 if wrong else float(given.sum())
                kept = vars(self).setdefault("kept", {})
                if key not in kept:
                    kept[key] = super().forward(given)
                answer: torch.Tensor = kept[key]
                return answer

        return Cached

    module = ModuleType("torchcache")
    module.torchcache = lambda: decorate  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("package", [slow("none"), slow("right"), slow("wrong")])
def test_it_prints_a_table_and_a_line_of_json_for_each_model(
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    found = None if package == "none" else _caching(package == "wrong")
    monkeypatch.setitem(sys.modules, "torchcache", found)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    images = np.random.default_rng(0).integers(0, 255, (32, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "images.npz", train_images=images, train_labels=np.arange(32) % 10)
    options = ["resnet", "--repeats", "1", "--cifar", str(tmp_path / "images.npz")]
    parts.main(options, TINY)
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert all(result[name]["warm_cpu_ms"] > 0 for name in ("plain", "by_hand", "ours"))
    assert all(result[name] > 0 for name in ("fill_over_by_hand", "warm_over_allowed"))
    said = {"none": "not installed", "right": "| torchcache | ", "wrong": "wrong: its losses"}
    assert said[package] in printed
    assert ("torchcache" in result) == (package == "right")


@pytest.mark.slow
def test_a_loop_that_learns_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ByHand):
        def _serve(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super()._serve(*args, **kwargs)

    monkeypatch.setitem(parts._LOOPS, "by_hand", Wrong)
    with pytest.raises(parts.ResultsDifferError, match="by_hand's losses differ by"):
        parts.run(CASES["resnet"], 1)


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parts.main(["resnets"])
    assert (
        "there is no resnets; there are whisper, resnet, clip, smolvlm" in capsys.readouterr().err
    )
