"""What a node promised, and what its machine knows of the run, is on disk, whole, through crashes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import forked, pipes
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.proto.ballot import first_record
from covey.runtime.joining.records import Records
from covey.runtime.views.view_driver import ViewDriver
from covey.wire import messages
from covey.wire.formation import Ending, KnownLineage, Remembered, new_lineage
from covey.wire.membership import Bound, MemberKey, Record, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.proto.changes import QuorumAwaited, QuorumLost

LINEAGE = b"l" * 16
IDS = [bytes([number]) * 32 for number in (1, 2, 3)]
LIVES = [bytes([number]) * 16 for number in (11, 12, 13)]
SEATS = [MemberKey(id, life) for id, life in zip(IDS, LIVES, strict=True)]
FIRST = first_record(SEATS, LINEAGE)
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow; a mode would not keep root from writing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(home: Path) -> list[Path]:
    return sorted((home / "runs").iterdir())


# On the disk


def test_what_was_written_last_is_read_by_the_same_node_of_the_same_run_only(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    assert records.read() is None
    later = Record(FIRST.members, View(LINEAGE, 3, (0, 2), 2), 7, 5, View(LINEAGE, 4, (2,), 2))
    records.write(Bound(0, FIRST, LINEAGE))
    records.write(Bound(4, later, LINEAGE, 2))
    assert Records("lab", "mine", IDS[0]).read() == Bound(4, later, LINEAGE, 2)
    for others in (("lab", "mine", IDS[1]), ("lab", "yours", IDS[0]), ("den", "mine", IDS[0])):
        assert Records(*others).read() is None
    (path,) = files(home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_node_that_is_bound_to_nothing_any_more_leaves_no_file(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    records.write(None)
    records.write(Bound(0, FIRST, LINEAGE))
    records.write(None)
    records.write(None)
    assert records.read() is None
    assert files(home) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"\xff" + data[1:]])
def test_a_damaged_record_is_named_and_nothing_is_made_of_it(home: Path, damage: Callable[[bytes], bytes]) -> None:
    records = Records("lab", "mine", IDS[0])
    records.write(Bound(2, FIRST, LINEAGE))
    (path,) = files(home)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{path} is damaged \(.+\); remove it"):
        records.read()


def test_a_record_that_others_may_read_or_change_is_refused(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    records.write(Bound(2, FIRST, LINEAGE))
    (path,) = files(home)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod 600"):
        records.read()


def test_on_a_full_disk_the_error_says_what_to_do_and_the_last_record_stays(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    records.write(Bound(2, FIRST, LINEAGE))
    expected = r"cannot write .*: File too large; make room, or set COVEY_HOME elsewhere"
    with full_disk(), pytest.raises(ConfigError, match=expected):
        records.write(Bound(3, FIRST, LINEAGE))
    assert records.read() == Bound(2, FIRST, LINEAGE)
    assert len(files(home)) == 1


def test_a_place_that_is_no_folder_is_named(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "runs").write_text("in the way")
    for use in (lambda it: it.read(), lambda it: it.write(Bound(0, FIRST, LINEAGE))):
        with pytest.raises(ConfigError, match=f"{home / 'runs'} is not a folder"):
            use(Records("lab", "mine", IDS[0]))


def test_a_writer_that_is_killed_leaves_one_whole_record(home: Path) -> None:
    code = """
import sys
from covey.proto.ballot import first_record
from covey.runtime.joining.records import Records
from covey.wire.membership import Bound, MemberKey
records, number = Records("lab", "mine", b"1" * 32), 0
while True:
    seats = [MemberKey(bytes([1 + rank]) * 32, bytes([1 + number % 200]) * 16) for rank in range(1 + number % 100)]
    records.write(Bound(number, first_record(seats, b"l" * 16), b"l" * 16))
    number += 1
    if number > 3:
        print(number, flush=True)
