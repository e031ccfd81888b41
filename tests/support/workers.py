"""`pytest --workers N`: import and collect all tests once, then run them in N forks of the process that has done so.

Workers that are started as new programs each import and collect ten thousand tests: 7 s of processor time apiece, and
15 s in a new checkout, where each compiles all test files too. A fork has everything at once.

A worker takes a file at a time, so that what the tests of a file share is made once. Workers of even numbers begin with
the folders whose tests mostly wait, the others with those whose tests compute: together they keep the cores busy. They
meet in the middle; when no file is left, a worker that is done takes half of what another has not begun of its own. A
test that ends its process has failed, and another worker goes on. Tests marked `alone` come last, in one worker.

`--shuffle SEED` runs files, and the tests of each file, in a random order.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.support import fork_server, forked
from tests.support.guard import stacks_below
from tests.support.waiting import HANG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

FOLDERS: Final = ("netns", "e2e", "security", "io", "torch", "sim", "contract")
"""Folders of tests, those that wait most first; what is not named comes last."""
KILL_AFTER: Final = HANG + 120.0
"""Seconds after which a worker whose test could not fail by itself is killed."""
AHEAD: Final = 2
"""Tests that a worker knows of, so that it need not wait for the next one when a test ends."""
FEWEST_SHARED: Final = 4
"""Tests of a file that two workers share, when no file is left; fewer stay with the worker that has begun the file."""
END_SECONDS: Final = 20.0
"""How long a worker may take to end, after its last test or an interruption, before it is killed."""
CLONE_NEWNET: Final = 0x40000000
OWN_NETWORK: Final = """
link set lo up
link add eth0 type veth peer name eth0-peer
link set eth0-peer up
link set eth0 up
address add 192.0.2.2/24 dev eth0
route add default via 192.0.2.1
"""
"""What `ip` makes of a new namespace: the other end of eth0 has no address, so that nothing there answers."""
VARIABLE: Final = "PYTEST_XDIST_WORKER"
"""Tells tests which worker they are in, as with pytest-xdist: gw0, gw1, ..."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N processes at a time")
    parser.addoption("--shuffle", type=int, default=None, metavar="SEED", help="run tests in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle is None:
        return
    chance = random.Random(config.option.shuffle)
    files = [list(tests) for _, tests in itertools.groupby(items, key=_path_of)]
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    items[:] = itertools.chain.from_iterable(files)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers > 0 and not config.option.collectonly:
        config.pluginmanager.register(Workers(config.option.workers))


@dataclass(frozen=True)
class LastWords:
    """Why a worker ends before it was told to, as it says; nothing if it could not say anything."""

    text: str


class Worker:
    """A forked process as the one that collected the tests knows it."""

    def __init__(self, number: int, pid: int, channel: Connection) -> None:
        self.number, self.pid, self.channel = number, pid, channel
        self.waiting: deque[int] = deque()
        """The rest of its file, by positions among all tests."""
        self.named: int | None = None
        """The test that it knows to come next; what that shares with the one before is kept for it."""
        self.running: deque[int] = deque()
        """The tests that it was told to run, the current one first."""
        self.since = time.monotonic()
        """When the current test began."""


class Workers:
    """Forks workers after the collection, deals tests out, and passes their reports on."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: dict[Connection, Worker] = {}
        self._files: deque[list[int]] = deque()
        """By positions among all tests, those of each file."""
        self._last: deque[list[int]] = deque()
        """The same, of tests that nothing may run beside."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        is_alone = [item.get_closest_marker("alone") is not None for item in session.items]
        is_shuffled = session.config.option.shuffle is not None
        self._files.extend(_by_file(session.items, (i for i, alone in enumerate(is_alone) if not alone), is_shuffled))
        self._last.extend(_by_file(session.items, (i for i, alone in enumerate(is_alone) if alone), is_shuffled))
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # results of several files alternate
        forked.preload_torch()
        gc.collect()
        gc.freeze()  # what was collected is shared with the workers as long as none writes to it
        try:
            for number in range(min(self._count, len(self._files))):
                self._start(session, number, deque())
            self._hear_all(session)
            if self._last:
                self._files = self._last
                self._start(session, 0, deque())
                self._hear_all(session)
        finally:
            for worker in list(self._workers.values()):
                self._end(worker)
        return True

    def _hear_all(self, session: pytest.Session) -> None:
        """Pass on what the workers report, until all of them have ended."""
        while self._workers:
            for channel in connection.wait(list(self._workers), timeout=10):
                self._hear(session, self._workers[channel])  # type: ignore[index]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
            for worker in self._workers.values():
                if worker.running and time.monotonic() - worker.since > KILL_AFTER:
                    sys.stderr.write(stacks_below(worker.pid))
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.since = time.monotonic()  # its end is heard soon

    def _start(self, session: pytest.Session, number: int, waiting: deque[int]) -> None:
        tasks = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else [""]
        assert len(tasks) == 1, f"importing the tests started threads, which a fork would lack: {threading.enumerate()}"
        ours, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for channel in (ours, *self._workers):
                channel.close()
            _work(session, number, theirs)
        theirs.close()
        worker = self._workers[ours] = Worker(number, pid, ours)
        worker.waiting = waiting
        for _ in range(AHEAD):
            self._feed(worker)

    def _next(self, worker: Worker) -> int | None:
        if not worker.waiting and not worker.running and not self._files:
            worker.waiting.extend(self._half_of_the_longest())
        # When few files are left, a worker that is still busy with one leaves the others to the rest.
        if not worker.waiting and self._files and (not worker.running or len(self._files) > 2 * self._count):
            worker.waiting.extend(self._files.pop() if worker.number % 2 else self._files.popleft())
        return worker.waiting.popleft() if worker.waiting else None

    def _half_of_the_longest(self) -> list[int]:
        """Take half of what another worker has not begun of its file, when no file is left."""
        waiting = max((worker.waiting for worker in self._workers.values()), key=len)
        return [waiting.pop() for _ in range(len(waiting) // 2)][::-1] if len(waiting) >= FEWEST_SHARED else []

    def _feed(self, worker: Worker) -> None:
        """Tell a worker of its next test; if there is none and it has nothing to do, let it end."""
        given = self._next(worker) if worker.named is None else worker.named
        if given is not None:
            worker.running.append(given)
            worker.named = self._next(worker)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_hear` notices
            if given is not None:
                worker.channel.send((given, worker.named))
            elif not worker.running:
                worker.channel.send(None)

    def _hear(self, session: pytest.Session, worker: Worker) -> None:
        hook = session.config.hook
        try:
            said = worker.channel.recv()
        except (EOFError, ConnectionResetError):
            said = LastWords("")
        if isinstance(said, LastWords):  # outside the handler: what the next worker raises has nothing to do with this
            self._ended(session, worker, said)
            return
        current = session.items[worker.running[0]]
        if said is None:
            worker.running.popleft()
            worker.since = time.monotonic()
            hook.pytest_runtest_logfinish(nodeid=current.nodeid, location=current.location)
            self._feed(worker)
            return
        report = hook.pytest_report_from_serializable(config=session.config, data=said)
        if report.when == "setup":
            hook.pytest_runtest_logstart(nodeid=current.nodeid, location=current.location)
        hook.pytest_runtest_logreport(report=report)

    def _ended(self, session: pytest.Session, worker: Worker, words: LastWords) -> None:
        """Take note of the end of a worker. If it had a test, that has failed, and another one takes the rest."""
        del self._workers[worker.channel]
        worker.channel.close()
        status = _reap(worker.pid)
        if worker.running:
            lost = session.items[worker.running.popleft()]
            text = f"the test ended its process, with {os.waitstatus_to_exitcode(status)}\n{words.text}".rstrip()
            report = pytest.TestReport(lost.nodeid, lost.location, {}, "failed", text, "call")
            session.config.hook.pytest_runtest_logreport(report=report)
            named = [] if worker.named is None else [worker.named]
            self._start(session, worker.number, deque([*worker.running, *named, *worker.waiting]))

    def _end(self, worker: Worker) -> None:
        """Interrupt a worker, and wait until it has ended."""
        worker.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGINT)
        _reap(worker.pid)


def _reap(pid: int) -> int:
    """Wait until a worker has ended, and kill it if it takes too long; return its status."""
    until = time.monotonic() + END_SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _by_file(items: list[pytest.Item], positions: Iterable[int], is_shuffled: bool) -> Iterator[list[int]]:
    """Yield the given positions for each file, in the order in which files are dealt out."""
    places = {name: place for place, name in enumerate(FOLDERS)}

    def place_of(index: int) -> tuple[int, str]:
        folder, _, path = _path_of(items[index]).removeprefix("tests/").partition("/")
        return places.get(folder, len(places)), path or folder

    # Stable: tests of a file stay in their order.
    ordered = positions if is_shuffled else sorted(positions, key=place_of)
    for _, of_file in itertools.groupby(ordered, key=lambda index: _path_of(items[index])):
        yield list(of_file)


def _path_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


# In the workers


def _work(session: pytest.Session, number: int, channel: Connection) -> None:
    """Run tests as they are named on a channel, and end the process."""
    atexit._clear()  # what the process before the fork has registered is its own
    code = 1
    try:
        _prepare(session.config, number, channel)
        try:
            while (given := channel.recv()) is not None:
                current, after = given
                session.config.hook.pytest_runtest_protocol(
                    item=session.items[current], nextitem=None if after is None else session.items[after]
                )
                if after is None or _path_of(session.items[after]) != _path_of(session.items[current]):
                    gc.collect()
                    gc.freeze()  # what this file leaves, caches above all, is looked through no more
                channel.send(None)
        finally:
            session._setupstate.teardown_exact(None)
        code = 0
    except (EOFError, ConnectionError):  # the run is interrupted
        pass
    except BaseException:  # a signal is none of the test's, but may come from one
        with contextlib.suppress(OSError):  # the run is interrupted
            channel.send(LastWords(traceback.format_exc()))
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(config: pytest.Config, number: int, channel: Connection) -> None:
    """Give a fork what it may not share with its siblings: number, network, folder, captured output, chance."""
    gc.set_threshold(fork_server.OBJECTS_BETWEEN_COLLECTIONS)
    os.environ[VARIABLE] = f"gw{number}"
    _own_network()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folder: Path = factory.getbasetemp() / f"worker{number}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    factory._basetemp = folder
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    forked.keep_torch_server(channel)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, channel))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _own_network() -> None:
    """Move to a new network namespace with a loopback interface and one other, if the kernel lets this process.

    Nodes of two workers then do not hear each other's multicast, nor meet at a port. Without the right to do so, tests
    share the network of the host.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or shutil.which("ip") is None or libc.unshare(CLONE_NEWNET):
        return
    subprocess.run(["ip", "-batch", "-"], input=OWN_NETWORK, text=True, timeout=END_SECONDS, check=True)


class _Sender:
    """Sends the reports of a worker to the process that prints them."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config, self._channel = config, channel

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._channel.send(data)
