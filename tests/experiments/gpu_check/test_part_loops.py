"""Test the loops with a frozen part: they learn alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from experiments.gpu_check.part_cases import TINY, part_cases
from experiments.gpu_check.part_loops import ByHand, Ours, Plain
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
        part = loop.model.get_submodule(case.blocks)
        deep = [one for one in part.modules() if isinstance(one, nn.Conv1d | nn.Conv2d)]
        _count(deep[0], loop, runs)  # Once: ours notices a forward that is replaced meanwhile.
        for _ in range(2):
            runs[loop] = 0
            loop.epoch(1)
        losses = torch.stack(loop.losses).tolist()
        assert losses == pytest.approx(torch.stack(plain.losses).tolist(), rel=1e-9)
    ours.close()
    assert [runs[loop] > 0 for loop in (plain, by_hand, ours)] == [True, False, False]
    assert ours.rows_read == len(case.rows)


def _count(module: nn.Module, loop: Any, runs: dict[Any, int]) -> None:
    run = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs[loop] += 1
        return run(*args, **kwargs)

    module.forward = counted
