"""Data sets go to machines with real agents: once, from whichever machine has them, and on after interruptions."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.attackers import call_on_loop
from tests.support.data_sets import DataTown, Halting, Lying, content, files_of, wanted
from tests.support.waiting import DEADLINE, wait_until

from covey.agent import data_store
from covey.agent.data_sets import DATA_CHUNK_BYTES, FetchRequest
from covey.agent.data_store import DataStore, data
from covey.agent.push import found_elsewhere, listed, push
from covey.base.errors import AuthError, CallRefusedError, ConfigError
from covey.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.agent.push import Pushed

pytestmark = pytest.mark.usefixtures("home")
MIB = DATA_CHUNK_BYTES


@pytest.fixture
def town(tmp_path: Path) -> Iterator[DataTown]:
    with contextlib.ExitStack() as ending:
        yield DataTown(tmp_path / "town", ending)
    for descriptor in data_store._used.values():
        os.close(descriptor)
    data_store._used.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "large").write_bytes(content(1, 5 * MIB + 17))
    for number in range(60):
        (folder / "a" / f"{number}").write_bytes(content(number, 100 * number))
    (folder / "a" / "b" / "tool").write_bytes(b"#!/bin/sh\n")
    (folder / "a" / "b" / "tool").chmod(0o755)
    return folder


def store_at(town: DataTown, name: str) -> DataStore:
    with town.at(name):
        return DataStore()


def sizes(outcome: Pushed) -> tuple[int, int]:
    assert not outcome.problem, outcome.problem
    return outcome.from_here, outcome.from_others


def test_a_folder_arrives_as_it_is_and_the_second_machine_takes_it_from_the_first(town: DataTown, folder: Path) -> None:
    for name in ("north", "south"):
        town.agent(name)
    with town.read(folder) as held:
        (north,) = town.push(held, "north")
        assert sizes(north) == (held.size, 0)
        (south,) = town.push(held, "south", holders=("north",))
        assert sizes(south) == (0, held.size), "the uplink of the desk carried it once"
        again = town.push(held, "north", "south")
        assert [(sizes(each), each.was_there) for each in again] == [((0, 0), True)] * 2
    for name in ("north", "south"):
        path = town.path(name)
        assert files_of(path) == files_of(folder)
        assert os.access(path / "a" / "b" / "tool", os.X_OK)
        assert (path / "large").stat().st_mode & 0o777 == 0o400, "a program does not change it by mistake"
        assert path.is_relative_to(town.store(name))


def test_two_machines_that_get_it_together_give_each_other_what_they_have(town: DataTown, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(content(7, 24 * MIB))
    for name in ("north", "south"):
        town.agent(name)
    with town.read(tmp_path / "model.pt") as held:
        outcomes = town.push(held, "north", "south")
    assert all(sum(sizes(each)) == 24 * MIB for each in outcomes)
    for name in ("north", "south"):
        path = town.path(name)
        assert path.name == "model.pt", "the path of a single file is that of the file"
        assert path.read_bytes() == (tmp_path / "model.pt").read_bytes()


def test_what_has_come_before_an_interruption_is_not_sent_again(town: DataTown, folder: Path) -> None:
    town.agent("north")
    with town.read(folder) as held:
        halting = Halting(held, pieces=100)
        with town.terminal() as (terminal, agents):
            outcomes: list[list[Pushed]] = []
            bar = ProgressBar("", 0, wanted=False)
            thread = threading.Thread(
                target=lambda: outcomes.append(push(terminal, wanted(halting), [agents["north"]], [], bar)), daemon=True
            )
            thread.start()
            assert halting.halted.wait(DEADLINE)
            (partial,) = (each for each in store_at(town, "north").reports() if not each.is_complete)
            assert 0 < partial.there < partial.size
            with pytest.raises(
                ConfigError, match=r"'set' is not completely on this machine .*covey push PATH --name set"
            ):
                town.path("north")
            for remote in list(town.agents["north"].mesh.all_linked):  # the network goes, and comes back
                for link in list(remote.links):
                    call_on_loop(link.abort)
            halting.go_on.set()
            thread.join(DEADLINE)
            assert outcomes, "the terminal goes on by itself when the network is back"
            ((north,),) = outcomes
        assert not north.problem, north.problem
        assert halting.given < held.size + 3 * MIB, "what came before was kept"
    assert files_of(town.path("north")) == files_of(folder)


def test_an_agent_that_was_killed_looks_what_it_has_and_gets_the_rest(town: DataTown, folder: Path) -> None:
    town.agent("north")
    with town.read(folder) as held:
        with town.at("north"):
            store = DataStore()
            partial, _ = store.begin("set", held.manifest, 1 << 30)
        for chunk in (0, 2, held.manifest.chunks - 1):  # an earlier agent had these, and one of them was damaged
            spot = held.manifest.spot(chunk)
            assert partial.put(chunk, held.read(chunk, 0, spot.size))
        damaged = held.manifest.spot(held.manifest.chunks - 1)
        path = partial.folder / "files" / held.manifest.files[damaged.file].path
        path.write_bytes(bytes(path.stat().st_size))
        partial.close()
        (north,) = town.push(held, "north")
        had = sum(held.manifest.spot(chunk).size for chunk in (0, 2) if held.manifest.spot(chunk).file != damaged.file)
        assert sizes(north) == (held.size - had, 0)
    assert files_of(town.path("north")) == files_of(folder)


def test_of_a_changed_folder_only_changed_chunks_are_sent_and_programs_keep_the_version_that_they_have(
    town: DataTown, folder: Path
) -> None:
    town.agent("north")
    with town.read(folder) as held:
        town.push(held, "north")
    before, old = town.path("north"), files_of(folder)
    with open(folder / "large", "r+b") as file:
        file.seek(2 * MIB + 5)
        file.write(b"changed")
    (folder / "a" / "7").unlink()
    (folder / "new").write_bytes(b"new")
    with town.read(folder) as held:
        (north,) = town.push(held, "north")
        assert sizes(north) == (MIB + 3, 0)
    assert files_of(before) == old, "a program that uses it has it whole"
    data_store._used.clear()  # as in another process
    after = town.path("north")
    assert files_of(after) == files_of(folder)
    assert (after / "a" / "8").stat().st_ino == (before / "a" / "8").stat().st_ino, "the disk has equal files once"
    reports = store_at(town, "north").reports()
    assert [(each.name, each.is_complete, each.is_used) for each in reports] == [("set", True, True)]


def test_a_machine_that_does_not_have_it_sends_it_from_those_that_do(town: DataTown, folder: Path) -> None:
    for name in ("north", "south"):
        town.agent(name)
    with town.read(folder) as held:
        town.push(held, "north")
    with town.terminal() as (terminal, agents):
        reports = listed(list(agents.values()))
        found = found_elsewhere("set", reports)
        (south,) = push(terminal, found, [agents["south"]], [agents["north"]], ProgressBar("", 0, wanted=False))
        assert sizes(south) == (0, found.size)
        with pytest.raises(ConfigError, match=r"no folder or file 'sets' here.*\(they have: set\)"):
            found_elsewhere("sets", reports)
    assert files_of(town.path("south")) == files_of(folder)


def test_a_machine_that_gives_wrong_bytes_is_left_and_the_others_give_them(town: DataTown, folder: Path) -> None:
    for name in ("north", "south"):
        town.agent(name)
    with town.read(folder) as held:
        town.push(held, "north")
        large = next(number for number, file in enumerate(held.manifest.files) if file.path == "large")
        path = town.path("north") / "large"
        path.chmod(0o600)
        with open(path, "r+b") as file:
            file.seek(3 * MIB)
            file.write(b"not what was pushed")
        (south,) = town.push(held, "south", holders=("north",))
        assert sum(sizes(south)) == held.size
        assert south.from_here >= MIB, "the desk gave what north could not"
        assert held.manifest.chunks_of(large)
    assert files_of(town.path("south")) == files_of(folder)


def test_a_file_that_changes_while_it_is_sent_is_an_error_that_names_it_and_nothing_is_published(
    town: DataTown, folder: Path
) -> None:
    town.agent("north")
    with town.read(folder) as held:
        (north,) = town.push(Lying(held, held.manifest.chunks - 1), "north")
        assert "large has changed on the machine that pushes it; push again" in north.problem
        with pytest.raises(ConfigError, match="not completely on this machine"):
            town.path("north")
        (again,) = town.push(held, "north")
        assert 0 < sum(sizes(again)) < held.size


def test_a_disk_that_is_full_is_said_with_what_to_remove_and_what_came_stays(
    town: DataTown, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    town.agent("north")
    (tmp_path / "small").write_bytes(content(3, MIB))
    with town.read(tmp_path / "small") as held:
        town.push(held, "north", called="small")
    monkeypatch.setenv("COVEY_DATA_TOTAL", str(4 * MIB))
    with town.read(folder) as held:
        (north,) = town.push(held, "north")
        assert "no room for the data set 'set'" in north.problem
        assert (
            "of the 4.0 MiB that they may take here; `covey data --remove NAME` frees space: there are small (1."
            in (north.problem)
        )
        assert not list(town.store("north").glob("*/partial-*")), "nothing was sent"
        monkeypatch.delenv("COVEY_DATA_TOTAL")
        writes = [0]
        real = os.pwrite

        def full(*arguments: object) -> int:  # the disk fills up while files come
            writes[0] += 1
            if writes[0] > 3:
                raise OSError(28, "No space left on device")
            return real(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            (north,) = town.push(held, "north")
        assert "cannot be written to" in north.problem
        assert "No space left on device" in north.problem
        assert "`covey data --remove NAME` frees space" in north.problem
        (again,) = town.push(held, "north")
        assert 0 < sum(sizes(again)) < held.size, "what came before stays"


def test_a_data_set_that_a_program_uses_is_not_removed_and_then_it_is(town: DataTown, folder: Path) -> None:
    town.agent("north")
    with town.read(folder) as held:
        town.push(held, "north")
    town.path("north")
    with town.terminal() as (_, agents):
        with pytest.raises(ConfigError, match="a program uses the data set 'set' here"):
            agents["north"].call("remove_data", "set")
        for descriptor in data_store._used.values():
            os.close(descriptor)
        data_store._used.clear()
        assert agents["north"].call("remove_data", "set") > 5 * MIB
        with pytest.raises(ConfigError, match="there is no data set 'set' here"):
            agents["north"].call("remove_data", "set")
    with pytest.raises(ConfigError, match="is not on this machine"):
        town.path("north")


def test_the_machine_that_pushes_finds_its_own_files_and_says_if_they_are_gone(town: DataTown, folder: Path) -> None:
    with town.at("desk"), town.read(folder) as held:
        data_store.remember_pushed("set", folder, held.manifest)
        assert data("set") == folder
        assert [(each.name, each.path) for each in data_store.pushed_here()] == [("set", str(folder))]
        folder.rename(folder.with_name("moved"))
        with pytest.raises(ConfigError, match=r"was pushed from .*pictures, and is not there any more; push it again"):
            data("set")


def test_two_commands_that_push_one_name_do_not_mix(town: DataTown, folder: Path) -> None:
    town.agent("north")
    with town.read(folder) as held:
        halting = Halting(held, pieces=10)
        with town.terminal() as (terminal, agents), town.terminal() as (other, others):
            bar = ProgressBar("", 0, wanted=False)
            outcomes: list[list[Pushed]] = []
            thread = threading.Thread(
                target=lambda: outcomes.append(push(terminal, wanted(halting), [agents["north"]], [], bar)), daemon=True
            )
            thread.start()
            assert halting.halted.wait(DEADLINE)
            (refused,) = push(other, wanted(held), [others["north"]], [], bar)
            assert "is being sent here by another command; wait for its end" in refused.problem
            halting.go_on.set()
            thread.join(DEADLINE)
            assert not outcomes[0][0].problem


def test_a_machine_without_the_right_gives_and_gets_nothing(town: DataTown, folder: Path) -> None:
    agent = town.agent("north")
    with town.read(folder) as held:
        town.push(held, "north")
        request = FetchRequest("mine", held.manifest.digest, len(held.manifest.encoded), (), is_here=True)
        with town.terminal("stranger") as (terminal, agents), terminal.giving(held, frozenset(town.machines.values())):
            with pytest.raises(AuthError, match="may not use north"):
                agents["north"].call("grant_data", held.manifest.digest, ())
            with pytest.raises(AuthError, match="may not use north"):
                agents["north"].call("remove_data", "set")
            with pytest.raises(AuthError, match="may not use north"):
                list(agents["north"].stream("fetch_data", request))
            with pytest.raises(AuthError, match="may not use north"):
                list(agents["north"].stream("data_sets"))
            line = terminal._data
            assert line is not None
            source = line.source(lambda: terminal.visit.mesh.met.get(agent.mesh.card.id), "north")
            with pytest.raises(AuthError, match="was not told to give data sets to"):
                source.list_bytes(held.manifest.digest, len(held.manifest.encoded))
    assert [each.name for each in store_at(town, "north").reports()] == ["set"]
    wait_until(lambda: not agent.data._grants._given)


def test_a_machine_that_gets_a_data_set_may_read_that_one_while_it_is_pushed_and_nothing_else(
    town: DataTown, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(content(9, 1000))
    north, south = town.agent("north"), town.agent("south")
    with town.read(folder) as held, town.read(tmp_path / "other", "other") as other:
        town.push(held, "north")
        town.push(other, "north", called="other")
        wait_until(lambda: not north.data._grants._given)  # both terminals have gone
        with town.terminal() as (_, agents):
            agents["north"].call("grant_data", held.manifest.digest, (town.machines["south"],))
            source = south.data.line.source(lambda: south._peer(north.mesh.card.id), "north")
            got = source.list_bytes(held.manifest.digest, len(held.manifest.encoded))
            assert got == held.manifest.encoded
            for function in ("programs", "data_sets", "start_program", "remove_data"):
                work = source._calls.call_async(source._seat, function, (), {}, rank=0)
                with pytest.raises(CallRefusedError, match=f"no function {function!r}"):
                    work.wait()
            with pytest.raises(Exception, match="was not told to give this data set"):
                source.list_bytes(other.manifest.digest, 10)
        wait_until(lambda: not north.data._grants._given)
        with pytest.raises(Exception, match="was not told to give this data set"):
            source.list_bytes(held.manifest.digest, 10)
