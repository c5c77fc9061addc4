"""Join a batch's loss from the losses of its parts, and detect losses that do not join.

batch_mean     joins a step's losses and gradients; the only place with the rule
loss_functions a user's loss as a `Loss`; torch's own are known to join, others are assumed to
split_probe    compares the joined loss with the whole batch's in some steps
"""

from autopipe.loss.batch_mean import (
    BatchMean,
    mean_and_correction,
    mean_of,
    precise,
    sum_and_count,
)
from autopipe.loss.loss_functions import (
    Loss,
    LossFunction,
    LossValue,
    choose_loss,
    head_of,
    smooth_labels,
    sum_over_targets,
)
from autopipe.loss.split_probe import SplitProbe, refuse_split

__all__ = [
    "BatchMean", "Loss", "LossFunction", "LossValue", "SplitProbe", "choose_loss", "head_of",
    "mean_and_correction", "mean_of", "precise", "refuse_split", "smooth_labels", "sum_and_count",
    "sum_over_targets",
]  # fmt: skip
