"""Prove that a stage in trouble says so, and that its neighbours do not wait for ever."""

from __future__ import annotations

import traceback

import torch.distributed as dist
from torch import Tensor, nn

from autopipe import SCHEDULES, LinkTimeoutError, run_program
from tests.models import tiny_model
from tests.pool import Pool
from tests.stages import StackWork, connect, place


def cut_the_graph() -> list[list[float] | None]:
    """Let the second stage ignore what it received."""
    stage, length, group = place()
    weight = nn.Parameter(torch.ones(6, 3, dtype=torch.float64))
    work = StackWork(nn.Sequential(), (2, 1))
    work.layers = lambda hidden: hidden @ weight if stage == 0 else hidden.detach() * weight[0, 0]
    run_program(SCHEDULES["1f1b"](length, 2)[stage], work, connect(group), (2, 1))
    return [None if weight.grad is None else weight.grad.flatten().tolist()]


def test_a_stage_that_ignores_its_input_sends_zeros_to_the_one_that_waits(two_ranks: Pool) -> None:
    (first,), (second,) = two_ranks.run(cut_the_graph)
    assert first == [0.0] * 18
    assert second is not None and any(second)


def attempt(fault: str) -> str:
    """Run a step in a group of its own in which something goes wrong; return this rank's error."""
    rank, length, _ = place()
    group = dist.new_group(list(range(length)))
    layers = tiny_model(num_blocks=6)[4 * rank:4 * rank + 4]
    work = StackWork(layers, (1, 2, 1))
    if fault == "shape" and rank == 0:
        work.layers = lambda hidden: hidden.repeat(1, len(hidden))
    if fault == "layer" and rank == 1:
        work.layers = nn.Sequential(FailingLayer(), *layers)
    program = SCHEDULES["1f1b"](length, 3)[rank]
    quiet = {"silent first": 0, "silent second": 1}.get(fault) == rank
    try:
        if not quiet:
            run_program(program, work, connect(group, timeout_s=0.3), (1, 2, 1))
    except (ValueError, LinkTimeoutError, ArithmeticError):
        return traceback.format_exc()
    finally:
        dist.barrier()
        dist.destroy_process_group(group)
    return ""


class FailingLayer(nn.Module):
    """Fail at micro-batches of two samples."""

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) == 2:
            raise ArithmeticError("a layer's own trouble")
        return hidden


def test_a_micro_batch_of_another_shape_is_an_error(two_ranks: Pool) -> None:
    first, _ = two_ranks.run(attempt, "shape")
    assert "ValueError: micro-batch 1 leaves the stage as TensorSpec(shape=(12,)" in first
    assert "pad them" in first


def test_an_exception_in_a_layer_surfaces_on_its_rank_with_its_traceback(two_ranks: Pool) -> None:
    first, second = two_ranks.run(attempt, "layer")
    assert "ArithmeticError: a layer's own trouble" in second
    assert 'raise ArithmeticError("a layer\'s own trouble")' in second
    assert "LinkTimeoutError: rank 0 waited for the gradients of rank 1" in first


def test_a_neighbour_that_never_sends_is_named_after_the_timeout(two_ranks: Pool) -> None:
    _, second = two_ranks.run(attempt, "silent first")
    assert "LinkTimeoutError: rank 1 waited for the activations of rank 0 (limit 0.3 s)" in second
    first, _ = two_ranks.run(attempt, "silent second")
    assert "LinkTimeoutError: rank 0 waited for the gradients of rank 1 (limit 0.3 s)" in first
