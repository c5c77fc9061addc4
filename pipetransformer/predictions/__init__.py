"""Keep what a model puts out for a data set, bring it together, and judge it as a whole.

kept_outputs: on each replica's last stage ─► gathering: on every rank ─► judged: compute_metrics
"""

from pipetransformer.predictions.gathering import gather_outputs
from pipetransformer.predictions.judged import EvalPrediction, PredictionOutput, judge
from pipetransformer.predictions.kept_outputs import OUTPUT, KeptOutputs, as_labels

__all__ = [
    "EvalPrediction", "KeptOutputs", "OUTPUT", "PredictionOutput", "as_labels",
    "gather_outputs", "judge",
]  # fmt: skip
