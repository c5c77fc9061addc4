"""Bring what all stages measured to the policy, layer by layer.

stages' signals ─► observing ─► Observed ─► LayerStats
stages' outputs of a fixed batch ─► probe ─┘
"""

from pipetransformer.layer_signals.observing import Observed, Observing
from pipetransformer.layer_signals.probe import PROBE_FOLDER, read_looks

__all__ = ["PROBE_FOLDER", "Observed", "Observing", "read_looks"]
