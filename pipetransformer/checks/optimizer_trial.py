"""Try an optimizer before anything starts, on parameters of a few numbers.

A rank builds the optimizer over its own stage's parameters, and again whenever these change.
Training stays the same only if an update depends on its own parameter's gradients, state and
settings. Other optimizers are refused.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.feed import own_random_numbers
from pipetransformer.model import (
    OptimizerFactory,
    OptimizerTraits,
    put_state,
    qualified_name,
    take_state,
)

_STEPS, _LATER_STEPS = range(3), range(3, 6)
_LOUD = 100.0
"""Factor on the gradients of the parameters outside a part, so that they rule a norm over all."""


def try_optimizer(
    factory: OptimizerFactory, model: nn.Module, device: torch.device
) -> OptimizerTraits:
    """Build the optimizer over small stand-ins for the trainable parameters, and step it.

    Raises:
        TypeError: the factory is no function.
        ValueError: it needs a closure or sparse gradients; fails for a part of the parameters;
            trains others than it was given; keeps state elsewhere; or mixes parameters.
    """
    if not callable(factory):
        raise TypeError(
            f"optimizer= is {factory!r}; give a function of a list of (name, parameter), for "
            "instance named_optimizer('adamw', 1e-3)"
        )
    shapes = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not shapes:
        return OptimizerTraits("", 0.0, ())
    names = list(shapes)
    middle = (len(names) + 1) // 2
    with own_random_numbers(device), torch.enable_grad():
        # First all parameters, for the plainer message, then each by itself.
        _Trial(factory, shapes, device, is_part=False)
        for name in names:
            _Trial(factory, {name: shapes[name]}, device)
        for part in filter(None, (names[:middle], names[middle:])):
            loud = set(names) - set(part)
            whole = _Trial(factory, shapes, device, loud).run(_STEPS)
            alone = _Trial(factory, {name: shapes[name] for name in part}, device).run(_STEPS)
            alone.compare(
                whole,
                "in another way where it does not train the other parameters, too, as in a stage "
                "of a pipeline or above frozen layers: by a norm or step size over all "
                "parameters, perhaps; switch that off (the Trainer can clip by the whole model's "
                "norm)",
            )
        going_on = _Trial(factory, shapes, device).run(_STEPS)
        resumed = _Trial(factory, shapes, device)
        resumed.load(going_on)
        resumed.run(_LATER_STEPS).compare(
            going_on.run(_LATER_STEPS),
            "in another way once it is built anew with the state of its parameters, as whenever "
            "layers move: it keeps something elsewhere",
        )
    state = take_state(going_on.optimizer, going_on.parameters)
    entries = tuple(sorted({key.rpartition("/")[2] for key in state}))
    groups = going_on.optimizer.param_groups
    settings = _spell([{**group, "params": len(group["params"])} for group in groups])
    return OptimizerTraits(going_on.name, going_on.learning_rate, entries, settings)


class _Trial:
    """Hold stand-ins and the optimizer over them.

    Args:
        loud: names of the parameters whose gradients are `_LOUD`.
        is_part: whether these are some of the model's parameters only; chooses the message.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        shapes: Mapping[str, nn.Parameter],
        device: torch.device,
        loud: Collection[str] = (),
        *,
        is_part: bool = True,
    ) -> None:
        self._loud = loud
        self.parameters = {name: _stand_in(name, p, device) for name, p in shapes.items()}
        try:
            self.optimizer: Optimizer = factory(list(self.parameters.items()))
            self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        except Exception as error:
            if not is_part:
                raise ValueError(
                    f"the optimizer= function fails for all parameters: {error!r}; it gets a list "
                    "of (name, parameter), and every group needs a learning rate"
                ) from error
            raise ValueError(
                f"the optimizer= function fails for the parameters {', '.join(list(shapes)[:3])}, "
                f"as a process may train them alone: {error!r}; build no empty groups, give every "
                "group a learning rate, and set requires_grad_(False) on what is not to be trained"
            ) from error
        self.name = qualified_name(type(self.optimizer))
        self._refuse_nonfinite()
        stand_ins = set(self.parameters.values())
        if not {p for group in self.optimizer.param_groups for p in group["params"]} <= stand_ins:
            raise ValueError(
                f"the optimizer= function built a {self.name} over other parameters than it was "
                "given; build it over its argument, a list of (name, parameter), as each process "
                "trains only some of them"
            )

    def _refuse_nonfinite(self) -> None:
        """Refuse settings with which nothing could be compared, and no weight stay finite."""
        for group in self.optimizer.param_groups:
            for key, value in group.items():
                is_tensor = isinstance(value, Tensor) and value.numel() == 1
                if (is_tensor or isinstance(value, float)) and not math.isfinite(float(value)):
                    raise ValueError(
                        f"{self.name} has {key}={float(value)} in its parameter groups; give a "
                        "finite number"
                    )

    def load(self, other: _Trial) -> None:
        """Continue from another trial's weights and state."""
        for name, parameter in other.parameters.items():
            self.parameters[name].data.copy_(parameter.data)
        state = take_state(other.optimizer, other.parameters)
        # take_state gives the optimizer's own tensors, which the other trial goes on updating.
        put_state(self.optimizer, self.parameters, {k: t.clone() for k, t in state.items()})

    def compare(self, other: _Trial, how: str) -> None:
        """Refuse the optimizer where the other trial's weights are not the same."""
        for name, parameter in self.parameters.items():
            tolerance = 64 * torch.finfo(parameter.dtype).eps
            if not parameter.allclose(other.parameters[name], rtol=tolerance, atol=tolerance):
                raise ValueError(f"{self.name} updates {name!r} {how}; or use another optimizer")

    def run(self, steps: range) -> _Trial:
        """Take some steps; refuse an optimizer that keeps state outside its parameters'."""
        before = self._other_state()
        for step in steps:
            for name, parameter in self.parameters.items():
                scale = _LOUD if name in self._loud else 1.0
                parameter.grad = scale * _random(f"{name} {step}", parameter)
            try:
                self.optimizer.step()
            except Exception as error:
                raise ValueError(
                    f"{self.name} cannot take a step from dense gradients alone: {error}; use an "
                    "optimizer whose step() needs no closure"
                ) from error
        after = self._other_state()
        changed = sorted(key for key in after if before.get(key) != after[key])
        if changed or not self.optimizer.state.keys() <= set(self.parameters.values()):
            raise ValueError(
                f"{self.name} keeps {', '.join(changed) or 'state'} beside the state of its "
                "parameters, which would start anew whenever layers move; use an optimizer that "
                "keeps all its state by parameter"
            )
        return self

    def _other_state(self) -> dict[str, str]:
        """Spell what the optimizer holds in its groups and attributes."""
        groups = self.optimizer.param_groups
        keys = {key for group in groups for key in group if key != "params"}
        attributes = {
            key: value for key, value in vars(self.optimizer).items() if key not in _torchs()
        }
        return {
            f"{key!r} in its parameter groups": _spell([group.get(key) for group in groups])
            for key in keys
        } | {f"the attribute {key!r}": _spell(value) for key, value in attributes.items()}


