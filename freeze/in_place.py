"""Freeze a model's bottom layers where they are, in any training loop.

model
  embeddings, cls_token ...  modules registered before the blocks freeze with block 0
  blocks                     0 .. num_frozen - 1 freeze
  norm, head ...             modules registered behind the blocks never freeze
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "apply", "children_but_head", "find_layers", "freeze_modules", "freeze_parameters",
    "freezing_with", "frozen_in_place", "keeps_in_eval", "list_before", "thawed_by", "tied_above",
]  # fmt: skip

_NAMES = "_frozen_in_place"
"""A module's attribute: names of its own parameters that trained before they froze.

Each module has its own, so it is found through any wrapper, and copies of the model have it.
"""


def apply(
    model: nn.Module, num_frozen: int, *, layers: Sequence[nn.Module] | None = None
) -> tuple[str, ...]:
    """Freeze the bottom layers of a model, and thaw those above; call it between two steps.

    Frozen parameters have no gradient. So torch's optimizers leave them alone, weight decay and
    momentum included, and keep their state for a thaw. (LBFGS does not: build it anew at each
    change.) A thaw affects only parameters that trained before `apply` froze them. Code compiled
    by `torch.compile` is thrown away at a change, as it does not notice one.

    Frozen modules run in eval mode (no dropout, no running statistics), even after `.train()`. A
    thaw gives each the mode that it had when it froze, or the model's mode if that has changed.

    Some parameters do not follow their layer:

    - One that a training layer shares, such as a tied embedding, goes on training. A module that
      has only such parameters stays in its mode.
    - One that a module around the blocks holds directly, such as a `cls_token` or a `logit_scale`,
      freezes with block 0: torch keeps no order between those and the blocks. To keep it training,
      put it into a module behind the blocks.

    With checkpointed layers give `use_reentrant=False`: else layers above frozen ones do not
    learn. After transformers' `gradient_checkpointing_enable` call
    `model.disable_input_require_grads()`: else frozen layers still run their backward. Skip
    `GradScaler.step` for an optimizer whose parameters are all frozen: it would raise.

    Args:
        model: not wrapped by DistributedDataParallel: freeze, then wrap anew. Not flattened by
            FullyShardedDataParallel either.
        layers: the blocks, bottom first, as they are registered; None uses `find_layers`.
    Returns:
        the names of all frozen parameters up to the last frozen layer, yours included.
    Raises:
        TypeError: `num_frozen` is no whole number.
        ValueError: there are fewer layers, or none were found; they are not the model's, or
            not in its order; or the model is wrapped or flattened. Nothing has changed then.
    """
    _refuse_wrapped(model)
    blocks = list(layers) if layers is not None else find_layers(model)
    num_frozen = _checked_number(num_frozen, len(blocks))
    bottom = _bottom(model, blocks, num_frozen)
    changed = _freeze_only(model, bottom.freezing)
    if _keep_in_eval(model, bottom.modules) or changed:
        _forget_compiled()
    frozen = {p for p in bottom.parameters if not p.requires_grad}
    return tuple(sorted(name for name, p in model.named_parameters() if p in frozen))


def _refuse_wrapped(model: nn.Module) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped by DistributedDataParallel, which waits for the gradients it "
            "found at the start; freeze model.module, and wrap that anew"
        )
    _refuse_flattened(model)


def _refuse_flattened(model: nn.Module) -> None:
    # FlatParameter's own mark: importing that class takes half as long as importing torch.
    named = model.named_parameters()
    flat = next((n for n, p in named if getattr(p, "_is_flat_param", False)), None)
    if flat is not None:
        raise ValueError(
            f"{flat!r} holds parameters of several layers, which FullyShardedDataParallel has "
            "flattened: all would freeze, or none; wrap with use_orig_params=True, or with "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def _checked_number(num_frozen: int, most: int) -> int:
    if isinstance(num_frozen, bool) or not hasattr(num_frozen, "__index__"):
        raise TypeError(
            f"num_frozen is {num_frozen!r} ({type(num_frozen).__name__}); give how many layers "
            "freeze, a whole number"
        )
    num_frozen = operator.index(num_frozen)
    if not 0 <= num_frozen <= most:
        raise ValueError(
            f"{num_frozen} layers cannot freeze; the model has {most}: give 0 to {most}"
        )
    return num_frozen


def freezing_with(model: nn.Module, layers: Sequence[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """Return the parameters that freeze with each layer, by name; an embedding's with layer 0."""
    _refuse_flattened(model)
    with_bottom = _bottom(model, layers, 1).freezing
    bottom = {name: p for name, p in model.named_parameters() if p in with_bottom}
    return [bottom, *(dict(layer.named_parameters()) for layer in layers[1:])]


