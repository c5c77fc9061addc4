"""Describe what is trained, and refuse models that cannot be trained in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autopipe.loss import Loss, LossFunction, choose_loss, smooth_labels
from freeze import FreezePolicy
from pipetransformer.checks.optimizer_trial import try_optimizer
from pipetransformer.config import TrainConfig
from pipetransformer.model import (
    DTYPES,
    LayeredModel,
    OptimizerFactory,
    OptimizerTraits,
    Task,
    adamw,
    attributes_of,
    decay_by_layer,
    held_tensors,
    is_opaque,
    named_tensors,
    plain_tensors,
    refuse_hooks,
)
from pipetransformer.processes import likely_device, world_size


def describe_task(
    layered: LayeredModel,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    config: TrainConfig,
    policy: FreezePolicy,
) -> tuple[Task, OptimizerTraits]:
    """Return what is trained, and what its optimizer is like, before the processes meet.

    Raises:
        ValueError: the model, the loss, the optimizer or the policy cannot be used.
    """
    device = likely_device(config.device)
    refuse_model(layered, DTYPES[config.precision])
    refuse_moving_opaque(layered.model, device)
    policy.check(layered.num_layers)
    optimizer = optimizer or adamw()
    traits = try_optimizer(optimizer, layered.model, device)
    if config.layer_decay is not None:
        optimizer = decay_by_layer(optimizer, layered, config.layer_decay)
    loss = choose_loss(loss_fn, layered.loss_fn, model=type(layered.model).__name__)
    loss = smooth_labels(loss, config.label_smoothing)
    trainable = frozenset(n for n, p in layered.model.named_parameters() if p.requires_grad)
    # Every step needs the gradient's norm anyway.
    signals = policy.signals | set(config.signals) | {"gradient_norm"}
    if world_size() > 1:
        _refuse_captured(loss, layered.model)
    task = Task(layered, loss, optimizer, config, trainable, signals)
    task.compiled(())  # Refuses an unknown backend.
    return task, traits


def refuse_model(model: LayeredModel, computes_in: torch.dtype | None) -> None:
    """Refuse what would be lost or altered where layers move and batches are split.

    Args:
        computes_in: a low precision, over weights that must be in float32; None is any.
    """
    sides, mask = model.sides_of(0, len(model.sublayers)), model.padding_mask
    if mask is not None and mask not in sides:
        raise ValueError(f"padding_mask is {mask!r}; give one of the sides: {', '.join(sides)}")
    _refuse_batch_statistics(model)
    _refuse_parameters(model.model)
    _refuse_shared_memory(model.model)
    _refuse_references(model.model)
    _refuse_module_hooks(model)
    if computes_in is not None:
        _refuse_low_weights(model.model)


def _refuse_batch_statistics(model: LayeredModel) -> None:
    in_eval = {module for part in model.parts for module in part.modules()}
    for name, module in model.model.named_modules():
        if module in in_eval:
            continue
        # The base of BatchNorm1d to 3d, SyncBatchNorm and their lazy forms, not of InstanceNorm.
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}: its statistics would depend on the "
                "micro-batches and replicas; use LayerNorm or GroupNorm"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            for option in ("sparse", "scale_grad_by_freq"):
                if getattr(module, option):
                    raise ValueError(
                        f"{name!r} is an {type(module).__name__} with {option}=True, whose "
                        "gradients cannot be summed over the parts of a batch; build it with "
                        f"{option}=False"
                    )


def _refuse_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kind = type(parameter).__name__
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is a {kind}: initialise lazy modules with one forward"
            )
        if is_opaque(parameter) and parameter.requires_grad:
            raise ValueError(
                f"parameter {name!r} is a {kind} and trains, but what trains must be a plain "
                "Parameter: set its requires_grad to False, and train adapters above it, such as "
                "peft's LoRA, or load the model without quantization_config"
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise ValueError(
                f"parameter {name!r} is complex, and norms and sums here are of real numbers; "
                "keep its real and imaginary part as two real ones"
            )
        refuse_hooks(name, parameter)


def refuse_moving_opaque(model: nn.Module, device: torch.device) -> None:
    """Refuse quantized weights, and others of classes of their own, where they would move.

    Args:
        device: of this process.
    """
    opaque = {name: one for name, one in named_tensors(model).items() if is_opaque(one)}
    for name, one in opaque.items():
        what = f"{name!r} is a {type(one).__name__}, which is never moved"
        if world_size() > 1:
            raise ValueError(
                f"{what}, and layers move between these {world_size()} processes: train in one "
                "process, by attach or FreezeCallback in a loop under DDP, or load the model "
                "without quantization_config"
            )
        # A wrapper may say another device than that of what it wraps.
        there = plain_tensors(one)[0].device
        if there.type != device.type:
            raise ValueError(
                f"{what}, and it is on {there} while this run trains on {device}: load the model "
                f"there, as by device_map={{'': '{device}'}} of from_pretrained, or give "
                f"device={there.type!r}"
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse tensors over one memory: where they move, each gets its own."""
    held = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), name)
        for name, tensor in named_tensors(model).items()
        if tensor.numel() and not tensor.is_meta and not is_opaque(tensor)
    )
    # Sorted by address: if any two overlap, so do two neighbours.
    for (_, end, name), (start, _, other) in zip(held, held[1:], strict=False):
        if start < end:
            raise ValueError(
                f"{name!r} and {other!r} share memory, but are two tensors, which would be untied "
                "where they move; tie them by assigning the very same Parameter within one "
                "sublayer, or copy one: nn.Parameter(tensor.detach().clone())"
            )


