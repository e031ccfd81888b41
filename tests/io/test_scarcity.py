"""A node whose process can open no more files: what keeps something true goes on, and works again when it can."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.io.test_mesh import Meshes, know_each_other, new_cluster, run, seed_of, until

from covey.base.errors import ConnectError
from covey.base.pace import Growing
from covey.net.discovery import interfaces, mdns
from covey.net.discovery.mdns import Beacon
from covey.runtime.links import handshake
from covey.runtime.loop import aside
from covey.runtime.peers import cluster_mesh as mesh_module
from covey.runtime.peers.hints import HINT_TRIES, DialOutcome, Hint, HintFollower, Origin
from covey.wire.messages import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.peers.search import Search


pytestmark = pytest.mark.usefixtures("home")

FULL = errno.EMFILE, os.strerror(errno.EMFILE)


class Shortage:
    """A function that fails for want of a descriptor until it is over."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.is_over, self.refused = False, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_over:
            self.refused += 1
            raise OSError(*FULL)
        return self._function(*args, **kwargs)


def test_addresses_are_kept_true_after_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = (Address("192.0.2.1", 9, "eth0"),)
    shortage = Shortage(interfaces.usable_interfaces)
    monkeypatch.setattr(mesh_module, "PING_SECONDS", 0.02)
    monkeypatch.setattr(mesh_module, "usable_interfaces", shortage)
    monkeypatch.setattr(mesh_module, "advertised", lambda *_: moved)

    async def work(meshes: Meshes) -> None:
        node = await meshes.add(new_cluster())
        await until(lambda: shortage.refused > 3)
        assert node.card.contact.addresses != moved
        shortage.is_over = True
        await until(lambda: node.card.contact.addresses == moved)

    run(work)


def test_multicast_begins_after_a_shortage_at_the_start_and_goes_on_after_one_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mdns, "INTERFACES_CHECK_EVERY", 0.05)
    shortage = Shortage(interfaces.all_interfaces)
    monkeypatch.setattr(interfaces, "all_interfaces", shortage)

    async def work(_meshes: Meshes) -> None:
        beacon = Beacon(bytes(32), 9, "lo", lambda *_: None)
        try:
            await beacon.start()
            assert "ulimit -n" in beacon.state
            await until(lambda: shortage.refused > 3)
            shortage.is_over = True
            await until(lambda: beacon.state == "announced on lo")
            shortage.is_over, shortage.refused = False, 0
            await until(lambda: shortage.refused > 3)
            shortage.is_over = True
            await until(lambda: beacon.state == "announced on lo")
        finally:
            await beacon.close()

    run(work)


def test_seeds_and_processes_of_the_same_host_are_found_after_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    shortage = Shortage(handshake.new_socket)
    monkeypatch.setattr(handshake, "new_socket", shortage)

    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        first = await meshes.add(cluster)
        second = await meshes.add(new_cluster(secret=cluster.secret, seeds=(seed_of(first),)))
        await until(lambda: shortage.refused > 3)
        (problem,) = second.report_problems().values()
        assert "ulimit -n" in problem
        shortage.is_over = True
        await until(lambda: know_each_other(first, second))

    run(work)


def test_a_link_is_made_while_the_interfaces_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        first = await meshes.add(cluster)
        second = await meshes.add(new_cluster(secret=cluster.secret))
        monkeypatch.setattr(interfaces, "all_interfaces", Shortage(interfaces.all_interfaces))
        _, there = interfaces._known
        monkeypatch.setattr(interfaces, "_known", (time.monotonic() - 60, there))
        assert await second.dial(Hint(first.card.contact.addresses)) is DialOutcome.LINKED
        await until(lambda: second.met[first.card.id].measured.is_set())
        assert second.met[first.card.id].round_trip > 0
        told = second.describe()  # names the interface of each link
        assert told.peers[0].interface == "lo"

    run(work)


def test_a_hint_is_not_given_up_because_this_process_can_open_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.runtime.peers.hints.SCARCE_SECONDS", 0.0)
    monkeypatch.setattr("covey.runtime.peers.hints.AGAIN_SECONDS", 0.004)
    monkeypatch.setattr("covey.runtime.peers.hints.HINT_PAUSES", Growing(0.001, 0.002))
    hint, dials = Hint((Address("192.0.2.1", 9),)), 0

    async def dial(_hint: Hint) -> DialOutcome:
        nonlocal dials
        dials += 1
        return DialOutcome.SCARCE if dials <= 3 * HINT_TRIES else DialOutcome.NO_NODE

    async def work(_meshes: Meshes) -> None:
        tasks = set()
        follower = HintFollower(dial, lambda _: False, lambda work: tasks.add(asyncio.create_task(work)))
        follower.found(hint, Origin.MULTICAST)
        following = asyncio.create_task(follower.keep_following())
        await until(lambda: dials == 4 * HINT_TRIES)
        await asyncio.sleep(0.1)
        assert dials == 4 * HINT_TRIES  # then it sleeps
        following.cancel()
        await asyncio.gather(following, *tasks, return_exceptions=True)

    run(work)


def test_where_no_thread_can_be_started_what_was_to_run_there_fails_as_the_system_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work(_meshes: Meshes) -> None:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            await aside(time.monotonic)

    run(work)


@pytest.mark.parametrize("error", [OSError(*FULL), ConnectError("no such host")])
def test_a_seed_is_tried_again_whatever_happened(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tries = 0

    async def fail(*_: Any) -> None:
        nonlocal tries
        tries += 1
        raise error

    monkeypatch.setattr("covey.runtime.peers.search.aside", fail)

    async def work(meshes: Meshes) -> None:
        node = await meshes.add(new_cluster(seeds=("127.0.0.1:9",)))
        search: Search = node.search
        await until(lambda: tries > 2)
        assert "127.0.0.1:9" in search.problems

    run(work)
