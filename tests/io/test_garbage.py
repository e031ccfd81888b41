"""Strangers at the door: whatever they send or keep to themselves, groups form and work, and memory stays bounded."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import DEADLINE, wait_until

from covey.base.config import GroupConfig
from covey.base.errors import RemoteProtocolError
from covey.runtime.environment import LaunchedRank
from covey.runtime.joining import node as node_module
from covey.runtime.joining.bootstrap import join_at
from covey.runtime.joining.launched_links import LaunchedLinks
from covey.runtime.lanes import dialler as lane_dialler
from covey.runtime.links import acceptor
from covey.runtime.links.handshake import LinkCredentials
from covey.runtime.links.limits import SOURCE_CONNECTIONS_RATE
from covey.wire import decoding, door, header, message_header, messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.runtime.group.group import Group

Address = str | tuple[str, int]
LANES = ("shm", "unix", "tcp", "secure")


# Bytes


def mutations(valid: list[bytes]) -> st.SearchStrategy[bytes]:
    """Random bytes, and valid messages with a few bytes changed, cut off or added."""

    def change(data: bytes, at: int, new: bytes, cut: int) -> bytes:
        at %= len(data) + 1
        return (data[:at] + new + data[at + len(new) :])[: max(0, len(data) - cut)]

    changed = st.builds(change, st.sampled_from(valid), st.integers(0, 500), st.binary(max_size=8), st.integers(0, 9))
    return st.binary(max_size=300) | changed


def card(*, socket: str = "", id: bytes = b"") -> messages.Card:
    return messages.Card(id, b"l" * 16, "here", "here", 1, messages.Contact("h", (), socket))


def hello(**changes: Any) -> messages.Hello:
    values: dict[str, Any] = {
        "version": messages.VERSION, "nonce": secrets.token_bytes(32), "purpose": "rank", "run": "attacked", "rank": 1,
        "size": 2, "lanes": "auto", "card": card(),
    }  # fmt: skip
    return messages.Hello(**(values | changes))


GREETINGS = [
    messages.encode(message)
    for message in (hello(), messages.Welcome(0, card(socket="/x"), "rank"), messages.Refusal("no", retry=False))
]
CONTROLS = [
    messages.encode(message)
    for message in (
        messages.Roster((messages.Contact("h", (), "/x"), messages.Contact("h", (messages.Address("::1", 5),), ""))),
        messages.Ready(),
        messages.Goodbye(),
        messages.Failing("ValueError: no"),
        messages.Dial(1, "messages"),
        messages.Announce(1, 2, 3, "barrier()"),
        messages.Position(1, 2, 3, 4, "barrier()"),
        messages.Revoke(1, "PeerLostError", "gone", (1, 2)),
        messages.Offer(b"a" * 16, b"s" * 32, 1, "collectives", "secure", 0, 2),
        messages.Known((card(socket="/x"),)),
        messages.Tell("r", "running", b"", b"", 1.0, (messages.PeerReport(card(), 0, "", "", "", "", -1.0, 0.0),)),
        messages.Reached((1.0,), ("",)),
    )
]


@given(mutations(GREETINGS))
def test_any_bytes_are_a_greeting_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(messages.decode_handshake(data), messages.Hello | messages.Welcome | messages.Refusal)


@given(mutations(CONTROLS))
def test_any_bytes_are_a_control_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        messages.decode_control(data)


@given(mutations([header.TransferHeader(1, 2, 0, 0, 0, 3, 4, 5, 6, 7).pack()]))
def test_any_bytes_are_a_transfer_header_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        found = header.unpack(data)
        assert header.unpack(found.pack()) == found


@given(mutations([message_header.encode(message_header.MessageHeader(1, 2, 12, 5, dtype_code=8, shape=(3,)))]))
def test_any_bytes_are_a_message_header_incomplete_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        found = message_header.decode(data, 0, len(data))
        assert found is None or found[1] <= len(data)


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 40), max_size=30), st.binary(max_size=20))
def test_frames_do_not_depend_on_how_the_bytes_arrive(bodies: list[bytes], cuts: list[int], rest: bytes) -> None:
    framer, stream, found = decoding.Framer(50), b"".join(map(decoding.frame, bodies)) + rest, []
    with contextlib.suppress(RemoteProtocolError):  # the rest may announce anything
        for cut in cuts:
            found += framer.feed(stream[:cut])
            stream = stream[cut:]
        found += framer.feed(stream)
    if not rest:
        assert found == bodies


@given(st.integers(51, 2**32 - 1))
def test_a_frame_beyond_the_limit_is_refused_before_it_arrives(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        decoding.Framer(50).feed(struct.pack("<I", length))


# Connections


class AttackedRun:
    """Two ranks of one run as threads, whose doors and token the test knows."""

    def __init__(self, folder: str, lanes: str, threads: ThreadPoolExecutor) -> None:
        self.folder, self.lanes, self.token = folder, lanes, secrets.token_bytes(32)
        self._threads = threads
        self._groups: dict[int, Future[Group]] = {}

    def start(self, rank: int) -> None:
        launched = LaunchedRank(rank=rank, size=2, folder=self.folder, token=self.token, name="attacked")
        config = GroupConfig(lanes=self.lanes, timeout=DEADLINE)
        self._groups[rank] = self._threads.submit(join_at, launched, config, timeout=DEADLINE)

    @property
    def credentials(self) -> LinkCredentials:
        return LinkCredentials.of_token(self.token)

    def doors(self, rank: int) -> list[Address]:
        """Return where `rank` listens, as soon as it does."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if self._groups[rank].done():
                self._groups[rank].result()
            for node in list(node_module._nodes):
                contact = node.card.contact
                if (
                    node.seat == rank
                    and contact.socket.startswith(self.folder)
                    and isinstance(node.links, LaunchedLinks)
                    and node.links.assembly.has_begun
                ):
                    return [contact.socket, *((address.ip, address.port) for address in contact.addresses)]
            threading.Event().wait(0.005)
        raise AssertionError("rank does not listen")

    def everywhere(self, work: Any) -> list[Any]:
        """Call `work(group)` on all ranks at the same time; return the results."""
        groups = [group.result(DEADLINE) for group in self._groups.values()]
        return [future.result(DEADLINE) for future in [self._threads.submit(work, group) for group in groups]]

    def close(self) -> None:
        self.everywhere(lambda group: group.close())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture(params=LANES)
