"""Record what ran when, and draw it.

recorder ─► span ─► trace (text) ─► pictures, summary (tables)
"""

from autopipe.trace.pictures import save_picture
from autopipe.trace.recorder import Recorder
from autopipe.trace.span import Span
from autopipe.trace.summary import Summary, as_bytes, text_table
from autopipe.trace.trace import Trace

__all__ = [
    "Recorder", "Span", "Summary", "Trace", "as_bytes", "save_picture", "text_table",
]  # fmt: skip
