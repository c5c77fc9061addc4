"""Repeat the experiments of GPipe and torchgpipe, at sizes of choice.

resnet, unet, amoebanet ◄─ *_speed (by runs), *_memory (by memory), accuracy
"""
