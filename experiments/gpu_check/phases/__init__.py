"""Prove and measure, a phase a file; each has a function `run(findings, setting)`.

loops         `attach`, callbacks and the Trainer against the plain loop and the ideal
parts         `attach(parts=...)` against the plain loop and a cache by hand
graphs        steps captured as CUDA graphs against launched ones, and the ideal
card          the machine: versions, memory, copies, matrix products
marked_tests  the tests marked cuda
equality      one device: against the plain loop, cached, resumed, without races
memory        a run near the memory limit
finetuning    a pretrained ViT on images: seconds an epoch, accuracy
pipelines     two stages that share the device
gpipe         torchgpipe's models at full size, one partition: rates and memory as published
"""
