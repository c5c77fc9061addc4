"""Measure the pipeline engine: `python -m experiments.benchmarks.engine`, and `...components`.

workloads ◄─ threads: GPipe beside peer_torchgpipe ──┬─► stage_copies: the bound of its bubbles
          ◄─ process_pipelines: beside torch's own ──┘
components ─► plain_order, kept_bytes    table: what is printed, and the bars
"""
