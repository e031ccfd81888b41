"""What a coordinator refuses: strangers, other secrets and certificates, and workers that pose as others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.authorities import Authority
from tests.support.coordinators import ask, coordinate, status, until, work
from tests.support.machines import end, heard, new_lab
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.coordinator import refusal, security, tls, tls_front
from covey.coordinator.certificates import derived, key_of, machine_of, subject_of
from covey.coordinator.refusal import RefusalError
from covey.net.keys import clusters, owner
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import own_machine
from covey.net.keys.organisation import PemFiles
from covey.runtime.environment import ClusterOptions
from covey.wire.messages import Charter, encode
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from tests.support.machines import Lab, Machine

NOBODY = 65534


def become_another_user() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


BEHIND = """
import json, sys
import grpc
from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator.coordinator_pb2_grpc import CoordinatorStub
try:
    CoordinatorStub(grpc.insecure_channel(f"unix:{sys.argv[1]}")).GetStatus(pb.GetStatusRequest(), timeout=500)
except grpc.RpcError as error:
    print(json.dumps(error.code().name), flush=True)
"""
"""Calls gRPC at a socket, without TLS, and prints the status of the answer."""
EVERYTHING = """
import json, sys
import grpc
from google.protobuf.message_factory import GetMessageClass
from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator.coordinator_pb2_grpc import CoordinatorStub
from covey.coordinator.security import SecretSecurity
from covey.runtime.environment import ClusterOptions
security = SecretSecurity(ClusterOptions("lab"))
papers = security.papers("worker")
credentials = grpc.ssl_channel_credentials(papers.authorities, papers.key, papers.chain)
stub = CoordinatorStub(
    grpc.secure_channel(sys.argv[1], credentials, [("grpc.ssl_target_name_override", security.server_name)])
)
found = {}
for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods:
    try:
        answer = getattr(stub, method.name)(GetMessageClass(method.input_type)(), timeout=500)
        found[method.name] = "answered" if not method.server_streaming else repr(next(answer))
    except grpc.RpcError as error:
        found[method.name] = error.code().name
