"""Give stage 0 its samples, through the frozen prefix and the cache where there are.

data's workers ─► sample_feed ─► stage 0
frozen_prefix ─────►┘  ├─ row_format, store_choice, node_store: rows, on a GPU or a node's
                       └─ coming_fetches: what follows the one that is made
"""

from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.sample_feed import Rows, SampleFeed, samples_of

__all__ = ["FrozenPrefix", "Rows", "SampleFeed", "samples_of"]
