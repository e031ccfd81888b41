"""What the extension does where memory, a name, a layout or a moment is not as it should be."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import socket
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from tests.support.compiled import needs_compiler, needs_native, shared_library
from tests.support.native_ends import PEER, SEQUENCE, transfers
from tests.support.sets import pairs

from covey.base import native as base_native
from covey.base.arithmetic import reduction
from covey.base.native import native, ufunc_trouble
from covey.net.host.machine import native_crypto
from covey.plan.moves import REDUCE, STORE, Recv
from covey.runtime.collectives.native_executor import NEEDS_LANE, STALLED, native_reduction
from covey.wire import seal
from covey.wire.header import HEADER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_native
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="no /proc")

# No memory to save a range


@needs_proc
@pytest.mark.parametrize("action", [STORE, REDUCE], ids=["stored", "reduced"])
def test_a_range_that_cannot_be_saved_is_not_overwritten(action: int) -> None:
    """Another attempt starts from the input, also if memory ran out in the middle of this one."""

    def is_restored() -> bool:
        nbytes = 32 << 20
        sent, target = np.full(nbytes, 7, np.uint8), np.full(nbytes, 3, np.uint8)
        undo, plan = native().module.Undo(), native().module.Plan((), (Recv(PEER, 0, 0, nbytes, action),), (True,))
        rule = native_reduction(reduction("sum", target.dtype), target.dtype, 1)
        runner = native().module.Runner(2)
        near, far = socket.socketpair()
        near.setblocking(False)
        lane = native().module.Stream(far.fileno())
        runner.set_lane(PEER, lane, near.fileno(), False)
        header = transfers([nbytes])[0].header
        left = memoryview(header + sent.tobytes())
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
        kept = []  # what earlier tests freed, and this process still has, could hold the range
        with contextlib.suppress(MemoryError):
            while True:
                kept.append(np.empty(1 << 20, np.uint8))
        reason = STALLED
        try:
            how = (rule, 1, header[: HEADER_PREFIX.size], SEQUENCE, undo, False, 0, 0, 0)
            reason = runner.start(plan, [target], *how)
            while left:
                left = left[near.send(left) :]
                reason = runner.resume(0)
        except MemoryError:
            reason = NEEDS_LANE
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        runner.finish()
        undo.restore()
        return reason == NEEDS_LANE and bool((target == 3).all())

    assert in_child(is_restored)


def in_child(says: Callable[[], bool]) -> bool:
    """Tell what a function returns in a forked process."""
    child = os.fork()
    if not child:
        code = 2
        try:
            code = 0 if says() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Keys


@needs_proc
@pytest.mark.parametrize(("kind", "is_slow"), pairs(["Sealed", "Striped"], [False, True]))
def test_no_key_is_left_in_memory_when_a_lane_is_freed(kind: str, is_slow: bool) -> None:
    """The key is one that the extension has derived: Python of that process never had it."""
    if native_crypto():
        pytest.skip(native_crypto())
    from covey.net.lanes.native import LongCipher

    secret, lane = os.urandom(32), os.urandom(16)
    near, far = socket.socketpair()
    told, tell = socket.socketpair()
    child = os.fork()
    if not child:
        try:
            told.close()
            keys, scopes = seal.lane_keys(secret, lane, 0), [seal.scope(lane, 0, each) for each in range(2)]
            ciphers = [LongCipher(each) if is_slow else None for each in scopes]
            far.setblocking(False)
            stream = (far.fileno(), keys[1], scopes[1], ciphers[1], keys[0], scopes[0], ciphers[0])
            held = getattr(native().module, kind)((stream,))
            del ciphers, stream
            tell.recv(1)
            held.peek()
            tell.send(b"derived")
            tell.recv(1)
            del held
            gc.collect()
            tell.send(b"freed")
            tell.recv(1)
        finally:
            os._exit(0)
    tell.close()
    try:
        sealer = seal.Sealer(seal.lane_keys(secret, lane, 0)[0], lane, 0, 0)
        sealer.renew()
        record = memoryview(bytearray(100 + seal.RECORD_OVERHEAD_BYTES))
        sealer.seal(bytes(100), record)
        near.sendall(record)
        told.send(b"!")
        assert told.recv(100) == b"derived"
        assert count_in_memory(child, sealer._key) > 0, "the search finds nothing"
        told.send(b"!")
        assert told.recv(100) == b"freed"
        assert count_in_memory(child, sealer._key) == 0
    finally:
        told.close()
        os.waitpid(child, 0)
        near.close()
        far.close()


def count_in_memory(process: int, pattern: bytes) -> int:
    """Count occurrences in the memory that a process can write."""
    found, piece = 0, bytearray(1 << 20)  # a process that runs tests has much
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            start, stop = (int(part, 16) for part in span.split("-"))
            if rights.startswith("rw"):
                for at in range(start, stop, len(piece) - len(pattern) + 1):
                    memory.seek(at)
                    found += piece.count(pattern, 0, memory.readinto(memoryview(piece)[: stop - at]))
    return found


# Names of attributes

PARTS: dict[str, dict[str, Any]] = {
    "operation": {"call": None, "sequence": 0, "returned": 0},
    "call_log": {"entered": 0},
    "operations": {"is_executing": False},
    "commit": {"phase": None, "returned": 0, "pending": False},
}


def make_shortcut(parts: dict[str, dict[str, Any]]) -> Any:
    module = native().module
    made = {name: SimpleNamespace(**attributes) for name, attributes in parts.items()}
    atomic = (made["operations"], made["commit"], 1, 2, module.Plan((), (), ()), module.Undo())
    return module.Shortcut(module.Runner(2), made["operation"], made["call_log"], [None], np.ndarray, 0, 0, 0, atomic)


def test_a_shortcut_refuses_objects_that_lack_an_attribute_it_sets() -> None:
    make_shortcut(PARTS)
    for part, attributes in PARTS.items():
        for name in attributes:
            renamed = {**attributes, f"{name}_renamed": attributes[name]}
            del renamed[name]
            with pytest.raises(TypeError, match=f"has no attribute '{name}'"):
                make_shortcut({**PARTS, part: renamed})


@pytest.mark.parametrize("kind", ["Sealed", "Striped"])
def test_a_lane_refuses_ciphers_that_lack_a_method(kind: str) -> None:
    if native_crypto():
        pytest.skip(native_crypto())
    methods = {"seal": print, "open": print, "set_key": print}
    for name in methods:
        cipher = SimpleNamespace(**{each: methods[each] for each in methods if each != name})
        with pytest.raises(TypeError, match=f"has no attribute '{name}'"):
            getattr(native().module, kind)(((0, bytes(16), b"", cipher, bytes(16), b"", cipher),))


# The layout of numpy's ufuncs


class Elsewhere:
    """Looks like np.add from Python, and has other things where the extension would look."""

    __slots__ = ("fields", *(f"slot_{number}" for number in range(16)))

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        return self.fields[name]


def test_ufuncs_that_are_laid_out_differently_are_noticed() -> None:
    add = {"nin": 2, "nout": 1, "types": np.add.types, "__name__": "add"}
    assert "numpy" in ufunc_trouble(native().module, (SimpleNamespace(**add),))
    assert "numpy" in ufunc_trouble(native().module, (Elsewhere(**add),))
    types = bytes(np.dtype(letter).num for types in np.add.types for letter in types.replace("->", ""))
    is_as_expected = native().module.is_ufunc_as_expected
    assert is_as_expected(np.add, 2, 1, "add", types)
    for differing in (
        (1, 1, "add", types),
        (2, 2, "add", types),
        (2, 1, "ad", types),
        (2, 1, "addd", types),
        (2, 1, "add", types[3:]),
        (2, 1, "add", types[:-1] + b"\0"),
    ):
        assert not is_as_expected(np.add, *differing), differing


@pytest.mark.parametrize("fails", ["is_ufunc_as_expected", "Reduction"])
def test_python_runs_the_plans_where_the_extension_does_not_fit_numpy(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    module = native().module

    wrong = SimpleNamespace(combine=lambda *_: None)
    monkeypatch.setattr(module, fails, lambda *_: False if fails == "is_ufunc_as_expected" else wrong)
    found = cast("Any", base_native.native).__wrapped__()
    assert found.module is None
    assert f"numpy {np.__version__} keeps the loops" in found.why_not


# Threads

HELPER = """
#include <unistd.h>
static _Atomic int is_posted, rung;
static ssize_t late_write(int fd, const void *bytes, size_t count)
{
    for (int waited = 0; !rung && !is_posted && waited < 100; waited++) /* of the first job only */
        usleep(1000);
    ssize_t taken = write(fd, bytes, count);
    rung++;
    return taken;
}
#define write late_write
#include "helper.c"
int64_t monotonic_ns(void) { return 0; }
void relax(void) { usleep(100); }

