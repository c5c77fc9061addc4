"""Repeat the experiments of GPipe and torchgpipe, at sizes of choice.

resnet, unet, amoebanet ◄─ __main__: the tables (by runs and memory)
"""
