"""Answer `pipetransformer plan`: what a machine or a described cluster would do with a model.

command ─► place (described), machine (measured) ─► answer ─► table
"""

from pipetransformer.forecast.command import add_plan_parser, plans_text, run_plan
from pipetransformer.forecast.named_model import ModelChoice, build_named
from pipetransformer.forecast.place import Place, described_place, make_request, profiled

__all__ = [
    "ModelChoice", "Place", "add_plan_parser", "build_named", "described_place", "make_request",
    "plans_text", "profiled", "run_plan",
]  # fmt: skip
