"""Make losses whose parts join to the loss of the whole batch, however it is split.

A step's batch is cut over replicas and micro-batches, and each part has a loss of its own::

    a mean over the samples     sum(n * mean) / sum(n)     right where all samples count alike
    (sum, count)                sum(sum) / sum(count)      right for weighted and ignored targets

torch's own losses are known here; those that are not of the first kind become the second. Another
function's value is used as it is; some steps compare it with its parts (`split_probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LossValue = Tensor | tuple[Tensor, Tensor | int]
LossFunction = Callable[[Any, Any], LossValue]
"""(output, target) -> a 0-dim mean over the samples, or (sum, count).

The Trainer's output is a Tensor. Its target is a Tensor, or a dict[str, Tensor] if the model has
several target names. A GPipe's are Tensors or tuples of Tensors.
"""

# As of torch 2.15: the function that a module calls, and the attributes that it passes.
_MODULES: Mapping[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    nn.BCELoss: (F.binary_cross_entropy, ("weight",)),
    nn.BCEWithLogitsLoss: (F.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
    nn.CrossEntropyLoss: (F.cross_entropy, ("weight", "ignore_index", "label_smoothing")),
    nn.HingeEmbeddingLoss: (F.hinge_embedding_loss, ("margin",)),
    nn.HuberLoss: (F.huber_loss, ("delta",)),
    nn.KLDivLoss: (F.kl_div, ("log_target",)),
    nn.L1Loss: (F.l1_loss, ()),
    nn.MSELoss: (F.mse_loss, ()),
    nn.MultiLabelMarginLoss: (F.multilabel_margin_loss, ()),
    nn.MultiLabelSoftMarginLoss: (F.multilabel_soft_margin_loss, ("weight",)),
    nn.MultiMarginLoss: (F.multi_margin_loss, ("p", "margin", "weight")),
    nn.NLLLoss: (F.nll_loss, ("weight", "ignore_index")),
    nn.PoissonNLLLoss: (F.poisson_nll_loss, ("log_input", "full", "eps")),
    nn.SmoothL1Loss: (F.smooth_l1_loss, ("beta",)),
    nn.SoftMarginLoss: (F.soft_margin_loss, ()),
}
_FUNCTIONS = frozenset(function for function, _ in _MODULES.values())

_OF_CLASSES = frozenset({F.cross_entropy, F.nll_loss})
"""Their mean is over targets that are not ignored, or over these targets' class weights."""

_OF_ROWS = frozenset({F.multi_margin_loss, F.multilabel_margin_loss})
"""Their mean is over rows of classes; they take a 1-dim output for a single sample."""

_WEIGH_EACH_ELEMENT = frozenset({F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss})
"""Their weight has the output's shape, and so belongs to one batch."""


@final
@dataclass(frozen=True)
class Loss:
    """Call a loss function, and state what is known about it.

    Args:
        function: (output, target) -> a 0-dim mean over the samples, or (sum, count).
        is_exact: whether parts are known to join to the whole; otherwise this is probed.
        ignore_index: class of targets that the accuracy leaves out, too.
        smoothed: returns the same loss with the given label smoothing; None if unknown.
        takes_unread: whether the function also takes what stands for outputs that it alone reads.
    Raises:
        TypeError: the function cannot be called.
    """

    function: LossFunction
    is_exact: bool = False
    ignore_index: int = -100
    smoothed: Callable[[float], Loss] | None = None
    takes_unread: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.function, type):
            name = self.function.__name__
            raise TypeError(f"the loss is the class {name}; give one of it, such as {name}()")
        if not callable(self.function):
            raise TypeError(
                f"the loss is a {type(self.function).__name__}; give a function of (output, "
                "target), for instance torch.nn.CrossEntropyLoss()"
            )

    def __call__(self, output: Any, target: Any) -> LossValue:
        """Return the function's value; an error unless it is a 0-dim mean, or (sum, count)."""
        value = self.function(output, target)
        # Every value is checked: a loss may return another kind for some batches.
        self._refuse_value(value)
        return value

    def wrapped(self, compute: Callable[[Loss, Tensor, Any], LossValue]) -> Loss:
        """Return a loss that is computed of this one; smoothed, of this one smoothed."""
        smoothed = self.smoothed

        def function(output: Tensor, target: Any) -> LossValue:
            return compute(self, output, target)

        function.__qualname__ = self.name  # Errors name what was given.
        smooth = None if smoothed is None else lambda share: smoothed(share).wrapped(compute)
        return replace(self, function=function, smoothed=smooth)

    def _refuse_value(self, value: Any) -> None:
        is_pair = isinstance(value, tuple) and len(value) == 2
        head, count = value if is_pair else (value, 1)
        if not isinstance(head, Tensor) or not isinstance(count, (Tensor, int, float)):
            kinds = " and a ".join(type(one).__name__ for one in (value if is_pair else [value]))
            raise TypeError(
                f"the loss {self.name!r} returned a {kinds}; return a 0-dim tensor, the mean over "
                "the samples, or (sum, count)"
            )
        shapes = [tuple(one.shape) for one in (head, count) if isinstance(one, Tensor)]
        if any(shapes):
            raise ValueError(
                f"the loss {self.name!r} has shape {', '.join(map(str, shapes))}; return a 0-dim "
                "mean, or (sum, count)"
            )
        if isinstance(count, Tensor) and count.requires_grad:
            raise ValueError(
                "the count of the loss's (sum, count) has a gradient, which would be lost: "
                "detach it where it is a weight, or return a mean"
            )

    @property
    def name(self) -> str:
        """Name the function for an error's text."""
        if isinstance(self.function, _TorchLoss):
            return self.function.name
        named = getattr(self.function, "__qualname__", None)
        return named if isinstance(named, str) else type(self.function).__qualname__


