"""Strangers at the UDP port of QUIC: they get no answer, no memory and no connection, and members still come in."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("qh3")

from tests.io.test_quic_pump import KEY, Admitting
from tests.support.waiting import DEADLINE, wait_until

from covey.net.quic import pump as pumping
from covey.net.quic.carrier import QuicCredentials, dial
from covey.net.quic.line import PROOFS_REMEMBERED, Entering, FirstDatagrams
from covey.net.quic.pump import UNPROVED_AT_ONCE, QuicPump
from covey.runtime.joining.node import node_of
from covey.runtime.links.limits import SOURCE_CONNECTIONS_BURST, SourceLimits
from covey.testing import run_threads
from covey.wire import door, quic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import covey
    from covey.net.quic.carrier import Carrier

AT_ONCE = 0.3
"""How long a stranger waits in vain for an answer."""


@pytest.fixture
def gate() -> Admitting:
    return Admitting(proves=False)


@pytest.fixture
def prey(gate: Admitting) -> Iterator[QuicPump]:
    made = QuicPump(gate, is_local=True)
    yield made
    made.close()


@pytest.fixture
def stranger(prey: QuicPump) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", prey.port))
        sock.settimeout(AT_ONCE)
        yield sock


def first_datagram(key: bytes, nonce: bytes = b"") -> bytes:
    """Return what a dialler with this key sends first."""
    cid = quic.proving_cid(key, nonce or secrets.token_bytes(quic.CID_NONCE_BYTES))
    made = dial(QuicCredentials(key).dialling, cid, ("127.0.0.1", 9), time.monotonic())
    return made.datagrams(time.monotonic())[0][0]


def welcomes_members(prey: QuicPump, gate: Admitting) -> bool:
    """Tell whether a member's connection works now."""
    member = QuicPump(Admitting(), is_local=True)
    gate.proves = True
    try:
        with member.dial(("127.0.0.1", prey.port), KEY) as sock:
            sock.settimeout(DEADLINE)
            with gate.came.get(timeout=DEADLINE) as other:
                other.settimeout(DEADLINE)
                sock.sendall(b"member")
                return other.recv(6) == b"member"
    finally:
        member.close()


def hears_nothing(sock: socket.socket) -> bool:
    with contextlib.suppress(TimeoutError):
        sock.recv(2048)
        return False
    return True


def test_garbage_gets_no_answer_and_harms_no_one(prey: QuicPump, gate: Admitting, stranger: socket.socket) -> None:
    chance = random.Random(3)
    genuine = first_datagram(KEY)
    for _ in range(300):
        size = chance.choice((1, 6, 21, 33, 1199, 1200, 1400))
        data = bytearray(chance.choice((genuine, chance.randbytes(1400)))[:size])
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if size < 1200 or not quic.is_proof(KEY, bytes(data[27:47])):
            stranger.send(data)
    assert hears_nothing(stranger)
    assert not prey._lines
    assert welcomes_members(prey, gate)


def test_a_first_datagram_without_the_key_gets_no_answer(prey: QuicPump, stranger: socket.socket) -> None:
    stranger.send(first_datagram(bytes(range(1, 33))))
    assert hears_nothing(stranger)
    assert prey.refused == 1


def test_a_member_proves_its_address_first_and_until_then_nothing_is_kept(
    prey: QuicPump, stranger: socket.socket
) -> None:
    """So a forged source address gets one datagram for each, and a shorter one."""
    stranger.settimeout(DEADLINE)
    for _ in range(20):
        question = first_datagram(KEY)
        stranger.send(question)
        answer = stranger.recv(2048)
        assert 2 * len(answer) < len(question)
    assert not prey._lines


def asked(first_datagrams: FirstDatagrams, source: tuple[str, int], now: float) -> tuple[Carrier, bytes]:
    """Return a dialler that was asked for its address, and its next datagram."""
    cid = quic.proving_cid(KEY, secrets.token_bytes(quic.CID_NONCE_BYTES))
    made = dial(QuicCredentials(KEY).dialling, cid, ("127.0.0.1", 9), now)
    retry = first_datagrams.judge(made.datagrams(now)[0][0], source, [KEY], now)
    assert isinstance(retry, bytes)
    made.receive([retry], ("127.0.0.1", 9), now)
    return made, made.datagrams(now)[0][0]


