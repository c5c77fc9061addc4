"""Have one thread work beside the others, on the same GPU as they."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def thread_on(device: torch.device, name: str) -> ThreadPoolExecutor:
    """Return a thread whose current GPU is `device`, if that is one."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    # A new thread's device is 0: its waits and copies would build a context there for every rank.
    index = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(index,)
    )
