"""Memory between two pages that cannot be touched: a step outside of it ends the process."""

from __future__ import annotations

import ctypes
import mmap


class GuardedMemory:
    """Some pages of memory, `view`. `close` makes its surroundings ordinary memory again."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._whole = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._whole))
        self._protect(0)
        self.view = memoryview(self._whole)[mmap.PAGESIZE : -mmap.PAGESIZE]

    def _protect(self, how: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (0, self._pages + 1):
            at = ctypes.c_void_p(self._start + page * mmap.PAGESIZE)
            assert libc.mprotect(at, ctypes.c_size_t(mmap.PAGESIZE), how) == 0, ctypes.get_errno()

    def close(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
