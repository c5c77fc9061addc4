"""Serve the command line: plan, verify, report, score, export, cache, demo.

main ─┬─► plan_command ─► places ─► plan_answer ─► plan_table
      └─► verify_command
places, verify_command ─► named_model ─► samples
"""

from pipetransformer.cli.main import main
from pipetransformer.cli.named_model import ModelChoice, build_named
from pipetransformer.cli.places import Place, described_place, profiled
from pipetransformer.cli.plan_answer import find_plan
from pipetransformer.cli.plan_table import answers_text

__all__ = [
    "ModelChoice", "Place", "answers_text", "build_named", "described_place", "find_plan",
    "main", "profiled",
]  # fmt: skip
