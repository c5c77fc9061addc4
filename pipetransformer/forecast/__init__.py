"""Answer `pipetransformer plan`: what a machine or a described cluster would do with a model.

command ─► place (described), machine (measured) ─► answer ─► table
"""

from pipetransformer.forecast.command import add_plan_parser, run_plan
from pipetransformer.forecast.named_model import ModelChoice, build_named
from pipetransformer.forecast.target import profiled

__all__ = [
    "ModelChoice", "add_plan_parser", "build_named", "profiled", "run_plan",
]  # fmt: skip
