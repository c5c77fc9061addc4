"""Count what the kernels of a chain of sublayers compute and move, without running them.

The chain runs on the meta device, where tensors have shapes and no memory, so that a model of any
size can be counted on any machine. Attention and dropout count as the one kernel each that a GPU
runs for them. FLOPs are those of matrix products, convolutions and attention; every other kernel
is known by the bytes that it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autopipe.profile import ProfiledSublayer, left_as_found

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}
_GATHERS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
"""They read only what they return of their first tensor."""


@dataclass(frozen=True)
class Kernel:
    """State what one kernel computes, and the bytes that it reads and writes."""

    name: str
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class SublayerCount:
    """Hold the kernels of a sublayer's passes over a batch, and its bytes.

    Args:
        forward: in train mode, with gradients recorded.
        input_backward: of the backward that gives the input's gradient alone.
        backward: of the whole one, its parameters' gradients added to existing ones.
        frozen: forward in eval mode without gradients.
        parameter_bytes, buffer_bytes: a tensor that several sublayers share counts in the first.
        gradient_bytes, num_trained: of its trainable parameters.
        saved_bytes: of the batch, what autograd keeps until backward beside parameters.
        output_bytes: of the batch.
    """

    forward: tuple[Kernel, ...]
    input_backward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    frozen: tuple[Kernel, ...]
    parameter_bytes: int
    gradient_bytes: int
    num_trained: int
    buffer_bytes: int
    saved_bytes: int
    output_bytes: int


def count_kernels(
    sublayers: Sequence[ProfiledSublayer], batch: Mapping[str, Tensor]
) -> list[SublayerCount]:
    """Count every sublayer's passes; the modules are left as they were.

    Args:
        sublayers: bottom first, with parameters and buffers on the meta device.
        batch: (B, ...) tensors on the meta device.
    Raises:
        ValueError: a sublayer looks at the values of its input, which are not there.
        TypeError: it returns something else than one tensor.
    """
    meta = torch.device("meta")
    counts: list[SublayerCount] = []
    counted: set[int] = set()
    below: Tensor | None = None
    with left_as_found([sublayer.module for sublayer in sublayers], meta), meta, _FusedKernels():
        for sublayer in sublayers:
            try:
                count, below = _count(sublayer, below, batch, counted)
            except (RuntimeError, NotImplementedError) as error:
                raise ValueError(
                    f"sublayer {sublayer.name!r} cannot be counted without data: {error}; "
                    "measure it on a machine instead"
                ) from error
            counts.append(count)
    return counts


def _count(
    sublayer: ProfiledSublayer,
    below: Tensor | None,
    batch: Mapping[str, Tensor],
    counted: set[int],
) -> tuple[SublayerCount, Tensor]:
    module = sublayer.module
    fresh = {id(p): p for p in module.parameters() if id(p) not in counted}
    buffers = {id(b): b for b in module.buffers() if id(b) not in counted}
    counted.update(fresh, buffers)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    forward, backward, saved_bytes, output = _train(sublayer, below, batch)
    for parameter in trained:
        parameter.requires_grad_(False)
    _, input_backward, _, _ = _train(sublayer, below, batch)
    for parameter in trained:
        parameter.requires_grad_(True)
    module.eval()
    with torch.no_grad(), _KernelCounter() as frozen:
        sublayer.call(below, batch)
    own = [parameter for parameter in trained if id(parameter) in fresh]
    return SublayerCount(
        forward=forward,
        input_backward=input_backward,
        backward=backward,
        frozen=tuple(frozen.kernels),
        parameter_bytes=sum(p.nbytes for p in fresh.values()),
        gradient_bytes=sum(p.nbytes for p in own),
        num_trained=len(own),
        buffer_bytes=sum(b.nbytes for b in buffers.values()),
        saved_bytes=saved_bytes,
        output_bytes=output.nbytes,
    ), output


def _train(
    sublayer: ProfiledSublayer, below: Tensor | None, batch: Mapping[str, Tensor]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...], int, Tensor]:
    """Run forward and backward; return their kernels, the saved bytes, and the output."""
    sublayer.module.train()
    hidden = None
    if below is not None:
        # A copy, because a leaf that needs a gradient forbids layers that work in place.
        hidden = below.detach().requires_grad_(below.is_floating_point()).clone()
    held = _storages([*sublayer.module.parameters(), *sublayer.module.buffers()])
    with _KernelCounter() as forward, _saved_storages() as saved:
        output = sublayer.call(hidden, batch)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"sublayer {sublayer.name!r} returned a {type(output).__name__}; it must "
            "return one tensor: move side values into the batch"
        )
    backward: tuple[Kernel, ...] = ()
    if output.requires_grad:
        for parameter in sublayer.module.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        gradient = torch.empty_like(output)
        with _KernelCounter() as counter:
            output.backward(gradient)
        backward = tuple(counter.kernels)
    saved_bytes = sum(saved[key].nbytes() for key in saved.keys() - held.keys())
    return tuple(forward.kernels), backward, saved_bytes, output.detach()


def _storages(tensors: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the tensors' storages; on the meta device they have no address to know them by."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in found}


@contextmanager
def _saved_storages() -> Iterator[dict[int, torch.UntypedStorage]]:
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update(_storages([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


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
            count = flop_registry.get(func.overloadpacket)
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            num_bytes = _touched_bytes(outputs)
            num_bytes += (
                _touched_bytes([*outputs, *inputs[1:]])
                if func.overloadpacket in _GATHERS
                else _touched_bytes(inputs)
            )
            self.kernels.append(Kernel(str(func.overloadpacket), flops, num_bytes))
        return result


def _starts_kernel(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Tell kernels from views and allocations."""
    if not outputs or func.overloadpacket in _ALLOCATIONS:
        return False
    is_view = _storages(outputs).keys() <= _storages(inputs).keys()
    return not is_view or func._schema.is_mutable


def _touched_bytes(tensors: Sequence[Tensor]) -> int:
    """Sum the bytes of the tensors; of an expanded one those that exist."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


class _FusedKernels(TorchFunctionMode):
    """Run attention and dropout as the single kernels that GPUs have for them.

    Elsewhere torch takes them apart, and a backward keeps what no GPU keeps: the probabilities of
    all pairs of tokens, and a mask in the activations' dtype.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SCALED_ATTENTION:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # No mode is asked about what a function of torch calls in turn.
            with _replaced_attention():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


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
    """Stand for any fused attention: equal in what they compute and keep."""
    if query.dim() != 4 or options.get("enable_gqa"):
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
