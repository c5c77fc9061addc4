"""Join a batch's loss from the losses of its parts, and detect losses that do not join.

joined        a user's loss as a `Loss`; torch's own are known to join, others are assumed to
split_probe   compares the joined loss with the whole batch's in some steps
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
