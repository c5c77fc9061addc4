"""Compare ways to share a model's work: replicas, pipelines with flushes, and without them.

networks ─► ways: how a batch is trained on ─► trained: on this machine
layer_graph ─► cuts ─► clusters ─► simulated: on described ones ◄─ drawn: schedules
"""
