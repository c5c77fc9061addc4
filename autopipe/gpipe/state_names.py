"""Give a GPipe module's state dict the names that the wrapped module has, and take both.

module   partitions.0.conv.weight  partitions.1.fc.weight
state    conv.weight               fc.weight
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn


def _rename(state: Any, prefix: str, new_name: Callable[[str], str]) -> None:
    """Rename a module's entries in a state dict; keep its order."""
    entries = [
        (prefix + new_name(key.removeprefix(prefix)) if key.startswith(prefix) else key, value)
        for key, value in state.items()
    ]
    state.clear()
    state.update(entries)


def name_as_wrapped(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    for entries in (state, getattr(state, "_metadata", None) or {}):
        _rename(entries, prefix, lambda key: re.sub(r"^partitions\.\d+\.", "", key))


def name_as_partitioned(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Take a state dict with the names of the wrapped module or of the partitions."""
    partitions = module.get_submodule("partitions").named_children()
    places = {name: j for j, partition in partitions for name, _ in partition.named_children()}

    def placed(key: str) -> str:
        layer = key.split(".")[0]
        return f"partitions.{places[layer]}.{key}" if layer in places else key

    _rename(state, prefix, placed)
