"""The template process: it imports what ranks need once, and each rank is a fork of it.

`keeper/warm_start.py` starts this file as a program and talks to it over a socket. Importing numpy and covey takes
longer than everything else that a rank does to join, so doing it once makes a run with more ranks than cores start
quickly.

Invariant: a rank cannot tell the difference. The script runs as `__main__` with the arguments, path, environment,
standard streams, signals, session and exit code that `python SCRIPT` would give it. If importing does anything that a
fork does not inherit (starts a thread, opens a file, prints), the template ends, and ranks are started one by one.

Only `os` and `sys` are imported at the top: Python has loaded both before `sys.path` is set.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from types import CodeType, TracebackType
    from typing import Any

CHANNEL_VARIABLE = "COVEY_TEMPLATE_FD"
"""Holds the descriptor of the socket to the keeper."""
REQUEST_LIMIT = 1 << 16
STANDARD_STREAMS = 3
"""A request carries standard input, output and error, then the descriptor of a secret."""
PRELOADED = (
    "numpy",
    "covey.runtime.joining.bootstrap",
    "covey.runtime.joining.generations",
    "covey.runtime.joining.launched_links",
    "covey.runtime.messages.messenger",
    "covey.runtime.calls.serve",
    "covey.runtime.joining.node",
    "covey.runtime.collectives.atomic",
    "covey.runtime.collectives.native_executor",
    "covey.net.lanes.native",
    "covey.runtime.group.restore",
    "covey.runtime.peers.launched_endpoint",
)
"""Together with their imports: what a rank loads until its first operation."""


def main() -> None:
    """Serve the keeper; in a fork, run the script. `sys.argv` is this file, the script and its arguments."""
    script = sys.argv[1]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # before imports: the script may have its own numpy
    import signal

    # A signal to all processes of a service must not end the template, because its ranks would die with it. A forked
    # rank gets blocked signals once it unblocks them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    import socket

    with socket.socket(fileno=int(os.environ.pop(CHANNEL_VARIABLE))) as channel:
        if not _preload(channel):
            return
        request, descriptors = _serve(channel)
        _take_over(request, channel)
    _redirect(request, descriptors)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    del sys.argv[0]
    sys.orig_argv = [sys.executable, *sys.argv]
    run_as_main(script)


def _preload(channel: socket.socket) -> bool:
    """Import what ranks need; tell whether a fork is equivalent to a process that imported it itself."""
    import gc
    import importlib
    import threading

    before = _open_descriptors()
    for name in PRELOADED:
        importlib.import_module(name)
    from covey.base.lane_kinds import LANE_KINDS
    from covey.base.native import native
    from covey.runtime.lanes.opener import opener_class
    from covey.runtime.processes import libc

    for kind in LANE_KINDS.values():
        opener_class(kind)
    native()
    libc()
    if threading.active_count() > 1 or _open_descriptors() != before:
        return False
    gc.collect()
    gc.freeze()  # else the first collection in each rank would copy shared pages
    channel.sendall(b"ready")
    return True


def _open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a rank for every request, and report ended ranks to the keeper. Returns only in a rank."""
    import json
    import select
    import signal
    import socket
    import warnings

    keeper = os.getppid()
    ranks: dict[int, int] = {}
    """By pidfd, which is readable once the process has ended: the pid."""
    events = select.poll()
    events.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in events.poll():
            if descriptor in ranks:
                pid = ranks.pop(descriptor)
                events.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                channel.sendall(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
                if os.getppid() == keeper:
                    os.kill(keeper, signal.SIGCHLD)  # as its parent would get it
                continue
            body, descriptors, _, _ = socket.recv_fds(channel, REQUEST_LIMIT, STANDARD_STREAMS + 1)
            if not body:
                os._exit(0)  # the keeper has closed the socket
            with warnings.catch_warnings():
                # The warning is about threads of numpy's libraries, which stop before a fork and restart when needed.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                return json.loads(body), descriptors
            for received in descriptors:
                os.close(received)
            watched = os.pidfd_open(pid)
            ranks[watched] = pid
            events.register(watched, select.POLLIN)


def _take_over(request: dict[str, Any], channel: socket.socket) -> None:
    """Start a session, die with the template, and tell the keeper, which may send signals from now on."""
    import json

    from covey.runtime.processes import die_with

    os.setsid()
    die_with(request["parent"])
    channel.sendall(json.dumps({"forked": os.getpid()}).encode())


def _redirect(request: dict[str, Any], descriptors: list[int]) -> None:
    """Set the streams, the environment and the random seeds of a forked rank."""
    import contextlib

    os.environ.update(request["variables"])
    kept = set(range(STANDARD_STREAMS))
    if request["secret"]:
        kept.add(secret := descriptors[STANDARD_STREAMS])
        os.set_inheritable(secret, True)
        os.environ[request["secret"]] = str(secret)
    for target, received in enumerate(descriptors[:STANDARD_STREAMS]):
        os.dup2(received, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.close(int(name))
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # Python's own generator does this after a fork


def run_as_main(script: str) -> None:
    """Run a Python script as `python SCRIPT` does, and end the process in the same way."""
    import builtins
    import importlib.machinery
    import types

    path = script if os.path.isabs(script) else f"{os.getcwd()}/{script}"
    program = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(program).update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None)
    if sys.version_info < (3, 14):
        program.__annotations__ = {}
    sys.modules["__main__"] = program
    code: CodeType | None = None
    failure: BaseException | None = None
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, vars(program))
    except SystemExit:
        raise
    except BaseException as error:
        failure = error
    if failure is not None:  # outside of `except`: else hooks would see it as the context of their own errors
        failure.__traceback__ = _within(code, failure.__traceback__)
        _show(failure)
        sys.excepthook = lambda *_: None  # already shown; raising it sets the exit code
        raise failure


def _within(code: CodeType | None, traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with this code."""
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    return traceback


def _show(error: BaseException) -> None:
    """Show an unhandled error, as the interpreter would."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    of_hook: BaseException | None = None
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as another:
        of_hook = another
    if of_hook is not None:
        sys.stderr.write("Error in sys.excepthook:\n")
        if of_hook.__traceback__ is not None:
            of_hook.__traceback__ = of_hook.__traceback__.tb_next
        sys.__excepthook__(type(of_hook), of_hook, of_hook.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


if __name__ == "__main__":
    main()
