"""Sum the losses of transformers' models, so that the losses of a batch's parts add up.

Which of them a model computes is not looked up by its class: each is held against the loss that
the model itself returns for a few samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopipe.loss import (
    Loss,
    LossFunction,
    LossValue,
    mean_of,
    sum_and_count,
    sum_over_targets,
)
from pipetransformer.model.forward import Entries, output_of
from pipetransformer.model.losses.word_head import UnreadLogits
from pipetransformer.model.modules import qualified_name, unwrapped


def own_loss_of(model: nn.Module, labels: Entries, answer: Any) -> LossFunction | None:
    """Return the loss that the model itself computed of labels; None where it computes none."""
    if qualified_name(type(unwrapped(model))).startswith("timm."):
        return F.cross_entropy
    if not labels or getattr(answer, "loss", None) is None:
        return None
    target = next(iter(labels.values())) if len(labels) == 1 else labels
    return own_loss(model, unwrapped(model).config, answer, output_of(answer), target)


def own_loss(model: nn.Module, config: Any, answer: Any, output: Tensor, target: Any) -> Loss:
    """Return the loss that a model of transformers has computed, as one whose parts add up.

    Args:
        answer: what its forward returned, with the loss.
        output: the answer's logits.
        target: the targets that it was given.
    Raises:
        ValueError: it is none of those known here.
    """
    own = float(answer.loss)
    # In low precision the same sum in another order differs by more.
    allowed = 1e-5 if answer.loss.dtype in (torch.float32, torch.float64) else 3e-2
    # The nearest, as an untrained model's losses of these and of shifted tokens are about equal.
    near: list[tuple[float, Loss]] = []
    for loss in _candidates(config, output, target):
        try:
            total, count = sum_and_count(loss(output, target), len(output))
        except (IndexError, RuntimeError, ValueError):
            continue  # Of another task: the shapes do not fit.
        mean = mean_of(float(total), float(count))
        if math.isclose(mean, own, rel_tol=allowed, abs_tol=1e-6):
            near.append((abs(mean - own), loss))
    if near:
        return min(near, key=lambda pair: pair[0])[1]
    further = sorted(name for name in answer if name.endswith(("aux_loss", "z_loss", "kl_loss")))
    why = f" (it adds {', '.join(further)})" if further else ""
    raise ValueError(
        f"the loss that this {type(model).__name__} returns is no cross entropy or squared error "
        f"whose parts would add up{why}: switch off what it adds in its configuration, such as "
        "output_router_logits, or give loss_fn="
    )


def _candidates(config: Any, output: Tensor, target: Any) -> list[Loss]:
    if isinstance(target, Mapping):
        return [Loss(span_loss, is_exact=True)]
    is_text = output.ndim == 3 and target.ndim == 2 and target.shape[1] <= output.shape[1]
    if is_text and not target.is_floating_point():
        # A tuned prompt comes before the text, and has outputs, but no targets.
        num_virtual = output.shape[1] - target.shape[1]
        return [_of_tokens(causal_loss, num_virtual), _of_tokens(token_loss, num_virtual)]
    return [classification_loss(config)]


def _of_tokens(function: Any, num_virtual: int) -> Loss:
    takes_unread = function is causal_loss
    if num_virtual > 0:
        function = partial(_prompted, function, num_virtual)

    def loss(compute: Any, **more: Any) -> Loss:
        return Loss(compute, is_exact=True, takes_unread=takes_unread, **more)

    return loss(function, smoothed=lambda share: loss(partial(function, label_smoothing=share)))


def _prompted(
    function: Any, num_virtual: int, output: Any, target: Tensor, **options: float
) -> Any:
    """Call a loss of tokens whose targets lack those of virtual tokens before the text."""
    return function(output, F.pad(target, (num_virtual, 0), value=-100), **options)


def token_loss(
    output: Tensor, target: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor | int]:
    """Sum the tokens' cross entropy, and count the tokens whose target is not -100.

    Args:
        output: (N, S, classes) logits.
        target: (N, S) int64.
    Source: BertForTokenClassification.forward of transformers, whose mean is over such tokens.
    """
    keywords = {"label_smoothing": label_smoothing}
    return sum_over_targets(F.cross_entropy, output.flatten(0, 1), target.flatten(), keywords)


def span_loss(output: Tensor, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy of answers' starts and ends, and count both together.

    Args:
        output: (N, S, 2) start and end logits.
        target: start_positions and end_positions, (N,) or (N, 1) int64; positions from S on are
            beyond a truncated text and ignored.
    Source: BertForQuestionAnswering.forward of transformers, which halves the mean over starts
        plus the mean over ends. Ours is equal where equally many starts and ends count. Else it
        weighs all positions alike: two means cannot be joined from a batch's parts.
    """
    length = output.shape[1]
    total, count = output.new_zeros(()), output.new_zeros((), dtype=torch.int64)
    for column, name in enumerate(("start_positions", "end_positions")):
        # What lies beyond a truncated text becomes `length`, the class that is ignored.
        positions = target[name].reshape(-1).clamp(0, length)
        total = total + F.cross_entropy(
            output[..., column], positions, ignore_index=length, reduction="sum"
        )
        count = count + (positions != length).sum()
    return total, count


