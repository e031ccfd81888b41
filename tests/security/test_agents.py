"""What members can make an agent do: nothing unless they are allowed, and within bounds if they are."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.agents import CONFIG, a_caller, an_agent
from tests.support.waiting import DEADLINE, wait_until

from covey.agent import jobs, service, snapshot
from covey.agent.callers import calling
from covey.agent.link_transport import SESSIONS_PER_LINK
from covey.agent.requests import FileEntry, StartRequest
from covey.base.errors import AuthError, ConfigError, ConnectError
from covey.net.audit import audit_reader
from covey.runtime import loop as control
from covey.runtime.links.link import BACKLOG_LIMIT
from covey.runtime.peers.mesh import MeshListener
from covey.runtime.peers.visit import visiting
from covey.runtime.state import audit
from covey.wire import messages
from covey.wire.calls import CallPayload, CallRequest, encode_call_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.remote_process import RemoteProcess

pytestmark = pytest.mark.usefixtures("home")


class Member(MeshListener):
    """A member that says to an agent what it likes."""

    def __init__(self) -> None:
        self.said: list[messages.Control] = []
        self.links_lost = 0

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        self.said.append(message)

    def lost(self, remote: RemoteProcess) -> None:
        self.links_lost += 1


@contextlib.contextmanager
def a_member(cluster: Cluster) -> Iterator[tuple[Member, Callable[[messages.Control], None]]]:
    """Yield a member, and what sends a message to the agent."""
    member = Member()
    with visiting(cluster, CONFIG, announce=False, listener=member) as visit:

        def agents() -> list[RemoteProcess]:
            return [each for each in visit.mesh.met.values() if each.purpose == "agent"]

        def send(message: messages.Control) -> None:
            wait_until(lambda: bool(agents()))
            control.soon(agents()[0].send, message)

        wait_until(lambda: bool(agents()))
        yield member, send


def a_call(name: str, number: int = 1, **payload: Any) -> bytes:
    return encode_call_message(CallRequest(number, name, 10.0, CallPayload(**payload)))


def test_a_member_that_is_not_allowed_can_call_nothing_and_learns_what_to_do() -> None:
    with an_agent(is_allowed=False) as (cluster, agent), a_caller(cluster) as (_, caller):
        started = StartRequest("train", 1, (), ("train.py",))
        for function, arguments in (
            ("start_program", (started,)),
            ("open_delivery", ("train",)),
            ("send_signal", (1, 9, 0)),
        ):
            with pytest.raises(AuthError, match="may not use north: there, add --allow"):
                caller.call(function, *arguments)
        with pytest.raises(AuthError):
            list(caller.stream("programs"))
        assert agent.service.jobs.all() == []
    audit._writer.flush(DEADLINE)
    events = [entry.event for entry in audit_reader.entries()]
    assert "program-refused" in events
    assert "program-started" not in events


def test_a_denied_machine_is_not_served_although_all_are_allowed() -> None:
    with an_agent(is_denied=True) as (cluster, agent), calling(replace(cluster, denied=frozenset()), CONFIG):
        wait_until(lambda: any("is denied on" in reason for reason in agent.mesh.problems.refusals.values()))
        assert not agent.mesh.all_linked


def test_the_bounds_of_agents_are_those_of_the_code() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "security.md").read_text().split())
    assert jobs.STARTS_RATE == 0.5
    for sentence in (
        f"runs {jobs.RUNNING_LIMIT} programs at a time, and after a burst of {jobs.STARTS_BURST:.0f} starts",
        f"at most {snapshot.SNAPSHOT_FILES_LIMIT} files and {snapshot.FOLDER_BYTES >> 30} GiB",
        f"{service.DELIVERIES_LIMIT} transfers are open at a time",
        f"Of the output of a program {jobs.LOG_BYTES >> 20} MiB are kept",
    ):
        assert sentence in page


def test_an_allowed_member_cannot_leave_the_folder_of_a_run_or_use_the_transfer_of_another() -> None:
    with an_agent() as (cluster, _), a_caller(cluster) as (_, caller), a_caller(cluster) as (_, other):
        number = caller.call("open_delivery", "train")
        for path in ("../x", "/etc/x", "a/../../x", "a\0b"):
            with pytest.raises(ConfigError, match="cannot be sent"):
                caller.call("offer_files", number, (FileEntry(path, 1, bytes(32)),))
        with pytest.raises(ConfigError, match="this transfer of files has ended"):
            other.call("offer_files", number, (FileEntry("a", 1, bytes(32)),))
        caller.call("offer_files", number, (FileEntry("a", 1, bytes(32)),))
        assert list(caller.stream("missing_files", number)) == [[0]]
        with pytest.raises(ConfigError, match="has changed while it was sent"):
            caller.call("put_bytes", number, 0, 0, b"x")
        for impossible in ((number, -1, 0, b""), (number, 0, 0, b"x" * 40_000), (number, "a", 0, b"")):
            with pytest.raises(ConfigError):
                caller.call("put_bytes", *impossible)
        with pytest.raises(ConfigError, match="1 to 100 printable"):
            caller.call("open_delivery", "a\x1b[2J")


def test_only_a_few_signals_can_be_sent_and_only_to_programs_of_the_agent() -> None:
    with an_agent() as (cluster, _), a_caller(cluster) as (_, caller):
        with pytest.raises(ConfigError, match="signal 19 cannot be sent"):
            caller.call("send_signal", 1, 19, 0)
        with pytest.raises(ConfigError, match="there is no program 1 here"):
            caller.call("send_signal", 1, 15, 0)
        with pytest.raises(ConfigError, match="there is no program 5 here"):
            list(caller.stream("follow", 5, 0, True, True))


def test_nonsense_about_calls_costs_a_member_its_link_and_others_are_served() -> None:
    sent = [
        [messages.AgentCall(1, 1, b"nonsense")],
        [messages.AgentCall(1, 1, a_call("programs")), messages.AgentCall(1, 3, b"")],
        [messages.AgentCall(1, 1, a_call("programs", 5)), messages.AgentCall(1, 2, a_call("programs", 5))],
    ]
    with an_agent() as (cluster, _), a_caller(cluster) as (_, caller):
        for said in sent:
            with a_member(cluster) as (member, send):
                for message in said:
                    send(message)
                wait_until(lambda member=member: member.links_lost > 0)  # type: ignore[misc]
        assert list(caller.stream("programs")) == []


def test_a_call_with_large_parts_is_answered_without_them() -> None:
    with an_agent() as (cluster, _), a_member(cluster) as (member, send):
        send(messages.AgentCall(1, 1, a_call("open_delivery", sizes=(1 << 40,))))
        send(messages.AgentCall(1, 2, a_call("open_delivery", 2, sizes=(1000,))))
        wait_until(lambda: len(member.said) >= 2)


def test_a_member_gets_few_sessions_on_a_link() -> None:
    with an_agent() as (cluster, agent), a_member(cluster) as (member, send):
        for session in range(SESSIONS_PER_LINK + 20):
            send(messages.AgentCall(session, 1, a_call("unknown")))
        refused = lambda: [each for each in member.said if isinstance(each, messages.AgentRefusal)]  # noqa: E731
        wait_until(lambda: len(refused()) >= 20)
        assert len(refused()) == 20
        assert len(agent._transport._sessions) == SESSIONS_PER_LINK


def test_a_terminal_takes_no_calls_of_agents() -> None:
    with an_agent() as (cluster, agent), a_caller(cluster) as (terminal, caller):
        assert list(caller.stream("programs")) == []
        session = next(iter(agent._transport._sessions.values()))
        remote = session.remote
        control.soon(remote.send, messages.AgentCall(99, 1, a_call("start_program")))
        assert list(caller.stream("programs")) == []
        assert len(terminal.transport._sessions) == 1


def test_readers_that_do_not_read_hold_up_neither_the_program_nor_other_members(tmp_path: Path) -> None:
    with an_agent() as (cluster, agent), a_caller(cluster) as (_, caller):
        request = StartRequest("flood", 1, (), ("x",))
        flood = ["sh", "-c", "head -c 30000000 /dev/zero"]
        job = agent.service.jobs.start(request, flood, tmp_path, "north")
        with a_caller(cluster) as (_, slow), contextlib.ExitStack() as stack:
            for _ in range(100):  # more streams than handlers, and none of them is read
                stream = slow._terminal.calls.stream(
                    slow._connected(), "follow", (1, 0, False, True), {}, rank=0, timeout=DEADLINE
                )
                stack.callback(stream.close)
            assert job.has_ended.wait(DEADLINE)
            begun = time.monotonic()
            assert [each.run for page in caller.stream("programs") for each in page] == ["flood"]
            assert time.monotonic() - begun < DEADLINE / 2
            session = max(agent._transport._sessions.values(), key=lambda each: each.sent)
            transport = session.link._transport
            assert transport is None or transport.get_write_buffer_size() <= 2 * BACKLOG_LIMIT


def test_many_calls_at_once_are_served_in_turn() -> None:
    with an_agent() as (cluster, _), a_caller(cluster) as (_, greedy), a_caller(cluster) as (_, modest):
        is_over = threading.Event()

        def flood() -> None:
            while not is_over.is_set():
                with contextlib.suppress(ConfigError, ConnectError, AuthError):
                    works = [greedy.begin("open_delivery", "x") for _ in range(200)]
                    for work in works:
                        work.exception()

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            for _ in range(5):
                assert list(modest.stream("programs")) == []
        finally:
            is_over.set()
            thread.join(DEADLINE)
