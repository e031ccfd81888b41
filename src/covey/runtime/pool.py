"""Memory for the payloads of this process: blocks of whole pages, which are used again.

A payload is allocated by one thread and freed by another: the one that receives, a handler of calls, the program.
malloc keeps memory for each thread, and what the others free there leaves holes, so a process with steady traffic would
grow for long. A block belongs to no thread. It serves whatever fits, and comes back when the last array over it is
dropped.

Invariants, for the holder of the lock: a block is lent to one array, or idle, or given back to the system; `used_bytes`
is the sum of those that are lent, and the idle ones have at most `Profile.kept_bytes`.

Memory that the program asks for never waits here, or else a program that must receive something before it can free
anything would wait for itself. What other nodes send unasked (`UnaskedMemory`) waits for room with them.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

POOLED_BYTES: Final = 32 * 1024
"""Smaller payloads come from malloc, which has them at hand without asking the system."""
SIZES_IN_AN_OCTAVE: Final = 4
"""Sizes of blocks from one power of two to the next."""
POOL_LOCK_SECONDS: Final = 1.0
"""How long a payload may wait for the lock, which is held for microseconds, before it gets memory from malloc."""
LARGEST_FIT: Final = 4
"""A payload may get an idle block that is larger than it needs, up to this many times."""


class Profile(NamedTuple):
    """What the pool keeps for later use."""

    kept_bytes: int
    """All idle blocks together."""
    largest: int
    """The largest block that is kept."""


PROFILES: Final = {
    "training": Profile(256 << 20, 64 << 20),
    "inference": Profile(64 << 20, 8 << 20),
    "small": Profile(8 << 20, 1 << 20),
}


def block_bytes(nbytes: int) -> int:
    """Return the size of the blocks for so many bytes: whole pages, for large ones at most a quarter more."""
    step = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // (2 * SIZES_IN_AN_OCTAVE))
    return -(-nbytes // step) * step


class _Lease(weakref.ref[Bytes]):
    """The use of a block by an array; called back when the array and all that views it are dropped."""

    __slots__ = ("block",)
    block: mmap.mmap


class BufferPool:
    """Lends blocks of memory. Any thread may call any method, a destructor or a signal handler, too."""

    _ident = staticmethod(threading.get_ident)  # also while the interpreter ends, and modules are empty
    _insort = staticmethod(bisect.insort)

    def __init__(self, profile: Profile = PROFILES["training"]) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._holder = 0
        """The thread that has the lock. It may run a destructor or a signal handler of the program meanwhile."""
        self._idle: OrderedDict[int, list[mmap.mmap]] = OrderedDict()
        """By size, the one that was used last at the end. Each has at least one block."""
        self._idle_sizes: list[int] = []
        """The keys of `idle`, sorted."""
        self._leases: dict[int, _Lease] = {}
        """By the identity of a block that is lent."""
        self._returned: deque[mmap.mmap | int] = deque()
        """Blocks whose arrays were dropped, and sizes of what is not set aside any more."""
        self._has_freed = False
        """Whether some of it was taken back since those that wait for room were told."""
        self.used_bytes = 0
        """The blocks that are lent."""
        self.most_bytes = 0
        """The most that were ever lent at the same time."""
        self.idle_bytes = 0
        """The blocks that are kept."""
        self.reserved_bytes = 0
        """What is about to be lent."""
        self.waits = 0
        """How often something had to wait for room."""
        self._waiting: deque[weakref.WeakMethod[Callable[[], None]]] = deque()
        """What to call when there may be room."""

    @property
    def profile(self) -> Profile:
        """What is kept."""
        return self._profile

    @profile.setter
    def profile(self, profile: Profile) -> None:
        self._profile = profile
        if self._enter():
            try:
                self._take_back()
            finally:
                self._leave()

    def take(self, nbytes: int) -> Bytes:
        """Return an array of so many bytes, of any content. Large ones begin at a page.

        Raises:
            MemoryError: there is not so much.
        """
        if nbytes < POOLED_BYTES or not self._enter():
            return np.empty(nbytes, np.uint8)
        try:
            self._take_back()
            return self._lend(nbytes)
        finally:
            self._leave()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array of any content, as `take` does."""
        return self.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def reserve(self, nbytes: int, limit: float) -> bool:
        """Set memory aside, if all that is lent or set aside has at most `limit` bytes then; return whether."""
        if not self._enter():
            return False
        try:
            self._take_back()
            has_room = self.used_bytes + self.reserved_bytes + nbytes <= limit
            self.reserved_bytes += nbytes if has_room else 0
            return has_room
        finally:
            self._leave()

    def unreserve(self, nbytes: int) -> None:
        """Give up what was set aside: it was taken, or is not needed. Less than 0: set it aside, whatever there is."""
        self._returned.append(nbytes)
        self._settle()

    def when_freed(self, function: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Call a method once, after memory has come back: on any thread, at any moment, so it must take no lock.

        It may have come back just before: look again after this.
        """
        self._waiting.append(function)

    def _dropped(self, lease: Any) -> None:
        """Take note that an array is gone: on any thread, at any moment."""
        self._returned.append(lease.block)
        self._settle()

    def trim(self) -> None:
        """Give all idle blocks back to the system."""
        before, self.profile = self._profile, Profile(0, 0)
        self.profile = before

    # The lock

    def _enter(self) -> bool:
        """Take the lock; False if this thread has it, and runs a destructor or a signal handler meanwhile."""
        if self._holder == self._ident() or not self._lock.acquire(timeout=POOL_LOCK_SECONDS):
            return False
        self._holder = self._ident()
        return True

    def _leave(self) -> None:
        self._holder = 0
        self._lock.release()
        if self._returned:
            self._settle()
        elif self._has_freed:
            self._tell_waiting()

    def _settle(self) -> None:
        """Take back what was returned, unless another thread is about to, or this one in what it was called from."""
        while self._returned and self._lock.acquire(blocking=False):
            self._holder = self._ident()
            try:
                self._take_back()
            finally:
                self._holder = 0
                self._lock.release()
        if self._has_freed and self._holder != self._ident():
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        self._has_freed = False
        for _ in range(len(self._waiting)):
            try:
                function = self._waiting.popleft()()
            except IndexError:  # another thread has told it
                return
            if function is not None:
                function()

    # With the lock

    def _lend(self, nbytes: int) -> Bytes:
        size = block_bytes(nbytes)
        at = bisect.bisect_left(self._idle_sizes, size)
        if at < len(self._idle_sizes) and self._idle_sizes[at] <= LARGEST_FIT * size:
            block = self._take_idle(self._idle_sizes[at])
        else:
            self._drop_idle(size)
            try:
                block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError, ValueError):  # no memory, or too many mappings, of which malloc needs none
                self._drop_all_idle()  # for malloc, and for whatever else this process needs
                return np.empty(nbytes, np.uint8)
        array = np.frombuffer(block, np.uint8, nbytes)
        lease = _Lease(array, self._dropped)
        lease.block = block
        self._leases[id(block)] = lease
        self.used_bytes += len(block)
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        return array

    def _take_back(self) -> None:
        """Keep the blocks that were returned, or give them back to the system. With the lock."""
        while self._returned:
            self._has_freed = True
            block = self._returned.popleft()
            if isinstance(block, int):
                self.reserved_bytes -= block
                continue
            del self._leases[id(block)]
            self.used_bytes -= len(block)
            if len(block) <= self._profile.largest:
                self._keep(block)
        self._drop_idle(0)

    def _drop_idle(self, more: int) -> None:
        """Give idle blocks back to the system, so that `more` bytes may be added to those that are lent."""
        most = max(self.most_bytes, self.used_bytes + more) * 5 // 4 - self.used_bytes - more
        while self.idle_bytes > min(most, self._profile.kept_bytes):
            self._take_idle(next(iter(self._idle)))  # of the size that was not needed for the longest time

    def _drop_all_idle(self) -> None:
        while self.idle_bytes:
            self._take_idle(next(iter(self._idle)))

    def _keep(self, block: mmap.mmap) -> None:
        size = len(block)
        blocks = self._idle.get(size)
        if blocks is None:
            self._idle[size] = blocks = []
            self._insort(self._idle_sizes, size)
        blocks.append(block)
        self._idle.move_to_end(size)
        self.idle_bytes += size

    def _take_idle(self, size: int) -> mmap.mmap:
        blocks = self._idle[size]
        block = blocks.pop()
        if blocks:
            self._idle.move_to_end(size)
        else:
            del self._idle[size]
            self._idle_sizes.remove(size)
        self.idle_bytes -= size
        return block

    def forked(self) -> None:
        """Go on in a forked child with its arrays: another thread of the parent may have had the lock."""
        self._lock, self._holder = threading.Lock(), 0
        for container in (self._idle, self._idle_sizes, self._returned):
            container.clear()
        self._leases = {number: lease for number, lease in self._leases.items() if lease() is not None}
        self.used_bytes = sum(len(lease.block) for lease in self._leases.values())
        self.idle_bytes = self.reserved_bytes = 0
        self._waiting.clear()


class UnaskedMemory:
    """The memory for what other nodes send unasked to one node of this process."""

    def __init__(self, pool: BufferPool, limit: int, came: Callable[[], None]) -> None:
        """Give memory while everything in the pool has at most `limit` bytes; call `came` when to ask again.

        `came` is a method, called on any thread at any moment, at most once after each call of `watch`.
        """
        self._pool, self._limit, self._came = pool, limit, weakref.WeakMethod(came)

    def reserve(self, nbytes: int, *, is_needed: bool) -> bool:
        """Set memory aside, if there is room or it `is_needed`; return whether. `taken` must follow."""
        if is_needed:
            self._pool.unreserve(-nbytes)
        return is_needed or self._pool.reserve(nbytes, self._limit)

    def taken(self, nbytes: int) -> None:
        """Take note that what was set aside was taken from the pool, or was not needed."""
        self._pool.unreserve(nbytes)

    def note_wait(self) -> None:
        """Count a payload that has to wait for room."""
        self._pool.waits += 1

    def watch(self) -> None:
        """Have `came` called when memory comes back; it may have come back just before this."""
        self._pool.when_freed(self._came)


pool: Final = BufferPool()
"""The memory for payloads of this process."""

os.register_at_fork(after_in_child=pool.forked)
