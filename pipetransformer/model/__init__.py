"""Say what is trained: the model's sublayers, its loss, precision and optimizer.

task: all of it in one value                        model_loan: gives it back as it came
layered_model: a model as a row of sublayers        registry: which adapter knows a model
timm_vit, transformers_*: the adapters              transformer: what they share
optimizers: built anew wherever layers go           precision: dtypes, and the scale of float16
compiled_blocks: through torch.compile, in steps    word_head: losses without all logits
"""

from pipetransformer.model.dependence import joined_outputs
from pipetransformer.model.entry_names import TARGETS, EntryNames, forward_parameters, names_of
from pipetransformer.model.followed_floats import FollowedFloats
from pipetransformer.model.general import WAYS_OUT, LoopUse, present
from pipetransformer.model.held_values import (
    attributes_of,
    held,
    held_tensors,
    is_opaque,
    marks_of,
    opaque_kept,
    plain_tensors,
)
from pipetransformer.model.layered_model import LayeredModel, Sublayer, row_of
from pipetransformer.model.model_loan import ModelLoan
from pipetransformer.model.named_parts import named_parts
from pipetransformer.model.optimizers import (
    NamedParameters,
    OptimizerFactory,
    OptimizerTraits,
    adamw,
    decay_by_layer,
    named_optimizer,
    put_state,
    take_state,
)
from pipetransformer.model.own_forward import output_of
from pipetransformer.model.packing import Packing, UnlikeAnswerError
from pipetransformer.model.part_record import replaced
from pipetransformer.model.parts import PartCall, PartTrial, beside_parts, present_parts
from pipetransformer.model.parts_forward import parts_forward_of
from pipetransformer.model.peft_models import (
    adapter_names,
    adapters_in_use,
    modules_with_adapters,
    unwrapped,
)
from pipetransformer.model.precision import DTYPES, LossScale, computing_in
from pipetransformer.model.recording import (
    ForwardFailedError,
    NoRowError,
    Reads,
    Row,
    block_lists,
    modules_of,
    whole_in_mode,
)
from pipetransformer.model.refusals import asks_for_gradients, qualified_name
from pipetransformer.model.registry import (
    adapt,
    entry_names,
    refuse_no_module,
    refuse_wrapper,
    register_adapter,
)
from pipetransformer.model.routers import ROUTERS
from pipetransformer.model.short_texts import on_short_first
from pipetransformer.model.task import (
    Task,
    build_optimizer,
    in_mode,
    modes_of,
    owned_parameters,
    set_frozen,
    set_modes,
    trained_parameters,
)
from pipetransformer.model.tensors import (
    has_hooks,
    large_embeddings,
    named_tensors,
    refuse_hooks,
    state_of,
)
from pipetransformer.model.word_head import UnreadLogits

__all__ = [
    "DTYPES", "EntryNames", "FollowedFloats", "ForwardFailedError", "LayeredModel", "ModelLoan",
    "LoopUse", "LossScale", "NamedParameters", "NoRowError", "OptimizerFactory", "OptimizerTraits",
    "Packing", "PartCall", "PartTrial", "ROUTERS", "Reads", "Row",
    "Sublayer", "TARGETS", "Task", "UnlikeAnswerError", "UnreadLogits", "WAYS_OUT", "adamw",
    "adapt",
    "adapter_names", "adapters_in_use", "asks_for_gradients", "attributes_of", "beside_parts",
    "block_lists", "build_optimizer", "computing_in",
    "decay_by_layer", "entry_names", "forward_parameters", "has_hooks",
    "held", "held_tensors", "is_opaque", "marks_of",
    "in_mode", "joined_outputs", "large_embeddings", "modes_of",
    "modules_of", "modules_with_adapters", "named_optimizer", "named_parts", "named_tensors",
    "names_of", "on_short_first", "opaque_kept", "output_of", "owned_parameters",
    "parts_forward_of",
    "plain_tensors", "present",
    "present_parts", "put_state", "qualified_name",
    "refuse_hooks", "refuse_no_module", "refuse_wrapper", "replaced", "row_of", "register_adapter",
    "set_frozen", "set_modes", "state_of",
    "take_state", "trained_parameters", "unwrapped", "whole_in_mode",
]  # fmt: skip