print(json.dumps(found), flush=True)
"""
"""Makes every call that there is, and prints what came of each."""


def options(files: dict[str, str]) -> list[str]:
    return [word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", path)]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


def ended(worker: subprocess.Popen[str]) -> str:
    """Return the last line of the error with which a worker failed."""
    code, _, err = end(worker)
    assert code == 1
    return err.strip().splitlines()[-1]


def register(machine: Machine, address: str, worker: str, **config: object) -> None:
    """Let a worker be alone in a run, and leave it."""
    process = work(machine, address, worker, size=1, **config)
    assert heard(process)[0] == "before"
    assert heard(process)[:2] == ["started", 0]
    assert end(process)[0] == 0


def test_only_holders_of_the_secret_are_heard_and_each_worker_has_its_own_key(lab: Lab) -> None:
    key = secrets.token_bytes(32)
    one, two, other = (lab.machine(name, "lab", key) for name in ("one", "two", "other"))
    other.enroll("lab", secrets.token_bytes(32))
    _, address = coordinate(one, "--cluster", "lab")
    register(two, address, "w0", cluster="lab")
    assert "AuthError" in (error := ended(work(one, address, "w0", size=1, cluster="lab")))
    assert "'w0' of run 'run' was registered by key" in error
    register(two, address, "w0", cluster="lab")  # the same key again
    (run,) = status(one, address, "--cluster", "lab")
    assert (run["round"], run["workers"][0]["worker_id"]) == (2, "w0")
    for words in (("--cluster", "lab"), ()):  # another secret; clear text
        refused = other.covey("coordinator", "status", address, *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "is not the coordinator: its certificate is not accepted" in refused.stderr


def test_certificates_decide_who_is_heard_and_are_read_again_when_they_change(lab: Lab) -> None:
    machine = lab.machine()
    acme, rogue = Authority(lab.folder, "acme"), Authority(lab.folder, "rogue")
    served = acme.issue("coordinator", "served")
    alice, bob = acme.issue("alice"), acme.issue("bob")
    _, address = coordinate(machine, *options(served))
    register(machine, address, "w0", **alice)
    assert "subject CN=alice, not by subject CN=bob" in ended(work(machine, address, "w0", size=1, **bob))
    register(machine, address, "w0", **acme.issue("alice"))  # renewed, with another key
    mallory = rogue.issue("alice")
    for wrong, reason in (
        (mallory, "is not the coordinator: its certificate is not accepted"),  # another authority
        (mallory | {"tls_ca": alice["tls_ca"]}, "does not accept the certificate of this process: unknown ca"),
    ):
        refused = machine.covey("coordinator", "status", address, *options(wrong))
        assert (refused.returncode, refused.stdout) == (1, "")
        assert reason in refused.stderr
    rogue.issue("coordinator", "served")  # the organisation moves to another authority
    (lab.folder / "acme-ca.pem").write_bytes((lab.folder / "rogue-ca.pem").read_bytes())
    assert status(machine, address, *options(mallory))[0]["round"] == 2


def test_bursts_of_handshakes_while_the_certificate_changes_50_times(lab: Lab) -> None:
    machine, acme = lab.machine(), Authority(lab.folder, "acme")
    key = ec.generate_private_key(ec.SECP256R1())
    served, alice = acme.issue("coordinator", "served", key), acme.issue("alice")
    coordinator, address = coordinate(machine, *options(served))
    stranger, worker = (ssl.create_default_context(cafile=alice["tls_ca"]) for _ in range(2))
    worker.load_cert_chain(alice["tls_cert"], alice["tls_key"])
    host, _, port = address.rpartition(":")

    def begin(count: int) -> list[Handshake]:
        return [Handshake(each, (host, int(port))) for _ in range(count) for each in (stranger, worker)]

    def finish(begun: list[Handshake]) -> None:
        expected = ["TLSV13_ALERT_CERTIFICATE_REQUIRED", ""] * (len(begun) // 2)
        assert [each.finish() for each in begun] == expected

    finish(begin(100))
    for number in range(50):
        begun = begin(2)
        (lab.folder / "next.pem").write_bytes(acme.sign(key, "coordinator"))
        (lab.folder / "next.pem").replace(served["tls_cert"])
        later = begin(1)
        finish([*begun, *later])
        now = ssl.PEM_cert_to_DER_cert((lab.folder / "served.pem").read_text())
        assert [each.served for each in later] == [now] * 2, f"change {number} was not followed"
    assert status(machine, address, *options(alice)) == []
    coordinator.send_signal(signal.SIGTERM)
    code, _, err = end(coordinator)
    assert code == 0
    assert "refused a connection from 127.0.0.1:" in err
    assert "it shows no certificate" in err


class Handshake:
    """A TLS handshake of a client that has said the first words, so that many of them are at the server at once."""

    def __init__(self, context: ssl.SSLContext, where: tuple[str, int]) -> None:
        context.set_alpn_protocols(["h2"])
        self.sock = socket.create_connection(where, DEADLINE)
        self.arrived, self.leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.connection = context.wrap_bio(self.arrived, self.leaving, server_hostname=where[0])
        self.served = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.connection.do_handshake()
        self.sock.sendall(self.leaving.read())

    def finish(self) -> str:
        """Return the reason why the server ends it, or "" if it begins to speak HTTP/2."""
        with self.sock:
            for step in (self.connection.do_handshake, self.connection.read):
                while True:
                    try:
                        step()
                        self.served = self.connection.getpeercert(binary_form=True) or b""
                        break
                    except ssl.SSLWantReadError:
                        self.sock.sendall(self.leaving.read())
                        arrived = self.sock.recv(1 << 16)
                        assert arrived, "the server ended the connection without a word"
                        self.arrived.write(arrived)
                    except ssl.SSLError as error:
                        return str(error.reason)
        return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("speaks_tls", [False, True], ids=["clear", "tls"])
def test_another_user_who_listens_first_learns_nothing(lab: Lab, speaks_tls: bool) -> None:
    machine, rogue = lab.machine(), Authority(lab.folder, "rogue")
    papers = rogue.issue("covey-coordinator")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(papers["tls_cert"], papers["tls_key"])
    context.load_verify_locations(papers["tls_ca"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    with other_user(context if speaks_tls else None) as (address, heard_there):
        asked = machine.covey("coordinator", "status", address)
        assert (asked.returncode, asked.stdout) == (1, "")
        assert "covey.AuthError" in ended(work(machine, address, "w0", size=1, timeout=DEADLINE))
        records = heard_there()
    assert records
    assert {kind for each in records for kind in record_types(each)} <= {20, 21, 22}, "it was told something"


@contextlib.contextmanager
def other_user(context: ssl.SSLContext | None) -> Iterator[tuple[str, Callable[[], list[bytes]]]]:
    """Let a process of another user listen on loopback, and speak TLS, or HTTP/2 in clear text.

    Yields the address, and what ends it and returns what each connection sent.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile() as file:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        child = os.fork()
        if not child:
            try:
                become_another_user()
                while True:
                    record(listener.accept()[0], context, file)
            finally:
                os._exit(1)
        try:

            def heard_there() -> list[bytes]:
                file.seek(0)
                return [bytes.fromhex(line.decode()) for line in file.read().splitlines()]

            yield address, heard_there
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def record(sock: socket.socket, context: ssl.SSLContext | None, file: Any) -> None:
    """Write what a client sends, until it ends the connection."""
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = context.wrap_bio(arrived, leaving, server_side=True) if context is not None else None
    sent = b""
    with sock, contextlib.suppress(OSError):
        if shaking is None:
            sock.sendall(bytes.fromhex("000000040000000000"))  # HTTP/2: no settings
        while piece := sock.recv(1 << 16):
            sent += piece
            if shaking is not None:
                arrived.write(piece)
                with contextlib.suppress(ssl.SSLError):
                    shaking.do_handshake()
                sock.sendall(leaving.read())
    file.write(sent.hex().encode() + b"\n")
    file.flush()


