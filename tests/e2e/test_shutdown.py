"""Orderly shutdown of real processes: closers in reverse order with deadlines, and calls that have begun finish."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from tests.support.ranks import Ranks, await_go, covey, say, threading
from tests.support.waiting import DEADLINE


def serve() -> str:
    group = covey.join()
    begun = threading.Event()

    @group.node.rpc
    def slow(seconds: float) -> str:
        begun.set()
        time.sleep(seconds)
        order.append("call")
        return "finished"

    order: list[str] = []
    covey.on_shutdown(lambda: say("closed", order=order, size=group.size))  # the first one runs last

    @covey.on_shutdown(timeout=0.2)
    def hang() -> None:
        order.append("hang")
        time.sleep(600)

    @covey.on_shutdown
    def fail() -> None:
        order.append("fail")
        raise ValueError("as always")

    @covey.on_shutdown
    def again() -> None:
        order.append("again")
        covey.shutdown()  # from a closer: returns at once

    group.barrier()
    if group.rank == 0:
        call = group.node.call_async(1, "slow", 1.0)
        say("calling")
        result = str(call.wait())
        try:  # it refuses new calls, and is gone soon
            group.node.call(1, "slow", 0.0, timeout=500)
        except (covey.ClosedError, covey.PeerLostError) as error:
            result += f", then {type(error).__name__}"
        say("returned", result=result)
        await_go()
    else:
        begun.wait()
        say("serving")
        time.sleep(600)
    return ""


def test_a_process_that_is_told_to_end_closes_in_order_and_finishes_its_calls() -> None:
    with Ranks(2, serve, lanes="unix") as ranks:
        ranks.hear("serving", [1])
        ranks.signal(1, signal.SIGTERM)
        (closed,) = ranks.hear("closed", [1])
        assert [each for each in closed["order"] if each != "call"] == ["again", "fail", "hang"]
        assert "call" in closed["order"], "it has ended before the last closer ran"
        assert closed["size"] == 2
        assert ranks.results([0])[0].startswith("finished, then ")
        ranks.await_exit([1], code=143)
        errors = ranks.errors(1)
        assert "ValueError: as always" in errors
        assert "hang did not end within 0.2 s; the shutdown continues without it" in errors


PROGRAM = """
import covey, signal, sys, time
{before}
group = covey.join()
covey.on_shutdown(lambda: print("first", flush=True))
covey.on_shutdown(lambda: print("second", group.barrier(), flush=True))
print("ready", flush=True)
{then}
"""


WRITING = """
import covey, logging, os, signal, sys, threading
covey.on_shutdown(lambda: print("closed", flush=True))
covey.on_shutdown(lambda: logging.warning("closing"))
logging.basicConfig(stream=sys.stdout, format="%(message)s")

def format(record):
    if record.msg == "text":  # the lock of the log is held now
        os.kill(os.getpid(), signal.{signal})
    return record.getMessage()

logging.root.handlers[0].format = format
logging.warning("text")
threading.Event().wait()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", -2), ("SIGTERM", 143)])
def test_a_signal_that_interrupts_writing_keeps_no_closer_from_writing(name: str, code: int) -> None:
    command = [sys.executable, "-c", WRITING.format(signal=name)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert (ended.returncode, ended.stdout) == (code, "text\nclosing\nclosed\n"), ended.stderr
    assert "did not end within" not in ended.stderr


@pytest.mark.parametrize(
    ("before", "then", "signum", "code"),
    [
        ("", "", None, 0),
        ("", "covey.shutdown(); covey.shutdown()", None, 0),
        ("", "time.sleep(600)", signal.SIGINT, -2),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))", "time.sleep(600)", signal.SIGTERM, 5),
    ],
    ids=["at-exit", "called-twice", "ctrl-c", "own-handler"],
)
def test_closers_run_once_however_a_process_ends(before: str, then: str, signum: int | None, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(before=before, then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            if signum is not None:
                program.send_signal(signum)
            program.wait(DEADLINE)
            assert program.stdout.read() == "second None\nfirst\n"  # `communicate` would miss what was read ahead
            assert program.returncode == code
        finally:
            program.kill()
