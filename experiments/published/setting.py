"""State the published experiment: its machines, its run and its results, each with its source.

Sources: [paper] PipeTransformer (ICML 2021), section 5; [program] the published program
(github.com/Distributed-AI/PipeTransformer), its README and its logs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopipe.cluster import load_cluster, modelled_profile
from autopipe.profile import Profile
from experiments.ablation.simulated import frozen_by_epoch
from pipetransformer.cli import ModelChoice, build_named, profiled

_DESCRIPTION = Path(__file__).parents[2] / "docs" / "clusters" / "2x8-rtx5000.toml"
CLUSTER = load_cluster(_DESCRIPTION)
"""The published machines; the file says where each number comes from."""

_SGD_PASSES = 5
"""SGD with momentum ([program]) reads weight, gradient and momentum and writes two of them."""

NUM_SAMPLES = 1_281_167
"""Of the training set (ImageNet-1k)."""
NUM_LAYERS = 12
EPOCHS = 10  # [program] the settings at the head of its ImageNet log
BATCH = 400  # [paper] of a pipeline, however many there are
ALPHA = 1 / 3  # [paper] of the speed-ups reported
CACHE_FROM = 3  # [paper] frozen layers; below, caching took longer than computing
HOST_S = 21e-3
"""CPU time of a micro-batch in a process that drives a pipeline by a thread a device, under one
lock; 8 ms in one thread. On a core of ours: 12 blocks of width 16, which compute next to nothing,
K = 8 (`experiments/results/ablation`, The published system)."""
TRANSITION_S = {8: 18.2 + 5, 4: 10.2 + 23, 2: 11.3 + 12, 1: 11.3 + 12}
"""By the new K: loading the model, then building DDP. [program] its performance log, slower node;
for K = 1, which it does not give, as for K = 2."""

SPEED_UPS = {
    "freeze only": 0.95,
    "+ AutoPipe + AutoCache": 1.26,
    "+ AutoPipe + AutoDP": 2.27,
    "all four": 2.83,
}
"""[paper] figure 9, over no freezing."""
THROUGHPUTS = {8: 368, 16: 410, 24: 386, 32: 340, 40: 298, 48: 286}
"""[paper] figure 11: samples/s by M at K = 8. [program] its log shows 420 of both nodes together,
so these are of two pipelines."""
LENGTHS = (8, 8, 4, 2, 2, 1)
"""[paper] K by epoch at alpha = 1/3."""


def published_frozen() -> tuple[int, ...]:
    """Return the frozen layers of every epoch."""
    return frozen_by_epoch(ALPHA, NUM_LAYERS, EPOCHS)


def published_profile() -> Profile:
    """Model ViT-B/16 at 224 pixels on one of the published devices, in float32.

    A forward through all frozen blocks takes 2.33 s of 320 images and 0.47 s of 64; published are
    2.313 and 0.471 ([program] README, of a device with 16 GB, which it does not name).
    """
    named = build_named(ModelChoice("vit_base_patch16_224"), device="meta")
    profile = modelled_profile(profiled(named), named.sample, CLUSTER)
    return replace(profile, optimizer_s_per_byte=_SGD_PASSES / CLUSTER.memory_bytes_per_s)