def causal_loss(
    output: Tensor | UnreadLogits, target: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor | int]:
    """Sum the cross entropy of each token by the tokens before it; see `token_loss`.

    Args:
        output: (N, S, words) logits, or what stands for them.
        target: (N, S) int64, not shifted: position s is predicted at s - 1.
    Source: ForCausalLMLoss of transformers, which computes in float32, too.
    """
    if isinstance(output, UnreadLogits):
        words = F.pad(target[:, 1:], (0, 1), value=-100)
        total = output.summed_losses(words, label_smoothing=label_smoothing)
        return total, (words != -100).sum()
    dtype = torch.promote_types(output.dtype, torch.float32)
    return token_loss(output[:, :-1].to(dtype), target[:, 1:], label_smoothing=label_smoothing)


def classification_loss(config: Any, label_smoothing: float = 0.0) -> Loss:
    """Build the loss of a transformers classifier from its configuration.

    Source: BertForSequenceClassification.forward of transformers, which guesses a problem that has
        no type. Ours returns the cross entropy as (sum, count), so that targets of -100 stay exact
        when a batch is split. Smoothed, it is that of transformers' LabelSmoother.
    """

    def guess(target: Tensor) -> str:
        if config.num_labels == 1:
            return "regression"
        integer = target.dtype in (torch.int64, torch.int32)
        return "single_label_classification" if integer else "multi_label_classification"

    def loss(output: Tensor, target: Tensor) -> LossValue:
        # Noted in the configuration, which is saved: transformers' pipelines read it there.
        problem = config.problem_type = config.problem_type or guess(target)
        if problem == "regression":
            if target.numel() != output.numel():
                raise ValueError(
                    f"a regression with num_labels={config.num_labels} has outputs of shape "
                    f"{tuple(output.shape)}, but targets are {tuple(target.shape)}; give each "
                    "sample num_labels values, or build the model with another num_labels"
                )
            return F.mse_loss(output, target.reshape(output.shape))
        if problem == "single_label_classification":
            keywords = {"label_smoothing": label_smoothing}
            return sum_over_targets(F.cross_entropy, output, target.reshape(-1), keywords)
        if label_smoothing:
            raise ValueError(
                f"label_smoothing is {label_smoothing}, but the targets are {target.dtype}; give "
                "classes as integers, or leave it out"
            )
        return F.binary_cross_entropy_with_logits(output, target)

    may_have_classes = config.problem_type == "single_label_classification" or (
        config.problem_type is None and config.num_labels > 1
    )
    smoothed = partial(classification_loss, config) if may_have_classes else None
    return Loss(loss, is_exact=True, smoothed=smoothed)
