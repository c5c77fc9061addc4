"""Keep freed host memory for the next tensors, where the C library would give it back at once."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of mallopt, as malloc.h numbers them."""
_USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""How environment variables begin that say which allocator there is, and how it works."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees from now on; tell whether it does.

    By default glibc maps every tensor above 32 MB anew and unmaps it when it is freed, and so the
    kernel zeroes each of its pages in every step. An environment that chooses an allocator, or
    sets one up, stays in force, and so does another C library's.
    """
    if platform.libc_ver()[0] != "glibc" or any(v.startswith(_USERS_OWN) for v in os.environ):
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))


def give_back_freed_memory() -> None:
    """Give what is free now back to the kernel; what is freed later may be kept again."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
