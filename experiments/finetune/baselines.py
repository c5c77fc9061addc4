"""Name the rivals, and say which options each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

KEEPS = "ddp+freeze+cache"
FREEZING = ("ddp+freeze", KEEPS)
BASELINES = ("ddp", *FREEZING, "short", "early-stop", "static", "lora", "small")
PLAIN = tuple(name for name in BASELINES if name != "early-stop")
"""Those that a plain loop trains; our Trainer stops early."""

OF_OURS = (
    "memory_limit_bytes",
    "pipeline_length",
    "max_replicas",
    "micro_batches",
    "scale_batch",
    "cache",
    "cache_keep",
    "cache_folder",
    "plan",
    "schedule",
    "stage_workers",
    "weight_versions",
    "activation_checkpointing",
    "compile",
    "signals",
    "freeze_interval_steps",
    "freeze_interval_share",
    "plan_only",
    "checkpoint_every_epochs",
)
"""Options that plain loops do not take."""
OF_ONE: Mapping[str, str] = {
    "budget_s": "short",
    "patience": "early-stop",
    "static_layers": "static",
    "lora_learning_rate": "lora",
}
"""Options that one rival alone takes."""


def takes(baseline: str | None, option: str) -> bool:
    """Return whether an option means anything to a rival, or to ours, which is None."""
    if option in OF_ONE:
        return OF_ONE[option] == baseline
    if option in ("freeze", "replay"):
        return baseline is None or baseline in FREEZING
    if option == "layer_decay":
        return baseline != "lora"
    return baseline not in PLAIN or option not in OF_OURS


def split_taken(
    arguments: Sequence[str], baseline: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a command line's arguments that a rival takes, and those that it does not."""
    return split_by_option(arguments, lambda name: takes(baseline, name))


def without_freeze(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command line's arguments without what freezes, for a run that repeats another's."""
    return split_by_option(arguments, lambda name: name != "freeze")[0]


def split_by_option(
    arguments: Sequence[str], keeps: Callable[[str], bool]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a command line's arguments by whether their option's name is to be kept."""
    taken: list[str] = []
    left: list[str] = []
    into = taken
    for one in arguments:
        if one.startswith("--"):
            name = one[2:].split("=")[0].replace("-", "_").removeprefix("no_")
            into = taken if keeps(name) else left
        into.append(one)
    return tuple(taken), tuple(left)
