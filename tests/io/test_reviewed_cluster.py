"""What a review of the cluster found: each of these once kept a join, a lane or a warning from coming."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from covey.base.config import GroupConfig
from covey.base.errors import ConfigError
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import NodeIdentity
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.mesh.endpoint import cluster_endpoint
from covey.runtime.mesh.joiner import Joiner
from covey.runtime.mesh.search import Search
from covey.wire import door, messages
from covey.wire.formation import Terms
from covey.wire.secret import ClusterSecret, encode_join_code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.runtime.mesh.remote_node import RemoteNode

DEADLINE = 20.0
CONFIG = GroupConfig(interfaces="lo")
TERMS = Terms(run="r", program="p.py", size=2, min_size=2, max_size=2, version="1", lanes="auto")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nodes meet in a folder of the test's own, and keep their files in another."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
        yield tmp_path / "home"


def new_cluster() -> Cluster:
    return Cluster(ClusterSecret("lab", secrets.token_bytes(32)))


def is_there(path: str) -> bool:
    return os.path.exists(path)


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must come in time."""
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE
    )


def test_a_seed_that_cannot_be_tried_now_ends_neither_the_search_nor_the_announcement() -> None:
    """An interface that was down for a moment, or no free descriptor: the node must still be found afterwards."""

    async def work() -> None:
        cluster = Cluster(new_cluster().secret, seeds=("127.0.0.1:9",))
        endpoint = cluster_endpoint(cluster, CONFIG, run="r", ports=(0,), identity=NodeIdentity.ephemeral())
        assert endpoint.host_registry is not None
        troubles: list[Exception] = [ConfigError("nothing matches that is up"), OSError(24, "Too many open files")]
        tried_again = asyncio.Event()

        async def try_seed(_seed: str, _addresses: tuple[messages.Address, ...]) -> None:
            if troubles:
                raise troubles.pop(0)
            tried_again.set()

        search = Search(
            cluster,
            endpoint.card,
            "lo",
            endpoint.host_registry,
            found=lambda _addresses, same_host=False: None,
            try_seed=try_seed,
        )
        searching = asyncio.create_task(search.run())
        try:
            async with asyncio.timeout(5):
                await tried_again.wait()
            assert is_there(endpoint.card.contact.socket)
        finally:
            searching.cancel()
            await asyncio.gather(searching, return_exceptions=True)
            await endpoint.acceptor.close()
            endpoint.on_close()

    asyncio.run(work())


def test_a_second_link_takes_nothing_away_from_a_run_that_goes_on() -> None:
    """A node that got another address is dialled there, too. What the others say must not vanish in that link."""

    async def work() -> None:
        cluster = new_cluster()
        nodes = []
        try:
            for _ in range(2):
                endpoint = cluster_endpoint(cluster, CONFIG, run="r", ports=(0,), identity=NodeIdentity.ephemeral())
                nodes.append(Joiner(cluster, CONFIG, endpoint, TERMS))
            smaller, larger = sorted(nodes, key=lambda node: node.card.id)
            for node in nodes:
                await node.open()
            await asyncio.gather(larger.form(10), smaller.form(10))
            (remote,) = larger.seated({messages.key_of(smaller.card): 0}).values()
            used: list[object] = []
            in_use = remote.link
            link_changed = larger.link_changed

            def note(who: RemoteNode) -> None:
                used.append(who.link)
                link_changed(who)

            larger.link_changed = note  # type: ignore[method-assign]
            port = smaller.card.contact.addresses[0].port
            await larger.mesh.dial((messages.Address("127.0.0.1", port),), same_host=True)
            assert all(link is in_use for link in used), "a link that the smaller one is about to close was used"
        finally:
            for node in nodes:
                await node.close()
                node.endpoint.on_close()

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await work()

    asyncio.run(bounded())


def test_a_wrong_key_is_told_although_something_harmless_was_told_just_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        acceptor = Acceptor([listener], secrets.token_bytes(32), "the run")
        acceptor.open()
        try:
            address = listener.getsockname()
            _, scanner = await asyncio.open_connection(*address)
            scanner.close()
            await scanner.wait_closed()
            while not acceptor.turned_away:  # noqa: ASYNC110 - an entrance tells nobody
                await asyncio.sleep(0.005)
            reader, writer = await asyncio.open_connection(*address)
            await reader.readexactly(door.CHALLENGE_BYTES)
            writer.write(bytes(door.ANSWER_BYTES))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        finally:
            await acceptor.close()

    with caplog.at_level(logging.INFO, "covey"):
        asyncio.run(asyncio.wait_for(work(), DEADLINE))
    assert any(
        record.levelno == logging.WARNING and "does not hold this cluster's key" in record.message
        for record in caplog.records
    )


def test_a_child_can_join_although_it_was_forked_while_another_thread_joined() -> None:
    done = python(
        """
import os, signal, threading, covey
from covey.runtime.joining import bootstrap
threading.Thread(target=lambda: covey.join("nobody-else", timeout=15), daemon=True).start()
while not bootstrap._joining.locked():
    pass
child = os.fork()
if not child:
    signal.alarm(5)
    os._exit(covey.join().size)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
""",
        COVEY_SECRET="ab" * 32,
        COVEY_INTERFACES="lo",
    )
    assert done.stdout.strip() == "1", done.stderr


def test_the_time_to_wait_for_the_others_may_come_from_the_environment_under_a_launcher() -> None:
    done = python(
        "import covey; covey.join()",
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_PORT="29783",
        COVEY_JOIN_TIMEOUT="1",
    )
    assert "timeout of 1 s" in done.stderr


def test_a_new_key_of_a_cluster_does_not_let_those_in_again_who_were_denied() -> None:
    old, kept_out = new_cluster(), secrets.token_bytes(32)
    clusters.save(Cluster(old.secret, denied=frozenset({kept_out})))
    code = encode_join_code(ClusterSecret("lab", secrets.token_bytes(32)))
    done = subprocess.run(
        [sys.executable, "-m", "covey", "enroll", "--force", "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert clusters.load("lab").denied == {kept_out}


def test_a_cluster_is_not_made_when_its_join_code_cannot_be() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "covey", "init", "lab"],
        env={**os.environ, "COVEY_INTERFACES": "no-such-interface"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 2
    assert not clusters.cluster_path("lab").exists()
