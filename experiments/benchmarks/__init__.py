"""Measure each part beside its peer and its limit: every file here is a command.

rivals: the Trainer beside a plain loop    plan: predicted steps beside measured ones
engine: micro-batches through stages       gpipe: GPipe's own experiments
measuring: what all of them time by, and the plain loop that they are compared with
"""
