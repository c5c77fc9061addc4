"""Build optimizers by name: torch's, and timm's where that is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipetransformer.optimizer.state_by_name import NamedParameters, OptimizerFactory

_ADAMW = partial(torch.optim.AdamW, fused=True)
_TORCH: Mapping[str, Callable[..., Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": _ADAMW,
    "adamw_torch": _ADAMW,
    "adamw_torch_fused": _ADAMW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}

_NOT_HIDDEN = ("*embed*", "*token*", "*head*", "*classifier*", "*qa_outputs*")
"""Names of weights that are no hidden layer's: of embeddings and heads, in the models known."""


def adamw(
    learning_rate: float = 1e-3,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
) -> OptimizerFactory:
    """Return a factory for AdamW that does not decay one-dimensional parameters (biases, norms).

    Args:
        learning_rate: of every group; the run's schedule multiplies it.
        weight_decay: of parameters with two or more dimensions.
        betas: decay rates of the moments.
    """
    return named_optimizer("adamw", learning_rate, weight_decay=weight_decay, betas=betas)


def named_optimizer(
    name: str,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
    no_decay: Collection[str] = (),
    decay_all: bool = False,
    **options: Any,
) -> OptimizerFactory:
    """Return a factory for one of torch's or timm's optimizers.

    Args:
        name: one of torch's "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw" (also
            "adamw_torch"), "nadam", "radam", "rmsprop", "sgd"; or any that
            `timm.optim.list_optimizers()` names, such as "lion", "muon", "adopt", "nadamw",
            "adafactorbv", "lars", "madgrad". A name that both have is torch's.
        learning_rate: of every group; the run's schedule multiplies it.
        weight_decay: of parameters with two or more dimensions, which biases and norms have not.
        no_decay: patterns, as of file names, of further parameters that do not decay.
        decay_all: decay every parameter, biases and norms included.
        options: the optimizer's own, such as betas= or momentum=; timm's have momentum=0.9 where
            they take one, as from timm's own factory. timm's "muon" and its kin also take
            fallback=, patterns of the weights that AdamW is to train, as it does all those of one
            dimension; by default embeddings and heads by their usual names.
    Raises:
        ValueError: the name or an option is not known, or timm is needed and not installed.

    The Trainer refuses the factories of timm's "lamb" and "adan" with their variants, which count
    steps for all parameters together, "kron", which draws random numbers for all of them, and
    "adahessian", which needs second derivatives.
    """
    build = _TORCH.get(name) or _of_timm(name)
    fallback = options.pop("fallback", _NOT_HIDDEN) if name.endswith("muon") else ()
    _check_options(name, build, {**options, **({"weight_decay": 0} if weight_decay else {})})

    def decays(parameter_name: str, parameter: nn.Parameter) -> bool:
        return decay_all or (parameter.ndim >= 2 and not _matches(parameter_name, no_decay))

    def factory(named_parameters: NamedParameters) -> Optimizer:
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for parameter_name, parameter in named_parameters:
            key = (decays(parameter_name, parameter), _matches(parameter_name, fallback))
            groups.setdefault(key, []).append(parameter)
        return build(
            [
                {
                    "params": parameters,
                    "weight_decay": weight_decay if is_decayed else 0.0,
                    **({"use_fallback": True} if falls_back else {}),
                }
                for (is_decayed, falls_back), parameters in sorted(groups.items(), reverse=True)
            ],
            lr=learning_rate,
            **options,
        )

    return factory


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _of_timm(name: str) -> Callable[..., Optimizer]:
    try:
        # Heavy, and optional.
        from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers
    except ImportError as error:
        raise ValueError(
            f"the optimizer {name!r} is none of torch's {', '.join(_TORCH)}; timm has others, "
            "but is not installed: pip install timm"
        ) from error
    names = list(map(str, list_optimizers()))
    if name not in names:
        raise ValueError(
            f"the optimizer {name!r} is none of torch's {', '.join(_TORCH)}, and none of timm's "
            f"{', '.join(names)}; choose one, or give a function that builds yours"
        )
    info = get_optimizer_info(name)
    if isinstance(info.opt_class, str):
        raise ValueError(
            f"the optimizer {name!r} is of another package than timm, and was not tried; give a "
            "function that builds it from a list of (name, parameter)"
        )
    defaults: dict[str, Any] = {"momentum": 0.9} if info.has_momentum else {}
    return partial(get_optimizer_class(name), **defaults)


def _check_options(name: str, build: Callable[..., Optimizer], options: Mapping[str, Any]) -> None:
    """Refuse what the optimizer does not take, before it is built in some stage."""
    known = inspect.signature(build).parameters.keys() - {"params", "lr"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"the optimizer {name!r} takes no {', '.join(unknown)}; choose of "
            f"{', '.join(sorted(known))}"
        )
