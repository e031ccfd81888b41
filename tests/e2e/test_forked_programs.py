"""A program that tests fork finds itself as one that is executed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.runtime.processes import die_with

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only")

LOOK = """
import json, os, signal, sys, threading
descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
told = {
    "argv": sys.argv,
    "arguments shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "environment shown": sorted(open("/proc/self/environ").read().rstrip(chr(0)).split(chr(0))),
    "buffered": [stream.line_buffering for stream in (sys.stdout, sys.stderr)] + [sys.stdout.write_through],
    "descriptors": [[number, os.get_inheritable(number)] for number in descriptors],
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "file": globals().get("__file__"),
    "folder": os.getcwd(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "name": __name__,
    "parent": os.getppid(),
    "path": sys.path,
    "signals": {int(each): str(signal.getsignal(each)).partition(" at ")[0] for each in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": threading.active_count(),
    "input": sys.stdin.read(),
}
print(json.dumps(told))
sys.exit(7)
"""

OWNERS = """
import gc, io, logging, multiprocessing.connection, socket
gc.unfreeze()
owners = []
for each in gc.get_objects():
    if issubclass(type(each), (io.FileIO, multiprocessing.connection.Connection)):
        owns = not each.closed and getattr(each, "closefd", True)
    else:
        owns = issubclass(type(each), socket.socket) and each.fileno() >= 0
    if owns:
        owners.append(f"{type(each).__name__} {each.fileno()} {getattr(each, 'name', '')}")
print(owners, logging.root.handlers, logging.root.level)
"""
"""Shows the objects that own a descriptor: a new program has none. Logging would write, the collector would close."""


def look(module: Any, argv: list[str], **options: Any) -> Any:
    given, held = os.pipe()
    try:
        done = module.run(
            [sys.executable, *argv], input="words", capture_output=True, text=True, pass_fds=[given],
            start_new_session=True, preexec_fn=functools.partial(die_with, os.getpid()), timeout=DEADLINE, **options,
        )  # fmt: skip
    finally:
        os.close(given)
        os.close(held)
    assert (done.returncode, done.stderr) == (7, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("how", ["file", "-c", "-m"])
def test_a_forked_program_finds_what_an_executed_one_finds(how: str, unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    argv = {"file": ["look.py"], "-c": ["-c", LOOK], "-m": ["-m", "look"]}[how] + ["a", "b c"]
    env = {**os.environ, "PYTHONPATH": f"/nowhere{os.pathsep}{forked.ROOT / 'src'}", "HERE": "yes"}
    env |= {"PYTHONUNBUFFERED": unbuffered}
    ways = [look(module, argv, cwd=tmp_path, env=env) for module in (forked, subprocess)]
    assert ways[0] == ways[1]


def test_a_program_forked_from_the_process_of_the_tests_finds_what_an_executed_one_finds(tmp_path: Path) -> None:
    if not forked.has_torch_server():
        pytest.skip("this process has not imported torch")
    (tmp_path / "look.py").write_text(LOOK)
    env = {**os.environ, "PYTHONPATH": f"/nowhere{os.pathsep}{forked.ROOT / 'src'}"}
    filters = "import warnings; print([(each[0], each[2]) for each in warnings.filters])"
    code = f"import logging, torch; logging.getLogger('torch').warning('told'); {filters}"
    for argv in (["look.py", "a"], ["-c", LOOK, "a"], ["-m", "look", "a"]):
        forked_one = look(forked, argv, cwd=tmp_path, env=env, popen=forked.TorchPopen)
        executed = look(subprocess, argv, cwd=tmp_path, env=env)
        for name in ("arguments shown", "environment shown"):  # there is room for the beginning only
            del forked_one[name], executed[name]
        assert forked_one == executed
    done = forked.run(
        [sys.executable, "-c", code], capture_output=True, text=True, popen=forked.TorchPopen, timeout=DEADLINE
    )
    assert (done.returncode, done.stderr.count("told")) == (0, 1), done.stderr
    plain = subprocess.run([sys.executable, "-c", filters], capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == plain.stdout


def test_no_object_in_a_forked_program_owns_a_descriptor_that_the_program_does_not_have() -> None:
    """Its number is given to another file: what pytest logs would be written into memory that ranks share."""
    own_server = [forked.TorchPopen] if forked.has_torch_server() else []
    for popen in (forked.Popen, *own_server, subprocess.Popen):
        with popen(
            [sys.executable, "-c", OWNERS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as program:
            assert program.communicate(timeout=DEADLINE) == ("[] [] 30\n", None), popen


def test_a_forked_program_has_its_parents_environment_and_folder_by_default() -> None:
    code = "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"
    told = [
        json.loads(module.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE).stdout)
        for module in (forked, subprocess)
    ]
    for environment, _ in told:
        for name in ("LC_CTYPE", "COLUMNS", "LINES"):  # libraries set these without Python's knowledge
            environment.pop(name, None)
    assert sorted(told[0][0].items()) == sorted(told[1][0].items())
    assert told[0][1] == told[1][1]


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import sys; sys.exit('words')", 1, "words"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_a_forked_program_ends_as_an_executed_one(code: str, status: int, said: str) -> None:
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr.strip().splitlines()[-1:]) == (status, [said] if said else [])


def test_forked_programs_differ_in_the_order_of_sets_and_in_chance() -> None:
    code = (
        "import random, numpy, ssl; print(hash('a'), random.random(), numpy.random.random(), ssl.RAND_bytes(8).hex())"
    )
    told = [forked.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() for _ in range(3)]
    assert len({words[0] for words in told}) == forked.SERVERS
    assert [len({words[place] for words in told}) for place in (1, 2, 3)] == [3, 3, 3]


def test_the_first_thread_of_a_forked_program_can_be_found_by_others() -> None:
    code = """
import os, signal, sys, threading, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
assert threading.get_native_id() == os.getpid()
main = threading.get_ident()
assert time.clock_gettime(time.pthread_getcpuclockid(main)) >= 0
threading.Thread(target=lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
time.sleep(500)
"""
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (5, "")