# At the first call: building an optimizer imports torch's compiler, which takes seconds.
@functools.cache
def _torchs() -> frozenset[str]:
    """Return the attributes of an optimizer that torch keeps itself."""
    later = (
        "_need_device_dtype_check_for_fused", "_opt_called", "_step_count",
        "_warned_capturable_if_run_uncaptured",
    )  # fmt: skip
    return frozenset({*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), *later})


def _stand_in(name: str, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    # timm's Muon trains what has fewer than four rows or columns in another way.
    shape = [min(size, 4) for size in parameter.shape]
    small = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=device))
    small.data.copy_(_random(name, small))
    # An optimizer may group parameters by attributes that the model has set on them.
    vars(small).update(vars(parameter))
    return small


def _random(what: str, like: Tensor) -> Tensor:
    """Return numbers from 0.5 to 1.5 in a tensor's shape; they are a function of the text.

    To be read alone: the same tensor may be returned again.
    """
    return _drawn(what, like.shape, like.dtype, like.device)


# Seven trials of an optimizer use the same numbers, and drawing them took as long as its steps.
@functools.lru_cache(maxsize=10_000)
def _drawn(what: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(what.encode()) * 7919 + len(what))
    return (torch.rand(shape, generator=generator) + 0.5).to(dtype).to(device)


def _spell(value: Any) -> str:
    """Spell plain values and tensors, so that a change in place shows; others by their type."""

    def plain(one: Any) -> Any:
        return one.tolist() if isinstance(one, Tensor) else str(type(one))

    return json.dumps(value, default=plain, skipkeys=True)