def record_types(sent: bytes) -> set[int]:
    """Return the types of the TLS records that a client has sent; 256 stands for what is no TLS."""
    found = set[int]()
    while sent:
        if len(sent) < 5 or sent[1] != 3:
            return found | {256}
        found.add(sent[0])
        sent = sent[5 + int.from_bytes(sent[3:5], "big") :]
    return found


def test_no_other_program_reaches_grpc_behind_its_tls(lab: Lab) -> None:
    machine = lab.machine()
    coordinator, _ = coordinate(machine)
    assert lab.left_behind() == []  # no path leads to its socket
    descriptors = Path(f"/proc/{coordinator.pid}/fd")
    (inner,) = [path for path in descriptors.iterdir() if os.readlink(path).endswith("/s (deleted)")]
    assert heard(machine.start("-c", BEHIND, str(inner))) == "UNAUTHENTICATED"  # the same user, who has the key anyway
    child = os.fork()
    if not child:
        try:
            become_another_user()
            socket.socket(socket.AF_UNIX).connect(str(inner))
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_oldest_connection_without_an_identity_makes_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tls_front, "MAX_HANDSHAKES", 2)
    assert (refusal.MAX_HANDSHAKES, refusal.MAX_CONNECTIONS, tls_front.TLS_FRONT_SECONDS) == (512, 4096, 5.0)
    monkeypatch.setattr(tls_front, "TLS_FRONT_SECONDS", DEADLINE)  # none of them ends by itself
    secured = security.LoopbackSecurity()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        certificate = doors[0].certificate(f"unix-abstract:{peer[1:].decode()}")
        writer.write(await reader.readexactly(5) + secured.identity(certificate).encode())
        await writer.drain()
        writer.close()

    async def play() -> None:
        door = doors[0] = tls_front.TlsFront(lambda: secured.papers("server"))
        grpc_stand_in = await asyncio.start_unix_server(answer, door.inner.removeprefix("unix:"))
        port = door.open("127.0.0.1", 0)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        dialling = tls.dialling(secured.papers("worker"))
        caller, sending = await asyncio.open_connection(
            "127.0.0.1", port, ssl=dialling, server_hostname=secured.server_name
        )
        assert await idle[0][0].read() == b""  # the oldest was ended
        sending.write(b"hello")
        assert await caller.read() == f"hellouser {os.getuid()}".encode()
        assert not idle[1][0].at_eof()
        for _, writer in (*idle, (caller, sending)):
            writer.close()
        await door.close()
        grpc_stand_in.close()

    doors: dict[int, tls_front.TlsFront] = {}
    asyncio.run(play())


