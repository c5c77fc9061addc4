"""Say what policies would have frozen in a run that is recorded, and what that would have saved.

report's decisions ─► score ─► command: a table and a picture
"""

from pipetransformer.scoring.command import add_score_parser, run_score
from pipetransformer.scoring.score import Score, recorded_score, score

__all__ = ["Score", "add_score_parser", "recorded_score", "run_score", "score"]
