"""Name every setting of a run, and check it before anything starts."""

from pipetransformer.config.setting_checks import (
    EVALUATION_FIELDS,
    ComputeMetrics,
    Metric,
    PreprocessLogits,
)
from pipetransformer.config.train_config import TrainConfig, make_config

__all__ = [
    "EVALUATION_FIELDS",
    "ComputeMetrics",
    "Metric",
    "PreprocessLogits",
    "TrainConfig",
    "make_config",
]