def test_a_worker_with_a_wrong_certificate_is_told_at_once_what_is_wrong(lab: Lab) -> None:
    machine = lab.machine()
    acme, rogue = Authority(lab.folder, "acme"), Authority(lab.folder, "rogue")
    coordinator, address = coordinate(machine, *options(acme.issue("coordinator")))
    other = rogue.issue("alice")
    purpose = acme.issue("eve", usage=ExtendedKeyUsageOID.CODE_SIGNING)
    nowhere = Authority(lab.folder, "elsewhere", host="127.0.0.9").issue("coordinator")
    elsewhere, address_elsewhere = coordinate(machine, *options(nowhere), "--state", str(lab.folder / "elsewhere"))
    patience = {"size": 1, "timeout": DEADLINE}  # none of them may wait for it
    for where, config, expected in (
        (address, acme.issue("bob", days=-1), "the certificate of this process for the coordinator at"),
        (address, other | {"tls_ca": acme.issue("x")["tls_ca"]}, "of this process: unknown ca"),
        (address, purpose, "of this process: unsupported certificate"),
        (address, other, "is not the coordinator: its certificate is not accepted"),
        (address, {}, "both must be processes of one user on one machine"),  # no certificate
        (address_elsewhere, nowhere, "certificate is not valid for '127.0.0.1'"),
    ):
        error = ended(work(machine, where, "w0", **patience, **config))
        assert error.startswith("covey.AuthError: "), error
        assert expected in error
    assert "expired at " in ended(work(machine, address, "w0", **patience, **acme.issue("bob", days=-1)))
    for process in (coordinator, elsewhere):
        process.send_signal(signal.SIGTERM)
        code, _, err = end(process)
        assert code == 0
        assert "refused a connection from 127.0.0.1:" in err


def test_a_denied_machine_neither_reads_nor_registers_and_is_no_coordinator(lab: Lab) -> None:
    key = secrets.token_bytes(32)
    one, two = (lab.machine(name, "lab", key) for name in ("one", "two"))
    _, address = coordinate(one, "--cluster", "lab")
    worker = work(two, address, "w0", size=1, cluster="lab")
    assert [heard(worker)[0] for _ in range(2)] == ["before", "started"]
    with patch.dict("os.environ", COVEY_HOME=str(two.home)):
        machine = own_machine()
    denied = one.covey("deny", machine.hex(), "--cluster", "lab")
    assert denied.returncode == 0, denied.stderr
    until(lambda: not ask([worker], "tell")[0][4])  # its stream has ended
    assert "is denied on" in ask([worker], "tell")[0][5]
    refused = two.covey("coordinator", "status", address, "--cluster", "lab")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is denied on" in refused.stderr
    assert "--undo` there lets it in" in refused.stderr
    error = ended(work(two, address, "w1", size=1, cluster="lab", timeout=DEADLINE))
    assert error.startswith("covey.AuthError: ")
    assert set(heard(two.start("-c", EVERYTHING, address)).values()) == {"PERMISSION_DENIED"}
    assert [each["worker_id"] for each in status(one, address, "--cluster", "lab")[0]["workers"]] == ["w0"]
    _, theirs = coordinate(two, "--cluster", "lab")  # a coordinator of the denied machine
    refused = one.covey("coordinator", "status", theirs, "--cluster", "lab")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"the coordinator at {theirs} is not accepted: machine " in refused.stderr
    assert one.covey("deny", machine.hex(), "--undo", "--cluster", "lab").returncode == 0
    until(lambda: ask([worker], "tell")[0][4])  # it comes back by itself
    assert end(worker)[0] == 0


def test_callers_tell_a_coordinator_of_the_owners_list(lab: Lab) -> None:
    owner, two, three = lab.owned("lab", secrets.token_bytes(32), "one", "two", "three")
    _, address = coordinate(two, "--cluster", "lab")  # no node runs there that could have heard of it
    assert status(three, address, "--cluster", "lab") == []
    with patch.dict("os.environ", COVEY_HOME=str(three.home)):
        machine = own_machine()
    assert owner.covey("deny", machine.hex(), "--cluster", "lab").returncode == 0
    assert status(owner, address, "--cluster", "lab") == []
    refused = three.covey("coordinator", "status", address, "--cluster", "lab")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is denied by the owner of the cluster" in refused.stderr
    with patch.dict("os.environ", COVEY_HOME=str(two.home)):
        kept = clusters.load("lab").charter
    assert kept is not None
    assert kept.denied == (machine,)


