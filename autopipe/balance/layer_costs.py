"""Measure the seconds and bytes of each layer of an nn.Sequential.

Every layer runs like a partition of its own: the graph is cut at its input, its output and its
skips, and is dropped before the next layer runs. So only one layer's activations are in memory,
and none counts for two layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from autopipe.profile import graph_leaves, left_as_found, now_s, saved_storages, storages, unshared
from autopipe.skip import Skippable, SkipStore, using

Tensors = Tensor | tuple[Tensor, ...]
"""What a layer takes and returns."""

_State = tuple[Tensors, SkipStore]
"""The hidden state, and the skips that wait."""

_Measure = Callable[[Callable[[], _State], list[Tensor]], tuple[_State, float]]
"""Runs a layer's forward, which takes these tensors; returns its results and its cost."""


def members(tensors: Tensors) -> tuple[Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)


def are_tensors(value: Any) -> bool:
    return bool(members(value)) and all(isinstance(tensor, Tensor) for tensor in members(value))


def layer_seconds(module: nn.Sequential, sample: Tensors, *, timeout_s: float) -> list[float]:
    """Return the seconds of each layer's forward and backward in train mode, over all passes."""
    device = members(sample)[0].device
    start_s = time.perf_counter()
    with left_as_found([module], device):
        module.train()
        passes: list[list[float]] = []
        while not passes or time.perf_counter() - start_s < timeout_s:
            passes.append(_measure_layers(module, sample, partial(_seconds, device)))
    # The first pass also initialises libraries and chooses algorithms: it counts only if alone.
    return [sum(seconds) for seconds in zip(*passes[1:] or passes, strict=True)]


def _seconds(
    device: torch.device, forward: Callable[[], _State], taken: list[Tensor]
) -> tuple[_State, float]:
    """Time a forward, and a backward from all its results; skips bring gradients of their own."""
    start_s = now_s(device)
    made = forward()
    forward_s = now_s(device) - start_s
    roots = [tensor for tensor in _tensors(made) if tensor.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    start_s = now_s(device)
    if roots:
        torch.autograd.backward(roots, gradients)
    return made, forward_s + now_s(device) - start_s


def layer_bytes(module: nn.Sequential, sample: Tensors, *, param_scale: float) -> list[float]:
    """Return the bytes that training keeps of each layer: activations and parameters.

    Activations are the output, stashed skips, and all else that the layer's graph holds, without
    the input. CUDA reports what a forward allocated. Elsewhere storages are counted, which misses
    tensors that an autograd.Function keeps without `save_for_backward`.
    """
    device = members(sample)[0].device
    held = [*module.parameters(), *module.buffers()]
    measure = partial(_allocated, device) if device.type == "cuda" else partial(_kept, held)
    with left_as_found([module], device):
        module.train()
        if device.type == "cuda":
            # Warm-up: libraries allocate workspaces at first use, which belong to no layer.
            _measure_layers(module, sample, measure)
        activations = _measure_layers(module, sample, measure)
    parameters = unshared(layer.parameters() for layer in module)
    return [
        param_scale * sum(parameter.nbytes for parameter in weights) + kept
        for weights, kept in zip(parameters, activations, strict=True)
    ]


def _allocated(
    device: torch.device, forward: Callable[[], _State], taken: list[Tensor]
) -> tuple[_State, float]:
    before = torch.cuda.memory_allocated(device)
    made = forward()
    return made, torch.cuda.memory_allocated(device) - before


def _kept(
    held: Sequence[Tensor], forward: Callable[[], _State], taken: list[Tensor]
) -> tuple[_State, float]:
    with saved_storages() as saved:
        made = forward()
    kept = {address: num_bytes for address, (num_bytes, _) in saved.items()}
    kept |= storages([*_tensors(made), *graph_leaves(_tensors(made))])
    return made, sum(kept[address] for address in kept.keys() - storages([*held, *taken]).keys())


def _measure_layers(module: nn.Sequential, sample: Tensors, measure: _Measure) -> list[float]:
    hidden = tree_map(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), sample)
    waiting: SkipStore = {}
    measured = []
    for index, layer in enumerate(module):
        popped = {
            key: waiting.pop(key)
            for child in layer.modules()
            if isinstance(child, Skippable)
            for key in child.poppable()
            if key in waiting
        }
        (hidden, stashed), value = _measure_layer(index, layer, (hidden, popped), measure)
        waiting |= stashed
        measured.append(value)
    return measured


def _measure_layer(
    index: int, layer: nn.Module, taken: _State, measure: _Measure
) -> tuple[_State, float]:
    # In a frame of its own, so that the layer's graph is freed before the next layer runs.
    # Copies, because a leaf that needs a gradient forbids layers that work in place.
    copied = tree_map_only(Tensor, Tensor.clone, taken)
    handed = _tensors((taken, copied))
    made, value = measure(partial(_forward, index, layer, *copied), handed)
    return tree_map_only(Tensor, _cut, made), value


def _forward(index: int, layer: nn.Module, hidden: Tensors, skips: SkipStore) -> _State:
    with using(skips):
        output = layer(hidden)
    if not are_tensors(output):
        raise TypeError(
            f"layer {index} ({type(layer).__name__}) returned a {type(output).__name__}; "
            f"it must return a tensor or a tuple of tensors"
        )
    return output, skips


def _cut(tensor: Tensor) -> Tensor:
    # As between stages, whether or not the layer's output needed a gradient.
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(differentiable)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
