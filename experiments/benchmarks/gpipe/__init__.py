"""Repeat the experiments of GPipe and torchgpipe, at sizes of choice.

resnet, unet, amoebanet ◄─ tables ◄─ __main__ (by runs and memory)
resnet ◄─ transparency: errors in a pipeline and without
"""
