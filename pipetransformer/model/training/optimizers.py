"""Build optimizers by name, give layers their own rates, and move optimizer state by name.

A stage builds its optimizer anew wherever layers go. Which layer a parameter is in follows from
its name, so its rate is the same in any stage of any pipeline. State is keyed by the parameter's
name in the user's model, so it survives every move.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.model.layered_model import LayeredModel
from pipetransformer.model.modules import laid_out_as

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
"""Names of embeddings' and heads' weights, in the models known."""

NamedParameters = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]


def adamw(
    learning_rate: float = 1e-3,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
) -> OptimizerFactory:
    """Return a factory for AdamW that does not decay one-dimensional parameters (biases, norms).

    Args:
        learning_rate: of every group; the run's schedule multiplies it.
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
            they take one. timm's "muon" and its kin also take fallback=: patterns of weights
            that AdamW trains, as it trains all of one dimension; by default embeddings and heads.
    Raises:
        ValueError: the name or an option is not known, or timm is needed and not installed.

    The Trainer refuses what acts on all parameters together: timm's "lamb" and "adan" with their
    variants count steps, "kron" draws random numbers. "adahessian" needs second derivatives.
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
        # timm is heavy, and optional.
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


def decay_by_layer(
    factory: OptimizerFactory, model: LayeredModel, decay: float
) -> OptimizerFactory:
    """Return a factory whose learning rates are `decay` times as high a layer further down.

    Each group that the given factory makes is split by layers, and keeps its other settings.

    Source: BEiT's layer-wise decay. The head has the group's own rate; an embedding is a layer of
        its own below block 0, though it freezes with it. timm gives a norm below the head the
        last block's rate; here it belongs to the head.
    """
    scales = learning_rate_scales(model, decay)

    def build(named_parameters: NamedParameters) -> Optimizer:
        # A parameter that no sublayer reads has no layer; it never gets a gradient.
        scale_of = {parameter: scales.get(name, 1.0) for name, parameter in named_parameters}
        optimizer = factory(named_parameters)
        parts = []
        for group in optimizer.param_groups:
            # The highest layer first: the first group's rate is taken for the peak rate.
            for scale in sorted({scale_of[p] for p in group["params"]}, reverse=True):
                own = [p for p in group["params"] if scale_of[p] == scale]
                # Not in place: a rate that is a tensor is shared with the other layers' groups.
                rates: dict[str, Any] = {
                    key: group[key] * scale for key in ("lr", "initial_lr") if key in group
                }
                parts.append({**group, **rates, "params": own})
        # In place, as an optimizer may hold this list under another name, too.
        optimizer.param_groups[:] = parts
        return optimizer

    return build


def learning_rate_scales(model: LayeredModel, decay: float) -> dict[str, float]:
    """Return the factor on the learning rate of every parameter, by its name."""
    top = model.num_layers
    embedding_is_apart = model.sublayers[1].layer == 0
    return {
        name: decay
        ** (top - model.sublayers[index].layer + int(index == 0 and embedding_is_apart))
        for name, index in model.owners.items()
    }


_NUMBER = "#number"


@dataclass(frozen=True)
class OptimizerTraits:
    """Describe the optimizer that a factory builds.

    Args:
        name: its class, "module.Class"; "" where nothing trains.
        peak_learning_rate: of the first parameter group, as built.
        entries: names of its state, as `take_state` gives them.
        settings: of its parameter groups, as text.
    """

    name: str
    peak_learning_rate: float
    entries: tuple[str, ...]
    settings: str = ""


def take_state(
    optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the state of the given parameters as a flat mapping "parameter/entry" -> tensor.

    Numbers become 0-dim float64 or int64 tensors under a marked name. Tensors are not copied.

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
    """Give the optimizer the state that `take_state` returned, on whatever device it is.

    Source: torch's `load_state_dict` places a state beside its parameter, but a step count in host
        memory unless the optimizer's kernels read it on the device. Ours also gives it the
        parameter's strides: fused kernels ignore strides.
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
