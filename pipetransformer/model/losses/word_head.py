"""Sum a language model's losses over its words in chunks of tokens.

    tokens          0 .. C-1    C .. 2C-1   ...     all N
    logits          (C, words)  (C, words)  ...     never
    kept of them    a sum, their gradients by hidden states and weights

A chunk's gradients are computed while its logits are there: no logits are computed twice. They
are those of the plain sum, and are multiplied by what the backward brings. Two cases compute them
in the backward instead, from logits that are computed again. In float16 they would be too small
without the scale of the loss. Where many backwards are to come, each would keep gradients of the
weights meanwhile.

Nothing is known of a head but what it does with numbers: `word_head` tries it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipetransformer.model.forward import Reads, output_of

LEAST_WORDS = 4096
"""From here on it pays: it is no slower, and the logits are the most of a head's memory."""

_CHUNK_BYTES, _CHUNK_BYTES_ON_CPU, _LEAST_TOKENS = 1 << 29, 1 << 26, 128
"""Of a chunk's logits. A chunk of fewer tokens moves weights more than it computes."""

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Fields of configurations, as of transformers 5.24, that may say what is done with logits."""


@final
@dataclass(frozen=True)
class WordHead:
    """Say how hidden states become logits: `cap * tanh(scale * linear(hidden) / cap)`.

    Args:
        cap: None is no bound.
    """

    linear: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether nobody would miss a call of the linear layer."""
        module = self.linear
        if type(module) is not nn.Linear or "forward" in vars(module):
            return False
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        return not any((*hooks, module._backward_hooks, module._backward_pre_hooks))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of all tokens, in the dtype of the hidden states."""
        return self.bounded(F.linear(hidden, self.linear.weight, self.linear.bias))

    def bounded(self, logits: Tensor) -> Tensor:
        """Return what becomes of the linear layer's output; writes into it."""
        if self.scale != 1:
            logits = logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


