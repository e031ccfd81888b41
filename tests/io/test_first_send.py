"""To which machines files go: real agents, some of which claim the names of others, and a person who is asked."""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import sys
from typing import TYPE_CHECKING

import pytest
import typer
from tests.support.agents import CONFIG
from tests.support.waiting import DEADLINE, wait_until

from covey.agent import callers
from covey.agent.agent import Permission, serving
from covey.agent.callers import calling
from covey.agent.launching import deliver
from covey.agent.requests import StartRequest
from covey.agent.snapshot import take_snapshot
from covey.base.errors import ConfigError
from covey.cli import consent, several_machines
from covey.cli.ps import trusted_reports
from covey.cli.several_machines import FanOut, Program
from covey.net.keys import clusters, trust
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity, id_text, machine_name, own_machine
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.agent.agent import ResidentAgent

HOST = "north"
"""What all machines with agents call themselves."""


def name_of(machine: bytes) -> str:
    return machine_name(f"{HOST}-x", machine)


TRAIN = Program("train.py", (), "train", False, None)


class Typed(io.StringIO):
    """What a person types at a terminal."""

    def isatty(self) -> bool:
        return True


class Place:
    """Machines with agents, all of the same host name, and a desk from which a person sends files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ending: contextlib.ExitStack) -> None:
        self.folder, self._monkeypatch, self._ending = folder, monkeypatch, ending
        self.cluster = Cluster(ClusterSecret("lab", secrets.token_bytes(32)))
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text("print(1)\n")
        (self.project / ".env").write_text("TOKEN=1\n")
        self.at("desk")
        monkeypatch.chdir(self.project)

    def at(self, name: str) -> bytes:
        """Go to a machine; return its id."""
        self._monkeypatch.setenv("COVEY_HOME", str(self.folder / name))
        clusters.save(self.cluster)
        ensure_identity()
        return own_machine()

    def agent(self, name: str) -> tuple[bytes, ResidentAgent]:
        """Start an agent on a machine that every member may use; return the id of the machine."""
        machine = self.at(name)
        with self._monkeypatch.context() as patched:
            patched.setattr(socket, "gethostname", lambda: HOST)
            agent = self._ending.enter_context(serving(self.cluster, CONFIG, Permission(machine, is_for_all=True)))
        self.at("desk")
        return machine, agent

    def arrived(self, name: str) -> list[str]:
        """Return the files that a machine has got."""
        return sorted(path.name for path in (self.folder / name / "agent" / "runs").glob("*/work/**/*"))

    def send(self, on: str, there: int, *, yes: bool = False) -> list[str]:
        """Send the folder as `covey run --on` does once so many agents are found; return the names of the machines."""
        book = trust.trusted(self.cluster)
        with take_snapshot(self.project) as snapshot, calling(self.cluster, CONFIG) as terminal:
            wait_until(lambda: len(terminal.agents({})) == there)
            found = terminal.find(None if on == "all" else on.split(","), book)
            consent.tell_left_out(snapshot, found.left_out)
            agents = consent.ask_to_send(self.cluster, found, book, snapshot, yes=yes)
            for agent in agents:
                deliver(agent, "train", snapshot, lambda _text: None)
            return sorted(agent.name for agent in agents)

    def refused(self, on: str, *, yes: bool = False) -> str:
        """Return why `covey run --on` refuses."""
        with pytest.raises(ConfigError) as raised:
            several_machines.start(
                TRAIN, FanOut(None, {}, (), None, False, (), yes), lambda _machines, _ranks: None, on=on, hosts=None
            )
        return str(raised.value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("COVEY_INTERFACES", "lo")
    monkeypatch.setattr(callers, "NAMED_SECONDS", 0.0)  # tests wait for the agents instead
    monkeypatch.setattr(callers, "AGENT_SEARCH_SECONDS", 0.0)
    with contextlib.ExitStack() as ending:
        yield Place(tmp_path, monkeypatch, ending)


def test_the_first_send_shows_machine_and_files_and_asks_and_the_answer_is_remembered(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    north, _ = place.agent("north")
    with monkeypatch.context() as patched:
        patched.setattr(callers, "NAMED_SECONDS", DEADLINE)
        refused = place.refused(id_text(north))
    assert f"({id_text(north)}); compare the id with what `covey up` printed there" in refused
    assert refused.endswith("there is no terminal to ask on; add --yes if you mean it")
    monkeypatch.setattr(sys, "stdin", Typed("n\n"))
    with pytest.raises(typer.Abort):
        place.send(HOST, 1)
    assert place.arrived("north") == []
    assert list(trust.trusted(place.cluster)) == [place.at("desk")]

    capfd.readouterr()
    monkeypatch.setattr(sys, "stdin", Typed("y\n"))
    assert place.send(HOST, 1) == [name_of(north)]
    shown = capfd.readouterr().err
    assert id_text(north) in shown
    assert f"They get 1 file (9 B) of {place.project}. The largest:\n  train.py  9 B\n" in shown
    assert "left out: .env may hold secrets and is not sent; --include sends it" in shown
    assert place.arrived("north") == ["train.py"]
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert place.send("all", 1) == [name_of(north)], "it is not asked again"


def test_a_member_that_claims_the_name_of_a_machine_that_is_off_gets_nothing(place: Place) -> None:
    north = place.at("north")
    place.at("desk")
    trust.remember(place.cluster, {north: name_of(north)}, has_had_files=True)
    evil, _ = place.agent("evil")
    for word in (HOST, name_of(north), id_text(north)):
        assert id_text(north) in place.refused(word, yes=True), word
        with pytest.raises(ConfigError, match=id_text(north)):
            place.send(word, 1, yes=True)
    with pytest.raises(ConfigError, match=f"now has the key {id_text(evil)}. Nothing was sent"):
        place.send(HOST, 1, yes=True)
    with pytest.raises(ConfigError, match=r"all machines that this one trusts, and none of them was found"):
        place.send("all", 1, yes=True)
    assert place.arrived("evil") == []

    place.agent("north")
    assert place.send(HOST, 2) == [name_of(north)], "nobody can block the name of a trusted machine"
    assert place.arrived("north") == ["train.py"]
    assert place.arrived("evil") == []


def test_all_means_all_trusted_machines_and_the_others_are_listed(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    (north, _), (south, _), (evil, _) = (place.agent(name) for name in ("north", "south", "evil"))
    with pytest.raises(ConfigError, match="means several machines") as raised:
        place.send(HOST, 3, yes=True)
    assert all(id_text(each) in str(raised.value) for each in (north, south, evil))
    assert len(place.send(f"{id_text(north)},{id_text(south)}", 3, yes=True)) == 2
    capfd.readouterr()
    assert len(place.send("all", 3)) == 2
    listed = f"trusts; name it with --on, and you are asked (its id is {id_text(evil)})"
    assert listed in " ".join(capfd.readouterr().err.split())
    assert [place.arrived(name) for name in ("north", "south", "evil")] == [["train.py"], ["train.py"], []]
    with calling(place.cluster, CONFIG) as terminal:
        wait_until(lambda: len(terminal.agents({})) == 3)
        same = {each: trust.TrustedMachine("same-aaaa") for each in (north, south)}
        names = {each.name for each in terminal.agents(same)}
        assert len(names) == 3, "the output of two machines of one name is told apart"


def test_logs_and_stop_leave_machines_out_that_are_not_trusted(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    (north, good), (evil, bad) = place.agent("north"), place.agent("evil")
    for agent in (good, bad):
        agent.service.jobs.start(StartRequest("train", 1, (), ("x",)), ["sleep", "60"], place.folder, "desk")
    trust.remember(place.cluster, {north: name_of(north)})
    with calling(place.cluster, CONFIG) as terminal:
        wait_until(lambda: len(terminal.agents({})) == 2)
        found = trusted_reports(terminal, place.cluster)
    assert [(agent.machine, [each.run for each in listed]) for agent, listed in found] == [(north, ["train"])]
    said = " ".join(capfd.readouterr().err.split())
    assert (
        f"{name_of(evil)} is not a machine that this one trusts, and is left out; `covey trust {id_text(evil)}`" in said
    )
