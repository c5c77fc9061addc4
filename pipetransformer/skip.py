"""Offer torchgpipe's names of skip connections: `from pipetransformer.skip import skippable`."""

from autopipe.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
