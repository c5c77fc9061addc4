"""Save a plain loop between two epochs, and go on from there: one file, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from experiments.finetune.killed_run import SAVED_LOOP
from pipetransformer.durable_files import replace_file


def save_loop(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, plain: Mapping[str, Any]
) -> None:
    """Save weights, the optimizer's state, which is of tensors, and plain values beside them."""
    states = optimizer.state_dict()["state"]
    tensors = _weights(model) | {
        f"state.{index}.{name}": value
        for index, state in states.items()
        for name, value in state.items()
    }
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    data = safetensors.torch.save(whole, metadata={"plain": json.dumps(plain)})
    replace_file(folder / SAVED_LOOP, data)


def read_plain(folder: Path) -> dict[str, Any]:
    """Return the plain values that were saved."""
    with safe_open(folder / SAVED_LOOP, "pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["plain"])
    return found


def restore_loop(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the model its saved weights, and the optimizer its state."""
    saved = safetensors.torch.load_file(folder / SAVED_LOOP)
    with torch.no_grad():
        for name, tensor in _weights(model).items():
            tensor.copy_(saved.pop(name))
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in saved.items():
        _, index, key = name.split(".")
        states.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter and buffer once, whatever names it has."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"model.{name}": tensor for name, tensor in named}
