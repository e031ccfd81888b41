"""A run on several machines as its terminal sees it: output, signals, failures and the exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE, wait_until

from covey.agent import shares
from covey.agent.screen import JsonScreen, Screen
from covey.agent.shares import Printed, Report, Said, SharedRun, ShareEnded, failure_code
from covey.runtime.keeper.output import RankLogs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class ScriptedShare:
    """A share that reports what a test has written down, and ends when it gets a signal."""

    def __init__(self, name: str, *reports: Report, on_signal: dict[int, Report] | None = None) -> None:
        self.name, self.signals, self.began = name, list[int](), threading.Event()
        self._reports, self._on_signal = reports, on_signal
        self._ends: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def run(self, report: Callable[[Report], None]) -> None:
        self.began.set()
        for each in self._reports:
            report(each)
        if self._on_signal is not None:
            report(self._ends.get(timeout=DEADLINE))

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)
        if self._on_signal and signum in self._on_signal:
            self._ends.put(self._on_signal[signum])


def test_lines_of_machines_do_not_mix_and_notes_name_their_machine(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.show("north", 1, b"[north 0] st")
    screen.show("south", 1, b"[south 1] one\n[south 1] tw")
    screen.show("north", 1, b"ep 1\n")
    screen.show("north", 2, b"covey: [north 0] failed with exit code 7\n")
    screen.show("north", 2, b"error: there is no folder\nssh: no\n\nconnect")
    screen.show("north", 2, b"ion\n")
    screen.ended("south")
    shown = capfd.readouterr()
    assert shown.out == "[south 1] one\n[north 0] step 1\n[south 1] tw\n"
    notes = "covey: north: [north 0] failed with exit code 7\n"
    assert shown.err == notes + "[north] error: there is no folder\n[north] ssh: no\n\n[north] connection\n"


def test_a_signal_for_all_machines_is_said_once_and_programs_read_lines_of_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = b"covey: SIGTERM: stopping\xe2\x80\xa6\n"
    for screen in (Screen(), JsonScreen(RankLogs(str(tmp_path / "logs")))):
        screen.show("north", 2, said)
        screen.note_for_all("SIGTERM: stopping…")
        for machine in ("north", "south"):
            screen.show(machine, 2, b"covey: another note\n" + said)
            screen.show(machine, 1, f"[{machine} 1] a \x1b[1mword".encode())
        screen.ended("north")
        screen.end(143, "stopped by SIGTERM")
        shown = capfd.readouterr()
        if not isinstance(screen, JsonScreen):
            assert shown.err.count("stopping…") == 2, "that of another terminal before, and its own"
            assert shown.err.count("another note") == 2
            continue
        assert shown.err == ""
        events = [json.loads(line) for line in shown.out.splitlines()]
        assert all(abs(event.pop("at") - time.time()) < DEADLINE for event in events)
        assert events == [
            {"event": "note", "machine": "north", "text": "SIGTERM: stopping…"},
            {"event": "note", "text": "SIGTERM: stopping…"},
            *({"event": "note", "machine": name, "text": "another note"} for name in ("north", "south")),
            {"event": "output", "machine": "north", "rank": 1, "stream": "stdout", "text": "a \x1b[1mword"},
            {"event": "ended", "code": 143, "reason": "stopped by SIGTERM"},
        ]
        assert (tmp_path / "logs" / "north-rank-1.log").read_text().startswith("a ")


def test_each_rank_has_a_log_file_without_the_prefix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(RankLogs(str(tmp_path / "logs")))
    screen.show("north-ab12", 1, b"[north 0] a\n[north 10] b\n[north] waiting\n[north 0] ")
    screen.show("north-ab12", 2, b"covey: a note\n[../../x 3] c\n")
    screen.show("north-ab12", 1, b"z\n")
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == {
        "north-rank-0.log": "a\nz\n",
        "north-rank-10.log": "b\n",
        "north.log": "waiting\n",
        "north-ab12.log": "covey: north-ab12: a note\n",
        "_.._x-rank-3.log": "c\n",
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "logs"]


def test_a_run_that_succeeds_everywhere_shows_its_output_and_returns_0(capfd: pytest.CaptureFixture[str]) -> None:
    parts = [ScriptedShare(name, Printed(1, f"[{name}] x\n".encode()), Said("hello"), ShareEnded(0)) for name in "ab"]
    assert SharedRun(parts, Screen(), lambda: False).attend() == 0
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[a] x", "[b] x"]
    assert sorted(shown.err.splitlines()) == ["covey: a: hello", "covey: b: hello"]


def test_after_a_failure_the_others_are_stopped_unless_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "FAILURE_SECONDS", 0.01)
    waiting = ScriptedShare("waits", on_signal={signal.SIGTERM: ShareEnded(143)})
    assert SharedRun([ScriptedShare("fails", ShareEnded(7)), waiting], Screen(), lambda: False).attend() == 7
    assert waiting.signals == [signal.SIGTERM]

    surviving = ScriptedShare("survives", on_signal={})
    asked: list[int] = []

    def goes_on() -> bool:
        asked.append(1)
        surviving._ends.put(ShareEnded(0))
        return True

    assert SharedRun([ScriptedShare("fails", ShareEnded(7)), surviving], Screen(), goes_on).attend() == 7
    assert surviving.signals == []
    assert asked


def test_a_machine_that_was_lost_is_no_failure_of_a_run_that_finishes_without_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shares, "FAILURE_SECONDS", 0.01)
    lost = ShareEnded(1, "the agent was restarted", is_lost=True)
    for end, code in ((0, 0), (7, 7)):
        other = ScriptedShare("south", on_signal={})

        def goes_on(other: ScriptedShare = other, end: int = end) -> bool:
            other._ends.put(ShareEnded(end))
            return True

        assert SharedRun([ScriptedShare("north", lost), other], Screen(), goes_on).attend() == code
    assert "covey: the run finished without north\n" in capfd.readouterr().err

    stopped = ScriptedShare("south", on_signal={signal.SIGTERM: ShareEnded(0)})
    assert SharedRun([ScriptedShare("north", lost), stopped], Screen(), lambda: False).attend() == 1, "it did not go on"
    assert SharedRun([ScriptedShare("north", lost)], Screen(), lambda: False).attend() == 1, "no machine finished it"


def test_the_exit_code_is_that_of_the_cause_not_of_ranks_that_lost_a_peer() -> None:
    assert failure_code([]) == 0
    assert failure_code([1, 1]) == 1
    assert failure_code([1, 7, 9]) == 7
    assert failure_code([139, 1]) == 139


@pytest.mark.parametrize(
    ("sent", "end", "code"),
    [(signal.SIGINT, 130, 130), (signal.SIGTERM, 143, 143), (signal.SIGTERM, 0, 0), (signal.SIGHUP, 129, 129)],
)
def test_a_signal_is_passed_on_to_all_machines_and_decides_the_exit_code(sent: int, end: int, code: int) -> None:
    parts = [ScriptedShare(name, Said("ready"), on_signal={sent: ShareEnded(end)}) for name in "abc"]
    before = signal.getsignal(sent)

    def send() -> None:
        parts[-1].began.wait(DEADLINE)
        os.kill(os.getpid(), sent)

    threading.Thread(target=send).start()
    assert SharedRun(parts, Screen(), lambda: False).attend() == code
    assert [part.signals for part in parts] == [[sent]] * 3
    assert signal.getsignal(sent) == before


def test_a_second_ctrl_c_is_passed_on_too_and_a_third_leaves() -> None:
    stubborn = ScriptedShare("a", on_signal={})

    def has_passed_on(count: int) -> bool:
        return len(stubborn.signals) == count

    def press() -> None:
        stubborn.began.wait(DEADLINE)
        for pressed in range(3):
            wait_until(functools.partial(has_passed_on, pressed))  # else two of them would be one
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    assert SharedRun([stubborn], Screen(), lambda: False).attend() == 130
    assert stubborn.signals[:2] == [signal.SIGINT] * 2
    stubborn._ends.put(ShareEnded(130))


def test_ctrl_c_that_the_kernel_gives_to_another_thread_is_passed_on() -> None:
    part = ScriptedShare("a", on_signal={signal.SIGINT: ShareEnded(130)})

    def waits() -> bool:
        return sys._current_frames()[main].f_code.co_name == "attend"

    def press() -> None:
        part.began.wait(DEADLINE)
        for _ in range(5):
            wait_until(waits)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    main = threading.get_ident()
    threading.Thread(target=press).start()
    assert SharedRun([part], Screen(), lambda: False).attend() == 130
    assert part.signals == [signal.SIGINT]


def test_ctrl_c_is_passed_on_while_the_terminal_takes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        screen = Screen()
        with monkeypatch.context() as patched:
            write, select_ = os.write, select.select
            patched.setattr(os, "write", lambda stream, data: write(writing if stream == 1 else stream, data))
            patched.setattr(
                select, "select", lambda r, w, x, t: select_(r, [writing if s == 1 else s for s in w], x, t)
            )
            part = ScriptedShare("a", Printed(1, b"stuck\n"), on_signal={signal.SIGINT: ShareEnded(130)})
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Timer(1.0, lambda: os.read(reading, 1 << 16)).start()
            assert SharedRun([part], screen, lambda: False).attend() == 130
            assert part.signals == [signal.SIGINT]
    finally:
        os.close(reading)
        os.close(writing)


def test_a_flood_of_output_waits_for_the_screen() -> None:
    most, lock = [0], threading.Lock()
    waiting = [0]

    class Flooding(ScriptedShare):
        def run(self, report: Callable[[Report], None]) -> None:
            for _ in range(1000):
                with lock:
                    waiting[0] += 1
                    most[0] = max(most[0], waiting[0])
                report(Printed(1, b"x"))
            report(ShareEnded(0))

    class Slow(Screen):
        def show(self, machine: str, stream: int, data: bytes, at: float = 0.0) -> None:
            with lock:
                waiting[0] -= 1

    assert SharedRun([Flooding("a")], Slow(), lambda: False).attend() == 0
    assert most[0] <= shares.BACKLOG_REPORTS + 2
