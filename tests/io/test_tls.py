"""Credentials: nodes of one cluster know each other by their keys, and no other gets through the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from tests.support.secured import secure_end
from tests.support.waiting import DEADLINE

from covey.base.errors import AuthError, ConnectError, CoveyError
from covey.cli.doctor.finding import Obstacle, obstacle
from covey.net.keys import tls
from covey.net.keys.tls import LINK_PROTOCOL, Channel, Credentials, peer_id
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import Greeter, LinkCredentials, RefusedError, admit, dial
from covey.wire import messages
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from covey.runtime.links.link import Link

SOURCE = Path(__file__).parents[2] / "src"
SECRET = ClusterSecret("lab", bytes(range(32)))
OTHER = ClusterSecret("lab", bytes(range(1, 33)))
NAMED_OTHERWISE = ClusterSecret("lab-2", bytes(range(32)))
ONE, TWO = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))


def credentials(private: Ed25519PrivateKey, secret: ClusterSecret = SECRET, purpose: str = "node-ca") -> Credentials:
    return Credentials(secret.derive(purpose), private)


def id_of(private: Ed25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE):
            return await work()

    return asyncio.run(bounded())


def authority(secret: ClusterSecret) -> bytes:
    contexts = credentials(ONE, secret)
    (root,) = contexts.dialling.get_ca_certs(binary_form=True)
    assert contexts.accepting.get_ca_certs(binary_form=True) == [root]
    return root


def test_the_authority_is_the_same_byte_for_byte_in_every_process() -> None:
    code = """
import sys
import threading
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from covey.net.keys.tls import Credentials
from covey.wire.secret import ClusterSecret
secret = ClusterSecret("lab", bytes(range(32)))
made = Credentials(secret.derive("node-ca"), Ed25519PrivateKey.generate())
print(made.dialling.get_ca_certs(binary_form=True)[0].hex())
"""
    roots = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        ).stdout.strip()
        for seed in (1, 2)
    }
    assert roots == {authority(SECRET).hex()}


def test_every_cluster_has_an_authority_of_its_own() -> None:
    assert len({authority(secret) for secret in (SECRET, OTHER, NAMED_OTHERWISE)}) == 3


def test_certificates_hold_whatever_the_clock_says() -> None:
    root = x509.load_der_x509_certificate(authority(SECRET))
    assert root.not_valid_before_utc.year == 2000
    assert root.not_valid_after_utc.year == 9999


@pytest.mark.parametrize("dialler_is_early", [True, False])
def test_a_clock_before_all_certificates_shows_in_the_error_on_either_side(
    monkeypatch: pytest.MonkeyPatch, dialler_is_early: bool
) -> None:
    """A certificate of the same cluster that is valid only later is what a node with a wrong clock sees."""
    good = credentials(ONE)
    monkeypatch.setattr(tls, "NOT_BEFORE", datetime.datetime(9000, 1, 1))
    late = credentials(TWO)
    monkeypatch.undo()
    sees, is_seen = (good, late) if dialler_is_early else (late, good)
    dialler, acceptor = Channel(sees, dialled=True), Channel(is_seen, dialled=False)
    errors: list[str] = []
    flight, is_dialler = dialler.shake(), True
    for _ in range(6):
        is_dialler = not is_dialler
        channel = dialler if is_dialler else acceptor
        try:
            flight = channel.shake(flight)
        except AuthError as error:
            errors.append(str(error))
            flight = channel.farewell()
    assert any(obstacle(error) is Obstacle.CLOCK_HERE for error in errors), errors
    assert any(obstacle(error) is Obstacle.CLOCK_THERE for error in errors), errors


Outcome = bytes | BaseException


def meet(dialling: ssl.SSLContext, accepting: ssl.SSLContext) -> tuple[Outcome, Outcome]:
    """Handshake and exchange a word each way; return the ids that the dialler and the acceptor see, or their errors."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()

    async def end(sock: socket.socket, context: ssl.SSLContext, *, dialled: bool) -> bytes:
        side = Credentials.__new__(Credentials)
        side.dialling = side.accepting = context
        sock.setblocking(False)
        link, peer = await secure_end(sock, side, dialled=dialled)
        try:
            link.send(b"word of the dialler" if dialled else b"word of the acceptor")
            assert await link.receive() == (b"word of the acceptor" if dialled else b"word of the dialler")
            return peer
        finally:
            link.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await link.ended.wait()

    async def both() -> tuple[Outcome, Outcome]:
        dialler, acceptor = end(one, dialling, dialled=True), end(other, accepting, dialled=False)
        return tuple(await asyncio.gather(dialler, acceptor, return_exceptions=True))  # type: ignore[return-value]

    try:
        return run(both)
    finally:
        one.close()
        other.close()


