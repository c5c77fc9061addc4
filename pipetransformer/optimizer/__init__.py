"""Build optimizers anew wherever layers go, with the state of the parameters they find there.

named      state by parameter name, taken out and put in
factories  optimizers by name, and `adamw`
trial      tries a user's optimizer out before anything starts: is it the same in parts?
"""

from pipetransformer.optimizer.factories import adamw, named_optimizer
from pipetransformer.optimizer.named import (
    NamedParameters,
    OptimizerFactory,
    put_state,
    take_state,
)
from pipetransformer.optimizer.trial import OptimizerTraits, try_optimizer

__all__ = [
    "NamedParameters", "OptimizerFactory", "OptimizerTraits", "adamw", "named_optimizer",
    "put_state", "take_state", "try_optimizer",
]  # fmt: skip