def _refuse_references(model: nn.Module) -> None:
    """Refuse plain attributes that hold a tensor of the model: they keep it where it moves."""
    names = _names_by_memory(model)
    for owner, module in model.named_modules():
        for attribute, value in attributes_of(module).items():
            if name := _first_named(names, value):
                raise ValueError(
                    f"attribute {attribute!r} of {owner!r} holds {name!r} beside the module that "
                    "owns it, and would keep the old one where that moves; read it from its "
                    "module in forward, or use nn.ParameterList"
                )


def _refuse_captured(loss: Loss, model: nn.Module) -> None:
    """Refuse a loss that holds parameters of the model, which move between processes."""
    names, function = _names_by_memory(model), loss.function
    parts = function.modules() if isinstance(function, nn.Module) else ()
    for value in (function, *(attributes_of(part) for part in parts)):
        if name := _first_named(names, value):
            raise ValueError(
                f"the loss {loss.name!r} has captured {name!r}, and would go on with what that "
                "was at the start, without its gradient, as parameters move between processes: "
                "decay weights by the optimizer, or compute a penalty in the last layer's forward"
            )


def _names_by_memory(model: nn.Module) -> dict[int, str]:
    # By storage, not by address: a view that starts in the middle counts as its owner.
    return {
        tensor.untyped_storage().data_ptr(): name
        for name, tensor in named_tensors(model).items()
        # What never moves may be held anywhere.
        if tensor.numel() and not tensor.is_meta and not is_opaque(tensor)
    }


def _first_named(names: Mapping[int, str], value: Any) -> str | None:
    """Return the name of the first tensor that a value holds, or holds a view of."""
    # A sparse tensor has no storage of its own, and a wrapper none.
    addresses = (
        one.untyped_storage().data_ptr()
        for one in held_tensors(value)
        if not one.is_sparse and not is_opaque(one)
    )
    return next((names[memory] for memory in addresses if memory in names), None)


def _refuse_module_hooks(model: LayeredModel) -> None:
    """Refuse hooks and compiled forwards that would not run, and hooks on parts of a gradient."""
    called = {module for sub in model.sublayers for module in sub.module.modules()}
    for name, module in model.model.named_modules():
        if module not in called and (module._forward_hooks or module._forward_pre_hooks):
            raise ValueError(
                f"{name or type(module).__name__!r} has forward hooks that would not run, as its "
                "sublayers are called one by one; hook the modules within it"
            )
        if module not in called and module._compiled_call_impl is not None:
            raise ValueError(
                f"{name or type(module).__name__!r} was compiled in place, which would have no "
                "effect, as its sublayers are called one by one; leave compile() out"
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise ValueError(
                f"{name or type(module).__name__!r} has backward hooks, which would run on the "
                "gradient of every micro-batch; remove them"
            )


def refuse_untrained(task: Task) -> None:
    """Raise a ValueError for a model without a trained parameter: no step would change it."""
    if not task.trainable:
        raise ValueError(
            f"no parameter of this {type(task.model.model).__name__} needs a gradient: call "
            "requires_grad_() on what is to be trained. Adapters of peft are loaded to train with "
            "is_trainable=True, and must not be disabled"
        )


def about_low_weights(model: nn.Module) -> str:
    """Say that weights which are trained in low precision lose small updates, or ""."""
    low = {
        name: p.dtype
        for name, p in model.named_parameters()
        if p.requires_grad and p.is_floating_point() and p.itemsize < torch.float32.itemsize
    }
    if not low:
        return ""
    name, dtype = next(iter(low.items()))
    return (
        f"parameter {name!r} and {len(low) - 1} others are {dtype}, in which updates below "
        f"{torch.finfo(dtype).eps / 2:.1g} of a weight are lost: load the model in float32 "
        "(dtype=torch.float32 in from_pretrained, or model.float()) and set precision="
    )


def about_tied_weights(task: Task) -> str:
    """Say that frozen layers whose tied tensor goes on training are not cached, or ""."""
    if task.prefix_depth(1):
        return ""
    name = min(task.model.shared_above(1) & task.trainable)
    return (
        f"no cache: {name!r} is tied to the head and goes on training, so that what frozen layers "
        "make of it changes with every step. tied_weights='freeze' freezes it with layer 0, "
        "'untie' gives the head a copy"
    )


def about_full_float32(
    model: nn.Module, computes_in: torch.dtype | None, device: torch.device
) -> str:
    """Say that a GPU multiplies float32 matrices slowly; "" where the caller has chosen how.

    Args:
        computes_in: what sublayers compute in; None is as the weights are.
    """
    if computes_in is not None or device.type != "cuda" or not torch.cuda.is_tf32_supported():
        return ""
    # torch's older switches set this one too; reading them is an error once it was set itself.
    is_chosen = torch.backends.cuda.matmul.fp32_precision != "none"
    if is_chosen or all(p.dtype != torch.float32 for p in model.parameters()):
        return ""
    return (
        "float32 matrices are multiplied in full precision, several times slower than this GPU "
        'can: set precision="bf16", or call torch.set_float32_matmul_precision("high") for TF32, '
        'or ("highest") to keep full precision without this warning'
    )


def _refuse_low_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, but precision= computes in low "
                "precision over weights in float32: call model.float() first, or leave precision "
                "out to train the weights as they are"
            )


def _extent_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last; a view may skip some."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return (last + 1) * tensor.element_size()