def test_an_acceptor_asks_for_no_second_client_hello() -> None:
    """The door has bound the connection to the first; a second one could be another dialler's."""
    dialling, accepting = credentials(ONE).dialling, credentials(TWO).accepting
    accepting.set_ecdh_curve("prime256v1")  # the dialler has sent a key for another curve, and could send this one
    dialler, acceptor = meet(dialling, accepting)
    assert isinstance(acceptor, AuthError)
    assert "no key exchange in common" in str(acceptor)
    assert isinstance(dialler, (AuthError, ConnectError))


def test_two_nodes_of_a_cluster_know_each_other_by_their_keys() -> None:
    assert meet(credentials(ONE).dialling, credentials(TWO).accepting) == (id_of(TWO), id_of(ONE))


def self_signed(private: Any) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "covey authority")])
    since = datetime.datetime(2000, 1, 1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(2)
    builder = builder.public_key(private.public_key()).not_valid_before(since)
    builder = builder.not_valid_after(since.replace(year=9000))
    return builder.sign(private, None if isinstance(private, Ed25519PrivateKey) else hashes.SHA256())


def strange_context(side: ssl._SSLMethod, private: Any = None, *, alpn: str = LINK_PROTOCOL) -> ssl.SSLContext:
    """Return a context that believes every peer, and shows a certificate that it signed itself, or none."""
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    if private is not None:
        key = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with tls.readable_once(key + self_signed(private).public_bytes(serialization.Encoding.PEM)) as path:
            context.load_cert_chain(path)
    return context


def credulous(made: Credentials) -> Credentials:
    """Return credentials that accept any other side, so that only that side's check can refuse."""
    for context in (made.dialling, made.accepting):
        context.verify_mode = ssl.CERT_NONE
    return made


def with_protocol(made: Credentials, protocol: str) -> Credentials:
    for context in (made.dialling, made.accepting):
        context.set_alpn_protocols([protocol])
    return made


STRANGERS: dict[str, Callable[[], Credentials]] = {
    "another secret": lambda: credentials(TWO, OTHER),
    "another cluster of the same key": lambda: credentials(TWO, NAMED_OTHERWISE),
    "a key for another purpose": lambda: credentials(TWO, purpose="door"),
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_whichever_side_dials_and_even_if_it_asks_for_nothing(
    stranger: Callable[[], Credentials],
) -> None:
    member = credentials(ONE)
    for strange in (stranger(), credulous(stranger())):
        for at_member, at_stranger in (
            meet(member.dialling, strange.accepting),
            meet(strange.dialling, member.accepting)[::-1],
        ):
            assert isinstance(at_member, CoveyError)
            assert isinstance(at_stranger, CoveyError)
            refusals = [at_member] if strange.dialling.verify_mode == ssl.CERT_NONE else [at_member, at_stranger]
            assert any(isinstance(error, AuthError) for error in refusals), refusals


@pytest.mark.parametrize(
    "private", [None, Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())], ids=["none", "own", "ec"]
)
def test_a_peer_without_a_certificate_or_with_one_it_signed_itself_is_refused_when_it_dials(private: Any) -> None:
    dialling = strange_context(ssl.PROTOCOL_TLS_CLIENT, private)
    at_stranger, at_member = meet(dialling, credentials(ONE).accepting)
    assert isinstance(at_member, AuthError)
    assert isinstance(at_stranger, CoveyError)


@pytest.mark.parametrize("private", [Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())])
def test_a_peer_with_a_certificate_it_signed_itself_is_refused_when_it_answers(private: Any) -> None:
    accepting = strange_context(ssl.PROTOCOL_TLS_SERVER, private)
    at_member, at_stranger = meet(credentials(ONE).dialling, accepting)
    assert isinstance(at_member, AuthError)
    assert isinstance(at_stranger, CoveyError)


