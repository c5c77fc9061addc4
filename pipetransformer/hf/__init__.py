"""Move in from transformers: its Trainer's interface over ours.

hf_trainer: train, save ─┬─► evaluations: evaluate and predict, also without labels
                         ├─► script_loss: a subclass's compute_loss
                         ├─► training_arguments: settings, or what is refused
                         └─► callback_bridge: transformers' callbacks
                               ├─► log_history: the log, for a run that goes on
                               └─► pretrained_checkpoints: for from_pretrained

    from pipetransformer.hf import Trainer    # instead of: from transformers import Trainer
"""

from pipetransformer.extras import require

for _package in ("transformers", "accelerate"):
    require(_package, purpose="pipetransformer.hf")

from pipetransformer.hf.hf_trainer import HFTrainer as Trainer  # noqa: E402

__all__ = ["Trainer"]
