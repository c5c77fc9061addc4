"""Say what is trained: the model's sublayers, its loss, precision and optimizer.

registry: which way shows a model ──┬─► adapters: by hand, for known classes
                                    ├─► general: any model with a row of blocks
                                    └─► parts: any model with frozen modules
layered_model: a row of sublayers         training: task, optimizer, precision, compiled blocks
losses: those that models compute         cut_sublayers: a model's own forward as sublayers
forward: what a model does as it runs     modules: what a model holds, without running it
"""

from pipetransformer.model.forward import (
    ROUTERS,
    TARGETS,
    EntryNames,
    ForwardFailedError,
    NoRowError,
    Packing,
    Reads,
    Row,
    UnlikeAnswerError,
    block_lists,
    forward_parameters,
    joined_outputs,
    names_of,
    on_short_first,
    output_of,
)
from pipetransformer.model.general import WAYS_OUT, LoopUse, present
from pipetransformer.model.layered_model import LayeredModel, Sublayer, row_of
from pipetransformer.model.losses import UnreadLogits
from pipetransformer.model.modules import (
    adapter_names,
    adapters_in_use,
    asks_for_gradients,
    attributes_of,
    computing_in,
    has_hooks,
    held,
    held_tensors,
    in_mode,
    is_opaque,
    large_embeddings,
    marks_of,
    modules_of,
    modules_with_adapters,
    named_tensors,
    opaque_kept,
    plain_tensors,
    qualified_name,
    refuse_hooks,
    set_modes,
    state_of,
    unwrapped,
    whole_in_mode,
)
from pipetransformer.model.parts import (
    FollowedFloats,
    PartCall,
    PartTrial,
    beside_parts,
    named_parts,
    parts_forward_of,
    present_parts,
    replaced,
)
from pipetransformer.model.registry import (
    adapt,
    entry_names,
    refuse_no_module,
    refuse_wrapper,
    register_adapter,
)
from pipetransformer.model.training import (
    DTYPES,
    LossScale,
    ModelLoan,
    NamedParameters,
    OptimizerFactory,
    OptimizerTraits,
    Task,
    adamw,
    build_optimizer,
    decay_by_layer,
    modes_of,
    named_optimizer,
    owned_parameters,
    put_state,
    set_frozen,
    take_state,
    trained_parameters,
)

__all__ = [
    "DTYPES", "EntryNames", "FollowedFloats", "ForwardFailedError", "LayeredModel", "LoopUse",
    "LossScale", "ModelLoan", "NamedParameters", "NoRowError", "OptimizerFactory",
    "OptimizerTraits", "Packing", "PartCall", "PartTrial", "ROUTERS", "Reads", "Row",
    "Sublayer", "TARGETS", "Task", "UnlikeAnswerError", "UnreadLogits", "WAYS_OUT", "adamw",
    "adapt", "adapter_names", "adapters_in_use", "asks_for_gradients", "attributes_of",
    "beside_parts", "block_lists", "build_optimizer", "computing_in", "decay_by_layer",
    "entry_names", "forward_parameters", "has_hooks", "held", "held_tensors", "in_mode",
    "is_opaque", "joined_outputs", "large_embeddings", "marks_of", "modes_of", "modules_of",
    "modules_with_adapters", "named_optimizer", "named_parts", "named_tensors", "names_of",
    "on_short_first", "opaque_kept", "output_of", "owned_parameters", "parts_forward_of",
    "plain_tensors", "present", "present_parts", "put_state", "qualified_name", "refuse_hooks",
    "refuse_no_module", "refuse_wrapper", "register_adapter", "replaced", "row_of",
    "set_frozen", "set_modes", "state_of", "take_state", "trained_parameters", "unwrapped",
    "whole_in_mode",
]  # fmt: skip
