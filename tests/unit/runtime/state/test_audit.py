"""What nodes note: written off the event loop, bounded whatever others do, and never a reason to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import AuthError, ConnectError
from covey.net.audit import audit_reader
from covey.net.host.locks import only_one
from covey.runtime.links.acceptor import TurnedAwayError
from covey.runtime.state import audit as audit_module
from covey.runtime.state.audit import (
    MEMBERS_BURST,
    PENDING_LIMIT,
    SILENT,
    SOURCE_ENTRIES_BURST,
    STRANGERS_BURST,
    Auditor,
)
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(audit_module, "_writer", audit_module._Writer())
    monkeypatch.setattr(audit_module, "ENTRIES_FLUSH_SECONDS", DEADLINE)
    return tmp_path / "home"


def on_a_loop(work: Callable[[], None]) -> None:
    async def call() -> None:
        work()

    asyncio.run(call())


def card(number: int) -> messages.Card:
    contact = messages.Contact("h", (messages.Address("10.0.0.9", 1),), "")
    return messages.Card(number.to_bytes(32, "big"), bytes(16), f"n{number}", "host", 1, contact)


def test_noting_does_not_wait_for_the_log(home: Path) -> None:
    """Another process keeps the log locked, or the disk is slow: the loop goes on."""
    auditor = Auditor("lab", "run")
    is_locked, may_go = threading.Event(), threading.Event()

    def keep_locked() -> None:
        with only_one(home / "audit" / ".lock"):
            is_locked.set()
            may_go.wait(DEADLINE)

    holder = threading.Thread(target=keep_locked)
    holder.start()
    try:
        assert is_locked.wait(DEADLINE)
        for number in range(100):
            auditor.note("joined", card(number))
        assert list(audit_reader.entries()) == []  # all of them came back before anything could be written
    finally:
        may_go.set()
        holder.join(DEADLINE)
    auditor.flush()
    assert [entry.name for entry in audit_reader.entries()] == [f"n{number}" for number in range(100)]
    assert audit_reader.verify().problems == ()


def test_a_flood_of_one_stranger_is_a_few_entries_and_their_number_is_kept() -> None:
    auditor = Auditor("lab", "run")

    def flood() -> None:
        for _ in range(50_000):
            auditor.refused_connection("10.0.0.66", AuthError("without the key"))
        auditor.refused_connection("10.0.0.7", AuthError("another source has entries of its own"))
        auditor.close()

    on_a_loop(flood)
    auditor.flush()
    found = list(audit_reader.entries())
    assert len(found) == SOURCE_ENTRIES_BURST + 2
    assert sum(entry.count for entry in found) == 50_001
    assert [entry.address for entry in found] == [*["10.0.0.66"] * 8, "10.0.0.7", "10.0.0.66"]
    assert all(entry.event == "refused" and entry.reason.startswith("secret: ") for entry in found)


def test_a_flood_of_many_sources_is_bounded_too() -> None:
    auditor = Auditor("lab", "run")

    def flood() -> None:
        for number in range(20_000):
            auditor.refused_connection(f"10.{number >> 14}.{number >> 7 & 127}.{number & 127}", TurnedAwayError("many"))
        auditor.close()

    on_a_loop(flood)
    auditor.flush()
    found = list(audit_reader.entries())
    assert len(found) <= STRANGERS_BURST + 2
    assert sum(entry.count for entry in found) == 20_000
    assert found[-1].address == "several"


def test_what_was_left_out_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "SUMMARY_SECONDS", 0.05)
    auditor = Auditor("lab", "run")

    async def flood() -> None:
        for _ in range(100):
            auditor.refused_connection("10.0.0.66", AuthError("x"))
        assert auditor._timer is not None
        await asyncio.sleep(auditor._timer.when() - asyncio.get_running_loop().time() + 0.01)  # after that timer

    asyncio.run(flood())
    auditor.flush()
    assert sum(entry.count for entry in audit_reader.entries()) == 100


def test_a_member_that_makes_itself_key_after_key_is_bounded_and_a_large_cluster_is_noted_whole() -> None:
    auditor = Auditor("lab", "run")

    def meet() -> None:
        for number in range(int(MEMBERS_BURST) + 500):
            auditor.note_paced("met", card(number).id, card(number), address="10.0.0.5", once=True)
        auditor.close()

    on_a_loop(meet)
    auditor.flush()
    found = list(audit_reader.entries())
    assert [entry.name for entry in found[: int(MEMBERS_BURST)]] == [f"n{n}" for n in range(int(MEMBERS_BURST))]
    assert len(found) <= MEMBERS_BURST + 2
    assert sum(entry.count for entry in found) == MEMBERS_BURST + 500


def test_a_connection_that_just_ended_is_no_refusal() -> None:
    """A node that dials several addresses of another one gives up all but one."""
    auditor = Auditor("lab", "run")
    on_a_loop(lambda: auditor.refused_connection("10.0.0.1", ConnectionResetError("in mid-greeting")))
    auditor.flush()
    assert list(audit_reader.entries()) == []


@pytest.mark.parametrize(
    ("cause", "noted"),
    [
        (ConnectionResetError("in mid-handshake"), []),
        (TimeoutError(), ["silent: it did not finish the handshake in time"]),
        (OSError("the disk is full"), ["limited: no TLS handshake"]),
    ],
)
def test_a_handshake_that_failed_is_noted_by_its_cause(cause: OSError, noted: list[str]) -> None:
    auditor = Auditor("lab", "run")
    error = ConnectError("no TLS handshake")
    error.__cause__ = cause
    on_a_loop(lambda: auditor.refused_connection("10.0.0.1", error))
    auditor.flush()
    assert [entry.reason for entry in audit_reader.entries()] == noted


def test_where_there_is_no_cluster_nothing_is_noted(home: Path) -> None:
    SILENT.note("joined", card(1))
    SILENT.refused("10.0.0.1", "x")
    SILENT.flush()
    assert not home.exists()


@pytest.mark.parametrize("when", ["from the start", "later"])
def test_a_log_that_cannot_be_written_is_told_once_and_stops_nothing(
    home: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    if when == "from the start":
        home.mkdir(mode=0o700)
        (home / "audit").write_text("not a folder")
    auditors = [Auditor("lab", "run") for _ in range(3)]
    if when == "later":
        (home / "audit" / "log.jsonl").mkdir()
    for auditor in auditors:
        auditor.note("joined", card(1))
        auditor.flush()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "the audit log is not written" in said[0].getMessage()


def test_notes_wait_for_a_log_that_can_be_written_again_and_too_many_are_counted(home: Path) -> None:
    auditor = Auditor("lab", "run")
    log = home / "audit" / "log.jsonl"
    log.mkdir()
    for number in range(PENDING_LIMIT + 10):
        auditor.note("joined", card(number))
    auditor.flush()
    log.rmdir()
    auditor.note("ended", card(1))  # there is no room for this one either
    auditor.flush()
    auditor.note("left", card(2))
    auditor.flush()
    found = list(audit_reader.entries())
    assert [entry.name for entry in found[:PENDING_LIMIT]] == [f"n{number}" for number in range(PENDING_LIMIT)]
    rest = [(entry.event, entry.count) for entry in found[PENDING_LIMIT:]]
    assert rest == [("dropped", 11), ("left", 1)]


def test_a_forked_child_writes_only_what_it_noted_itself() -> None:
    code = """
import os, sys
from covey.runtime.state.audit import Auditor
auditor = Auditor("lab", "run")
auditor.note("joined", reason="parent")
child = os.fork()
if not child:
    auditor.note("joined", reason="child")
    auditor.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""  # the parent's are written when it exits
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=DEADLINE, check=True)
    assert sorted(entry.reason for entry in audit_reader.entries()) == ["child", "parent"]
