"""Refuse what cannot be trained, before anything is started."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torch import nn

from autopipe import fitting_lengths
from pipetransformer.adapters import LayeredModel, LossFunction
from pipetransformer.checkpoint import holds_checkpoint
from pipetransformer.config import TrainConfig
from pipetransformer.resume import CHECKPOINTS, resumes

_LOGGER = logging.getLogger(__name__)


def choose_loss(model: LayeredModel, loss_fn: LossFunction | None) -> LossFunction:
    """Return the given loss, or the model's own.

    Raises:
        ValueError: there is neither.
    """
    chosen = loss_fn or model.loss_fn
    if chosen is None:
        raise ValueError(
            f"a {type(model.model).__name__} has no loss of its own; give loss_fn=, for instance "
            "torch.nn.CrossEntropyLoss()"
        )
    return chosen


def check_world(config: TrainConfig, num_ranks: int, slots_per_node: int) -> None:
    """Refuse a run that cannot be split over the ranks; for launchers, before they start any.

    A run that continues on fewer ranks than its length needs goes on with a shorter pipeline.

    Raises:
        ValueError: the length does not fit the ranks, or the global batch is smaller than the
            replicas.
    """
    allowed = fitting_lengths(num_ranks, slots_per_node)
    length = config.length or 1
    if length not in allowed:
        unfit = (
            f"pipeline length {length} does not fit {num_ranks} processes with {slots_per_node} "
            "slots a node"
        )
        if not _continues(config):
            raise ValueError(f"{unfit}; choose one of {list(allowed)} or start more")
        length = max(one for one in allowed if one < length)
        if os.environ.get("RANK", "0") == "0":
            _LOGGER.warning("%s: the run continues with at most %d", unfit, length)
    replicas = 1 if config.scale_batch else num_ranks // length
    if config.batch_size < replicas:
        raise ValueError(
            f"batch_size {config.batch_size} is smaller than the {replicas} replicas that may "
            f"train; give at least {replicas}, so that each has a sample"
        )


def _continues(config: TrainConfig) -> bool:
    """Tell whether there is a run to continue, and it is to be continued."""
    folder = config.folder
    return folder is not None and holds_checkpoint(Path(folder) / CHECKPOINTS) and resumes(config)


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse batch normalisation, whose statistics would depend on how a batch is split.

    Raises:
        ValueError: a module normalises over the batch.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}: its statistics would depend on the "
                "micro-batches and replicas; use LayerNorm or GroupNorm"
            )
