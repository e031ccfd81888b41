"""A process that has imported numpy and covey, and forks itself for each Python program that a test starts.

`tests.support.forked` starts this file as a program and sends it requests over a socket. Importing takes 0.25 s of
processor time for a rank of one host and 0.5 s for a node of a cluster; a fork takes a few milliseconds.

A forked program runs as `__main__` with the arguments, path, environment, working folder, streams, descriptors, session
and exit code that a new interpreter would give it, and shows its arguments and environment in /proc. It is a child of
the process that sent the request, which is the parent of this process, too.

A program that starts Python programs itself, such as `covey run`, gets a companion: a copy of this process, made before
the program begins, which serves the program as this process serves the test.

A process that runs tests and has imported all that programs need, torch among it, forks a server from itself, before it
starts a thread (`serve_from_here`).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not imported here
if TYPE_CHECKING:
    import socket
    from typing import Any

HIGH = 700
"""Received descriptors are moved to this number and above while the wanted numbers are taken."""
REQUEST_LIMIT = 1 << 18
DESCRIPTOR_LIMIT = 64
_CLONE_FLAGS = 0x00008000 | 0x01000000 | 0x00200000 | 17
"""CLONE_PARENT, CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID, SIGCHLD."""
OBJECTS_BETWEEN_COLLECTIONS = 5000
"""Instead of Python's 700, in programs and in workers: looking for garbage takes a twelfth of their time otherwise."""
PRELOADED = (
    "argparse",
    "covey.agent.agent",
    "covey.agent.launching",
    "covey.cli.allow",
    "covey.cli.charter",
    "covey.cli.clusters",
    "covey.cli.deny",
    "covey.cli.enroll",
    "covey.cli.init",
    "covey.cli.main",
    "covey.cli.run",
    "covey.cli.secret",
    "covey.cli.status.command",
    "covey.net.discovery.mdns",
    "covey.net.keys.secret_sources",
    "covey.net.keys.tls",
    "covey.runtime.calls.service",
    "covey.runtime.group.compression",
    "covey.runtime.group.node",
    "covey.runtime.joining.cluster_join",
    "covey.runtime.keeper.warm_start",
    "covey.wire.seal",
    "inspect",
    "logging",
    "multiprocessing",
    "numpy.random",
    "runpy",
    "shlex",
    "tempfile",
    "tests.support.forked",
    "tests.support.pipes",
    "tests.support.ranks",
    "textwrap",
    "unittest.mock",
)
"""Beside what the template process of `covey run` preloads."""


def main() -> None:
    """Serve the test; in a fork, become the program."""
    _, root, channel_number, *others = sys.argv[1:]
    own_path = sys.path[1:]  # without the folder of this file
    sys.path[:] = [f"{root}/src", root, *own_path]
    request = _serve_and_become(_preload(int(channel_number), others), own_path, _FILTERS)
    if request["finalizes"]:
        _run(request["argv"])
    else:
        _end(_code_of(request["argv"]))


def serve_from_here(channel: socket.socket, own_path: list[str]) -> None:
    """Serve the test that this process is a fork of, made before it had a second thread; in a fork, be the program.

    The caller has closed the objects that own descriptors, except `channel` and the files of logging.
    """
    import faulthandler
    import logging
    import signal
    import threading
    import warnings

    os.setsid()
    # An object that owns a descriptor is closed before its number is given to other files: pytest's log file would be
    # written into the memory that ranks share.
    for handler in [*logging.root.handlers]:
        logging.root.removeHandler(handler)
        handler.close()
    logging.root.setLevel(logging.WARNING)
    kept = channel.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, max(kept + 64, HIGH + DESCRIPTOR_LIMIT))
    faulthandler.disable()  # pytest's writes to a descriptor that is closed
    # What pytest has put in their places.
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "_pytest.assertion.rewrite"]
    warnings.resetwarnings()  # to those of a new interpreter
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category, append=True)
    request = _serve_and_become(channel, own_path, [*warnings.filters])
    code, interrupted = 1, False
    try:
        code = _code_of(request["argv"])
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        if interrupted:
            _flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        _end(code)


def _serve_and_become(channel: socket.socket, own_path: list[str], filters: list[Any]) -> dict[str, Any]:
    """Serve the test; in a fork, become the program that was asked for, and return the request."""
    import signal

    # A signal to all processes of a terminal ends the test, which closes the socket.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    request, descriptors = _serve(channel, filters)
    _become(request, descriptors, own_path)
    while request["starts_programs"] and (channel := _with_companion()) is not None:
        request, descriptors = _serve(channel, filters)
        _become(request, descriptors, own_path)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the thread blocked that started this server
    return request


def _preload(number: int, others: list[str]) -> socket.socket:
    import gc
    import importlib
    import socket
    import threading

    gc.disable()  # what is imported is no garbage
    from covey.runtime.keeper import template
    from covey.runtime.processes import libc

    for name in (*template.PRELOADED, *PRELOADED, *others):
        importlib.import_module(name)
    libc()
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, (
        "a preloaded module starts a thread, which no fork would have"
    )
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    return socket.socket(fileno=number)