def test_a_proof_of_an_address_is_good_for_that_address_this_connection_and_a_short_time() -> None:
    first_datagrams, here, now = FirstDatagrams(), ("10.0.0.1", 5), 1000.0
    _, answer = asked(first_datagrams, here, now)
    assert first_datagrams.judge(answer, ("10.0.0.2", 5), [KEY], now) == b""
    assert first_datagrams.judge(answer, here, [KEY], now + quic.TOKEN_SECONDS + 1) == b""
    assert FirstDatagrams().judge(answer, here, [KEY], now) == b""
    found = first_datagrams.judge(answer, here, [KEY], now)
    assert isinstance(found, Entering)
    first_datagrams.entered(found)
    assert first_datagrams.judge(answer, here, [KEY], now) == b"", "one that was seen on the way is worth nothing"


def test_used_proofs_are_not_remembered_without_end() -> None:
    first_datagrams = FirstDatagrams()
    for number in range(PROOFS_REMEMBERED + 10):
        first_datagrams.entered(Entering(KEY, b"", b"", number.to_bytes(20, "big")))
    assert len(first_datagrams._used) == PROOFS_REMEMBERED


def test_connections_that_prove_nothing_on_the_stream_are_few_and_end(
    prey: QuicPump, gate: Admitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pumping, "PROVE_SECONDS", 3.0)
    with contextlib.ExitStack() as stack:
        other = QuicPump(Admitting(), is_local=True)
        stack.callback(other.close)
        socks = [stack.enter_context(other.dial(("127.0.0.1", prey.port), KEY)) for _ in range(UNPROVED_AT_ONCE + 8)]
        until = time.monotonic() + DEADLINE
        seen = 0
        while time.monotonic() < until and seen < len(socks):
            with contextlib.suppress(Exception):
                stack.callback(gate.came.get(timeout=0.1).close)
            seen = sum(hung_up(sock) for sock in socks)
            assert sum(not line.is_proved for line in list(prey._lines)) <= UNPROVED_AT_ONCE + 1
        assert seen == len(socks), "all of them have ended"
        assert welcomes_members(prey, gate)


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def test_a_source_that_comes_too_often_is_refused(
    prey: QuicPump, gate: Admitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SourceLimits()

    def comes(ip: str, _local: str) -> Callable[[], None] | None:
        arrival = limits.come(ip, 0.0, is_member=False)
        return None if arrival is None else arrival.proved_key

    monkeypatch.setattr(gate, "comes", comes)
    for _ in range(int(SOURCE_CONNECTIONS_BURST)):
        assert comes("127.0.0.1", "") is not None
    before = prey.refused
    other = QuicPump(Admitting(), is_local=True)
    try:
        with other.dial(("127.0.0.1", prey.port), KEY):
            until = time.monotonic() + DEADLINE
            while prey.refused == before:
                assert time.monotonic() < until
                time.sleep(0.01)
        assert not prey._lines
    finally:
        other.close()


def test_a_connection_to_a_node_has_to_pass_the_door_and_claim_a_lane() -> None:
    def body(group: covey.Group) -> None:
        if group.rank == 0:
            node = node_of(group)
            assert node is not None
            key, port = node.credentials.door_key, node.lanes.openers["quic"].port()
            outsider = QuicPump(Admitting(), is_local=True)
            try:
                for claims in (False, True):
                    with outsider.dial(("127.0.0.1", port), key) as sock:
                        sock.settimeout(DEADLINE)
                        challenge = sock.recv(door.CHALLENGE_BYTES, socket.MSG_WAITALL)
                        assert len(challenge) == door.CHALLENGE_BYTES
                        said = door.answer(key, challenge, door.Purpose.LANE, bytes(door.BOUND_BYTES))
                        sock.sendall(said + bytes(100) if claims else bytes(len(said)))
                        assert sock.recv(1) == b"", "it knows the door's key, and no lane's; or not even that"
            finally:
                outsider.close()
            assert node.acceptor.turned_away == 2
        group.barrier()

    run_threads(2, body, lanes="quic", timeout=DEADLINE)


def test_questions_about_paths_are_answered_to_members_only(prey: QuicPump, stranger: socket.socket) -> None:
    nonce = os.urandom(16)
    stranger.send(quic.path_probe(bytes(range(1, 33)), nonce))
    assert hears_nothing(stranger)
    stranger.settimeout(DEADLINE)
    question = quic.path_probe(KEY, nonce)
    stranger.send(question)
    answer = stranger.recv(2048)
    assert answer == quic.path_answer(KEY, nonce)
    assert len(answer) == len(question)


def test_a_connection_that_breaks_qh3_ends_alone(
    prey: QuicPump, gate: Admitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicError(BaseException):
        """As Rust's panics: no Exception."""

    def panic(*_: object) -> None:
        raise PanicError("index out of range")

    gate.proves = True
    other = QuicPump(Admitting(), is_local=True)
    try:
        with other.dial(("127.0.0.1", prey.port), KEY) as sock:
            sock.settimeout(DEADLINE)
            with gate.came.get(timeout=DEADLINE) as victim:
                victim.settimeout(DEADLINE)
                (line,) = prey._lines
                monkeypatch.setattr(line.carrier, "receive", panic)
                sock.sendall(b"boom")
                assert victim.recv(1) == b""
                assert "PanicError" in victim.problem
        assert prey.error == ""
        assert welcomes_members(prey, gate)
    finally:
        other.close()


MISDEEDS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "more than it may": (
        "sent more than it may",
        lambda peer: peer.send_stream_data(quic.DIALLER_BYTES, bytes(8 << 20)),
    ),
    "more on the stream of limits": (
        "limit",
        lambda peer: peer.send_stream_data(quic.DIALLER_LIMITS, secrets.token_bytes(1 << 20)),
    ),
    "streams without end": (
        "opened a stream that no covey opens",
        lambda peer: [peer.send_stream_data(8 + 4 * number, b"x") for number in range(50)],
    ),
    "reset": ("sent what no covey sends", lambda peer: peer.reset_stream(quic.DIALLER_BYTES, 7)),
    "stop": ("sent what no covey sends", lambda peer: peer.stop_stream(quic.ACCEPTOR_BYTES, 7)),
    "an end before its bytes": ("", lambda peer: peer.send_stream_data(quic.DIALLER_BYTES, b"", end_stream=True)),
    "pings": ("", lambda peer: [peer.send_ping(number) for number in range(5000)]),
    "a close with a long reason": ("r" * 10, lambda peer: peer.close(7, None, "r" * 900)),
}
"""What a member with the key may do to a connection, and words of what the other end says of it."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("name", MISDEEDS)
def test_a_member_that_misbehaves_ends_its_own_connection_only(prey: QuicPump, gate: Admitting, name: str) -> None:
    words, misbehave = MISDEEDS[name]
    gate.proves = True
    other = QuicPump(Admitting(), is_local=True)
    try:
        with other.dial(("127.0.0.1", prey.port), KEY) as sock:
            sock.settimeout(DEADLINE)
            with gate.came.get(timeout=DEADLINE) as victim:
                victim.settimeout(DEADLINE)
                sock.sendall(b"hello")
                assert victim.recv(5) == b"hello"
                victim.sendall(b"hello")
                assert sock.recv(5) == b"hello"
                (line,) = other._lines
                before = resident_bytes()

                def order(_now: float) -> None:
                    misbehave(line.carrier._connection)
                    other._touched[line] = None  # its datagrams leave now: qh3 sends no close that waits for seconds

                assert other._order(order)
                if words:
                    wait_until(lambda: words in victim.problem)
                assert welcomes_members(prey, gate)
                grown = resident_bytes() - before
                assert grown < 192 << 20, f"{grown >> 20} MiB, of which the member itself holds up to 128"
        assert prey.error == ""
    finally:
        other.close()


def test_a_source_that_nothing_can_be_sent_to_stops_nothing(prey: QuicPump, gate: Admitting) -> None:
    """No datagram can be sent to port 0, but one may say that it comes from there."""
    assert prey._udp.send([(b"answer", ("127.0.0.1", 0)), (b"another", ("255.255.255.255", 9))]) == 2
    assert welcomes_members(prey, gate)
