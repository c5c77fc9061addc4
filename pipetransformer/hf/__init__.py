"""Move in from transformers: its Trainer's interface over ours.

hf_trainer: train, evaluate, predict ─┬─► training_arguments: settings, or what is refused
                                      ├─► unhonoured: what else is refused
                                      └─► callback_bridge: transformers' callbacks

    from pipetransformer.hf import Trainer    # instead of: from transformers import Trainer
"""

from pipetransformer.hf.hf_trainer import HFTrainer as Trainer

__all__ = ["Trainer"]
