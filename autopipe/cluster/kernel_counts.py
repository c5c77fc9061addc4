"""Count what the kernels of a chain of sublayers compute and move, without running them.

The chain runs on the meta device, where tensors have shapes and no memory. So any machine can
count a model of any size. Attention and dropout count as the one kernel each that a GPU runs.
FLOPs are those of matrix products, convolutions and attention, two a multiply-add. Every other
kernel costs only the bytes that it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autopipe.profile import ProfiledSublayer, chain_bytes, left_as_found, storages

_META = torch.device("meta")
_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}
_GATHERS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
"""They read of their first tensor only the part that they return."""


@dataclass(frozen=True)
class Kernel:
    """State what one kernel computes, and the bytes that it reads and writes."""

    flops: float
    num_bytes: float


@dataclass(frozen=True)
class SublayerKernels:
    """Hold the kernels of a sublayer's passes; `backward` is the whole one."""

    forward: tuple[Kernel, ...]
    input_backward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    frozen: tuple[Kernel, ...]


def count_kernels(
    sublayers: Sequence[ProfiledSublayer], batch: Mapping[str, Tensor]
) -> list[SublayerKernels]:
    """Count every sublayer's passes over a batch, all on the meta device.

    A ValueError if one reads its input's values, or runs an operation without a FLOP formula.
    """
    counts: list[SublayerKernels] = []
    below: Tensor | None = None
    modules = [sublayer.module for sublayer in sublayers]
    with left_as_found(modules, _META), _META, _FusedKernels():
        for sublayer in sublayers:
            try:
                count, below = _count(sublayer, below, batch)
            except (RuntimeError, NotImplementedError) as error:
                raise ValueError(
                    f"sublayer {sublayer.name!r} cannot be counted without data: {error}; "
                    "measure it on a machine instead"
                ) from error
            counts.append(count)
    return counts


def count_bytes(
    sublayers: Sequence[ProfiledSublayer], batch: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Count as `chain_bytes` does, on the meta device."""
    with _META, _FusedKernels():
        return chain_bytes(sublayers, batch)


def _count(
    sublayer: ProfiledSublayer, below: Tensor | None, batch: Mapping[str, Tensor]
) -> tuple[SublayerKernels, Tensor]:
    trained = nn.ParameterList(p for p in sublayer.module.parameters() if p.requires_grad)
    forward, backward, output = _train(sublayer, below, batch)
    # Once more without the weights' gradients: what is left is the input's.
    trained.requires_grad_(False)
    _, input_backward, _ = _train(sublayer, below, batch)
    trained.requires_grad_(True)
    sublayer.module.eval()
    with torch.no_grad(), _KernelCounter() as frozen:
        sublayer.run(below, batch)
    return SublayerKernels(forward, input_backward, backward, tuple(frozen.kernels)), output


def _train(
    sublayer: ProfiledSublayer, below: Tensor | None, batch: Mapping[str, Tensor]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...], Tensor]:
    sublayer.module.train()
    hidden = None
    if below is not None:
        # A copy, because a leaf that needs a gradient forbids layers that work in place.
        hidden = below.detach().requires_grad_(below.is_floating_point()).clone()
    with _KernelCounter() as forward:
        output = sublayer.run(hidden, batch)
    backward = _KernelCounter()
    if output.requires_grad:
        # Existing gradients, as of an earlier micro-batch, make the backward add to them.
        for parameter in sublayer.module.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        gradient = torch.empty_like(output)
        with backward:
            output.backward(gradient)
    return tuple(forward.kernels), tuple(backward.kernels), output.detach()


class _KernelCounter(TorchDispatchMode):
    """Note every operation that would start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if _starts_kernel(func, inputs, outputs):
            read = [*outputs, *inputs[1:]] if func.overloadpacket in _GATHERS else inputs
            # An expanded tensor has fewer bytes in memory than its shape says.
            num_bytes = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*outputs, *read))
            self.kernels.append(Kernel(flops_of(func, args, kwargs, result), num_bytes))
        return result


