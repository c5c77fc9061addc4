"""The loops that are compared and timed train on the same batches, and learn the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.gpu_check.loops import ByHand, Ideal, Plain
from experiments.gpu_check.phases.loops import _small_cases
from experiments.gpu_check.workloads import LoopCase

CASES = {case.name: case for case in _small_cases(torch.float64)}


def losses_of(loop: ByHand) -> torch.Tensor:
    for num_frozen in (0, 2, 2, 2):
        loop.epoch(num_frozen)
    return torch.stack(loop.losses)


@pytest.mark.parametrize(
    "case", [CASES["bert"], CASES["vit"], replace(CASES["vit"], num_workers=1)]
)
def test_the_ideal_loop_s_losses_are_the_plain_one_s_step_by_step(case: LoopCase) -> None:
    # From the second epoch on its batches had been others, which a mean of all losses hid.
    ideal, plain = losses_of(Ideal(case, "cpu")), losses_of(Plain(case, "cpu"))
    torch.testing.assert_close(ideal, plain, rtol=1e-9, atol=1e-12)
