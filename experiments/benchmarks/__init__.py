"""Measure each part beside its peer and its limit: every file here is a command.

The whole Trainer: rivals · overhead · busy (beside restless) · data · cache · signals ·
predicted_savings · precision · plan · transition (by transition_run) · launch_rate
engine: micro-batches through stages    gpipe: GPipe's own experiments
measuring: what all of them time by, and the plain loop that they are compared with
"""
