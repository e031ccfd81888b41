"""Terminals and agents over real links: what is lost with a link, and what is not."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.agents import CONFIG, a_caller, an_agent
from tests.support.attackers import call_on_loop
from tests.support.waiting import DEADLINE, wait_until

from covey.agent import callers
from covey.agent.agent import Permission, serving
from covey.agent.delivery import run_folder, work_folder
from covey.agent.launching import AgentShare, deliver
from covey.agent.requests import StartRequest
from covey.agent.shares import Printed, Said, ShareEnded
from covey.agent.snapshot import take_snapshot
from covey.base.errors import ConfigError
from covey.net.host.folders import home
from covey.net.keys import clusters, trust
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity, id_text, own_machine
from covey.runtime.peers.visit import visiting
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from pathlib import Path

    from covey.agent.agent import ResidentAgent
    from covey.agent.callers import AgentCaller
    from covey.agent.shares import Report

pytestmark = pytest.mark.usefixtures("home")

COUNTING = """
i=0
while [ $i -lt 40 ]; do
    echo line $i
    i=$((i+1))
    while [ $((i % 15)) = 0 ] && [ ! -e after-$i ]; do sleep 0.02; done
done
exit 3
"""


def abort_links(agent: ResidentAgent) -> None:
    for session in list(agent._transport._sessions.values()):
        call_on_loop(session.link.abort)


def test_a_terminal_that_loses_its_link_continues_where_it_was(tmp_path: Path) -> None:
    with an_agent() as (cluster, agent), a_caller(cluster) as (_, caller):
        request = StartRequest("train", 1, (), ("x",), lease=DEADLINE)
        job = agent.service.jobs.start(request, ["sh", "-c", COUNTING], tmp_path, "here")
        reports: list[Report] = []
        share = AgentShare(caller, job.number)
        thread = threading.Thread(target=share.run, args=(reports.append,), daemon=True)
        thread.start()

        def printed() -> bytes:
            return b"".join(each.data for each in reports if isinstance(each, Printed))

        for lines in (15, 30):
            wait_until(lambda lines=lines: printed().count(b"\n") == lines)  # type: ignore[misc]
            abort_links(agent)
            (tmp_path / f"after-{lines}").touch()
        thread.join(DEADLINE)
        assert printed() == b"".join(b"line %d\n" % number for number in range(40))
        assert reports[-1] == ShareEnded(3)
        assert [each.text for each in reports if isinstance(each, Said)].count("connected again") == 2


def test_a_signal_that_finds_no_link_is_sent_over_the_next_one(tmp_path: Path) -> None:
    with an_agent() as (cluster, agent), a_caller(cluster) as (_, caller):
        job = agent.service.jobs.start(StartRequest("train", 1, (), ("x",)), ["sleep", "60"], tmp_path, "here")
        assert list(caller.stream("programs"))
        abort_links(agent)
        AgentShare(caller, job.number).send_signal(15)
        assert job.has_ended.wait(DEADLINE)
        assert job.log.code == 143


def test_a_signal_that_is_repeated_because_its_answer_was_lost_is_sent_once(tmp_path: Path) -> None:
    count = "trap 'echo got it' INT; echo ready; while [ ! -e enough ]; do sleep 0.02; done"
    with an_agent() as (cluster, agent), a_caller(cluster) as (_, caller):
        job = agent.service.jobs.start(StartRequest("train", 1, (), ("x",)), ["sh", "-c", count], tmp_path, "here")

        def printed() -> bytes:
            return b"".join(data for _, data in job.log.read(0).records)

        wait_until(lambda: printed() == b"ready\n")
        for token, times in ((7, 1), (7, 1), (8, 2)):
            caller.call("send_signal", job.number, 2, token)
            wait_until(lambda times=times: printed().count(b"got it") >= times)  # type: ignore[misc]
        (tmp_path / "enough").touch()
        assert job.has_ended.wait(DEADLINE)
        assert printed() == b"ready\ngot it\ngot it\n"


def test_files_of_many_chunks_and_pages_arrive_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "large").write_bytes(bytes(range(256)) * 8000)
    for number in range(600):
        (folder / f"file-{number}").write_text(str(number))
    notes: list[str] = []
    with an_agent() as (cluster, agent), a_caller(cluster) as (_, caller):
        with take_snapshot(folder) as snapshot:
            assert deliver(caller, "train", snapshot, notes.append) == 601
        (work,) = (agent.service._folder / "runs").glob("train-*/work")
        assert {path.name: path.read_bytes() for path in work.iterdir()} == {
            path.name: path.read_bytes() for path in folder.iterdir()
        }
        (folder / "file-7").write_text("seven")
        with take_snapshot(folder) as snapshot:
            assert deliver(caller, "train", snapshot, notes.append) == 1
    assert notes == [f"{caller.name}: 601 of 601 files sent (2001 KiB)", f"{caller.name}: 1 of 601 files sent (1 KiB)"]


def test_agents_are_found_by_name_host_and_id_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "NAMED_SECONDS", 0.3)
    with an_agent() as (cluster, agent), a_caller(cluster) as (terminal, caller):
        card, book = agent.mesh.card, trust.trusted(cluster)
        for name in (card.name, card.name.upper(), card.host_name, card.id.hex(), id_text(card.id)[:6]):
            assert [each.name for each in terminal.find([name], book).trusted] == [caller.name]
            assert [each.name for each in terminal.find([name], {}).new] == [caller.name]
        with pytest.raises(
            ConfigError, match=rf"no agent 'nowhere' was found \(there: {card.name} \({id_text(card.id)}\)\)"
        ):
            terminal.find([card.name, "nowhere"], book)


def test_a_node_that_finds_only_an_agent_at_its_seed_does_not_dial_it_again_and_again() -> None:
    with an_agent() as (cluster, agent):
        port = agent.mesh.card.contact.addresses[0].port
        seeded = replace(cluster, seeds=(f"127.0.0.1:{port}",))
        with visiting(seeded, CONFIG, announce=False) as visit:
            wait_until(lambda: bool(visit.mesh.met))
            visit.mesh.search._needs_seeds = lambda: True  # as for a node of a run, to which an agent is a guest
            visit.look(1.0)
            links = list(agent.mesh.visitors)
            visit.look(2.5)
            assert set(agent.mesh.visitors) <= set(links)


def test_a_second_agent_in_the_same_folder_is_refused_until_the_first_has_ended() -> None:
    with an_agent() as (cluster, agent):
        permission = Permission(own_machine(), here="north")
        with pytest.raises(ConfigError, match="another `covey up` uses"), serving(cluster, CONFIG, permission):
            pass
        assert (home() / "agent" / "jobs").is_dir(), "what the first one needs is still there"
        assert agent.service.jobs.all() == []
    with serving(cluster, CONFIG, permission):
        pass


def test_a_terminal_is_told_that_an_agent_was_restarted_and_its_program_has_ended() -> None:
    with an_agent() as (cluster, _), a_caller(cluster) as (_, caller):
        caller.card = msgspec.structs.replace(
            caller.card, life=caller.card.life[::-1]
        )  # the agent that is linked is another process
        reports: list[Report] = []
        AgentShare(caller, 1).run(reports.append)
        assert reports == [ShareEnded(1, "the agent was restarted, and its programs have ended with it", is_lost=True)]


def test_an_error_of_an_agent_keeps_its_lines_and_no_other_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("cannot install (exit code 1); its last output:\nERROR: no\x1b[31m such\n\tpackage")

    with an_agent() as (cluster, agent), a_caller(cluster) as (_, caller):
        monkeypatch.setattr(agent.service.jobs, "get", fail)
        with pytest.raises(ConfigError) as caught:
            caller.call("send_signal", 1, 2, 3)
    *_, first, second, third = str(caught.value).splitlines()
    assert first.endswith("(exit code 1); its last output:")
    assert (second, third) == ("ERROR: no\\x1b[31m such", "\\tpackage")


def finished(agent: ResidentAgent, caller: AgentCaller, run: str, script: str, *, is_temporary: bool) -> int:
    """Run a shell script in the folder of a run, to its end; return the number of the program."""
    number = caller.call("open_delivery", run, *([True] if is_temporary else []))
    assert list(caller.stream("missing_files", number)) == [[]]
    caller.call("finish_delivery", number)
    work = work_folder(run_folder(home() / "agent" / "runs", run))
    job = agent.service.jobs.start(StartRequest(run, 1, (), ("x",)), ["sh", "-c", script], work, "here")
    assert job.has_ended.wait(DEADLINE)
    return job.number


def test_what_a_program_has_written_into_a_folder_can_be_read_and_nothing_else() -> None:
    script = (
        "mkdir out; seq 20000 > out/large; ln -s /etc/passwd out/link; mkfifo out/pipe; ln -s /etc etc; true > out/no"
    )
    with an_agent() as (cluster, agent), a_caller(cluster) as (_, caller):
        number = finished(agent, caller, "write", script, is_temporary=False)
        files: dict[str, bytes] = {}
        for chunk in caller.stream("read_files", number, "out"):
            files[chunk.name] = files.get(chunk.name, b"") + chunk.data
            assert chunk.size == 108894
        assert files == {"large": "".join(f"{each}\n" for each in range(1, 20001)).encode()}
        assert list(caller.stream("read_files", number, "etc")) == [], "a link is not followed"
        assert list(caller.stream("read_files", number, "nothing")) == []
        for path in ("..", "out/../..", "/etc", "."):
            with pytest.raises(ConfigError, match="cannot be sent"):
                list(caller.stream("read_files", number, path))


def test_a_temporary_folder_goes_with_its_program_or_when_the_agent_is_started_again() -> None:
    ensure_identity()
    cluster = Cluster(ClusterSecret("lab", secrets.token_bytes(32)))
    clusters.save(cluster)
    runs = home() / "agent" / "runs"
    with serving(cluster, CONFIG, Permission(own_machine())) as agent, a_caller(cluster) as (_, caller):
        first = finished(agent, caller, "first", "echo 1 > saved", is_temporary=True)
        kept = finished(agent, caller, "kept", "echo 1 > saved", is_temporary=False)
        for number in (first, kept):
            caller.call("forget_program", number)
        assert [path.name.rpartition("-")[0] for path in runs.iterdir()] == ["kept"]
        finished(agent, caller, "second", "echo 1 > saved", is_temporary=True)
        request = StartRequest("busy", 1, (), ("x",))
        busy = agent.service.jobs.start(request, ["sleep", "60"], work_folder(run_folder(runs, "busy")), "here")
        with pytest.raises(ConfigError, match="run 'busy' runs"):
            caller.call("forget_program", busy.number)
    assert {path.name.rpartition("-")[0] for path in runs.iterdir()} == {"kept", "second", "busy"}
    with serving(cluster, CONFIG, Permission(own_machine())):
        assert {path.name.rpartition("-")[0] for path in runs.iterdir()} == {"kept", "busy"}
