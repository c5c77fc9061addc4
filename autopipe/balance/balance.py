"""Choose how many layers each partition of a pipeline gets, by measuring the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autopipe.balance.layer_costs import Tensors, are_tensors, layer_bytes, layer_seconds, members
from autopipe.partition import best_split


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensors,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Balance partitions by the time that their layers' forward and backward take.

    The dearest partition is as cheap as possible, and the others are as even as that allows. The
    module is measured in train mode and left as it was.

    Args:
        partitions: number of partitions, from 1 to the number of layers.
        module: its layers take and return a tensor or a tuple of tensors; they may stash and pop
            skips.
        sample: input of any batch size.
        timeout: seconds; passes over the layers repeat until they are over, once at least.
        device: where module and sample must be; None for any device.
    Returns:
        number of layers in each partition, for `GPipe`.
    Raises:
        TypeError: the module is no nn.Sequential, or an input or output is neither a tensor nor a
            tuple of tensors.
        ValueError: module, sample and device do not agree, or an argument is out of range.
    Source: torchgpipe's documentation, 2.3.4. Its default device is CUDA. It splits by Barany and
    Grinberg's block partitions, whose dearest partition costs up to twice as much.
    """
    _check_partitions(partitions, module)
    _check_placement(module, sample, device)
    return _split(layer_seconds(module, sample, timeout_s=timeout), partitions)


def balance_by_size(  # noqa: PLR0913 - the documented interface
    partitions: int,
    module: nn.Sequential,
    input: Tensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Balance partitions by the memory that their layers need in training.

    A layer needs what one micro-batch keeps until its backward, plus `param_scale` times its
    parameters: the parameters, their gradients, and the optimizer's state.

        optimizer   param_scale   state per parameter
        SGD         2 or 3        none; momentum_buffer with momentum
        Adam        4 or 5        exp_avg, exp_avg_sq; max_exp_avg_sq with amsgrad
        Adadelta    4             square_avg, acc_delta
        Adagrad     3             sum
        RMSprop     3 to 5        square_avg; momentum_buffer with momentum; grad_avg if centered

    Args:
        partitions, module, device: as for `balance_by_time`.
        input: mini-batch of the size to train with; (B, ...) tensors.
        chunks: number of micro-batches to train with; the largest has ceil(B / chunks) samples.
        param_scale: tensors in memory per parameter, itself included.
    Returns, Raises, Source: as for `balance_by_time`.
    """
    _check_partitions(partitions, module)
    _check_placement(module, input, device)
    if not 0 <= param_scale < math.inf:
        raise ValueError(
            f"param_scale must be at least 0, got {param_scale}; 2 counts parameters and gradients"
        )
    sizes = layer_bytes(module, _micro_batch(input, chunks), param_scale=param_scale)
    return _split(sizes, partitions)


def _check_partitions(partitions: int, module: nn.Sequential) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, got a {type(module).__name__}"
        )
    if not 1 <= partitions <= len(module):
        most = len(module)
        raise ValueError(
            f"{most} layers cannot fill {partitions} partitions; choose from 1 to {most}"
        )


def _check_placement(
    module: nn.Sequential, sample: Tensors, device: torch.device | str | None
) -> None:
    if not are_tensors(sample):
        raise TypeError(
            f"the sample must be a tensor or a tuple of tensors, got a {type(sample).__name__}"
        )
    placed = (*members(sample), *module.parameters(), *module.buffers())
    devices = {tensor.device for tensor in placed}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"module and sample must be on one device, got {names}; move them")
    actual = devices.pop()
    if actual.type == "meta":
        raise ValueError("nothing can be measured on the meta device; move module and sample")
    if device is None:
        return
    wanted = torch.device(device)
    # A device without an index, such as "cuda", stands for any one of its type.
    indices = {wanted.index, actual.index} - {None}
    if wanted.type != actual.type or len(indices) > 1:
        raise ValueError(
            f"module and sample are on {actual}, but device is {wanted}; move them there"
        )


def _micro_batch(batch: Tensors, chunks: int) -> Tensors:
    if any(tensor.dim() == 0 for tensor in members(batch)):
        raise ValueError(
            "a tensor without dimensions cannot be split; its first must be the sample"
        )
    lengths = {len(tensor) for tensor in members(batch)}
    if len(lengths) > 1:
        counts = ", ".join(map(str, sorted(lengths)))
        raise ValueError(f"the input's tensors must hold equally many samples, got {counts}")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    num_samples = math.ceil(lengths.pop() / chunks)
    return tree_map(lambda tensor: tensor[:num_samples], batch)


def _split(costs: Sequence[float], partitions: int) -> list[int]:
    below = [0.0, *accumulate(costs)]

    def part_cost(part: int, first: int, last: int) -> float:
        return below[last] - below[first]

    boundaries = best_split(len(costs), partitions, part_cost)
    assert boundaries is not None  # Every layer may be in every partition.
    return [last - first for first, last in pairwise(boundaries)]
