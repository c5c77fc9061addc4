"""Answer `pipetransformer plan`: what a machine or a described cluster would do with a model.

command ─► place (described), measured_here ─► answer ─► table
"""

from pipetransformer.forecast.answer import find_plan
from pipetransformer.forecast.command import add_plan_parser
from pipetransformer.forecast.named_model import ModelChoice, build_named
from pipetransformer.forecast.place import Place, described_place, profiled
from pipetransformer.forecast.table import answers_text

__all__ = [
    "ModelChoice", "Place", "add_plan_parser", "answers_text", "build_named", "described_place",
    "find_plan", "profiled",
]  # fmt: skip