def _serve(channel: socket.socket, filters: list[Any]) -> tuple[dict[str, Any], list[int]]:
    """Answer requests. Returns in the programs only; they get these filters of warnings."""
    import pickle
    import socket
    import warnings

    warnings.simplefilter("ignore")  # numpy's threads, of which there is none
    while True:
        body, descriptors, _, _ = socket.recv_fds(channel, REQUEST_LIMIT, DESCRIPTOR_LIMIT)
        if not body:
            os._exit(0)
        pid = _fork_beside()
        if pid == 0:
            channel.detach()  # the program has no use for it, and may have another file of this number
            request = pickle.loads(body)
            if os.getppid() != request["parent"]:
                os._exit(1)
            warnings.resetwarnings()
            warnings.filters[:] = filters  # type: ignore[index]
            return request, descriptors
        channel.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_beside() -> int:
    """Fork as `os.fork` does, but to a child of this process's parent: a sibling. On Linux with glibc.

    An orphan would get there, too: of a second fork, which copies the tables of all pages once more. With torch that is
    half of what it costs to start a program. This does what glibc's `fork` does, which tells the child its thread id at
    a place that glibc keeps to itself; Python has handlers for its own part.
    """
    import ctypes
    import platform

    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    place = ctypes.c_void_p(_place_of_thread_id(libc))
    number, last = {"x86_64": (56, (place, None)), "aarch64": (220, (None, place))}[platform.machine()]
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(ctypes.c_long(number), ctypes.c_long(_CLONE_FLAGS), None, None, *last))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _place_of_thread_id(libc: Any) -> int:
    """Return where glibc keeps the id of this thread, the only one: it is once among the first words of its record."""
    import ctypes

    libc.pthread_self.restype = ctypes.c_void_p
    record = libc.pthread_self()
    words = (ctypes.c_int * 512).from_address(record)
    (place,) = [index for index, word in enumerate(words) if word == os.getpid()]
    return int(record) + place * ctypes.sizeof(ctypes.c_int)


def _with_companion() -> Any:
    """Fork the companion. Return its socket there; in the program, use it for `subprocess` and return None."""
    import socket

    from tests.support import forked

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        forked.start_programs_with(ours)
        return None
    ours.detach()
    kept = theirs.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, max(kept + 64, HIGH + DESCRIPTOR_LIMIT))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    _show(["companion"], {})  # not to be taken for a program that is left behind
    return theirs


def _become(request: dict[str, Any], descriptors: list[int], own_path: list[str]) -> None:
    """Take over streams, descriptors, environment, folder and session."""
    import fcntl
    import io

    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    os.closerange(3, min(high))
    os.closerange(max(high) + 1, max(high) + 64)
    for descriptor, target in zip(high, request["targets"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    if request["new_session"]:
        os.setsid()
    if request["before"] is not None:
        request["before"]()
    _show(request["argv"], request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = given + [path for path in own_path if path not in given]  # as `site` does for paths of .pth files
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or request["argv"][1] == "-u"
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        binary = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            binary,
            encoding,
            errors,
            line_buffering=not unbuffered and (number == 2 or binary.isatty()),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if logging := sys.modules.get("logging"):
        for reference in logging._handlerList:
            if type(handler := reference()) is logging.StreamHandler:
                handler.stream = sys.stderr  # torch's was made for the stream of another process
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python's own generators do this by themselves


def _show(argv: list[str], env: dict[str, str]) -> None:
    """Write arguments and environment where /proc and `ps` read them, into the memory of those of this process."""
    import ctypes

    with open("/proc/self/stat") as file:
        places = [int(word) for word in file.read().rpartition(")")[2].split()[45:49]]
    texts = (map(os.fsencode, argv), (os.fsencode(f"{name}={value}") for name, value in env.items()))
    for start, end, words in zip(places[::2], places[1::2], texts, strict=True):
        text = b"".join(word + b"\0" for word in words)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _code_of(argv: list[str]) -> int:
    """Run a program; return its exit code. An error or Ctrl-C passes through, for the interpreter to end with."""
    try:
        _run(argv)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    return 0


def _end(code: int) -> None:
    """End the process as the interpreter does, but leave its memory to the kernel.

    Taking the modules of a fork apart copies every page that it shares with its siblings: more than half of what a
    short program costs, and 0.2 s with torch. So does what torch takes back of its operators.
    """
    import atexit
    import threading
    import weakref

    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        if info.func.__module__ == "torch.library":
            info.atexit = False
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    _flush()
    os._exit(code & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _run(argv: list[str]) -> None:
    """Run a program as `__main__`, as the interpreter does with these arguments."""
    sys.orig_argv = argv
    if argv[1] == "-u":
        argv = [argv[0], *argv[2:]]
    if argv[1] == "-m":
        import runpy

        sys.path.insert(0, os.getcwd())
        sys.argv = argv[1:2] + argv[3:]
        sys.modules.pop(argv[2], None)  # the program becomes it
        runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined]
    elif argv[1] == "-c":
        import builtins
        import types

        sys.path.insert(0, "")
        sys.argv = argv[1:2] + argv[3:]
        program = sys.modules["__main__"] = types.ModuleType("__main__")
        vars(program).update(__builtins__=builtins)
        exec(compile(argv[2], "<string>", "exec", dont_inherit=True), vars(program))
    else:
        from covey.runtime.keeper.template import run_as_main

        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[1])))
        sys.argv = argv[1:]
        run_as_main(argv[1])


if __name__ == "__main__":
    import warnings as _warnings

    _FILTERS = [*_warnings.filters]
    main()
