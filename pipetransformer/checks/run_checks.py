"""Refuse settings and surroundings that cannot train, before anything is started."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch

from autopipe.plan import fitting_lengths
from pipetransformer.checkpoint import CHECKPOINTS, holds_checkpoint, resumes
from pipetransformer.config import TrainConfig
from pipetransformer.feed import SizedDataset, check_dataset
from pipetransformer.processes import slots_of_a_node, world_size

_LOGGER = logging.getLogger(__name__)


def check_settings(
    config: TrainConfig, train_dataset: SizedDataset, eval_dataset: SizedDataset | None
) -> None:
    """Refuse, before the processes meet, settings and data sets that do not fit together.

    Raises:
        TypeError, ValueError: the first of what does not fit.
    """
    check_dataset(train_dataset, "train_dataset")
    if eval_dataset is not None:
        check_dataset(eval_dataset, "eval_dataset")
    check_selection(config, has_eval_dataset=eval_dataset is not None)
    check_world(config, world_size(), slots_of_a_node())
    resumes(config)  # Refuses a folder.


def check_world(config: TrainConfig, num_ranks: int, slots_per_node: int) -> None:
    """Refuse a run that cannot be split over the ranks; launchers call it before they start any.

    A run that continues on too few ranks for its length gets a shorter pipeline.

    Raises:
        ValueError: the length does not fit the ranks, or the global batch the replicas.
    """
    if config.stage_workers is not None:
        _check_workers(config, config.stage_workers, num_ranks)
        return
    allowed = fitting_lengths(num_ranks, slots_per_node)
    length = config.pipeline_length or 1
    if length not in allowed:
        unfit = (
            f"pipeline length {length} does not fit {num_ranks} processes with {slots_per_node} "
            "slots a node"
        )
        checkpoints = None if config.folder is None else Path(config.folder) / CHECKPOINTS
        continues = checkpoints is not None and holds_checkpoint(checkpoints) and resumes(config)
        if not continues:
            raise ValueError(f"{unfit}; choose one of {list(allowed)} or start more")
        length = max(one for one in allowed if one < length)
        # The ranks have not met yet, so the environment alone tells who speaks for all.
        if os.environ.get("RANK", "0") == "0":
            _LOGGER.warning("%s: the run continues with at most %d", unfit, length)
    replicas = 1 if config.scale_batch else num_ranks // length
    replicas = min(replicas, config.max_replicas or replicas)
    size = config.micro_batch_size or 1
    if size > 1 and config.most_micro_batches() < replicas:
        raise ValueError(
            f"global_batch_size {config.global_batch_size} has fewer micro-batches of "
            f"micro_batch_size {size} than the {replicas} replicas that may train; choose a "
            f"micro_batch_size of at most {max(1, config.global_batch_size // replicas)}"
        )
    if config.global_batch_size < replicas:
        raise ValueError(
            f"global_batch_size {config.global_batch_size} is smaller than the {replicas} "
            f"replicas that may train; give at least {replicas}, so that each has a sample"
        )


def _check_workers(config: TrainConfig, workers: tuple[int, ...], num_ranks: int) -> None:
    if sum(workers) != num_ranks:
        raise ValueError(
            f"stage_workers {workers} are {sum(workers)} processes, but {num_ranks} were started; "
            "give as many"
        )
    # Once layers are frozen, every process may become a replica of one stage.
    if config.most_micro_batches() < num_ranks:
        raise ValueError(
            f"global_batch_size {config.global_batch_size} has no micro-batch for each of the "
            f"{num_ranks} processes, all of which may train at the same time; enlarge it, or "
            "lower micro_batch_size"
        )


def check_selection(config: TrainConfig, *, has_eval_dataset: bool) -> None:
    """Refuse settings that need evaluations, or a folder, where there are none."""
    judging = {
        "load_best_model_at_end": config.load_best_model_at_end,
        "early_stopping_patience": config.early_stopping_patience is not None,
    }
    judges = ", ".join(name for name, is_set in judging.items() if is_set)
    if config.evaluate_every_steps and not has_eval_dataset:
        judges = judges or "evaluate_every_steps"
    if judges and not has_eval_dataset:
        raise ValueError(f"{judges} needs evaluations, but there is no eval_dataset; give one")
    if judges and not (config.evaluate_every_epochs or config.evaluate_every_steps):
        raise ValueError(
            f"{judges} needs evaluations, and none is due; give evaluate_every_epochs=1 or "
            "evaluate_every_steps"
        )
    if config.load_best_model_at_end and config.folder is None:
        raise ValueError(
            "load_best_model_at_end=True needs a folder to keep the best weights in; give "
            "folder=..."
        )


def about_large_batch(config: TrainConfig, num_samples: int) -> str:
    """Say that a batch is larger than the training set, or ""."""
    if config.global_batch_size <= num_samples:
        return ""
    return (
        f"global_batch_size is {config.global_batch_size}, but the training set has {num_samples} "
        "samples: an epoch is one step of them all"
    )


def about_many_views(config: TrainConfig) -> str:
    """Say that no view of a sample comes again before the run is over, or ""."""
    views = config.cache_views
    if views is None or views < config.epochs or config.cache_keep:
        return ""
    return (
        f"cache_views is {views}, and the run has {config.epochs} epochs: no row is read again, "
        "and the cache saves nothing. Give fewer views, or train for more epochs"
    )


def about_momentum(config: TrainConfig, optimizer: str, num_ranks: int) -> str:
    """Say that momentum and gradients of older weights learn slower together, or "".

    Args:
        optimizer: its groups' settings, spelled as JSON.
    """
    if config.weight_versions is None or num_ranks == 1 or config.pipeline_length == 1:
        return ""
    groups = json.loads(optimizer or "[]")
    momenta = [group.get("momentum", (group.get("betas") or (0.0,))[0]) for group in groups]
    momentum = max(filter(None, momenta), default=0.0)
    if not momentum:
        return ""
    return (
        f"weight_versions is {config.weight_versions!r}, and the optimizer's momentum is "
        f"{momentum:g}: with gradients one step old the largest stable rate falls to "
        f"{(1 - momentum) / (2 * (1 + momentum)):.2g} of what it was, and Transformers learned "
        "slower at every rate we tried. Compare with a run without weight_versions=, lower the "
        "momentum and the rate, and warm up"
    )


def refuse_surroundings(*, trains: bool) -> None:
    """Refuse to run within modes of torch that would silently change the numbers.

    Raises:
        ValueError: an autocast, `inference_mode` or, where gradients are needed, `no_grad` is on.
    """
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise ValueError(
                f"torch.autocast({kind!r}) is on around the Trainer; it would train every step "
                "with the first step's weights, which it keeps in low precision until it is left: "
                "call the Trainer outside of it, and give it precision='bf16' or 'fp16'"
            )
    if torch.is_inference_mode_enabled() or (trains and not torch.is_grad_enabled()):
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ValueError(
            f"torch.{mode}() is on around the Trainer, which needs gradients; call it outside"
        )
