"""A keeper among the nodes of a cluster: it finds its own, and tells all the others how they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVarTuple

import msgspec
import pytest
from tests.support.waiting import DEADLINE

from covey.base.config import GroupConfig
from covey.base.numbers import Seat
from covey.net.host import readings
from covey.net.host.machine import hardware
from covey.net.host.readings import MachineReader
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import NodeIdentity
from covey.proto.health import ProcessState
from covey.runtime.keeper.service import ClusterKeeperService
from covey.runtime.metrics import inspection
from covey.runtime.metrics.inspection import READINGS, PacedAnswers
from covey.runtime.peers.cluster_mesh import ClusterMesh
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.runtime.peers.mesh import MeshListener
from covey.runtime.views import process_table
from covey.wire import messages
from covey.wire.progress import decode_readings
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.runtime.peers.remote_process import RemoteProcess

Args = TypeVarTuple("Args")
CONFIG = GroupConfig(interfaces="lo")


pytestmark = pytest.mark.usefixtures("home")


def new_cluster(**changes: Any) -> Cluster:
    return replace(Cluster(ClusterSecret("lab", secrets.token_bytes(32))), **changes)


class Node(MeshListener):
    """A node that would be in a run, and notes what keepers say."""

    def __init__(self, cluster: Cluster, config: Any, endpoint: Any, *, announce: bool) -> None:
        self.mesh = ClusterMesh(cluster, config, endpoint, self, purpose="candidate", announce=announce)
        self.said: list[tuple[bytes, messages.Control]] = []
        self.changed = asyncio.Event()

    def keeper_linked(self, remote: RemoteProcess) -> None:
        self.changed.set()

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        assert remote.purpose == "keeper"
        self.said.append((remote.card.id, message))
        self.changed.set()

    def standing(self, card: messages.Card) -> int | None:
        """Return what a keeper last said of a process."""
        vouches = [message for _, message in self.said if isinstance(message, messages.Vouch)]
        return dict(vouches[-1].processes).get(card.life) if vouches else None

    async def until(self, condition: Callable[[*Args], bool], *args: *Args) -> None:
        while not condition(*args):
            self.changed.clear()
            await self.changed.wait()


async def add(
    stack: contextlib.AsyncExitStack, cluster: Cluster, *, announce: bool = True, host: str = "", **changes: Any
) -> Node:
    """Open a node with some things on its card, until the test is over."""
    endpoint = cluster_endpoint(cluster, CONFIG, run="r", ports=(0,), identity=NodeIdentity.ephemeral())
    stack.callback(endpoint.on_close)
    contact = msgspec.structs.replace(endpoint.card.contact, host=host or endpoint.card.contact.host)
    card = msgspec.structs.replace(endpoint.card, contact=contact, **changes)
    node = Node(cluster, CONFIG, replace(endpoint, card=card), announce=announce)
    stack.push_async_callback(node.mesh.close)
    await node.mesh.open()
    return node


def sleeper(stack: contextlib.AsyncExitStack) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "1000"])
    stack.callback(process.wait, DEADLINE)
    stack.callback(process.kill)
    return process


def opened(stack: contextlib.AsyncExitStack, cluster: Cluster) -> ClusterKeeperService:
    service = ClusterKeeperService(cluster, CONFIG)
    stack.callback(service.close)
    service.start()
    return service


def run(work: Callable[[contextlib.AsyncExitStack], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE), contextlib.AsyncExitStack() as stack:
            await work(stack)

    asyncio.run(bounded())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of stopped processes")
def test_every_node_hears_how_the_processes_of_a_keeper_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        cluster, process = new_cluster(), sleeper(stack)
        service = opened(stack, cluster)
        own = await add(stack, cluster, keeper=service.id, pid=process.pid)
        other = await add(stack, cluster)
        braggart = await add(stack, cluster, keeper=service.id, host="elsewhere")
        for node in (other, braggart):
            await node.until(lambda node: node.standing(own.mesh.card) == ProcessState.BUSY, node)
        assert {keeper for keeper, _ in other.said} == {keeper.card.id for keeper in other.mesh.keepers} == {service.id}
        assert service.id not in other.mesh.met
        assert other.standing(braggart.mesh.card) is None
        monkeypatch.setattr(process_table, "REPORT_EVERY", 2 * DEADLINE)  # only news are told from now on
        other.said.clear()
        await other.until(lambda: messages.Vouch in [type(message) for _, message in other.said])
        process.send_signal(signal.SIGSTOP)
        await other.until(lambda: other.standing(own.mesh.card) == ProcessState.STOPPED)
        process.send_signal(signal.SIGCONT)
        await other.until(lambda: other.standing(own.mesh.card) == ProcessState.BUSY)
        process.kill()
        await own.mesh.close()
        await other.until(lambda: other.standing(own.mesh.card) == ProcessState.EXITED)

    run(work)


def test_the_last_word_of_a_keeper_is_how_its_processes_ended() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        cluster, process = new_cluster(), sleeper(stack)
        service = opened(stack, cluster)
        own = await add(stack, cluster, keeper=service.id, pid=process.pid)
        other = await add(stack, cluster)
        await other.until(lambda: other.standing(own.mesh.card) == ProcessState.BUSY)
        process.kill()
        process.wait(DEADLINE)
        await asyncio.to_thread(service.close)
        await other.until(lambda: other.standing(own.mesh.card) == ProcessState.EXITED)

    run(work)


def test_a_run_survives_if_a_node_of_the_keeper_says_so_and_no_other() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        cluster = new_cluster()
        service = opened(stack, cluster)
        own, other = await add(stack, cluster, keeper=service.id), await add(stack, cluster)
        founded = messages.Founded(0, b"l" * 16, False, (messages.SeatedMember(Seat(0), own.mesh.card),), "continue")
        for node in (other, own):
            assert not service.survives
            while True:  # of two links that were opened at once one is closed, and what was said there is lost
                await node.until(lambda node: bool(node.mesh.keepers), node)
                keeper = node.mesh.keepers[-1]
                keeper.send(founded)
                with contextlib.suppress(TimeoutError):
                    await keeper.ask(messages.Ask(), 0.5)  # answered after what came before was heard
                    break
            await asyncio.to_thread(service.catch_up)
        assert service.survives

    run(work)


def test_a_node_that_comes_later_to_a_network_without_multicast_is_met_too() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        cluster, process = new_cluster(), sleeper(stack)
        first = await add(stack, cluster, announce=False)
        seeded = replace(cluster, seeds=(f"127.0.0.1:{first.mesh.card.contact.addresses[0].port}",))
        service = opened(stack, seeded)
        await first.until(lambda: bool(first.mesh.keepers))
        own = await add(stack, seeded, announce=False, keeper=service.id, pid=process.pid)
        await first.until(lambda: first.standing(own.mesh.card) == ProcessState.BUSY)
        await own.until(lambda: own.standing(own.mesh.card) == ProcessState.BUSY)

    run(work)


def test_a_keeper_that_cannot_come_to_the_cluster_says_so_quietly(caplog: pytest.LogCaptureFixture) -> None:
    service = ClusterKeeperService(new_cluster(), GroupConfig(interfaces="nosuch0"))
    with caplog.at_level(logging.INFO, logger="covey"):
        service.start()
        for thread in threading.enumerate():
            if thread.name == "covey-keeper":
                thread.join(DEADLINE)
        service.catch_up()
        service.close()
        service.close()
    (record,) = caplog.records
    assert (record.levelno, service.survives) == (logging.INFO, False)
    assert "no keeper in cluster 'lab'" in record.getMessage()


def test_a_keeper_that_is_closed_at_once_never_comes() -> None:
    before = len(os.listdir(tempfile.gettempdir()))
    service = ClusterKeeperService(new_cluster(), CONFIG)
    service.close()
    service.start()
    for thread in threading.enumerate():
        if thread.name == "covey-keeper":
            thread.join(DEADLINE)
    assert len(os.listdir(tempfile.gettempdir())) == before


def test_a_view_that_asks_a_rank_how_its_machine_is_used_has_the_keeper_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers: list[MachineReader] = []

    class Counted(MachineReader):
        def __init__(self) -> None:
            readers.append(self)
            super().__init__()

    monkeypatch.setattr(readings, "MachineReader", Counted)
    monkeypatch.setattr(inspection, "KEEPER_ANSWER_SECONDS", DEADLINE)

    async def work(stack: contextlib.AsyncExitStack) -> None:
        cluster, process = new_cluster(), sleeper(stack)
        service = opened(stack, cluster)
        own = [await add(stack, cluster, keeper=service.id, pid=process.pid) for _ in range(2)]
        stranger = await add(stack, cluster)

        async def told(node: Node) -> messages.Inspected:
            await node.until(lambda: bool(node.mesh.keepers))
            answers: asyncio.Queue[messages.Inspected] = asyncio.Queue()
            paced = PacedAnswers()
            for asker in (b"one", b"other"):  # two views, of which each gets the answer
                paced.answer(messages.Inspect(READINGS), asker, answers.put_nowait, node.mesh.own_keeper())
            first = await answers.get()
            assert (await answers.get()).body == first.body
            return first

        for node in own:
            read = decode_readings((await told(node)).body)
            assert read.cores == hardware().cores
        assert len(readers) == 1, "the keeper has read, and no rank"
        assert stranger.mesh.own_keeper() is None

        monkeypatch.setattr(inspection, "KEEPER_ANSWER_SECONDS", 0.0)  # a keeper that does not answer in time
        here: asyncio.Queue[messages.Inspected] = asyncio.Queue()
        loop, node = asyncio.get_running_loop(), own[0]

        def answered(answer: messages.Inspected) -> None:
            loop.call_soon_threadsafe(here.put_nowait, answer)

        PacedAnswers().answer(messages.Inspect(READINGS), b"one", answered, node.mesh.own_keeper())
        assert decode_readings((await here.get()).body).cores == read.cores
        assert len(readers) == 2

    run(work)
