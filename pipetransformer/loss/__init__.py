"""Join a batch's loss from the losses of its parts, and find out which losses do not join.

joined        a user's loss as a `Loss`: torch's own are known, others are believed
loss_scale    what float16 gradients need to be neither too small nor too large
split_probe   compares, now and then, what is believed with the loss of the whole
"""

from pipetransformer.loss.joined import (
    Loss,
    LossFunction,
    LossValue,
    as_sum_and_count,
    choose_loss,
    head_of,
    mean_of,
    smooth_labels,
    sum_over_targets,
)
from pipetransformer.loss.loss_scale import LossScale
from pipetransformer.loss.split_probe import SplitProbe, refuse_split

__all__ = [
    "Loss", "LossFunction", "LossScale", "LossValue", "SplitProbe", "as_sum_and_count",
    "choose_loss", "head_of", "mean_of", "refuse_split",
    "smooth_labels", "sum_over_targets",
]  # fmt: skip
