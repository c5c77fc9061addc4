"""Freeze a model's bottom layers where they are, in any training loop.

model
  embeddings, cls_token ...  what is registered before the blocks freezes with block 0
  blocks                     0 .. num_frozen - 1 freeze
  norm, head ...             what is registered behind them never freezes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NAMES = "_frozen_in_place"
"""The model's attribute that names what trained before it froze; copies of the model have it."""


def apply(
    model: nn.Module, num_frozen: int, *, layers: Sequence[nn.Module] | None = None
) -> tuple[str, ...]:
    """Freeze the bottom layers of a model, and thaw those above; to be called between two steps.

    Parameters that freeze lose their gradient, so that torch's optimizers leave them alone, weight
    decay and momentum included, and keep their state for a thaw. Their modules stay in eval mode
    (no dropout, no running statistics) whatever `.train()` is called. A thaw lets train again what
    trained before, and nothing else. The same call twice changes nothing more. What
    `torch.compile` made of the model is thrown away at a change, as it does not notice one.

    A parameter that a layer which still trains uses, too, such as a tied embedding, goes on
    training.

    Args:
        model: not wrapped by DistributedDataParallel, which counts on every gradient it found at
            the start: freeze, then wrap anew.
        num_frozen: layers from the bottom.
        layers: the blocks, bottom first; None takes the model's largest ModuleList or Sequential
            of equal blocks.
    Returns:
        the names of all parameters that are frozen by now.
    Raises:
        ValueError: there are not so many layers, or none were found; or the model is wrapped.
    """
    _refuse_wrapped(model)
    blocks = list(layers) if layers is not None else find_layers(model)
    if not 0 <= num_frozen <= len(blocks):
        raise ValueError(
            f"{num_frozen} layers cannot freeze; the model has {len(blocks)}: give 0 to "
            f"{len(blocks)}"
        )
    modules = _bottom(model, blocks, num_frozen)
    names = _names_of(model, blocks, num_frozen)
    before: set[str] = getattr(model, _NAMES, set())
    parameters = dict(model.named_parameters())
    freezing = {name for name in names if parameters[name].requires_grad}
    thawing = before - names
    for name in freezing:
        parameters[name].requires_grad_(False)
        parameters[name].grad = None
    for name in thawing & parameters.keys():
        parameters[name].requires_grad_(True)
    after = (before | freezing) - thawing
    setattr(model, _NAMES, after)
    _keep_in_eval(model, set(modules))
    if freezing or thawing:
        torch._dynamo.reset()
    return tuple(sorted(after))


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's blocks: the members of its largest list of modules of one class.

    Raises:
        ValueError: there is none; give the layers yourself.
    """
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 1
        and len({type(one) for one in module}) == 1
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of equal blocks; give layers=, bottom first"
        )
    return max(lists, key=lambda own: sum(p.numel() for one in own for p in one.parameters()))


def _refuse_wrapped(model: nn.Module) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped by DistributedDataParallel, which waits for the gradients it "
            "found at the start; freeze model.module, and wrap that anew"
        )


def _bottom(model: nn.Module, blocks: Sequence[nn.Module], num_frozen: int) -> list[nn.Module]:
    """Return what freezes: the first blocks, and modules that are registered before them."""
    if not num_frozen:
        return []
    return [*_before(model, blocks[0]), *blocks[:num_frozen]]


def _before(module: nn.Module, block: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that are registered before a block, at each level of the way to it."""
    for child in module.children():
        if child is block:
            return
        if any(one is block for one in child.modules()):
            yield from _before(child, block)
            return
        yield child


def _names_of(model: nn.Module, blocks: Sequence[nn.Module], num_frozen: int) -> set[str]:
    """Name the parameters that freeze, but for those that also have a place that trains."""
    if not num_frozen:
        return set()
    path_of = {module: path for path, module in model.named_modules()}
    frozen = tuple(f"{path_of[block]}." for block in blocks[:num_frozen])
    # A module's own parameters come before its children's.
    places = list(model.named_parameters(remove_duplicate=False))
    first = next(i for i, (name, _) in enumerate(places) if name.startswith(frozen[0]))
    is_frozen = [i < first or name.startswith(frozen) for i, (name, _) in enumerate(places)]
    training = {p for (_, p), own in zip(places, is_frozen, strict=True) if not own}
    return {name for name, p in model.named_parameters() if p not in training}


def _keep_in_eval(model: nn.Module, frozen: set[nn.Module]) -> None:
    """Put modules into eval mode for as long as they are frozen; others back into the model's."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        own = [key for key, hook in hooks.items() if hook is _stay_in_eval]
        if own and module not in frozen:
            hooks.pop(own[0])
            module.train(model.training)
        elif module in frozen:
            if not own:
                module.register_forward_pre_hook(_stay_in_eval)
            module.eval()


def _stay_in_eval(module: nn.Module, _: object) -> None:
    if module.training:
        module.eval()
