"""Take an optimizer's state out by parameter name and put it into another optimizer.

State is keyed by the parameter's name in the user's model, never by its position in a group, so it
survives every move, and an optimizer built anew over other parameters finds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

NamedParameters = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]

_NUMBER = "#number"


def adamw(learning_rate: float = 1e-3, *, weight_decay: float = 0.01,
          betas: tuple[float, float] = (0.9, 0.999)) -> OptimizerFactory:
    """Return a factory for AdamW that does not decay one-dimensional parameters (biases, norms).

    Args:
        learning_rate: of every group; the run's schedule multiplies it.
        weight_decay: of parameters with two or more dimensions.
        betas: decay rates of the moments.
    """

    def build(named_parameters: NamedParameters) -> Optimizer:
        decayed = [p for _, p in named_parameters if p.ndim >= 2]
        plain = [p for _, p in named_parameters if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay},
                  {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas,
                                 fused=True)

    return build


def peak_learning_rate(factory: OptimizerFactory, model: nn.Module) -> float:
    """Return the first parameter group's learning rate, as built for the whole model.

    The optimizer is built over empty tensors, so it takes no memory; 0 where nothing trains.
    """
    named = [
        (name, nn.Parameter(p.detach().new_empty((0,) * p.ndim)))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    return float(factory(named).param_groups[0]["lr"]) if named else 0.0


def take_state(optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
               ) -> dict[str, Tensor]:
    """Return the state of the given parameters as a flat mapping "parameter/entry" -> tensor.

    Numbers become 0-dim float64 or int64 tensors under a marked name. Tensors are the optimizer's
    own, not copies.

    Raises:
        TypeError: an entry is neither a tensor, a number nor None.
    """
    flat: dict[str, Tensor] = {}
    if optimizer is None:
        return flat
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                flat[f"{name}/{key}"] = value
            elif isinstance(value, (int, float)):
                flat[f"{name}/{key}{_NUMBER}"] = torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
            elif value is not None:
                raise TypeError(f"{type(optimizer).__name__} keeps a {type(value).__name__} as "
                                f"{key!r}; only tensors and numbers can move between ranks: use "
                                "another optimizer")
    return flat


def put_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter],
              flat: Mapping[str, Tensor]) -> None:
    """Give the optimizer the state that `take_state` returned."""
    for key, value in flat.items():
        name, _, entry = key.rpartition("/")
        state = optimizer.state[parameters[name]]
        if entry.endswith(_NUMBER):
            state[entry.removesuffix(_NUMBER)] = value.item()
        else:
            state[entry] = value
