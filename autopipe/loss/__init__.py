"""Join a batch's loss from the losses of its parts, and find out which losses do not join.

joined        a user's loss as a `Loss`: torch's own are known, others are believed
split_probe   compares, now and then, what is believed with the loss of the whole
"""

from autopipe.loss.joined import (
    Loss,
    LossFunction,
    LossValue,
    choose_loss,
    head_of,
    mean_of,
    smooth_labels,
    sum_over_targets,
)
from autopipe.loss.split_probe import SplitProbe, refuse_split

__all__ = [
    "Loss", "LossFunction", "LossValue", "SplitProbe", "choose_loss", "head_of", "mean_of",
    "refuse_split", "smooth_labels", "sum_over_targets",
]  # fmt: skip
