"""Name every setting of a run, and check it before anything starts.

train_config    the settings, each with its type, rule, default and meaning
rules           which values are allowed, and the words for it
contradictions  which of them do not go together
schedules       how the learning rate follows the step
"""

from pipetransformer.config.rules import PIPEDREAM_PLANS, PLANS
from pipetransformer.config.schedules import (
    LearningRateSchedule,
    constant,
    cosine_with_warmup,
    named_schedule,
)
from pipetransformer.config.train_config import (
    EVALUATION_FIELDS,
    CollateFunction,
    ComputeMetrics,
    Metric,
    PreprocessLogits,
    TrainConfig,
    make_config,
    usual_prefix_chunk,
)

__all__ = [
    "CollateFunction", "ComputeMetrics", "EVALUATION_FIELDS", "LearningRateSchedule", "Metric",
    "PIPEDREAM_PLANS", "PLANS", "PreprocessLogits", "TrainConfig", "constant",
    "cosine_with_warmup", "make_config", "named_schedule", "usual_prefix_chunk",
]  # fmt: skip