def test_a_charter_that_the_owner_has_not_signed_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    clusters.save(Cluster(ClusterSecret("lab", bytes(32)), owner=owner.make("lab")))
    secured = security.SecretSecurity(ClusterOptions("lab"))
    for wrong in (b"", b"garbage", encode(Charter(5, "here", (bytes(32),), None, bytes(64)))):
        secured.hear(wrong)
        assert secured.find().charter is None
        assert secured.charter() == b""


def test_a_certificate_names_its_machine_with_a_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    secured = security.SecretSecurity(ClusterOptions("lab", bytes(32)))
    own = derived(ClusterSecret("lab", bytes(32)), None, "operator").chain
    assert machine_of(own) == own_machine()
    assert secured.identity(own) == key_of(own)
    der = ssl.PEM_cert_to_DER_cert(own.decode())
    forged = der.replace(own_machine(), bytes(32))  # a machine that has not signed
    unsigned = Authority(tmp_path, "acme").issue("alice")
    for wrong in (ssl.DER_cert_to_PEM_cert(forged).encode(), Path(unsigned["tls_cert"]).read_bytes(), b"garbage"):
        assert machine_of(wrong) == b""
        with pytest.raises(RefusalError, match="names no machine"):
            secured.identity(wrong)


def test_files_in_the_middle_of_a_renewal_change_nothing(tmp_path: Path) -> None:
    acme = Authority(tmp_path, "acme")
    named = acme.issue("alice")
    files = PemFiles.of(*named.values())
    assert files is not None
    good = files.read()
    assert subject_of(good.chain) == "subject CN=alice"
    before = (tmp_path / "acme-alice.key").read_bytes()
    acme.issue("alice")
    after = (tmp_path / "acme-alice.key").read_bytes()
    (tmp_path / "acme-alice.key").write_bytes(before)  # the certificate is new, the key is not
    assert files.read() == good
    (tmp_path / "acme-alice.key").write_bytes(after)
    assert files.read() != good
    (tmp_path / "acme-alice.key").unlink()
    assert files.read().key == after
    with pytest.raises(ConfigError, match="cannot read"):
        PemFiles(**{name.removeprefix("tls_"): path for name, path in named.items()}).read()
    (tmp_path / "acme-alice.key").write_bytes(before)
    with pytest.raises(ConfigError, match="is not the key of the certificate"):
        PemFiles(**{name.removeprefix("tls_"): path for name, path in named.items()}).read()


def test_a_certificate_without_a_subject_is_known_by_its_names_and_garbage_by_nothing(tmp_path: Path) -> None:
    acme = Authority(tmp_path, "acme")
    named = acme.issue("", "nameless")
    content = (tmp_path / "nameless.pem").read_bytes()
    assert subject_of(content) == "names 127.0.0.1"
    assert key_of(content).startswith("key ")
    assert subject_of(b"garbage") == key_of(b"garbage") == ""
    assert named["tls_cert"].endswith("nameless.pem")


def test_a_changed_secret_is_used_for_the_next_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(security, "READ_SECONDS", 0.0)
    before, after = ClusterSecret("lab", bytes(32)), ClusterSecret("lab", bytes(31) + b"1")
    clusters.save(Cluster(before))
    saved = security.SecretSecurity(ClusterOptions("lab"))
    given = security.SecretSecurity(ClusterOptions("other", bytes(32)))
    assert saved.find().secret == before
    clusters.save(Cluster(after))
    assert saved.find().secret == after
    assert given.find().secret.key == bytes(32)  # it was given, and is in no file


def test_keys_differ_by_machine_and_role_and_stay_the_same(tmp_path: Path) -> None:
    secret, before = ClusterSecret("lab", bytes(32)), ClusterSecret("lab", bytes(31) + b"1")
    found = {}
    for home in ("one", "two"):
        with patch.dict("os.environ", COVEY_HOME=str(tmp_path / home)):
            for role in ("worker/run/w0", "worker/run/w1", "server"):
                papers = derived(secret, before, role)
                assert derived(secret, None, role).key == papers.key
                assert papers.authorities.count(b"BEGIN CERTIFICATE") == 2
                found[home, role] = key_of(papers.chain)
    assert len(set(found.values())) == len(found)
