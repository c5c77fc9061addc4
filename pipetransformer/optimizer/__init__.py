"""Build optimizers anew wherever layers go, with the state of the parameters they find there.

optimizers_by_name  and `adamw`
state_by_name       by parameter name, taken out and put in
layer_decay         learning rates of their own for layers, around any factory
trial               tries a user's optimizer out before anything starts: is it the same in parts?
schedules           how the learning rate follows the step
"""

from pipetransformer.optimizer.layer_decay import LAYER, decay_by_layer, split_by_layer
from pipetransformer.optimizer.optimizers_by_name import adamw, named_optimizer
from pipetransformer.optimizer.schedules import (
    LearningRateSchedule,
    check_warmup,
    constant,
    cosine_with_warmup,
    named_schedule,
    polynomial_with_warmup,
)
from pipetransformer.optimizer.state_by_name import (
    NamedParameters,
    OptimizerFactory,
    put_state,
    take_state,
)
from pipetransformer.optimizer.trial import OptimizerTraits, try_optimizer

__all__ = [
    "LAYER", "LearningRateSchedule", "NamedParameters", "OptimizerFactory", "OptimizerTraits",
    "adamw", "check_warmup", "constant", "cosine_with_warmup", "decay_by_layer", "named_optimizer",
    "named_schedule", "polynomial_with_warmup", "put_state", "split_by_layer", "take_state",
    "try_optimizer",
]  # fmt: skip