@pytest.mark.parametrize("strange_dials", [True, False])
def test_a_member_that_speaks_another_protocol_is_refused(strange_dials: bool) -> None:
    member, strange = credentials(ONE), with_protocol(credentials(TWO), "covey/2")
    one, other = (strange, member) if strange_dials else (member, strange)
    results = meet(one.dialling, other.accepting)
    assert isinstance(results[1 if strange_dials else 0], AuthError), results
    assert all(isinstance(result, CoveyError) for result in results)


@pytest.mark.parametrize("strange_dials", [True, False])
def test_older_versions_of_tls_are_not_spoken(strange_dials: bool) -> None:
    member, strange = credentials(ONE), credentials(TWO)
    for context in (strange.dialling, strange.accepting):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    one, other = (strange, member) if strange_dials else (member, strange)
    results = meet(one.dialling, other.accepting)
    assert isinstance(results[1], AuthError), results  # the acceptor chooses the version
    assert isinstance(results[0], CoveyError)


def test_no_session_is_resumed() -> None:
    """No ticket is given out, so that every connection proves both keys anew."""
    one, two = credentials(ONE), credentials(TWO)
    session = None
    for _ in range(3):
        ends = socket.socketpair()
        for end in ends:
            end.settimeout(DEADLINE)
        accepted: list[ssl.SSLSocket] = []
        accepting = threading.Thread(
            target=lambda sock=ends[1], taken=accepted: taken.append(two.accepting.wrap_socket(sock, server_side=True))
        )
        accepting.start()
        with one.dialling.wrap_socket(ends[0], session=session) as dialler:
            accepting.join(DEADLINE)
            accepted[0].sendall(b"word")
            assert dialler.recv(4) == b"word"
            assert not dialler.session_reused
            assert dialler.session is not None
            assert not dialler.session.has_ticket
            session = dialler.session
            accepted[0].close()


def test_no_key_is_left_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    credentials(ONE)
    monkeypatch.delattr("os.memfd_create", raising=False)
    credentials(ONE)
    assert list(tmp_path.iterdir()) == []


def test_a_connection_without_a_certificate_has_no_id() -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    fresh = credentials(ONE).dialling.wrap_bio(incoming, outgoing)
    with pytest.raises(AuthError):
        peer_id(fresh)


# Through the door


def card_of(private: Ed25519PrivateKey, **changes: Any) -> messages.Card:
    contact = messages.Contact("host", (messages.Address("127.0.0.1", 1),), "")
    values: dict[str, Any] = {
        "id": id_of(private),
        "life": b"l" * 16,
        "name": "n",
        "host_name": "n",
        "pid": 1,
        "contact": contact,
    }
    return messages.Card(**(values | changes))


def hello_of(card: messages.Card) -> messages.Hello:
    return messages.Hello(messages.VERSION, secrets.token_bytes(32), "visitor", "", -1, 0, "auto", card)


def gate_of(
    private: Ed25519PrivateKey, secret: ClusterSecret = SECRET, door: ClusterSecret | None = None
) -> LinkCredentials:
    return LinkCredentials((door or secret).derive("door"), tls=credentials(private, secret))