"""
    records = Records("lab", "mine", b"1" * 32)
    for _ in range(3):
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        with forked.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as writer:
            try:
                said = int(pipes.stdout(writer).readline())
            finally:
                writer.kill()
        bound = records.read()
        assert bound is not None
        assert bound.generation >= said - 1
        assert len(bound.record.members) == 1 + bound.generation % 100
        assert bound.record.members[0].life == bytes([1 + bound.generation % 200]) * 16


# Lineages, of the whole machine


def lineage(number: int) -> bytes:
    return new_lineage(float(number), b"r" * 10)


def test_all_nodes_of_a_machine_know_the_lineages_that_one_of_them_learned_of(home: Path) -> None:
    one, other = Records("lab", "mine", IDS[0]), Records("lab", "mine", IDS[1])
    assert one.lineages() == Remembered()
    one.remember(Remembered((KnownLineage(lineage(5), ("a", "b")),)))
    other.remember(Remembered((KnownLineage(lineage(6), ()),), (Ending(lineage(1), True),)))
    for records in (one, other):
        known = records.lineages()
        assert {each.lineage: each.names for each in known.open} == {lineage(5): ("a", "b"), lineage(6): ()}
        assert known.ended == (Ending(lineage(1), True),)
    one.remember(Remembered((), (Ending(lineage(6), False),)))
    assert [each.lineage for each in other.lineages().open] == [lineage(5)]
    assert Records("lab", "yours", IDS[0]).lineages() == Remembered()
    assert Records("den", "mine", IDS[0]).lineages() == Remembered()


def test_a_person_gives_up_what_may_be_going_on_and_keeps_what_is_over(home: Path) -> None:
    records = Records("lab", "mine", b"")
    assert records.forget_lineages() == {}
    records.remember(Remembered((KnownLineage(lineage(5), ("a",)),), (Ending(lineage(1), True),)))
    assert records.forget_lineages() == {lineage(5): ("a",)}
    assert records.lineages() == Remembered((), (Ending(lineage(1), True),), (lineage(5),))
    records.remember(Remembered((KnownLineage(lineage(5), ("a",)),)))
    assert [each.lineage for each in records.lineages().open] == [lineage(5)], "it was heard of again"
    assert records.lineages().given_up == (lineage(5),)


def test_a_damaged_record_of_lineages_is_named(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    records.remember(Remembered((KnownLineage(lineage(5), ()),)))
    (path,) = (home / "runs").glob("*.lineages")
    path.write_bytes(b"?" + path.read_bytes())
    with pytest.raises(ConfigError, match=rf"{path} is damaged"):
        records.lineages()


# Members


class Assembly:
    """The members of a run, whose messages reach each other at once."""

    def __init__(self) -> None:
        self.here: dict[int, RecordingMember] = {}
        self.news = asyncio.Event()

    def send(self, sender: int, rank: int, message: messages.Agreeing) -> None:
        member = self.here[rank]
        asyncio.get_running_loop().call_soon(member.view_driver.received, sender, message.body)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self.news.clear()
                await self.news.wait()


class RecordingMember:
    """A member with no operations, that writes down what it promises."""

    def __init__(self, assembly: Assembly, rank: int, record: Record = FIRST, **options: Any) -> None:
        self._assembly, self._rank = assembly, rank
        self.records = Records("lab", "mine", IDS[rank])
        self.views: list[View] = []
        self.error: Exception | None = None
        store = lambda record: self.records.write(Bound(0, record, LINEAGE))  # noqa: E731
        self.view_driver = ViewDriver(0, record, rank, LIVES[rank], self, store=store, **options)
        assembly.here[rank] = self

    def send(self, rank: int, message: messages.Control, *, wakes: bool) -> None:
        assert isinstance(message, messages.Agreeing)
        self._assembly.send(self._rank, rank, message)

    def freeze(self, number: int) -> tuple[()]:
        return ()

    def accepted(self) -> None:
        pass

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        self.views.append(view)
        self._assembly.news.set()

    def excluded(self, view: View) -> None:
        raise AssertionError(f"was put out by {view}")

    def waiting(self, effect: QuorumAwaited) -> None: ...

    def quorum_lost(self, effect: QuorumLost) -> None:
        raise AssertionError(effect)

    def failed(self, error: Exception) -> None:
        self.error = error
        self._assembly.news.set()


def gather(count: int, **options: Any) -> tuple[Assembly, list[RecordingMember]]:
    """Return members that are linked with each other."""
    assembly = Assembly()
    record = first_record(SEATS[:count], LINEAGE)
    members = [RecordingMember(assembly, rank, record, **options) for rank in range(count)]
    for member in members:
        for rank in range(count):
            if members[rank] is not member:
                member.view_driver.link_up(rank, LIVES[rank])
    return assembly, members


def test_a_member_that_cannot_write_a_promise_down_gives_none_and_takes_no_more_part(home: Path) -> None:
    async def scenario() -> None:
        assembly, members = gather(3, patience=1.0)
        (home / "runs").rename(home / "moved")
        (home / "runs").write_text("in the way")
        members[0].view_driver.disturbed(0)
        await assembly.until(lambda: members[0].error is not None)
        assert isinstance(members[0].error, ConfigError)
        assert "is not a folder" in str(members[0].error)
        assert all(member.views == [] for member in members)
        for member in members:
            member.view_driver.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
