"""Say what policies would have frozen in a run that is recorded, and what that would have saved.

report's decisions ─► policy_scores ─► score_command: a table and a picture
"""

from pipetransformer.scoring.policy_scores import Score, recorded_score, score
from pipetransformer.scoring.score_command import add_score_parser

__all__ = ["Score", "add_score_parser", "recorded_score", "score"]
