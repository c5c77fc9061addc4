"""Freeze a model's bottom blocks, and cache what they compute, in a training loop of one's own.

cached_loop: which samples come, what freezes, where rows are
given_batch: whether a forward is given the batch whose rows are at hand
served_blocks: has the model's own forward start above its frozen blocks
"""

from pipetransformer.loop.cached_loop import CachedLoop, attach

__all__ = ["CachedLoop", "attach"]