def choose_loss(given: LossFunction | None, own: LossFunction | None, *, model: str) -> Loss:
    """Return the given loss, or the model's own, in a form whose parts join if possible.

    Raises:
        TypeError: it is no function.
        ValueError: there is no loss, its parts cannot be joined, or it has trained parameters.
    """
    chosen = own if given is None else given
    if chosen is None:
        raise ValueError(
            f"a {model} has no loss of its own; give loss_fn=, such as torch.nn.CrossEntropyLoss()"
        )
    if isinstance(chosen, Loss):
        return chosen
    named = chosen.named_parameters() if isinstance(chosen, nn.Module) else ()
    if trained := next((name for name, p in named if p.requires_grad), None):
        raise ValueError(
            f"the loss {type(chosen).__name__} has parameters of its own ({trained}), which would "
            "not be trained; make them part of the model's last layer, or set requires_grad to "
            "False"
        )
    return known_loss(chosen) or Loss(chosen)


def smooth_labels(loss: Loss, label_smoothing: float) -> Loss:
    """Return the same loss with a share of each target spread over all classes.

    Raises:
        ValueError: the loss is not known to be a cross entropy over classes.
    """
    if not label_smoothing:
        return loss
    if loss.smoothed is None:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, but the loss {loss.name} is not known to be a "
            "cross entropy over classes without smoothing of its own; leave it out, and give a "
            "loss_fn= that smooths, such as "
            f"torch.nn.CrossEntropyLoss(label_smoothing={label_smoothing})"
        )
    return loss.smoothed(label_smoothing)


def known_loss(loss_fn: Callable[..., Any]) -> Loss | None:
    """Return one of torch's own losses in a form whose parts join; None for any other function.

    Known are modules of exactly torch's classes, without hooks or a forward set on the instance;
    functions of torch.nn.functional; and a functools.partial of these that gives keywords.
    """
    options: Callable[[], dict[str, Any]]
    if isinstance(loss_fn, nn.Module):
        if type(loss_fn) not in _MODULES or "forward" in vars(loss_fn) or _has_hooks(loss_fn):
            return None
        function, names = _MODULES[type(loss_fn)]
        name = type(loss_fn).__name__
        # Read at every call, as the module does: a weight may change during a run.
        options = partial(_attributes, loss_fn, (*names, "reduction"))
    else:
        keywords: dict[str, Any] = {}
        function = loss_fn
        if isinstance(loss_fn, partial) and not loss_fn.args:
            function, keywords = loss_fn.func, loss_fn.keywords
        # Compared by identity: a function object of the user's may not be hashable.
        if not any(function is one for one in _FUNCTIONS) or keywords.keys() & {"input", "target"}:
            return None
        name, options = f"F.{function.__name__}", keywords.copy
    present = options()
    _refuse_options(name, function, present)
    ignored = present.get("ignore_index", -100)

    def smoothed(label_smoothing: float) -> Loss:
        added = {"label_smoothing": label_smoothing}
        loss = _TorchLoss(name, function, lambda: {**options(), **added})
        return Loss(loss, is_exact=True, ignore_index=ignored)

    # A loss that smooths already keeps its own smoothing.
    is_plain = function is F.cross_entropy and not present.get("label_smoothing")
    return Loss(
        _TorchLoss(name, function, options),
        is_exact=True,
        ignore_index=ignored,
        smoothed=smoothed if is_plain else None,
    )


