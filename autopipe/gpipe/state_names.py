"""Give a GPipe module's state dict the names that the wrapped module has, and take both.

module   partitions.0.conv.weight  partitions.1.fc.weight
state    conv.weight               fc.weight
"""

from __future__ import annotations

from typing import Any

from torch import nn


def _partitions(module: nn.Module) -> nn.ModuleList:
    partitions = module.get_submodule("partitions")
    assert isinstance(partitions, nn.ModuleList)
    return partitions


def _wrapped_names(module: nn.Module) -> dict[str, str]:
    """Map the names of layers in the partitions to their names in the wrapped module."""
    return {
        f"partitions.{j}.{name}": name
        for j, partition in enumerate(_partitions(module))
        for name, _ in partition.named_children()
    }


def _rename(names: dict[str, str], state: Any, prefix: str) -> None:
    """Rename entries of a state dict in place, keeping their order."""
    lengths = sorted({name.count(".") + 1 for name in names}, reverse=True)

    def renamed(key: str) -> str:
        if not key.startswith(prefix):
            return key
        parts = key[len(prefix) :].split(".")
        for length in lengths:
            layer = ".".join(parts[:length])
            if layer in names:
                return prefix + ".".join([names[layer], *parts[length:]])
        return key

    entries = [(renamed(key), value) for key, value in state.items()]
    state.clear()
    state.update(entries)


def name_as_wrapped(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    """Give a state dict the names of the wrapped module."""
    _rename(_wrapped_names(module), state, prefix)
    if isinstance(getattr(state, "_metadata", None), dict):
        _rename(_wrapped_names(module), state._metadata, prefix)


def name_as_partitioned(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Take a state dict with the names of the wrapped module or of the partitions."""
    _rename({name: inner for inner, name in _wrapped_names(module).items()}, state, prefix)