@contextlib.asynccontextmanager
async def host(
    credentials: LinkCredentials, welcome: messages.HandshakeMessage, greeted: list[Any] | None = None
) -> AsyncIterator[tuple[str, int]]:
    """A node that answers every Hello with `welcome`; keeps what became of each greeting."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    acceptor = Acceptor([listener], credentials.door_key, "test")
    links: list[Link] = []

    async def on_link(sock: socket.socket, said: bytes) -> None:
        try:
            greeter = Greeter(card_of(Ed25519PrivateKey.generate()), lambda _hello, _id: welcome)  # type: ignore[return-value,arg-type]
            admitted = await admit(sock, credentials, said, greeter)
        except (CoveyError, OSError) as error:
            if greeted is not None:
                greeted.append(error)
            raise
        if admitted is not None:
            links.append(admitted[0])
            if greeted is not None:
                greeted.append(admitted[1].card.id)

    acceptor.give_links(on_link)
    acceptor.open()
    try:
        yield listener.getsockname()
    finally:
        await acceptor.close()
        for link in links:
            link.abort()
            await link.ended.wait()


async def hang_up(link: Link) -> None:
    link.abort()
    await link.ended.wait()


def test_a_greeting_proves_both_cards() -> None:
    greeted: list[Any] = []

    async def work() -> bytes:
        async with host(gate_of(TWO), messages.Welcome(-1, card_of(TWO), "visitor"), greeted) as where:
            link, welcome, peer = await dial(where, gate_of(ONE), hello_of(card_of(ONE)))
            await hang_up(link)
            assert welcome.card == card_of(TWO)
            return peer

    assert run(work) == id_of(TWO)
    assert greeted == [id_of(ONE)]


def test_a_member_that_poses_as_another_is_refused_by_the_node_that_it_dials() -> None:
    async def work() -> None:
        async with host(gate_of(TWO), messages.Welcome(-1, card_of(TWO), "visitor")) as where:
            await dial(where, gate_of(ONE), hello_of(card_of(TWO)))

    with pytest.raises(RefusedError, match="your key does not fit the id you gave"):
        run(work)


def test_a_member_that_poses_as_another_is_refused_by_the_node_that_dials_it() -> None:
    async def work() -> None:
        async with host(gate_of(TWO), messages.Welcome(-1, card_of(ONE), "visitor")) as where:
            await dial(where, gate_of(ONE), hello_of(card_of(ONE)))

    with pytest.raises(AuthError, match="poses as a node whose key it does not have"):
        run(work)


def test_a_refusal_carries_its_reason_to_the_dialler() -> None:
    async def work() -> None:
        async with host(gate_of(TWO), messages.Refusal("not today", retry=True)) as where:
            await dial(where, gate_of(ONE), hello_of(card_of(ONE)))

    with pytest.raises(RefusedError, match="not today") as caught:
        run(work)
    assert caught.value.retry


def test_a_wrong_secret_is_noticed_by_the_dialler_at_the_door_or_behind_it() -> None:
    async def work(mine: LinkCredentials) -> None:
        async with host(gate_of(TWO), messages.Welcome(-1, card_of(TWO), "visitor")) as where:
            await dial(where, mine, hello_of(card_of(ONE)))

    with pytest.raises(ConnectError, match="did not accept this cluster's secret"):
        run(lambda: work(gate_of(ONE, OTHER)))
    with pytest.raises(AuthError):
        run(lambda: work(gate_of(ONE, OTHER, door=SECRET)))


def test_a_cold_handshake_takes_less_than_ten_milliseconds() -> None:
    """Door, TLS and Hello on loopback: the processor time of both ends, which a busy machine does not change much."""

    async def work() -> list[float]:
        credentials, hello = gate_of(ONE), hello_of(card_of(ONE))
        taken = []
        async with host(gate_of(TWO), messages.Welcome(-1, card_of(TWO), "visitor")) as where:
            for _ in range(20):
                began = time.process_time()
                link, _, _ = await dial(where, credentials, hello)
                taken.append(time.process_time() - began)
                await hang_up(link)
        return taken

    taken = run(work)
    assert statistics.median(taken) < 0.010, taken
