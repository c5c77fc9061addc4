"""Measure each part beside its peer and its limit: every file here is a command.

The whole Trainer: rivals · plan · host    attach: host · own_loop
engine: micro-batches through stages    gpipe: GPipe's own experiments
measuring: what all of them time by, and the plain loop that they are compared with
"""
