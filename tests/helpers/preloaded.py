"""Import what the functions of tests do, in the process that all ranks are forks of: each rank
would take seconds for transformers, timm and hypothesis.
"""

from __future__ import annotations

import gc
import importlib

gc.disable()  # What is imported stays; looking for garbage in it took a sixth of the time.
for _name in (
    "pipetransformer.hf",
    "tests.helpers.adapted",
    "tests.helpers.forced",
    "torch._dynamo",  # The first optimizer of a process imports it.
):
    importlib.import_module(_name)
gc.freeze()
gc.enable()
