"""Run a loop's own model from its frozen blocks up, or only its parts.

forward_call: for which there are rows             short_forward: starts above the frozen blocks
served_parts: or its parts have rows               model_hooks: what copies do without
partial_forward: ends at a block; part_cuts        replaced_forward, sharded_weights: trainers' own
model_watch: what is changed by hand               rounding: what rounded rows change
"""

from pipetransformer.loop.forward.forward_call import LoopCall, RowBatch, guessed_call, learning
from pipetransformer.loop.forward.model_hooks import ModelHook
from pipetransformer.loop.forward.model_watch import (
    InnerHooks,
    ModelWatch,
    left_alone,
    looking_hook,
)
from pipetransformer.loop.forward.partial_forward import PartialForward
from pipetransformer.loop.forward.replaced_forward import in_own_forward
from pipetransformer.loop.forward.rounding import compare_rounded
from pipetransformer.loop.forward.sharded_weights import (
    NotHereError,
    Place,
    ShardedWeights,
    all_agree,
)
from pipetransformer.loop.forward.short_forward import ShortForward

__all__ = [
    "InnerHooks", "LoopCall", "ModelHook", "ModelWatch", "NotHereError", "PartialForward", "Place",
    "RowBatch", "ShardedWeights", "ShortForward", "all_agree", "compare_rounded", "guessed_call",
    "in_own_forward", "learning", "left_alone", "looking_hook",
]  # fmt: skip