def head_of(value: LossValue) -> Tensor:
    """Return the part of a loss's value to differentiate: the mean, or the sum."""
    return value[0] if isinstance(value, tuple) else value


@final
@dataclass(frozen=True)
class _TorchLoss:
    """Call a function of torch.nn.functional, with its options, so that its parts join."""

    name: str
    function: Callable[..., Tensor]
    options: Callable[[], dict[str, Any]]

    def __call__(self, output: Tensor, target: Tensor) -> LossValue:
        keywords = {
            # A module's weight may be left on the CPU: the model is moved, the loss is not.
            name: value.to(output.device) if isinstance(value, Tensor) else value
            for name, value in self.options().items()
        }
        self._refuse_shapes(output, target, keywords)
        if self.function in _OF_CLASSES and not target.is_floating_point():
            return sum_over_targets(self.function, output, target, keywords)
        # Samples have equally many elements or rows, so the mean over these is that over samples.
        # This holds for class probabilities, too: torch leaves weights out of their count.
        return self.function(output, target, **keywords)

    def _refuse_shapes(self, output: Tensor, target: Tensor, keywords: Mapping[str, Any]) -> None:
        """Refuse inputs that would be compared across samples, or taken for a single sample."""
        if self.function in _OF_CLASSES | _OF_ROWS:
            if output.ndim < 2:
                raise ValueError(
                    f"{self.name} takes outputs of shape {tuple(output.shape)} for one sample's "
                    "classes; let the model return (samples, classes)"
                )
        elif output.ndim != target.ndim or len(output) != len(target):
            raise ValueError(
                f"{self.name} would compare every sample with every other, as outputs have shape "
                f"{tuple(output.shape)} and targets {tuple(target.shape)}; reshape one to the "
                "other's"
            )
        for name in ("weight", "pos_weight"):
            weight = keywords.get(name)
            if weight is not None and weight.ndim >= output.ndim and weight.shape[0] != 1:
                raise ValueError(
                    f"the {name} of {self.name} has shape {tuple(weight.shape)}, one for each "
                    f"sample of one batch; give what holds for all, such as shape "
                    f"{tuple(output.shape[1:])}, or a function that takes it from the target and "
                    "returns (sum, count)"
                )


def sum_over_targets(
    function: Callable[..., Tensor], output: Tensor, target: Tensor, keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of (N, ...) class indices, and the divisor of torch's mean.

    The divisor is the sum of the targets' class weights, with and without label smoothing (torch
    2.15; the test compares them), or the number of targets, each without ignored targets.
    """
    losses = function(output, target, **{**keywords, "reduction": "none"})
    # The mean fits into float16, but the sum over many targets would overflow.
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    counts = target != keywords.get("ignore_index", -100)
    weight = keywords.get("weight")
    if weight is None:
        return total, counts.sum()
    # long(), because torch takes one-byte indices for a mask.
    weights = weight[target.long().where(counts, 0)].where(counts, 0)
    return total, weights.sum(dtype=total.dtype)


def _refuse_options(name: str, function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Refuse a loss whose parts cannot be joined, whatever its inputs."""
    if keywords.get("size_average") is not None or keywords.get("reduce") is not None:
        raise ValueError(f"{name} is given size_average or reduce; give reduction='mean' instead")
    reduction = keywords.get("reduction", "mean")
    if reduction != "mean" and (function, reduction) != (F.kl_div, "batchmean"):
        raise ValueError(
            f"{name} has reduction={reduction!r}, but a step's gradient is that of a mean; give "
            "reduction='mean', and instead of a sum's larger steps a larger learning rate"
        )
    if function in _WEIGH_EACH_ELEMENT and keywords.get("weight") is not None:
        raise ValueError(
            f"{name} is given a weight for each element of one batch; give a function that takes "
            "the weights from the target and returns (sum, count)"
        )


def _attributes(module: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
