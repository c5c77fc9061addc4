"""Take an optimizer's state out by parameter name and put it into another optimizer.

State is keyed by the parameter's name in the user's model, never by its position in a group, so it
survives every move, and an optimizer built anew over other parameters finds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.adapters import laid_out_as

NamedParameters = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]

_NUMBER = "#number"


def take_state(
    optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the state of the given parameters as a flat mapping "parameter/entry" -> tensor.

    Numbers become 0-dim float64 or int64 tensors under a marked name. Tensors are the optimizer's
    own, not copies.

    Raises:
        TypeError: an entry is neither a tensor, a number nor None.
    """
    flat: dict[str, Tensor] = {}
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.items():
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, Tensor):
                flat[f"{name}/{key}"] = value
            elif isinstance(value, (int, float)):
                flat[f"{name}/{key}{_NUMBER}"] = torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else torch.int64
                )
            elif value is not None:
                raise TypeError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r}; only "
                    "tensors and numbers can move between ranks: use another optimizer"
                )
    return flat


def put_state(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], flat: Mapping[str, Tensor]
) -> None:
    """Give the optimizer the state that `take_state` returned, wherever it lay meanwhile.

    Source: the rules by which torch's `load_state_dict` places a state: beside its parameter, but
    a step count in host memory unless the optimizer's kernels read it on the device. Ours also
    lays out what has the parameter's shape as the parameter is: fused kernels work on memory.
    """
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for key, value in flat.items():
        name, _, entry = key.rpartition("/")
        while name and name not in parameters:  # An entry's name may have slashes, too.
            name, _, more = name.rpartition("/")
            entry = f"{more}/{entry}"
        parameter = parameters[name]
        state = optimizer.state[parameter]
        if entry.endswith(_NUMBER):
            state[entry.removesuffix(_NUMBER)] = value.item()
            continue
        group = group_of.get(parameter, {})
        on_cpu = entry == "step" and not (group.get("fused") or group.get("capturable"))
        value = value.to("cpu" if on_cpu else parameter.device)
        same_shape = value.shape == parameter.shape
        state[entry] = laid_out_as(parameter, value) if same_shape else value
