"""Run pipelines of micro-batches, and choose them.

`GPipe` wraps a sequential module; `balance` and `skip` serve it. Beneath it, and beneath the
Trainer: schedules, engine, links; profile, partition, plan, simulation.
"""

from autopipe import balance, skip
from autopipe.batch_norm import (
    DeferredBatchNorm,
    convert_deferred_batch_norm,
    restore_batch_norm,
)
from autopipe.block_partition import block_partition
from autopipe.chain import chain_bytes, chain_seconds
from autopipe.channel import Peer, Receiver, Sender, TensorSpec
from autopipe.engine import StageLinks, StageReport, StageRun, StageWork, run_program
from autopipe.gpipe import GPipe
from autopipe.gpipe_checks import flatten_sequential
from autopipe.lengths import fitting_lengths
from autopipe.link import LinkAbove, LinkBelow, Payload
from autopipe.network import AllReduceCost, LinkCost
from autopipe.paper_plan import (
    paper_length,
    paper_lengths,
    paper_plan,
    paper_split,
    throughput_table,
    trial_plans,
)
from autopipe.partition import greedy_partition, min_max_partition
from autopipe.plan import PipelinePlan, PlanRequest, candidates, plan_pipeline, predict
from autopipe.process_link import ProcessLinkAbove, ProcessLinkBelow
from autopipe.profile import (
    MeasuredChain,
    Profile,
    ProfiledSublayer,
    SublayerCost,
    join_chains,
    join_sizes,
    profile_sublayers,
    time_rounds,
)
from autopipe.profile import merge as merge_profiles
from autopipe.recorder import Recorder
from autopipe.schedule import (
    SCHEDULES,
    Instruction,
    Op,
    Schedule,
    draw,
    forward_only,
    gpipe,
    one_f_one_b,
)
from autopipe.simulate import Simulation, simulate
from autopipe.span import Span
from autopipe.task import is_checkpointing, is_recomputing
from autopipe.throughput import Table, Tables, table_text
from autopipe.timeline import Trace
from autopipe.watchdog import LinkError, Watchdog

__all__ = [
    "AllReduceCost",
    "DeferredBatchNorm",
    "GPipe",
    "Instruction",
    "LinkAbove",
    "LinkBelow",
    "LinkCost",
    "LinkError",
    "MeasuredChain",
    "Op",
    "Payload",
    "Peer",
    "PipelinePlan",
    "PlanRequest",
    "ProcessLinkAbove",
    "ProcessLinkBelow",
    "Profile",
    "ProfiledSublayer",
    "Receiver",
    "Recorder",
    "SCHEDULES",
    "Schedule",
    "Sender",
    "Simulation",
    "Span",
    "StageLinks",
    "StageReport",
    "StageRun",
    "StageWork",
    "SublayerCost",
    "Table",
    "Tables",
    "TensorSpec",
    "Trace",
    "Watchdog",
    "balance",
    "block_partition",
    "candidates",
    "chain_bytes",
    "chain_seconds",
    "convert_deferred_batch_norm",
    "draw",
    "fitting_lengths",
    "flatten_sequential",
    "forward_only",
    "gpipe",
    "greedy_partition",
    "is_checkpointing",
    "is_recomputing",
    "join_chains",
    "join_sizes",
    "merge_profiles",
    "min_max_partition",
    "one_f_one_b",
    "paper_length",
    "paper_lengths",
    "paper_plan",
    "paper_split",
    "plan_pipeline",
    "predict",
    "profile_sublayers",
    "restore_batch_norm",
    "run_program",
    "simulate",
    "skip",
    "table_text",
    "throughput_table",
    "time_rounds",
    "trial_plans",
]
