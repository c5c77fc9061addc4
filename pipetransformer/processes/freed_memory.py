"""Have this process keep the memory that it frees, while a run needs it again at every step.

                     as glibc comes                         in a run
tensors >= 32 MB     mapped anew, unmapped when freed       from the heap
end of the heap      given back when 64 MB of it are free   kept
"""

from __future__ import annotations

import ctypes
import os
import platform
import weakref
from typing import final

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of mallopt, as malloc.h numbers them."""
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
"""What glibc itself comes to where large tensors are freed. Whoever sets one of these ends its own
adjustment of the thresholds, which begin at 128 KB, so that is no state to go back to."""
_USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Prefixes of the environment variables by which a user chooses or tunes the allocator."""
_KEEPERS = set[int]()
"""Those who keep memory in this process, by their ids."""


@final
class FreedMemory:
    """Keep what the process frees, from `keep` to `give_back`, or until this is collected.

    By default glibc maps every tensor above 32 MB anew and unmaps it when it is freed, so the
    kernel zeroes its pages in every step. A user's own allocator, or its settings in the
    environment, stay in force.
    """

    def __init__(self) -> None:
        self._put_back: weakref.finalize | None = None

    def keep(self) -> bool:
        """Keep what is freed from now on; tell whether that is so."""
        if self._put_back is not None:
            return True
        if platform.libc_ver()[0] != "glibc" or any(v.startswith(_USERS_OWN) for v in os.environ):
            return False
        library = ctypes.CDLL(None)
        if not (library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1)):
            return False
        _KEEPERS.add(id(self))
        self._put_back = weakref.finalize(self, _leave, id(self))
        self._put_back.atexit = False  # Nobody needs memory after the process.
        return True

    def give_back(self) -> None:
        """Give free memory to the kernel, from now on as it is freed, once nobody keeps it."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None


def give_back_free_pages() -> None:
    """Give to the kernel what is free now, also while this process keeps what it frees."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _leave(keeper: int) -> None:
    _KEEPERS.discard(keeper)
    if not _KEEPERS:
        library = ctypes.CDLL(None)
        for parameter, value in _USUAL.items():
            library.mallopt(parameter, value)
        give_back_free_pages()