def attacked(request: pytest.FixtureRequest, threads: ThreadPoolExecutor) -> Iterator[AttackedRun]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        attacked = AttackedRun(folder, request.param, threads)
        try:
            yield attacked
        finally:
            attacked.close()


@pytest.fixture
def strangers() -> Iterator[contextlib.ExitStack]:
    """Connections that stay open until the test is over."""
    with contextlib.ExitStack() as stack:
        yield stack


def connect(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.connect(address)  # without a timeout: a unix socket refuses a dialler that will not wait when many do
        sock.settimeout(DEADLINE)
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)


def end(sock: socket.socket) -> None:
    """Say that nothing follows, unless the other side has closed already."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def read(sock: socket.socket) -> bytes:
    """Read until the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(4096):
            data += piece
    return data


def read_challenge(sock: socket.socket) -> bytes:
    data = b""
    while len(data) < door.CHALLENGE_BYTES:
        piece = sock.recv(door.CHALLENGE_BYTES - len(data))
        assert piece, "closed before the challenge"
        data += piece
    return data


def pass_the_door(sock: socket.socket, credentials: LinkCredentials, purpose: door.Purpose) -> bytes:
    """Answer the challenge; return what was said at the door."""
    challenge = read_challenge(sock)
    answer = door.answer(credentials.door_key, challenge, purpose, secrets.token_bytes(door.BOUND_BYTES))
    send(sock, answer)
    return challenge + answer


def introduce(
    address: Address, credentials: LinkCredentials, hello: messages.Hello, *, token: bytes | None = None
) -> tuple[bytes, messages.HandshakeMessage | None]:
    """Go through the door and the greeting; return what was sent after it, and the answer if there was one."""
    with connect(address) as sock:
        sent = greeting(sock, credentials, hello, token=token)
        send(sock, sent)
        end(sock)
        answer = read(sock)
    return sent, messages.decode_handshake(answer[36:]) if len(answer) > 36 else None


def greeting(
    sock: socket.socket, credentials: LinkCredentials, hello: messages.Hello, *, token: bytes | None = None
) -> bytes:
    """Go through the door; return what a dialler says next."""
    said = pass_the_door(sock, credentials, door.Purpose.LINK)
    body = messages.encode(hello)
    return door.dial_proof(token if token is not None else credentials.token, said, body) + decoding.frame(body)


RUBBISH = (
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"tls" * 50,
    secrets.token_bytes(31),
    secrets.token_bytes(5000),
    bytes(32) + b"\xff\xff\xff\xff" + bytes(100_000),
    bytes(32) + struct.pack("<I", 4096) + bytes(4095),
    bytes(32) + struct.pack("<I", 0),
    bytes(16) + bytes(1) + bytes(32),
)


def bother(address: Address, credentials: LinkCredentials) -> None:
    """Come with rubbish at the door and behind it, without the key, and with answers to another challenge."""
    for rubbish in RUBBISH:
        with connect(address) as sock:
            send(sock, rubbish)
            end(sock)
            assert len(read(sock)) <= door.CHALLENGE_BYTES  # nothing beyond the challenge
        for purpose in (door.Purpose.LINK, door.Purpose.LANE):
            with connect(address) as sock:
                pass_the_door(sock, credentials, purpose)
                send(sock, rubbish)
                end(sock)
                assert read(sock) == b""  # a peer that has proved nothing gets no answer
    other = LinkCredentials.of_token(secrets.token_bytes(32))
    assert introduce(address, other, hello())[1] is None
    assert introduce(address, credentials, hello(), token=other.token)[1] is None
    with connect(address) as sock:
        replayed = door.answer(credentials.door_key, bytes(16), door.Purpose.LINK, bytes(door.BOUND_BYTES))
        read_challenge(sock)
        send(sock, replayed)
        assert read(sock) == b""
    with connect(address) as sock:
        greeted = greeting(sock, credentials, hello())
    with connect(address) as sock:
        pass_the_door(sock, credentials, door.Purpose.LINK)
        send(sock, greeted)  # proved for what was said at another door
        assert read(sock) == b""
    with connect(address) as sock:
        pass_the_door(sock, credentials, door.Purpose.LANE)
        send(sock, secrets.token_bytes(lane_dialler.LANE_BYTES) + b"\0" + secrets.token_bytes(door.PROOF_BYTES))
        assert read(sock) == b""


