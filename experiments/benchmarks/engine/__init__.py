"""Measure the pipeline engine: `python -m experiments.benchmarks.engine`.

workloads ◄─ threads: GPipe beside peer_torchgpipe ──┬─► stage_copies: the bound of its bubbles
          ◄─ process_pipelines: beside torch's own ──┘
table: what is printed, and the bars
"""
