"""Run a model's forward to see what it does, and run it in parts.

recording: where its row of blocks is      own_forward: up to the blocks, a block, behind them
entry_names: what it takes of a batch      beside_blocks: what is around its blocks
dependence: what parts depend on           short_texts: to look at little
routers, packing: what rows hold beside a hidden state, or in its place
"""

from pipetransformer.model.forward.beside_blocks import beside_blocks, holds_block
from pipetransformer.model.forward.dependence import (
    PADDING_MASK,
    are_equal,
    half_padded,
    joined_outputs,
    padding_mask,
    read_for_shape,
    run_through,
)
from pipetransformer.model.forward.entry_names import (
    TARGETS,
    EntryNames,
    Read,
    forward_parameters,
    names_of,
    split_batch,
    without_cache,
)
from pipetransformer.model.forward.own_forward import (
    CutForward,
    Entries,
    Left,
    has_own_forward,
    output_of,
)
from pipetransformer.model.forward.packing import (
    Flat,
    Packing,
    PartAnswer,
    UnlikeAnswerError,
    answer_of,
    of_each,
    refuse_unknown,
    tensors_of,
)
from pipetransformer.model.forward.recording import (
    Arguments,
    ForwardFailedError,
    NoRowError,
    Reads,
    Recording,
    Row,
    block_lists,
    record,
    watched,
)
from pipetransformer.model.forward.routers import ROUTERS, gathering_nothing, gathers, router_rows
from pipetransformer.model.forward.short_texts import on_short_first

__all__ = [
    "Arguments", "CutForward", "Entries", "EntryNames", "Flat", "ForwardFailedError", "Left",
    "NoRowError", "PADDING_MASK", "Packing", "PartAnswer", "ROUTERS", "Read", "Reads",
    "Recording", "Row", "TARGETS", "UnlikeAnswerError", "answer_of", "are_equal",
    "beside_blocks", "block_lists", "forward_parameters", "gathering_nothing", "gathers",
    "half_padded", "has_own_forward", "holds_block", "joined_outputs", "names_of", "of_each",
    "on_short_first", "output_of", "padding_mask", "read_for_shape", "record",
    "refuse_unknown", "router_rows", "run_through", "split_batch", "tensors_of", "watched",
    "without_cache",
]  # fmt: skip
