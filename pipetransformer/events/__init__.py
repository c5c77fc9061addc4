"""Tell callbacks what happens in a run, on every rank alike.

callback: what may be overridden ─► event_calls: called, and agreed on      tensorboard
"""

from pipetransformer.events.callback import Callback
from pipetransformer.events.event_calls import Events, check_callbacks
from pipetransformer.events.tensorboard import TensorBoard

__all__ = ["Callback", "Events", "TensorBoard", "check_callbacks"]
