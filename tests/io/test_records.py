"""What a node promised is on its disk, whole, through crashes; and its next life votes by it."""

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

from covey.base.errors import ConfigError
from covey.proto.ballot import first_record
from covey.runtime.council import Council
from covey.runtime.records import Records
from covey.runtime.voter import Voter
from covey.wire.membership import Bound, Fate, Record, Seat, Verdict, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.proto.changes import QuorumLost
    from covey.wire import messages

DEADLINE = 20.0
LINEAGE = b"l" * 16
IDS = [bytes([number]) * 32 for number in (1, 2, 3)]
LIVES = [bytes([number]) * 16 for number in (11, 12, 13)]
SEATS = [Seat(id, life) for id, life in zip(IDS, LIVES, strict=True)]
FIRST = first_record(SEATS, LINEAGE)
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow; a mode would not keep those from writing who run as root."""
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
    records.write(0, FIRST)
    records.write(4, later)
    assert Records("lab", "mine", IDS[0]).read() == Bound(4, later)
    for others in (("lab", "mine", IDS[1]), ("lab", "yours", IDS[0]), ("den", "mine", IDS[0])):
        assert Records(*others).read() is None
    (path,) = files(home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_who_is_bound_to_nothing_any_more_leaves_no_file_and_may_say_so_twice(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    records.forget()
    records.write(0, FIRST)
    records.forget()
    records.forget()
    assert records.read() is None
    assert files(home) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"\xff" + data[1:]])
def test_a_damaged_record_is_named_and_nothing_is_made_of_it(home: Path, damage: Callable[[bytes], bytes]) -> None:
    records = Records("lab", "mine", IDS[0])
    records.write(2, FIRST)
    (path,) = files(home)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{path} is damaged \(.+\); remove it"):
        records.read()


def test_a_record_that_others_may_read_or_change_is_refused(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    records.write(2, FIRST)
    (path,) = files(home)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod 600"):
        records.read()


def test_on_a_full_disk_the_error_says_what_to_do_and_the_last_record_stays(home: Path) -> None:
    records = Records("lab", "mine", IDS[0])
    records.write(2, FIRST)
    expected = r"cannot write .*: File too large; make room, or set COVEY_HOME elsewhere"
    with full_disk(), pytest.raises(ConfigError, match=expected):
        records.write(3, FIRST)
    assert records.read() == Bound(2, FIRST)
    assert len(files(home)) == 1


def test_a_place_that_is_no_folder_is_named(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "runs").write_text("in the way")
    for use in (lambda it: it.read(), lambda it: it.write(0, FIRST)):
        with pytest.raises(ConfigError, match=f"{home / 'runs'} is not a folder"):
            use(Records("lab", "mine", IDS[0]))


def test_a_writer_that_is_killed_leaves_one_whole_record(home: Path) -> None:
    code = """
import sys
from covey.proto.ballot import first_record
from covey.runtime.records import Records
from covey.wire.membership import Seat
records, number = Records("lab", "mine", b"1" * 32), 0
while True:
    seats = [Seat(bytes([1 + place]) * 32, bytes([1 + number % 200]) * 16) for place in range(1 + number % 100)]
    records.write(number, first_record(seats, b"l" * 16))
    number += 1
    if number > 3:
        print(number, flush=True)
