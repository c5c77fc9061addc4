"""Prove that a stage in trouble says so, and that its neighbours do not wait for ever."""

from __future__ import annotations

import traceback

import torch.distributed as dist
from torch import Tensor, nn

from autodp import PeerError
from autopipe.engine.executor import run_program
from autopipe.schedule import SCHEDULES
from tests.pool import Pool
from tests.stages import StackWork, connect, layers_of, place, stage_model

SIZES = (1, 2, 1)


class FailingLayer(nn.Module):
    """Fail at micro-batches of two samples."""

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) == 2:
            raise ArithmeticError("a layer's own trouble")
        return hidden


class WideningLayer(nn.Module):
    """Give a micro-batch of two samples twice the width."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.repeat(1, len(hidden))


def attempt(fault: str) -> str:
    """Run a step in which something goes wrong, in a group of its own; return the traceback."""
    rank, length, _ = place()
    # A wait that ran out leaves its group unusable; the world's has to survive.
    group = dist.new_group(list(range(length)))
    assert isinstance(group, dist.ProcessGroup)
    layers = layers_of(stage_model(), rank, length)
    added = {"shape on 0": WideningLayer, "layer on 1": FailingLayer}.get(f"{fault} on {rank}")
    work = StackWork(layers if added is None else nn.Sequential(*layers, added()), SIZES)
    program = SCHEDULES["1f1b"](length, len(SIZES))[rank]
    try:
        if fault != f"silent {rank}":
            # The rank at fault is to fail by its own fault, however slow its neighbour is.
            links = connect(group, timeout_s=0.3 if added is None else 30.0)
            run_program(program, work, links, SIZES)
    except (ValueError, PeerError, ArithmeticError):
        return traceback.format_exc()
    finally:
        dist.barrier()
        dist.destroy_process_group(group)
    return ""


def test_a_micro_batch_of_another_shape_is_an_error(two_ranks: Pool) -> None:
    first, _ = two_ranks.run(attempt, "shape")
    assert "ValueError: micro-batch 1 leaves the stage as TensorSpec(shape=(" in first
    assert "samples of one step need one shape: pad them" in first


def test_an_exception_in_a_layer_surfaces_on_its_rank_with_its_traceback(two_ranks: Pool) -> None:
    first, second = two_ranks.run(attempt, "layer")
    assert "ArithmeticError: a layer's own trouble" in second
    assert 'raise ArithmeticError("a layer\'s own trouble")' in second
    assert "PeerError: rank 0 waited for the gradients of rank 1" in first


def test_a_neighbour_that_never_sends_is_named_after_the_timeout(two_ranks: Pool) -> None:
    _, second = two_ranks.run(attempt, "silent 0")
    assert "PeerError: rank 1 waited for the activations of rank 0 (limit 0.3 s)" in second
    first, _ = two_ranks.run(attempt, "silent 1")
    assert "PeerError: rank 0 waited for the gradients of rank 1 (limit 0.3 s)" in first
