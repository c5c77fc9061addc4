"""Present a model with any frozen modules, by what these return.

parts_forward: its own forward, to rows and from rows ──► parts: how one forward ran
named_parts: those that a user names                      └─► part_record: follows a forward
followed_floats: do values decide what is computed?
"""

from pipetransformer.model.parts.followed_floats import FollowedFloats
from pipetransformer.model.parts.named_parts import named_parts
from pipetransformer.model.parts.part_record import replaced
from pipetransformer.model.parts.parts import PartCall, PartTrial, beside_parts, present_parts
from pipetransformer.model.parts.parts_forward import adapt_parts, parts_forward_of

__all__ = [
    "FollowedFloats", "PartCall", "PartTrial", "adapt_parts", "beside_parts", "named_parts",
    "parts_forward_of", "present_parts", "replaced",
]  # fmt: skip
