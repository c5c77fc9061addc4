"""Serve the command line: plan, verify, report, score, export.

main ─┬─► plan_command ─► places ─► plan_answer, replicated_stages ─► plan_table
      ├─► verify_command ─► smaller_config
      └─► score
places, verify_command ─► named_model ─► configured_model, lora, known_integers
"""

from pipetransformer.cli.main import main
from pipetransformer.cli.model_choice import ModelChoice
from pipetransformer.cli.named_model import build_named
from pipetransformer.cli.places import Place, described_place, profiled
from pipetransformer.cli.plan_answer import find_plan
from pipetransformer.cli.plan_table import answers_text
from pipetransformer.cli.score import recorded_score, score

__all__ = [
    "ModelChoice", "Place", "answers_text", "build_named", "described_place", "find_plan",
    "main", "profiled", "recorded_score", "score",
]  # fmt: skip
