"""Compare ways to share a model's work: replicas, pipelines with flushes, and without them.

layer_graph ─► cuts, clusters ─► simulated: what each way takes on a described cluster
networks ─┬─► staleness: what each rule of weight versions learns at its own rate
          └─► drawn: schedules side by side, simulated and measured
"""