def _starts_kernel(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return whether an operation starts a kernel: it is no view, and no allocation."""
    if not outputs or func.overloadpacket in _ALLOCATIONS:
        return False
    # A result in an input's storage is a view, unless the operation wrote into it.
    is_view = storages(outputs).keys() <= storages(inputs).keys()
    return not is_view or func._schema.is_mutable


class _FusedKernels(TorchFunctionMode):
    """Run attention and dropout as the single kernels that GPUs have for them.

    Taken apart, they keep the probabilities of all pairs of tokens, and a mask in the
    activations' dtype.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # Modes do not see what a function of torch calls in turn: patch it.
            with _replaced_attention():
                return func(*args, **kwargs)
        fused = {_SCALED_ATTENTION: _attention, F.dropout: _dropout}
        return fused.get(func, func)(*args, **kwargs)


_SCALED_ATTENTION = F.scaled_dot_product_attention


@contextmanager
def _replaced_attention() -> Iterator[None]:
    fused: Any = _attention
    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _SCALED_ATTENTION


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Run the CPU's fused attention, which stands for all: equal in FLOPs and in what is kept."""
    # What no fused attention takes goes torch's own way. Heads that share their keys are taken.
    is_learned = attn_mask is not None and attn_mask.requires_grad
    if query.dim() != 4 or value.shape[-1] != query.shape[-1] or is_learned:
        return _SCALED_ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **options)
    output: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=options.get("scale")
    )[0]
    return output


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if p == 0 or not training:
        return input
    return torch.native_dropout(input, p, True)[0]


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of an operation that has run; a NotImplementedError if nobody said."""
    packet = func.overloadpacket
    # Ours first: torch has wrong formulas for some of these.
    if (formula := _FORMULAS.get(packet)) is not None:
        return formula(*args, **kwargs)
    if (count := flop_registry.get(packet)) is not None:
        return int(count(*args, **kwargs, out_val=result))
    if func.namespace not in {"aten", "prims"}:
        raise NotImplementedError(
            f"nobody has said, by flop_counter.register_flop_formula, what {packet} computes"
        )
    return 0


def _convolution_backward(gradient: Tensor, hidden: Tensor, weight: Tensor, *options: Any) -> int:
    """Count the forward's FLOPs for each gradient that is asked for.

    torch's formula ignores that a group's weights see only that group's channels. They are
    (C_out, C_in / groups, ...), or transposed; `options` are torch's from bias_sizes on.
    """
    is_transposed, output_mask = options[4], options[-1]
    batch, _, *places = (hidden if is_transposed else gradient).shape
    return 2 * batch * prod(places) * weight.numel() * sum(output_mask[:2])


def _grouped_mm(left: Tensor, right: Tensor, *options: Any, **named: Any) -> int:
    """Count a grouped product; a 2-D side divides its rows or columns among the groups."""
    groups = len(left) if left.dim() == right.dim() == 3 else 1
    return 2 * groups * prod(left.shape[-2:]) * right.shape[-1]


def _attended(query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any) -> int:
    """Count each query head's two products, also where several share their keys and values."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attended_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> int:
    """Count five products: the scores once more, and the gradients of scores and inputs."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


def _trilinear(*args: Any, **named: Any) -> int:
    """Count a bilinear form of three tensors, and the dimensions to insert into each."""
    shapes = []
    for tensor, expanded in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dimension in sorted(expanded):
            shape.insert(dimension, 1)
        shapes.append(shape)
    return 2 * prod(torch.broadcast_shapes(*shapes))


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.convolution_backward: _convolution_backward,
    _aten._grouped_mm: _grouped_mm,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attended,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attended_backward,
    _aten._trilinear: _trilinear,
    _aten.mv: lambda matrix, vector: 2 * matrix.numel(),
}
