"""Know models of peft by their names, and refuse adapters that a forward does not train alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

_INSTEAD = "give a LoraConfig, or train with transformers.Trainer"

_REFUSED = {
    "ADALORA": "its ranks are allotted by update_and_allocate, which a training loop must call, "
    f"and it adds to the loss: {_INSTEAD}",
    **dict.fromkeys(
        ("PREFIX_TUNING", "CARTRIDGE"),
        "it hands all blocks one cache of keys and values, to which each adds its own: give a "
        "PromptTuningConfig, whose virtual tokens are part of the sequence, or a LoraConfig",
    ),
    **dict.fromkeys(
        ("MULTITASK_PROMPT_TUNING", "POLY"),
        f"it takes task_ids beside what the model takes: {_INSTEAD}",
    ),
}
"""By peft's name of the kind: why, and what to do."""


def unwrapped(model: Any) -> Any:
    """Return the model that a `peft` model calls in its forward."""
    names = {kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("peft.")}
    if "PeftMixedModel" in names:
        return model.base_model.model
    return model.get_base_model() if names else model


def modules_with_adapters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of some modules that peft has given adapters."""
    return [module for module in modules if "_disable_adapters" in vars(module)]


def adapters_in_use(modules: Iterable[nn.Module]) -> list[tuple[bool, str]]:
    """Return of each module with adapters whether they are switched off, and which are chosen."""
    chosen = ((own["_disable_adapters"], own.get("_active_adapter")) for own in map(vars, modules))
    # peft makes a list of a name when it switches to another and back.
    return [(off, str([one] if isinstance(one, str) else one)) for off, one in chosen]


def adapter_names(model: nn.Module) -> set[str]:
    """Return the names of adapters' own parameters."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if "_disable_adapters" in vars(module)
        for name, _ in module.named_parameters()
        if not name.startswith("base_layer.")
    }


def name_untied(model: nn.Module, untied: Collection[nn.Module]) -> None:
    """Have adapters save modules that no longer share their tensors with the embedding.

    With `ensure_weight_tying` peft ties such modules again wherever the adapter is loaded.
    """
    configs: Any = getattr(model, "peft_config", None)
    for adapter, config in configs.items() if isinstance(configs, Mapping) else ():
        end = f".modules_to_save.{adapter}"
        names = [n for n, module in model.named_modules() if module in untied and n.endswith(end)]
        if names and getattr(config, "ensure_weight_tying", False):
            config.ensure_weight_tying = False
            whole = (name.removesuffix(end).removeprefix("base_model.model.") for name in names)
            config.modules_to_save = [*config.modules_to_save, *whole]


def refuse_peft(model: object) -> None:
    """Raise a ValueError for adapters that would not train, or not as they should.

    Args:
        model: any; one that peft has put no adapter into is fine.
    """
    configs: Any = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        what = f"adapter {name!r} of this {type(model).__name__} is of the kind {kind}"
        if kind in _REFUSED:
            raise ValueError(f"{what}: {_REFUSED[kind]}")
        if getattr(config, "alora_invocation_tokens", None) is not None:
            # Its layers learn from hooks, set while the whole forward runs, where to begin.
            raise ValueError(
                f"{what} with alora_invocation_tokens, which act within the model's whole "
                "forward alone: leave them out, or train with transformers.Trainer"
            )
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if getattr(module, "merged_adapters", None) and _trains(module):
            raise ValueError(
                f"the adapters in {path!r} are merged into its weights, and would get no "
                "gradient: call unmerge_adapter() to train them, or merge_and_unload() to train "
                "the model itself"
            )


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