static enum outcome done_at_once(struct lane *lane, struct outgoing *out, struct pollfd *polls, int *count)
{
    (void)lane, (void)polls, (void)count;
    if (out->nbytes)
        return IDLE;
    out->sent = 0;
    return MOVED;
}

/* 1 if the descriptor tells of a job that is over, and not of one that is under way; else 0. */
__attribute__((visibility("default"))) int is_quiet_while_it_works(void)
{
    struct outgoing first = {.nbytes = 0, .sent = -1}, second = {.nbytes = 1};
    struct helper *helper = helper_start(NULL, done_at_once);
    enum outcome outcome;
    helper_post(helper, &first);
    while (!helper_result(helper, &outcome))
        usleep(100);
    helper_post(helper, &second);
    is_posted = 1;
    while (!rung)
        usleep(100);
    struct pollfd done = {.fd = helper_fd(helper), .events = POLLIN};
    bool is_quiet = poll(&done, 1, 0) == 0;
    helper_cancel(helper);
    bool tells = poll(&done, 1, 0) == 1;
    helper_end(helper);
    return is_quiet && tells;
}
"""


@needs_compiler
def test_a_ring_that_comes_late_does_not_keep_an_operation_awake(tmp_path: Path) -> None:
    """The helper may be stopped between the end of a job and the ring that tells of it."""
    assert ctypes.PyDLL(str(shared_library(tmp_path, HELPER))).is_quiet_while_it_works() == 1


@cache
def extension_bytes() -> bytes:
    return Path(native().module.__file__).read_bytes()


@pytest.mark.parametrize("name", ["strerror", "strtok", "localtime", "gmtime", "asctime", "ctime", "rand", "setenv"])
def test_the_extension_uses_no_function_that_threads_share(name: str) -> None:
    assert b"\0strerror_r\0" in extension_bytes() or sys.platform != "linux", "names of functions are found elsewhere"
    assert b"\0%b\0" % name.encode() not in extension_bytes()
