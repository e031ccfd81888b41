"""What a stranger can see: captured packets, files, environments, logs and errors, and no secret in any of them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.attackers import LOOPBACK, new_cluster, run_nodes
from tests.support.nodes import Cluster as Nodes
from tests.support.nodes import node_id
from tests.support.waiting import DEADLINE

from covey.base.errors import CoveyError
from covey.net.keys import secret_sources
from covey.net.keys.identity import NodeIdentity, id_text, node_name
from covey.runtime.environment import ClusterOptions
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.testing.netns import Lan, require_namespaces
from covey.wire import messages
from covey.wire.secret import ClusterSecret, encode_join_code

if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCE = Path(__file__).parents[2] / "src"
PREFIX = "covey-sec"
HOST_NAME = "the-hidden-host-name"
CLUSTER, RUN = "hidden-cluster-name", "hidden-run-name"
TALK = f"""
import json, socket, sys
socket.gethostname = lambda: {HOST_NAME!r}
import numpy as np
import covey

block = bytes.fromhex(sys.argv[4])
with covey.join(sys.argv[2], **json.loads(sys.argv[3])) as group:
    tensor = np.tile(np.frombuffer(block, np.uint8), 4096).copy() if group.rank == 0 else np.zeros(64 * 4096, np.uint8)
    group.broadcast(tensor, 0)
    assert tensor.tobytes() == block * 4096
    group.all_gather_object({{"text": block.hex(), "rank": group.rank}})
    if group.rank == 0:
        group.send(tensor, 1)
        group.send_object(block, 1)
    else:
        group.recv(0, out=tensor)
        assert group.recv_object(0) == block
    print(json.dumps(group.lanes()))
"""
REDUCE = """
import json, sys, time
import covey
with covey.join(sys.argv[2], **json.loads(sys.argv[3])) as group:
    group.all_reduce(1)
    print("ready", flush=True)
    began = time.monotonic()
    try:
        while True:
            assert group.all_reduce(group.rank + 1) == 3
            group.send_object(1, 1 - group.rank)
            group.recv_object(1 - group.rank)
    except covey.PeerLostError as error:
        print(json.dumps([str(error), error.rank]), flush=True)
"""


def forms(name: str, key: bytes) -> Iterable[tuple[str, bytes]]:
    """Every way in which a secret could leak by mistake."""
    yield name, key
    yield f"{name} in hex", key.hex().encode()
    yield f"{name} in HEX", key.hex().upper().encode()
    yield f"{name} as Python writes it", repr(key)[2:-1].encode()
    for kind in ("sha256", "sha1", "md5", "sha512"):
        yield f"{kind} of {name}", hashlib.new(kind, key).digest()
        yield f"{kind} of {name} in hex", hashlib.new(kind, key).hexdigest().encode()


def hidden(secret: ClusterSecret) -> dict[str, bytes]:
    found = dict(forms("the secret", secret.key))
    for purpose in ("node-ca", "door", "mdns", "local"):
        found |= dict(forms(f"the key for {purpose}", secret.derive(purpose)))
    return found


def test_a_capture_of_all_that_two_nodes_exchange_tells_nothing() -> None:
    require_namespaces()
    nodes, block = Nodes(CLUSTER), secrets.token_bytes(64)
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        lan.switch.start_capture()
        code = TALK.replace("sys.argv[4]", repr(block.hex()))
        pair = [nodes.start(host, RUN, code=code, size=2, timeout=DEADLINE) for host in lan.hosts]
        ends = [node.end() for node in pair]
        assert [(end[0], "secure" in end[1]) for end in ends] == [(0, True)] * 2, ends
        capture = lan.switch.captured()
        ids = [node_id(host) for host in lan.hosts]
    sent = sum(map(len, capture.streams().values()))
    assert sent > 2 * 64 * 4096, "the tensor did not travel through the capture"
    announced = capture.datagrams(5353)
    assert any(b"_covey" in packet for packet in announced), "nothing was announced"
    needles = hidden(ClusterSecret(CLUSTER, bytes.fromhex(nodes.secret)))
    needles |= {"the tensor": block[:16], "its end": block[-16:], "the object": block.hex().encode()[:32]}
    needles |= {"host name": HOST_NAME.encode(), "cluster name": CLUSTER.encode(), "run name": RUN.encode()}
    for number, node in enumerate(ids):
        needles |= {f"id {number}": node[:12], f"id {number} in hex": node.hex()[:16].encode()}
        needles |= {f"id {number} in letters": id_text(node)[:12].encode()}
        needles |= {f"name {number}": node_name(HOST_NAME, node).encode()}
    assert [what for what, needle in needles.items() if needle in capture] == []


def test_forged_resets_are_a_lost_peer_for_every_rank_at_once() -> None:
    require_namespaces()
    nodes = Nodes(CLUSTER)
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        pair = [nodes.start(host, RUN, code=REDUCE, size=2, timeout=DEADLINE) for host in lan.hosts]
        for node in pair:
            assert pipes.stdout(node.process).readline() == "ready\n", pipes.stderr(node.process).read()
        assert lan.switch.reset_connections() >= 2
        ends = [node.end() for node in pair]
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert sorted(json.loads(out)[1] for _, out, _ in ends) == [0, 1]


# This machine


def test_no_text_that_an_object_makes_of_itself_has_a_secret_in_it() -> None:
    cluster, identity = new_cluster(), NodeIdentity.ephemeral()
    lane_secret = secrets.token_bytes(32)
    endpoint = cluster_endpoint(cluster, LOOPBACK, run="run", ports=(0,), identity=identity)
    try:
        shown = {
            "ClusterSecret": cluster.secret,
            "Cluster": cluster,
            "ClusterOptions": ClusterOptions("prey", cluster.secret.key.hex()),
            "NodeIdentity": identity,
            "Gate": endpoint.credentials,
            "Seat": endpoint,
            "NewSecret": messages.NewSecret(cluster.secret.key, 1, 600, bytes(64)),
            "Offer": messages.Offer(bytes(16), lane_secret, 0, "collectives", "secure", 0, 1),
        }
        needles = list(hidden(cluster.secret).values()) + [value for _, value in forms("lane", lane_secret)]
        needles += [value for _, value in forms("key", identity.private.private_bytes_raw())]
        telling = [
            name
            for name, value in shown.items()
            if any(needle in f"{value!r} {value!s}".encode("utf-8", "surrogateescape") for needle in needles)
        ]
        assert telling == []
    finally:
        endpoint.on_close()
        for listener in endpoint.acceptor._listeners:
            listener.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-1],
        lambda text: text + "0",
        lambda text: text[:10],
        lambda text: f"covey1-{text}",
        lambda text: "a a a " + text[-8:],
    ],
)
def test_no_error_about_a_secret_repeats_it(spoil: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = new_cluster().secret
    for text in (secret.key.hex(), encode_join_code(secret)):
        bad = spoil(text)
        file = tmp_path / "secret"
        file.write_text(bad)
        file.chmod(0o600)
        for env in ({"COVEY_SECRET": bad}, {"COVEY_SECRET_FILE": str(file)}):
            monkeypatch.setattr(secret_sources, "_environment_secret", None)
            with pytest.raises(CoveyError) as raised:
                secret_sources.find("prey", dict(env))
            told = f"{raised.value!r} {raised.value} {raised.value.__cause__!r}"
            if len(part := bad[7:40]) > 6:  # shorter ones are in some of the words that it proposes
                assert part not in told
            assert text[7:17] not in told


JOIN = """
import json, logging, os, subprocess, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
import covey
with covey.join("run", size=2, interfaces="lo", lanes="secure", timeout=500) as group:
    assert group.all_reduce(group.rank + 1) == 3
    group.barrier()
    print(subprocess.run(["env"], capture_output=True, text=True).stdout)
    print(subprocess.run(["ps", "-ww", "-o", "args", "-p", str(os.getpid())], capture_output=True, text=True).stdout)
    print(dict(os.environ))
    try:
        group.barrier()
        if group.rank == 1:
            os._exit(3)
        group.all_reduce(1)
    except covey.CoveyError as error:
        print(repr(error), error.__dict__)
