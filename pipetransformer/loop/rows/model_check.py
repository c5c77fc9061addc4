"""Refuse models that have no rows, before one is looked at."""

from __future__ import annotations

from torch import nn

from pipetransformer.loop.batches import BatchForm
from pipetransformer.loop.forward import LoopCall, guessed_call
from pipetransformer.loop.rows.settings import LoopSettings
from pipetransformer.model import names_of


def check_model(model: nn.Module, settings: LoopSettings) -> None:
    """Raise a ValueError where blocks' answers are no rows, or no rank can make them alone."""
    _refuse_sharded(model, settings)
    _refuse_prompts(model)


def expected_call(model: nn.Module, form: BatchForm) -> LoopCall:
    """Return what a loop gives a model of batches; raise a ValueError where no name says it."""
    call = guessed_call(model, form.names)
    if call is None:
        raise ValueError(
            f"batches have the entries {list(form.names)}, and the model takes "
            f"{list(names_of(model).inputs)}: which is given which cannot be told by their names. "
            "Name entries as the model does, or use `attach` in a loop of your own, which learns "
            "it from the first forward"
        )
    return call


def _refuse_prompts(model: nn.Module) -> None:
    configs = getattr(model, "peft_config", {})
    if any(getattr(one, "is_prompt_learning", False) for one in configs.values()):
        raise ValueError(
            "the model puts prompts that it learns before each sample, so that frozen blocks "
            "return something else at every step: there is nothing to cache"
        )


def _refuse_sharded(model: nn.Module, settings: LoopSettings) -> None:
    # By its name: importing that class takes half as long as importing torch.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) gathers a block's weights on all ranks at once, but "
            "ranks compute rows for unequal numbers of samples, and would wait for each other: "
            "use torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel, or freeze "
            "without rows by freeze.apply"
        )
    if "FSDPModule" not in kinds:
        return
    refused = {
        "parts=": settings.parts,
        "cache_keep=": settings.cache.get("cache_keep"),
        "cache_dtype=": settings.cache.get("cache_dtype"),
    }
    if odd := [name for name, value in refused.items() if value]:
        raise ValueError(
            f"with fully_shard (FSDP2) {odd[0]} is not served: freeze= blocks, leave {odd[0]} "
            "out, or use DistributedDataParallel"
        )
