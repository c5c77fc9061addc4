"""Move in from transformers: its Trainer's interface over ours.

argument_table ─► training_arguments: settings, or what is refused
            hf_trainer: train, evaluate, predict ─► callback_bridge: transformers' callbacks

    from pipetransformer.hf import Trainer    # instead of: from transformers import Trainer
"""

from pipetransformer.hf.hf_trainer import HFTrainer as Trainer

__all__ = ["Trainer"]
