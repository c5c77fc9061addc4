"""Record what ran when, and write it for people and for Perfetto.

recorder ─► span ─► trace (text) ─► chrome (JSON), summary (tables)
"""

from autopipe.trace.recorder import Recorder
from autopipe.trace.span import Span
from autopipe.trace.summary import Summary, as_bytes, text_table
from autopipe.trace.trace import Trace

__all__ = [
    "Recorder", "Span", "Summary", "Trace", "as_bytes", "text_table",
]  # fmt: skip
