"""How the ranks of a launcher come together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.base.numbers import Seat
from covey.base.version import __version__
from covey.proto.health import Cause, ProcessState
from covey.runtime import loop as control
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.launched_links import LaunchedLinks
from covey.runtime.joining.node import node_of
from covey.runtime.links.handshake import RefusedError
from covey.runtime.peers.launcher_mesh import LauncherMesh
from covey.runtime.peers.peer_table import PeerTable
from covey.testing.threads import run_threads
from covey.wire import messages
from covey.wire.versions import only

if TYPE_CHECKING:
    import covey
    from covey.runtime.joining.node import NodeParts
    from covey.runtime.peers.remote_process import RemoteProcess


def test_every_rank_tells_every_other_once_that_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[tuple[int, int]] = Counter()
    send = PeerTable.send

    def count(peers: PeerTable, peer: Seat, message: Any, **wakes: bool) -> None:
        said[peers.seat, peer] += isinstance(message, messages.Ready)
        send(peers, peer, message, **wakes)

    monkeypatch.setattr(PeerTable, "send", count)
    run_threads(5, lambda group: group.barrier(), lanes="unix", timeout=DEADLINE)
    assert said == {(rank, peer): 1 for rank in range(5) for peer in range(5) if rank != peer}


def test_no_rank_of_one_host_is_told_what_it_knows_already(monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[str] = Counter()
    send = PeerTable.send

    def count(peers: PeerTable, peer: Seat, message: Any, **wakes: bool) -> None:
        said[type(message).__name__] += 1
        send(peers, peer, message, **wakes)

    monkeypatch.setattr(PeerTable, "send", count)
    run_threads(3, lambda group: group.barrier(), lanes="unix", timeout=DEADLINE)
    assert said["Roster"] == 0


def test_the_word_of_a_keeper_reaches_the_ranks_that_agree_on_views() -> None:
    """In a cluster members decide: they have to know which processes are vouched for."""

    def work(group: covey.Group) -> float:
        node, generation = node_of(group), engine_of(group).generation
        assert node is not None
        assert generation is not None
        group.barrier()
        presence, other = generation.view_driver._core._presence, 1 - group.rank

        async def hear(value: ProcessState) -> float:
            node.views.losses.vouched(node.peers[Seat(other)].card.keeper, [(node.peers[Seat(other)].life, int(value))])
            return presence.vouched_until(other)

        assert control.start(hear(ProcessState.STOPPED)).result(DEADLINE) < 0
        return control.start(hear(ProcessState.BUSY)).result(DEADLINE)

    began = time.monotonic()
    assert min(run_threads(2, work, lanes="unix", timeout=DEADLINE)) > began


@pytest.mark.parametrize("step", [-1, 1], ids=["older", "newer"])
def test_ranks_of_different_protocols_are_told_at_once_which_machine_to_update(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Rank 1 comes once rank 2 is linked with rank 0, which then tells it why the run cannot form."""
    hello, dial, use = LauncherMesh.hello, LauncherMesh.dial, LauncherMesh._use
    other = messages.VERSION + step
    is_linked = asyncio.Event()

    def note(mesh: LauncherMesh, peer: RemoteProcess, *of_link: Any) -> None:
        use(mesh, peer, *of_link)
        if mesh.members is not None and (mesh.members.seat, peer.seat) == (0, 2):
            is_linked.set()

    async def dial_late(mesh: LauncherMesh, peer: RemoteProcess) -> None:
        if mesh.hello().rank == 1:
            await is_linked.wait()
        await dial(mesh, peer)

    monkeypatch.setattr(LauncherMesh, "_use", note)
    monkeypatch.setattr(LauncherMesh, "dial", dial_late)

    def of_another_release(mesh: LauncherMesh) -> messages.Hello:
        said = hello(mesh)
        card = msgspec.structs.replace(said.card, version="9.9", host_name="south")
        return msgspec.structs.replace(said, versions=only(other), card=card) if said.rank == 1 else said

    monkeypatch.setattr(LauncherMesh, "hello", of_another_release)
    with pytest.raises(ExceptionGroup) as raised:
        run_threads(3, lambda group: group.barrier(), lanes="unix", timeout=DEADLINE)
    assert len(raised.value.exceptions) == 3
    for error in raised.value.exceptions:
        assert isinstance(error, ConfigError), error
        assert f"south speaks protocol {other} (covey 9.9)" in str(error)
        assert f"speaks {messages.VERSION} (covey {__version__})" in str(error)
        assert str(error).endswith("update covey on south") == (step < 0)


@pytest.mark.parametrize("news", ["its process has exited", "a view without it"])
def test_a_rank_that_left_before_it_exited_is_not_lost(news: str) -> None:
    """The keeper's word that a process has exited may be read before the last that the process itself said."""
    nodes: dict[int, NodeParts] = {}
    is_out, is_heard = threading.Event(), threading.Event()

    def work(group: covey.Group) -> None:
        node = node_of(group)
        assert node is not None
        nodes[group.rank] = node
        group.barrier()
        if group.rank:
            is_out.set()
            is_heard.wait(DEADLINE)  # its own goodbye comes later
            return

        assert is_out.wait(DEADLINE)  # of the barrier, which its exclusion would end

        async def hear_both_at_once() -> bool:
            nodes[1].peers.send(Seat(0), messages.Goodbye())  # in the socket now: this rank has not looked there
            assert not node.peers[Seat(1)].has_left
            if news == "a view without it":
                node.views.losses.exclude(Seat(1))
            else:
                node.views.losses.silent(Seat(1), news, Cause.EXITED)
            return node.peers[Seat(1)].has_left

        try:
            assert control.start(hear_both_at_once()).result(DEADLINE)
            assert engine_of(group).failure.message_error() is None, "taken for a loss"
        finally:
            is_heard.set()

    run_threads(2, work, lanes="unix", timeout=DEADLINE)


def test_a_member_that_dials_what_another_process_has_become_does_not_end_its_link() -> None:
    """A restarted process listens where its predecessor did, which members of smaller seats may still dial."""

    def work(group: covey.Group) -> tuple[str, bool]:
        node, other = node_of(group), Seat(1 - group.rank)
        assert node is not None
        assert isinstance(node.links, LaunchedLinks)
        assert isinstance(node.links.mesh, LauncherMesh)
        peer = node.peers[other]
        before, refusal = peer.link, ""
        group.barrier()
        if group.rank == 0:
            with pytest.raises(RefusedError) as refused:
                control.start(node.links.mesh.dial(peer)).result(DEADLINE)
            refusal = str(refused.value)
        group.barrier()
        is_open = peer.link is before and before is not None and before.is_open
        group.barrier()  # before a rank leaves
        return refusal, is_open

    said = run_threads(2, work, lanes="unix", timeout=DEADLINE)
    assert said == [("rank 0 must not dial rank 1; the higher rank of a pair dials", True), ("", True)]
