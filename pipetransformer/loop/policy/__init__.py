"""Ask a policy, in a loop or trainer that is not ours, what freezes.

epoch_policy: before an epoch ─► freeze_observer: watches steps ─► step_times: what layers cost
freeze_advice: says what was done                                 adapter_advice: LoRA, and where
"""

from pipetransformer.loop.policy.epoch_policy import EpochPolicy
from pipetransformer.loop.policy.freeze_advice import FreezeAdvice
from pipetransformer.loop.policy.freeze_observer import FreezeObserver

__all__ = ["EpochPolicy", "FreezeAdvice", "FreezeObserver"]
