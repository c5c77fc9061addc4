"""Give a GPipe module's state dict the names that the wrapped module has, and take both.

module   partitions.0.conv.weight  partitions.1.fc.weight
state    conv.weight               fc.weight
"""

from __future__ import annotations

from typing import Any

from torch import nn


def _wrapped_names(module: nn.Module) -> dict[str, str]:
    return {
        f"partitions.{j}.{name}": name
        for j, partition in module.get_submodule("partitions").named_children()
        for name, _ in partition.named_children()
    }


def _rename(names: dict[str, str], state: Any, prefix: str, *, depth: int) -> None:
    """Rename layers, whose names have `depth` parts, in a state dict; keep its order."""

    def renamed(key: str) -> str:
        parts = key.removeprefix(prefix).split(".")
        layer = ".".join(parts[:depth])
        if not key.startswith(prefix) or layer not in names:
            return key
        return prefix + ".".join([names[layer], *parts[depth:]])

    entries = [(renamed(key), value) for key, value in state.items()]
    state.clear()
    state.update(entries)


def name_as_wrapped(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    names = _wrapped_names(module)
    _rename(names, state, prefix, depth=3)
    if isinstance(getattr(state, "_metadata", None), dict):
        _rename(names, state._metadata, prefix, depth=3)


def name_as_partitioned(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Take a state dict with the names of the wrapped module or of the partitions."""
    names = {name: inner for inner, name in _wrapped_names(module).items()}
    _rename(names, state, prefix, depth=1)
