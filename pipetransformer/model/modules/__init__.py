"""Look at a model's modules and tensors without running it.

tensors: names, layouts, hooks            held_values: what objects hold, and quantized weights
peft_models: adapters, by peft's names    refusals: what is lost as parts are called one by one
modes: train, eval and autocast, for a while
"""

from pipetransformer.model.modules.held_values import (
    attributes_of,
    held,
    held_tensors,
    is_opaque,
    marks_of,
    opaque_kept,
    plain_tensors,
)
from pipetransformer.model.modules.modes import (
    computing_in,
    in_mode,
    modules_of,
    set_modes,
    whole_in_mode,
)
from pipetransformer.model.modules.peft_models import (
    adapter_names,
    adapters_in_use,
    modules_with_adapters,
    name_untied,
    refuse_peft,
    unwrapped,
)
from pipetransformer.model.modules.refusals import (
    asks_for_gradients,
    has_input_gradients,
    qualified_name,
    refuse_checkpointing,
    refuse_lost_checkpointing,
    refuse_replaced,
)
from pipetransformer.model.modules.tensors import (
    has_hooks,
    laid_out_as,
    large_embeddings,
    named_tensors,
    refuse_hooks,
    state_of,
)

__all__ = [
    "adapter_names", "adapters_in_use", "asks_for_gradients", "attributes_of", "computing_in",
    "has_hooks", "has_input_gradients", "held", "held_tensors", "in_mode", "is_opaque",
    "laid_out_as", "large_embeddings", "marks_of", "modules_of", "modules_with_adapters",
    "name_untied", "named_tensors", "opaque_kept", "plain_tensors", "qualified_name",
    "refuse_checkpointing", "refuse_hooks", "refuse_lost_checkpointing", "refuse_peft",
    "refuse_replaced", "set_modes", "state_of", "unwrapped", "whole_in_mode",
]  # fmt: skip
