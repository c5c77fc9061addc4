"""Say how a model is trained: its optimizer, precision and compiled blocks.

task: all of it in one value           model_loan: gives a model back as it came
optimizers: built anew wherever layers go
precision: dtypes, and the scale of float16
compiled_blocks: through torch.compile, in steps
"""

from pipetransformer.model.training.model_loan import ModelLoan
from pipetransformer.model.training.optimizers import (
    NamedParameters,
    OptimizerFactory,
    OptimizerTraits,
    adamw,
    decay_by_layer,
    named_optimizer,
    put_state,
    take_state,
)
from pipetransformer.model.training.precision import DTYPES, LossScale
from pipetransformer.model.training.task import (
    Task,
    build_optimizer,
    modes_of,
    owned_parameters,
    set_frozen,
    trained_parameters,
)

__all__ = [
    "DTYPES", "LossScale", "ModelLoan", "NamedParameters", "OptimizerFactory",
    "OptimizerTraits", "Task", "adamw", "build_optimizer", "decay_by_layer", "modes_of",
    "named_optimizer", "owned_parameters", "put_state", "set_frozen", "take_state",
    "trained_parameters",
]  # fmt: skip