"""


def test_a_secret_given_by_the_environment_is_in_no_child_no_log_and_no_file(home: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="covey-sec-") as temp:  # short: sockets lie in it
        check_environment_secret(home, Path(temp))


def check_environment_secret(home: Path, temp: Path) -> None:
    secret = new_cluster("default").secret
    env = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
    env |= {
        "COVEY_HOME": str(home), "COVEY_SECRET": secret.key.hex(), "PYTHONPATH": str(SOURCE), "COVEY_DEBUG": "1",
        "PYTHONASYNCIODEBUG": "1", "TMPDIR": str(temp), "XDG_RUNTIME_DIR": str(temp),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    pair = [
        subprocess.Popen([sys.executable, "-c", JOIN], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        texts = [b"".join(process.communicate(timeout=2 * DEADLINE)) for process in pair]
    finally:
        for process in pair:
            process.kill()
            process.wait(DEADLINE)
    assert sorted(process.returncode for process in pair) == [0, 3], texts
    assert all(b"PATH=" in text and b"python" in text for text in texts)
    texts += [path.read_bytes() for path in (*temp.rglob("*"), *home.rglob("*")) if path.is_file()]
    needles = hidden(secret)
    assert [what for text in texts for what, needle in needles.items() if needle in text] == []


def test_logging_at_debug_shows_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cluster = new_cluster()
    run_nodes(cluster, lambda group: group.all_gather_object(group.rank))
    needles = hidden(cluster.secret)
    text = "\n".join(f"{record.getMessage()} {record.args!r}" for record in caplog.records).encode()
    assert [what for what, needle in needles.items() if needle in text] == []


SHOW = """
import os, subprocess, sys, covey
before = "COVEY_SECRET" in os.environ
{join}
words = [sys.executable, "-c", "import os; print('COVEY_SECRET' in os.environ)"]
child = subprocess.check_output(words, text=True).strip()
print("before", before, "after", "COVEY_SECRET" in os.environ, "child", child)
"""


@pytest.mark.parametrize("how", ["a group of one", "covey run -n", pytest.param("launch", marks=pytest.mark.thorough)])
def test_a_secret_given_by_the_environment_is_in_no_child_of_any_group(home: Path, tmp_path: Path, how: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
    env |= {"COVEY_HOME": str(home), "COVEY_SECRET": secrets.token_hex(32), "PYTHONPATH": str(SOURCE)}
    script = tmp_path / "script.py"
    script.write_text(SHOW.format(join="covey.join().close()"))
    words = [sys.executable, str(script)]
    if how == "covey run -n":
        words = [sys.executable, "-m", "covey", "run", "-n", "2", str(script)]
    elif how == "launch":
        script.write_text(
            "import covey, os\n"
            "def main(group):\n"
            f"    exec({SHOW.format(join='')!r})\n"
            "if __name__ == '__main__':\n"
            "    covey.launch(main, 2)\n"
        )
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=2 * DEADLINE)
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition("before ")[2] for line in ended.stdout.splitlines() if "before " in line]
    # A group of one is told by its own environment, which it can only clear itself.
    first = "True" if how == "a group of one" else "False"
    assert lines == [f"{first} after False child False"] * (1 if how == "a group of one" else 2)
