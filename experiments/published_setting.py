"""State the published experiment: its machines, its run and its results, each with its source.

Sources: [paper] PipeTransformer (ICML 2021), section 5; [program] the published program
(github.com/Distributed-AI/PipeTransformer), its README and its logs; [sheet] NVIDIA's data sheet
of the Quadro RTX 5000; [here] measured by this project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from autopipe import LinkCost, Profile, ProfiledSublayer
from autopipe.cluster import Cluster
from autopipe.modelled import modelled_profile
from pipetransformer import LayeredModel
from pipetransformer.named_model import ModelChoice, build_named

EFFICIENCY = 0.45
"""Share of the peak that matrix products reach. With it the modelled forward of 320 images through
frozen layers takes 2.33 s on one device, of 64 images 0.47 s; FORWARD_S has what was measured.
Neither pipelines nor speed-ups enter it."""
FORWARD_S = {320: 2.313, 64: 0.471}
"""[program] README: one device's forward through all frozen blocks, by its batch. It does not name
the device; it has 16 GB, as the published ones."""

_LAUNCH_S = 1 / 93_000
"""[here] One process started 93,000 small operations a second on a CPU; for these machines it is
an estimate. At 2 us no speed-up moves by more than 3 %."""

CLUSTER = Cluster(
    name="2 x 8 Quadro RTX 5000",
    nodes=2,  # [paper]
    slots_per_node=8,  # [paper]
    memory_bytes=16_000_000_000,  # [paper]
    memory_bytes_per_s=448e9,  # [sheet]
    flops_per_s={"float32": EFFICIENCY * 11.2e12},  # [sheet] the peak; [program] no autocast
    link=LinkCost(_LAUNCH_S, 15.754e9),  # [paper] PCIe 3.0, 16 lanes
    node_link=LinkCost(_LAUNCH_S, 5e9),  # [paper] InfiniBand CX353A
    kernel_overhead_s=_LAUNCH_S,
)
_SGD_PASSES = 5
"""SGD with momentum ([program]) reads weight, gradient and momentum and writes two of them."""

NUM_SAMPLES = 1_281_167
"""Of the training set (ImageNet-1k)."""
NUM_LAYERS = 12
EPOCHS = 10  # [program] the settings at the head of its ImageNet log
BATCH = 400  # [paper] of a pipeline, however many there are
ALPHA = 1 / 3  # [paper] of the speed-ups reported
CACHE_FROM = 3  # [paper] frozen layers; below, caching took longer than computing
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
HOURS = 26.5  # [paper] of the run without freezing
THROUGHPUTS = {8: 368, 16: 410, 24: 386, 32: 340, 40: 298, 48: 286}
"""[paper] figure 11: samples/s by M at K = 8. [program] its log shows 420 of both nodes together,
so these are of two pipelines."""
LENGTHS = (8, 8, 4, 2, 2, 1)
"""[paper] K by epoch at alpha = 1/3."""


def frozen_by_epoch(num_epochs: int = EPOCHS) -> list[int]:
    """Return the frozen layers of every epoch: the rule's closed form, rounded up."""
    levels = (NUM_LAYERS * (1 - (1 - ALPHA) ** epoch) for epoch in range(num_epochs))
    return [math.ceil(level - 1e-9) for level in levels]


def published_profile() -> Profile:
    """Model ViT-B/16 at 224 pixels on one of the published devices, in float32."""
    named = build_named(ModelChoice("vit_base_patch16_224"), device="meta")
    sublayers = [
        ProfiledSublayer(
            sublayer.name, sublayer.layer, sublayer.module, partial(_call, named.model, index)
        )
        for index, sublayer in enumerate(named.model.sublayers)
    ]
    profile = modelled_profile(sublayers, named.sample, CLUSTER)
    return replace(profile, optimizer_s_per_byte=_SGD_PASSES / CLUSTER.memory_bytes_per_s)


def _call(
    model: LayeredModel, index: int, hidden: Tensor | None, batch: Mapping[str, Tensor]
) -> Tensor:
    return model.call(index, batch if hidden is None else hidden, sides=batch)