"""
    records = Records("lab", "mine", b"1" * 32)
    for _ in range(3):
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as writer:
            try:
                said = int(writer.stdout.readline())
            finally:
                writer.kill()
        bound = records.read()
        assert bound.generation >= said - 1
        assert len(bound.record.members) == 1 + bound.generation % 100
        assert bound.record.members[0].life == bytes([1 + bound.generation % 200]) * 16


# And what its next life does by it


class Assembly:
    """The nodes of a run, whose messages reach each other at once; a node that is not here hears nothing."""

    def __init__(self) -> None:
        self.here: dict[int, Councillor | Voter] = {}
        self.news = asyncio.Event()

    def send(self, sender: int, place: int, message: messages.Agreeing) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, sender, place, message)

    def _deliver(self, sender: int, place: int, message: messages.Agreeing) -> None:
        match self.here.get(place):
            case Councillor() as member:
                member.council.received(sender, message.body)
            case Voter() as voter:
                voter.received(IDS[sender], message)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self.news.clear()
                await self.news.wait()


class Watched(Records):
    """Records that tell when they are given up."""

    def __init__(self, place: int, forgotten: Callable[[], None]) -> None:
        super().__init__("lab", "mine", IDS[place])
        self._forgotten = forgotten

    def forget(self) -> None:
        super().forget()
        self._forgotten()


class Councillor:
    """A member with no operations, that writes down what it promises."""

    def __init__(self, assembly: Assembly, place: int, record: Record = FIRST, **options: Any) -> None:
        self._assembly, self._place = assembly, place
        self.records = Records("lab", "mine", IDS[place])
        self.views: list[View] = []
        self.error: Exception | None = None
        store = lambda record: self.records.write(0, record)  # noqa: E731
        self.council = Council(0, record, place, LIVES[place], self, store=store, **options)
        assembly.here[place] = self

    def send(self, place: int, message: messages.Agreeing) -> None:
        self._assembly.send(self._place, place, message)

    def freeze(self, number: int) -> None:
        self.council.frozen(number, ())

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        self.views.append(view)
        self._assembly.news.set()

    def excluded(self, view: View) -> None:
        raise AssertionError(f"was put out by {view}")

    def quorum_lost(self, effect: QuorumLost) -> None:
        raise AssertionError(effect)

    def failed(self, error: Exception) -> None:
        self.error = error
        self._assembly.news.set()


def gather(places: int, **options: Any) -> tuple[Assembly, list[Councillor]]:
    """Return members that are linked with each other."""
    assembly = Assembly()
    record = first_record(SEATS[:places], LINEAGE)
    members = [Councillor(assembly, place, record, **options) for place in range(places)]
    for member in members:
        for place in range(places):
            if members[place] is not member:
                member.council.link_up(place, LIVES[place])
    return assembly, members


def crash(assembly: Assembly, members: list[Councillor], place: int) -> None:
    assembly.here.pop(place)
    members[place].council.close()
    for number in assembly.here:
        members[number].council.link_down(place)


def come_back(assembly: Assembly, members: list[Councillor], place: int, life: bytes) -> Voter:
    """Start a node anew from its disk, and link it with the others."""
    records = Watched(place, assembly.news.set)

    def send(id: bytes, message: messages.Agreeing) -> None:
        assembly.send(place, IDS.index(id), message)

    bound = records.read()
    assert bound is not None
    voter = Voter(bound, IDS[place], life, records, send)
    assembly.here[place] = voter
    for number, member in enumerate(members):
        if assembly.here.get(number) is member:
            member.council.link_up(place, life)
            voter.link_up(IDS[number], LIVES[number])
    return voter


def test_of_two_the_other_goes_on_when_the_tie_breaker_is_back_to_vote_which_is_then_bound_no_more(home: Path) -> None:
    async def scenario() -> None:
        assembly, members = gather(2)
        crash(assembly, members, 0)
        members[1].council.judged(0, is_dead=True)
        await asyncio.sleep(0.3)
        assert members[1].views == []  # half without the tie-breaker decides nothing
        voter = come_back(assembly, members, 0, b"n" * 16)
        await assembly.until(lambda: bool(members[1].views) and members[0].records.read() is None)
        assert [view.ranks for view in members[1].views] == [(1,)]
        bound = members[1].records.read()
        assert (bound.record.view.ranks, bound.record.view.tie_breaker) == ((1,), 1)
        voter.close()
        members[1].council.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_a_node_that_accepted_a_view_and_crashed_is_still_bound_to_it(home: Path) -> None:
    async def scenario() -> None:
        assembly, members = gather(2)
        # Its last life accepted that the other goes on alone, and died before it heard that this was decided.
        view = View(LINEAGE, 1, (1,), 1, (Verdict(7, 5, Fate.COMMIT),))
        crash(assembly, members, 0)
        members[0].records.write(0, Record(tuple(SEATS[:2]), View(LINEAGE, 0, (0, 1), 0), 4, 4, view))
        voter = come_back(assembly, members, 0, b"n" * 16)
        members[1].council.judged(0, is_dead=True)
        await assembly.until(lambda: bool(members[1].views))
        assert members[1].views == [view]
        voter.close()
        members[1].council.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_of_three_two_go_on_and_who_comes_back_late_learns_that_it_is_out(home: Path) -> None:
    async def scenario() -> None:
        assembly, members = gather(3)
        crash(assembly, members, 2)
        for member in members[:2]:
            member.council.judged(2, is_dead=True)
        await assembly.until(lambda: all(member.views for member in members[:2]))
        voter = come_back(assembly, members, 2, b"n" * 16)
        await assembly.until(lambda: members[2].records.read() is None)
        for member in members[:2]:
            assert [view.ranks for view in member.views] == [(0, 1)]
        voter.close()
        for member in members[:2]:
            member.council.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_who_cannot_write_a_promise_down_gives_none_and_takes_no_more_part(home: Path) -> None:
    async def scenario() -> None:
        assembly, members = gather(3, patience=1.0)
        (home / "runs").rename(home / "moved")
        (home / "runs").write_text("in the way")
        members[0].council.disturbed(0)
        await assembly.until(lambda: members[0].error is not None)
        assert isinstance(members[0].error, ConfigError)
        assert "is not a folder" in str(members[0].error)
        assert all(member.views == [] for member in members)
        for member in members:
            member.council.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