@final
@dataclass(frozen=True)
class UnreadLogits:
    """Stand for logits that nobody reads but the loss.

    Args:
        hidden: (N, S, width), what the head's linear layer would be given.
        dtype: of autocast, in which it computes; None is that of the hidden states.
        in_backward: whether gradients are computed there, and logits a second time.
    """

    hidden: Tensor
    head: WordHead
    dtype: torch.dtype | None = None
    in_backward: bool = False

    def summed_losses(self, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """Return the sum of the tokens' cross entropies.

        Args:
            target: (N, S) int64, the word to predict at each token; -100 for none.
        """
        linear, dtype = self.head.linear, self.dtype or self.hidden.dtype
        form = _Form(self.head, dtype, label_smoothing, self.in_backward)
        rows, words = self.hidden.flatten(0, 1), target.flatten()
        if not torch.is_grad_enabled():
            return _sums(form, (rows, linear.weight, linear.bias, words))[0]
        total: Tensor = _ChunkedSum.apply(rows, linear.weight, linear.bias, words, form)
        return total


@dataclass(frozen=True)
class _Form:
    """Say how logits become losses; see `UnreadLogits`."""

    head: WordHead
    dtype: torch.dtype
    smoothing: float
    in_backward: bool

    @property
    def exact(self) -> torch.dtype:
        """Return the dtype of logits behind the linear layer, losses and sums."""
        return torch.promote_types(self.dtype, torch.float32)


class _ChunkedSum(torch.autograd.Function):
    """Sum losses; keep their gradients, or what these are computed from."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, words: Tensor, form: _Form
    ) -> Tensor:
        ctx.form, tensors = form, (hidden, weight, bias, words)
        if form.in_backward:
            ctx.save_for_backward(*tensors)
            return _sums(form, tensors)[0]
        total, ctx.gradients = _sums(form, tensors, ctx.needs_input_grad[:3])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.form.in_backward:
            found = _sums(ctx.form, ctx.saved_tensors, ctx.needs_input_grad[:3], factor)[1]
        else:
            # Not kept here: autograd would copy a gradient that another holds, too.
            found, ctx.gradients = ctx.gradients, None
            if found is None:
                raise RuntimeError("the loss over words was back-propagated a second time")
            found = [None if one is None else one.mul_(factor) for one in found]
        return (*found, None, None)


def _sums(
    form: _Form,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    wanted: tuple[bool, ...] = (False, False, False),
    factor: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sum of losses, and the gradients that are wanted, times a factor.

    Args:
        tensors: hidden states (T, width), weight, bias, and the words to predict, (T,).
        wanted: whether gradients are, of the first three.
    """
    hidden, weight, bias, words = tensors
    by_hidden = torch.empty_like(hidden) if wanted[0] else None
    by_weight = torch.zeros_like(weight, dtype=form.exact) if wanted[1] else None
    by_bias = torch.zeros_like(weight[:, 0], dtype=form.exact) if wanted[2] else None
    total = torch.zeros((), dtype=form.exact, device=hidden.device)
    matrix, bias = weight.to(form.dtype), None if bias is None else bias.to(form.dtype)
    for rows in _chunks(len(hidden), weight):
        given = hidden[rows].to(form.dtype)
        # Without a name here, by which logits would be held beside those of the next chunk.
        losses, slope = _losses(form, F.linear(given, matrix, bias), words[rows], any(wanted))
        total += losses
        if slope is None:
            continue
        slope = (slope if factor is None else slope.mul_(factor)).to(form.dtype)
        if by_hidden is not None:
            by_hidden[rows] = slope @ matrix
        if by_weight is not None and form.dtype == form.exact:
            by_weight.addmm_(slope.T, given)
        elif by_weight is not None:
            by_weight.add_(slope.T @ given)
        if by_bias is not None:
            by_bias.add_(slope.sum(0, dtype=form.exact))
        del slope
    sums = [one if one is None else one.to(weight.dtype) for one in (by_weight, by_bias)]
    return total, [by_hidden, *sums]


def _chunks(num_tokens: int, weight: Tensor) -> Iterator[slice]:
    limit = _CHUNK_BYTES_ON_CPU if weight.device.type == "cpu" else _CHUNK_BYTES
    size = max(_LEAST_TOKENS, limit // (4 * len(weight)))
    return (slice(first, first + size) for first in range(0, num_tokens, size))


def _losses(
    form: _Form, logits: Tensor, words: Tensor, wants_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of a chunk's losses, and its gradient by the linear layer's output.

    Args:
        logits: (C, words) of the linear layer; written into.
    """
    head, share = form.head, form.smoothing
    logits = head.bounded(logits.to(form.exact))
    bend = None
    if wants_slope and head.cap is not None:
        bend = logits.div(head.cap).square_().neg_().add_(1)
    counts = (words != -100)[:, None]
    places = words[:, None].where(counts, 0)
    losses = (share - 1) * logits.gather(1, places)
    if share:
        losses -= share * logits.mean(1, keepdim=True)
    top = logits.amax(1, keepdim=True)
    powers = logits.sub_(top).exp_()
    sums = powers.sum(1, keepdim=True)
    losses += sums.log() + top
    total = losses.where(counts, 0).sum()
    if not wants_slope:
        return total, None
    slope = powers.div_(sums)
    if share:
        slope.sub_(share / logits.shape[1])
    slope.scatter_add_(1, places, torch.full_like(sums, share - 1)).masked_fill_(~counts, 0)
    if bend is not None:
        slope.mul_(bend)
    return total, slope.mul_(head.scale) if head.scale != 1 else slope


def word_head(
    linear: nn.Linear,
    config: Any,
    run_above: Callable[..., Any],
    *,
    tensor_ids: Collection[int] = (),
) -> WordHead | None:
    """Find out what a model does with the output of its last linear layer.

    In the place of its output come random numbers, so large that a bound shows. What becomes of
    them must be what the configuration says, and must depend on nothing else that has a gradient.

    Args:
        run_above: runs the model behind its blocks, with `head` in the layer's place.
        tensor_ids: of the model's tensors. What is done by them may be another later, as where a
            buffer holds a temperature.
    Returns:
        None where anything else is done than is known here.
    """
    if not WordHead(linear).is_plain or linear.out_features < LEAST_WORDS:
        return None
    draws = torch.Generator().manual_seed(0)
    # The same for all tokens: a table of all would take memory before anything has begun.
    row = torch.randn(linear.out_features, generator=draws).mul_(20).to(linear.weight)
    shapes, read = list[torch.Size](), set[int]()

    def stand_in(hidden: Tensor) -> Tensor:
        shapes.append(hidden.shape)
        return row.expand(*hidden.shape[:-1], -1).clone()

    with torch.enable_grad(), Reads(lambda one: read.add(one) if shapes else None):
        logits = output_of(run_above(head=stand_in))
    if [len(shape) for shape in shapes] != [3] or logits.requires_grad or read & {*tensor_ids}:
        return None
    if logits.shape != (*shapes[0][:2], linear.out_features):
        return None
    scales = [one for scale in _numbers(config, _SCALES) for one in (scale, 1 / scale)]
    caps = [None, *_numbers(config, _CAPS)]
    heads = [WordHead(linear, *one) for one in product([1.0, *scales], caps)]
    gaps = [float((logits - head.bounded(row.clone())).abs_().max()) for head in heads]
    # The nearest: in low precision another may be near, too.
    least = min(range(len(heads)), key=gaps.__getitem__)
    allowed = 1e-5 if row.dtype in (torch.float32, torch.float64) else 1e-2
    return heads[least] if gaps[least] <= allowed * float(logits.abs().max()) else None


def _numbers(config: Any, names: tuple[str, ...]) -> list[float]:
    """Return the numbers that a configuration has under some names."""
    parts = (config, getattr(config, "text_config", None))
    found = [getattr(part, name, None) for part in parts for name in names]
    return [float(one) for one in found if isinstance(one, (int, float)) and one > 0]