def freeze_parameters(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Freeze further parameters of a model, until `apply` is called again, which thaws them."""
    if _freeze_only(model, {*_frozen_by_us(model), *parameters}):
        _forget_compiled()


def freeze_modules(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Freeze further modules, wherever they are in a model, until `apply` is called again.

    They stay in eval mode.
    """
    parts = {part for module in modules for part in module.modules()}
    parameters = {one for part in parts for one in part._parameters.values() if one is not None}
    if _freeze_only(model, {*_frozen_by_us(model), *parameters}) | _keep_in_eval(
        model, {*_kept_in_eval(model), *parts}
    ):
        _forget_compiled()


def frozen_in_place(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that `apply` has frozen, and nobody has thawed since."""
    frozen = _frozen_by_us(model)
    return {name: p for name, p in model.named_parameters() if p in frozen}


def thawed_by(
    model: nn.Module, num_frozen: int, *, layers: Sequence[nn.Module]
) -> dict[str, nn.Parameter]:
    """Return by name the parameters that `apply` would thaw, given `num_frozen`."""
    staying = _bottom(model, layers, num_frozen).freezing
    return {name: p for name, p in frozen_in_place(model).items() if p not in staying}


def tied_above(
    model: nn.Module, num_frozen: int, *, layers: Sequence[nn.Module]
) -> set[nn.Parameter]:
    """Return the parameters of frozen layers that `apply` leaves, as others use them, too."""
    bottom = _bottom(model, layers, num_frozen)
    return bottom.parameters - bottom.freezing


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's blocks: the members of its largest list of modules of one class.

    Where a plain `nn.Sequential` has none, its children are, but for the last, the head.

    Raises:
        ValueError: there is none, or another such list is as large, or lies before it, as an
            encoder before a decoder; give the layers yourself.
    """
    lists = _lists_of_equal_blocks(model)
    if not lists and (children := children_but_head(model)):
        return children
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of equal blocks; give layers=, bottom first"
        )
    sizes = {
        path: sum(p.numel() for block in module for p in block.parameters())
        for path, module in lists.items()
    }
    largest = max(sizes, key=sizes.__getitem__)
    if (before := list_before(model, list(lists[largest]))) is not None:
        raise ValueError(
            f"{before!r} lies before {largest!r}, both lists of equal blocks, and would freeze as "
            "a whole with block 0; give layers=, bottom first"
        )
    for path, size in sizes.items():
        is_apart = path != largest and not (_holds(path, largest) or _holds(largest, path))
        if is_apart and size == sizes[largest]:
            # For instance the experts of two alternating classes of layers.
            raise ValueError(
                f"{largest!r} and {path!r} are equally large lists of equal blocks; give layers="
            )
    return list(lists[largest])


def children_but_head(model: nn.Module) -> list[nn.Module]:
    """Return the children that a plain `nn.Sequential` runs below its last one, if it is one."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return list(model)[:-1]
    return []


def list_before(model: nn.Module, layers: Sequence[nn.Module]) -> str | None:
    """Return the name of a list of equal blocks that would freeze as a whole with layer 0.

    That is one with weights which is registered before the layers: an encoder before a decoder.
    """
    lists = _lists_of_equal_blocks(model)
    paths = _paths_of(list(model.named_modules(remove_duplicate=False)), layers)
    for path, module in model.named_modules():
        if path == paths[0]:
            break
        is_apart = not any(_holds(path, inner) or _holds(inner, path) for inner in paths)
        if path in lists and is_apart and any(p.numel() for p in module.parameters()):
            return path
    return None


def _lists_of_equal_blocks(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 1
        and len({type(block) for block in module}) == 1
    }


def _holds(path: str, other: str) -> bool:
    """Return whether the module at `path` holds the one at `other`."""
    return other.startswith(f"{path}.") if path else bool(other)


@dataclass(frozen=True)
class _Bottom:
    """Hold the parameters up to the last frozen layer, and what freezes.

    `freezing` lacks parameters that a training layer uses, too; `modules` run in eval mode.
    """

    parameters: set[nn.Parameter]
    freezing: set[nn.Parameter]
    modules: set[nn.Module]


def _bottom(model: nn.Module, blocks: Sequence[nn.Module], num_frozen: int) -> _Bottom:
    """Find what freezes, looking at every place of each module: a block may be used twice."""
    _reshard(model)
    places = list(model.named_modules(remove_duplicate=False))
    block_paths = _paths_of(places, blocks)
    if not num_frozen:
        return _Bottom(set(), set(), set())
    first, frozen_paths = block_paths[0], block_paths[:num_frozen]
    parameters, training = set[nn.Parameter](), set[nn.Parameter]()
    modules, others = set[nn.Module](), set[nn.Module]()
    is_before = True
    for path, module in places:
        is_before = is_before and path != first
        is_around = _holds(path, first)
        is_frozen = is_before or any(path == own or _holds(own, path) for own in frozen_paths)
        (parameters if is_frozen else training).update(module.parameters(recurse=False))
        (modules if is_frozen and not is_around else others).add(module)
    # A module whose parameters all train elsewhere is no frozen one.
    for module in modules - others:
        own = set(module.parameters())
        if own and own <= training:
            others.update(module.modules())
    return _Bottom(parameters, parameters - training, modules - others)


def _reshard(model: nn.Module) -> None:
    """Have units of `fully_shard` hold the parameters that the optimizer has.

    Behind an evaluation the root's still holds gathered ones, which are forgotten with the next
    step, and what was set of them.
    """
    for module in model.modules():
        # By its name: importing that class takes half as long as importing torch.
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def _paths_of(places: Sequence[tuple[str, nn.Module]], blocks: Sequence[nn.Module]) -> list[str]:
    """Return the blocks' paths; raise a ValueError if they are not one behind the other."""
    paths: list[str] = []
    rest = iter(places[1:])
    for index, block in enumerate(blocks):
        path = next(
            (
                path
                for path, module in rest
                if module is block and not (paths and _holds(paths[-1], path))
            ),
            None,
        )
        if path is None:
            known = any(module is block for _, module in places[1:])
            raise ValueError(
                f"layer {index}, of {type(block).__name__}, is not registered "
                f"{f'behind layer {index - 1}' if known and index else 'in the model'}; give each "
                "of the model's blocks once, in the order in which they are registered"
            )
        paths.append(path)
    return paths


def _forget_compiled() -> None:
    """Throw compiled code away, which does not notice what needs a gradient."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:  # Nothing is compiled without it, and its import takes seconds.
        compiler.reset()


def _owners(model: nn.Module) -> list[tuple[nn.Module, dict[str, nn.Parameter]]]:
    """Return each module with its own parameters by name."""
    return [(module, dict(module.named_parameters(recurse=False))) for module in model.modules()]


def _frozen_by_us(model: nn.Module) -> set[nn.Parameter]:
    # A parameter that trains by now was thawed by the user: it is no longer ours.
    return {
        own[name]
        for module, own in _owners(model)
        for name in vars(module).get(_NAMES, set()) & own.keys()
        if not own[name].requires_grad
    }


def _freeze_only(model: nn.Module, wanted: set[nn.Parameter]) -> bool:
    """Freeze these parameters, thaw others that `apply` froze; return whether any changed."""
    owners, before = _owners(model), _frozen_by_us(model)
    freezing = {p for p in wanted if p.requires_grad}
    for p in freezing:
        p.requires_grad_(False)
        p.grad = None
    for p in before - wanted:
        p.requires_grad_(True)
    after = before & wanted | freezing
    for module, own in owners:
        # Not setattr: a compiled module would set it on the module that it wraps.
        vars(module)[_NAMES] = {name for name, p in own.items() if p in after}
        if not vars(module)[_NAMES]:
            del vars(module)[_NAMES]
    return before != after


@dataclass(frozen=True)
class _StayInEval:
    """Put a frozen module into eval mode before its forward; keeps the modes it froze in.

    Where peft has given it adapters, these stay frozen, too.
    """

    mode: bool
    model_mode: bool
    has_adapters: bool

    def __call__(self, module: nn.Module, _: object) -> None:
        if self.has_adapters:
            _freeze_again(module)
        if module.training:
            # All its parts, too: a forward may read their modes without calling them.
            for one in module.modules():
                if _hook_of(one) is not None:
                    one.training = False


def _freeze_again(module: nn.Module) -> None:
    """Freeze what `apply` has frozen, and peft has thawed: it does whenever it switches adapters.

    Here, as a checkpoint that runs the module once more must find the same.
    """
    for one in module.modules():
        for name in vars(one).get(_NAMES, ()):
            parameter = one._parameters.get(name)
            if parameter is not None and parameter.requires_grad:
                parameter.requires_grad_(False)


def keeps_in_eval(hook: object) -> bool:
    """Return whether a hook is that of a frozen module, and does nothing else."""
    return isinstance(hook, _StayInEval)


def _hook_of(module: nn.Module) -> tuple[int, _StayInEval] | None:
    """Return a frozen module's hook and its key, None for other modules."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, _StayInEval):
            return key, hook
    return None


def _kept_in_eval(model: nn.Module) -> dict[nn.Module, tuple[int, _StayInEval]]:
    return {module: found for module in model.modules() if (found := _hook_of(module))}


def _keep_in_eval(model: nn.Module, wanted: set[nn.Module]) -> bool:
    """Put modules into eval mode while they are frozen; return whether any changed.

    Each has its own hook, as a block may be a list whose members are called one by one. A compiled
    module needs none: its mode is that of the module it wraps.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        wanted = {one for one in wanted if not isinstance(one, compiler.OptimizedModule)}
    hooks = _kept_in_eval(model)
    leaving, entering = hooks.keys() - wanted, wanted - hooks.keys()
    new = {
        # By peft's attribute of layers that it has given adapters.
        one: _StayInEval(one.training, model.training, "_disable_adapters" in vars(one))
        for one in entering
    }
    for module in leaving:
        key, hook = hooks[module]
        del module._forward_pre_hooks[key]
        module.training = hook.mode if hook.model_mode == model.training else model.training
    for module, own in new.items():
        # Before other hooks: spectral_norm's, for instance, reads the mode.
        module.register_forward_pre_hook(own, prepend=True)
    for module in wanted:
        module.training = False
    return bool(leaving or entering)