def add(group: Group) -> list[float]:
    return [float(value) for value in group.all_reduce(np.arange(3.0) * (group.rank + 1))]


def test_a_group_forms_while_strangers_crowd_its_doors(
    attacked: AttackedRun, strangers: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "NODE_STRANGER_SECONDS", 2 * DEADLINE)  # the idle ones do not run out of time
    attacked.start(0)
    doors = attacked.doors(0)
    for where in doors:
        bother(where, attacked.credentials)
        for _ in range(300):
            strangers.enter_context(connect(where))
    attacked.start(1)
    assert attacked.everywhere(add) == [[0.0, 3.0, 6.0]] * 2


def test_a_group_works_and_opens_lanes_while_strangers_crowd_its_doors(
    attacked: AttackedRun, strangers: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covey")
    for rank in range(2):
        attacked.start(rank)
    assert attacked.everywhere(add) == [[0.0, 3.0, 6.0]] * 2
    descriptors, resident = count_descriptors(), resident_bytes()
    for rank in range(2):
        for where in attacked.doors(rank):
            bother(where, attacked.credentials)
            assert isinstance(introduce(where, attacked.credentials, hello(version=99))[1], messages.Refusal)
            for number in range(300):
                sock = strangers.enter_context(connect(where))
                send(sock, secrets.token_bytes(number % 40))
    assert attacked.everywhere(lambda group: add(group.split(0))) == [[0.0, 3.0, 6.0]] * 2
    assert attacked.everywhere(exchange) == [1.0, 0.0]
    for rank in range(2):
        for where in attacked.doors(rank):
            time.sleep(4 * len(RUBBISH) / SOURCE_CONNECTIONS_RATE)  # so many the door answers again after a crowd
            bother(where, attacked.credentials)
    strangers.close()
    assert resident_bytes() - resident < 32 << 20
    assert 1 <= sum("connections; the last one" in record.getMessage() for record in caplog.records) <= 2 * 2
    assert attacked.everywhere(add) == [[0.0, 3.0, 6.0]] * 2
    wait_until(lambda: count_descriptors() < descriptors + 20)


def exchange(group: Group) -> float:
    group.send(np.array([float(group.rank)]), dst=1 - group.rank)
    return float(group.recv(src=1 - group.rank)[0])


def test_diallers_that_hold_the_key_and_say_no_more_are_forgotten_in_time(
    attacked: AttackedRun, strangers: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.runtime.links.handshake.HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr("covey.runtime.lanes.acceptor.HANDSHAKE_SECONDS", 0.5)
    for rank in range(2):
        attacked.start(rank)
    assert attacked.everywhere(add) == [[0.0, 3.0, 6.0]] * 2
    for where in attacked.doors(0):
        for number, purpose in enumerate((door.Purpose.LINK, door.Purpose.LANE) * 20):
            sock = strangers.enter_context(connect(where))
            pass_the_door(sock, attacked.credentials, purpose)
            send(sock, bytes(number))
    assert attacked.everywhere(lambda group: add(group.split(0))) == [[0.0, 3.0, 6.0]] * 2
    acceptor = next(node.acceptor for node in list(node_module._nodes) if node.seat == 0)
    wait_until(lambda: not acceptor._guests)


def test_diallers_that_know_the_token_but_are_not_the_expected_rank_are_refused(attacked: AttackedRun) -> None:
    for rank in range(2):
        attacked.start(rank)
    assert attacked.everywhere(add) == [[0.0, 3.0, 6.0]] * 2
    right = {"lanes": attacked.lanes, "size": 2}
    for where in attacked.doors(0):
        for wrong in (
            hello(**right),
            hello(**right, rank=0),
            hello(**right, rank=7),
            hello(**right, rank=-1),
            hello(**(right | {"size": 3})),
            hello(**right, version=messages.VERSION + 1),
            hello(**right, purpose="candidate"),
            hello(**right, purpose="keeper"),
            hello(**right, purpose="kept"),
            hello(**right, purpose="mischief"),
            hello(**right, run="another"),
            hello(**right, card=card(id=b"i" * 32)),
        ):
            answer = introduce(where, attacked.credentials, wrong)[1]
            assert isinstance(answer, messages.Refusal), (wrong, answer)
    assert attacked.everywhere(add) == [[0.0, 3.0, 6.0]] * 2
    assert attacked.everywhere(lambda group: add(group.split(0))) == [[0.0, 3.0, 6.0]] * 2


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
