"""Refuse what a GPipe module cannot run, before anything is moved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import nn

_ADVICE = "autopipe.balance.balance finds one: balance_by_time(num_partitions, module, sample)"


def check_module(module: nn.Module) -> None:
    """Raise unless the module is a Sequential without a layer used twice."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, not {type(module).__name__}"
        )
    # named_children leaves out a module that it has listed before.
    if len(list(module.named_children())) != len(module):
        raise ValueError(
            "module with duplicate children is not supported: a layer can be in one place of one "
            "partition only; use copies, or one layer that calls it twice"
        )


def check_balance(module: nn.Sequential, balance: Iterable[int] | None) -> list[int]:
    if balance is None:
        raise ValueError(
            "balance is required: the number of layers of each partition; only layers that are on "
            f"two devices or more show it, where devices are not named; {_ADVICE}"
        )
    counts = list(balance)
    if any(int(count) != count or count < 1 for count in counts):
        raise ValueError(f"all balance numbers must be positive integers, got {counts}; {_ADVICE}")
    if sum(counts) != len(module):
        raise ValueError(
            f"module and sum of balance have different lengths (module: {len(module)}, "
            f"sum of balance: {sum(counts)}); {_ADVICE}"
        )
    return [int(count) for count in counts]


def placed_partitions(
    module: nn.Sequential,
) -> tuple[list[int] | None, list[torch.device] | None]:
    """Return balance and devices of layers that are on their devices already.

    Layers without tensors join those before them, and the first ones those behind them. Both are
    None where all layers are on one device.

    Raises:
        ValueError: a layer is on several devices.
    """
    places: list[torch.device | None] = []
    for name, layer in module.named_children():
        found = {tensor.device for tensor in (*layer.parameters(), *layer.buffers())}
        if len(found) > 1:
            listed = " and ".join(sorted(map(str, found)))
            raise ValueError(f"layer {name!r} is on {listed}; move it to one device")
        places.append(found.pop() if found else None)
    first = next((place for place in places if place is not None), None)
    joined = [*accumulate(places, lambda before, place: place or before, initial=first)][1:]
    runs = [(place, len(list(run))) for place, run in groupby(joined) if place is not None]
    if len(runs) < 2:
        return None, None
    return [count for _, count in runs], [place for place, _ in runs]


def choose_devices(
    devices: Iterable[int | str | torch.device] | None, *, num_partitions: int
) -> list[torch.device]:
    """Return one device a partition, as `GPipe` documents them."""
    if isinstance(devices, (str, torch.device)):
        raise TypeError(
            f"devices is one device, {devices!r}; name one a partition, {num_partitions} in all"
        )
    if devices is None:
        on_cuda = torch.cuda.is_available()
        devices = range(torch.cuda.device_count()) if on_cuda else ["cpu"] * num_partitions
    names = list(devices)
    if len(names) < num_partitions:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(names)}, partitions: "
            f"{num_partitions}); a device may be named several times"
        )
    return [_device(name) for name in names[:num_partitions]]


def _device(name: int | str | torch.device) -> torch.device:
    device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")  # Without an index, as tensors on the CPU have none.
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device} does not exist; there are {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def check_sharing(partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]) -> None:
    """Raise if a parameter would have to be on two devices."""
    owner: dict[nn.Parameter, tuple[str, torch.device]] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for name, layer in partition.named_children():
            for parameter in layer.parameters():
                first, place = owner.setdefault(parameter, (name, device))
                if place != device:
                    raise ValueError(
                        "module with duplicate parameters in distinct children is not supported "
                        f"across devices: layers {first!r} on {place} and {name!r} on {device} "
                        "share one; balance them into one partition, or untie them"
                    )


def flatten_sequential(module: nn.Sequential) -> nn.Sequential:
    """Return a Sequential of the layers of nested Sequentials, without copies.

    A layer's name is joined from its parents' and its own by underscores: `parent_child`.

    Raises:
        ValueError: two layers would have one name.
    """

    def flat(sequential: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
        for name, child in sequential.named_children():
            if isinstance(child, nn.Sequential):
                yield from ((f"{name}_{inner}", layer) for inner, layer in flat(child))
            else:
                yield name, child

    layers = list(flat(module))
    if len({name for name, _ in layers}) < len(layers):
        raise ValueError(
            "flattening gives two layers one name; rename a layer so that no name is another's "
            "parent and child joined by an underscore"
        )
    return nn.Sequential(OrderedDict(layers))
