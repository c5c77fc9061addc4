"""Scale float16 losses, and show how the loss of a batch is joined from its parts.

autopipe.loss   joins a batch's loss from its parts, and finds out which losses do not join
loss_scale      what float16 gradients need to be neither too small nor too large
"""

from autopipe.loss import (
    Loss,
    LossFunction,
    LossValue,
    SplitProbe,
    as_sum_and_count,
    choose_loss,
    head_of,
    mean_of,
    refuse_split,
    smooth_labels,
    sum_over_targets,
)
from pipetransformer.loss.loss_scale import LossScale

__all__ = [
    "Loss", "LossFunction", "LossScale", "LossValue", "SplitProbe", "as_sum_and_count",
    "choose_loss", "head_of", "mean_of", "refuse_split",
    "smooth_labels", "sum_over_targets",
]  # fmt: skip
