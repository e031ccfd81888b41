"""Runs on this machine by name: commands of their user find them, ask their ranks, and leave."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from covey.base.errors import ConfigError
from covey.net.host.runs import LocalRunFound, describe, find_local_run, local_runs
from covey.runtime import loop as control
from covey.runtime.joining.node import node_of
from covey.runtime.keeper.keeper import LocalRun
from covey.runtime.keeper.pages import collect
from covey.runtime.links.handshake import RefusedError, dial
from covey.runtime.peers.local_visit import LocalVisit, visiting_ranks
from covey.runtime.peers.mesh import COMMANDS_LIMIT
from covey.testing.threads import run_threads
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey import Group

INSPECT = messages.Inspect("operations")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def below(base: Path) -> list[LocalRunFound]:
    return [run for run in local_runs() if Path(run.folder).parent == base]


@pytest.mark.usefixtures("base")
def test_a_run_is_found_by_name_or_process_while_its_keeper_lives() -> None:
    name = f"train {secrets.token_hex(4)}"
    with LocalRun(3, name=name) as run:
        found = find_local_run(name)
        assert found == LocalRunFound(name, os.getpid(), 3, run.folder)
        assert found == find_local_run(str(os.getpid()))
        assert found.token() == run.token
        with (
            LocalRun(2, name=name),
            pytest.raises(ConfigError, match=f"2 runs '{name}' are running here; name one by its"),
        ):
            find_local_run(name)
    assert find_local_run(name) is None
    with pytest.raises(ConfigError, match="is over"):
        found.token()


def test_folders_that_are_not_those_of_a_living_run_are_passed_over(base: Path) -> None:
    with LocalRun(2, name="mine") as run:
        about, copy = Path(run.folder) / "about", base / "covey-run-copy"
        copy.mkdir(mode=0o700)
        for file in ("about", "token", "keeper.lock"):  # as a killed keeper leaves them: not locked
            (copy / file).write_bytes((Path(run.folder) / file).read_bytes())
        (base / "covey-run-link").symlink_to(run.folder)
        assert [each.folder for each in below(base)] == [run.folder]
        os.chmod(run.folder, 0o755)
        assert below(base) == []
        os.chmod(run.folder, 0o700)
        for nonsense in (b"", b"1", b"x 2 mine", b"1 0 mine", b"1 9999999 mine", b"\xff 1 mine"):
            about.write_bytes(nonsense)
            assert below(base) == []
        about.unlink()
        os.mkfifo(about)
        assert below(base) == []


def found_run(group: Group) -> LocalRunFound:
    """Return the run of these threads, described as a keeper would."""
    node = node_of(group)
    assert node is not None
    assert node.credentials.token is not None
    folder = str(Path(node.card.contact.socket).parent)
    if group.rank == 0:
        describe(folder, "threads", group.size, node.credentials.token)
    group.barrier()
    return LocalRunFound("threads", os.getpid(), group.size + 1, folder)


def test_a_command_asks_all_ranks_that_have_joined_and_they_go_on() -> None:
    def body(group: Group) -> None:
        run = found_run(group)
        group.all_reduce(np.full(10, group.rank))
        if group.rank == 1:
            with visiting_ranks(run) as visit:
                assert visit.ranks == [0, 1, 2], "a fourth rank has not joined"
                flights = collect(visit.ask)
                assert [flight.run for flight in flights] == ["threads"] * 3
                assert visit.ask(messages.Inspect("secrets"), 10.0) == {
                    rank: messages.Inspected("secrets", 0, 0, b"") for rank in range(3)
                }
            for number in range(2 * COMMANDS_LIMIT):  # the oldest of too many is dropped, and the ranks stay usable
                late = LocalVisit(run, run.token())
                late.link(20.0)
                assert late.ranks == [0, 1, 2], number
            answers = late.ask(INSPECT, 10.0)
            assert all(answer is not None for answer in answers.values())
        assert group.all_reduce(group.rank) == 3

    run_threads(3, body)


def test_without_the_token_or_from_beyond_a_unix_socket_no_rank_answers() -> None:
    def body(group: Group) -> None:
        run, node = found_run(group), node_of(group)
        assert node is not None
        if group.rank == 0:
            stranger = LocalVisit(run, secrets.token_bytes(32))
            stranger.link(20.0)
            assert stranger.ranks == []
            (address,) = node.card.contact.addresses
            card = messages.Card(b"", secrets.token_bytes(16), "visitor", "", 1, messages.Contact("", (), ""))
            hello = messages.Hello(messages.VERSION, secrets.token_bytes(32), "visitor", "", -1, 0, "", card)
            with pytest.raises(RefusedError, match="which gives out the ranks"):
                control.run(dial((address.ip, address.port), node.credentials, hello), 20.0)
        group.barrier()

    run_threads(2, body, lanes="tcp")
