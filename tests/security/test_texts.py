"""What others write is read by people: in errors, logs and tables. Nothing in it moves a cursor, forges a line or fills
a screen."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.security.test_handshake import handshake_with
from tests.support.attackers import (
    BROKEN,
    Insider,
    call_on_loop,
    dial_tls,
    dialling_context,
    hear,
    new_cluster,
    read,
    run_nodes,
    until,
)
from tests.support.waiting import DEADLINE

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.net.keys.tls import Credentials
from covey.runtime.group.internals import engine_of
from covey.wire import decoding, door, formation, messages, store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.attackers import Victim

    from covey.runtime.group.group import Group

EVIL = "\x1b]0;owned\x07\x1b[2J\r\nERROR run is over\n\u202e\x9b31m"
LONGEST = 8 * 1000
"""Characters of any text that gets through, of whatever kind."""
RAW = {("Hello", "run"), ("Contact", "socket"), *(("Terms", name) for name in formation.Terms.__struct_fields__)}
"""Compared or used, and shown only as Python writes a string."""
KINDS: list[Any] = [
    *typing.get_args(messages.HandshakeMessage),
    *typing.get_args(messages.Control),
    *typing.get_args(formation.Formation),
    store.Refused,
]


def forged(kind: Any, text: str, name_text: str | None = None) -> Any:
    """Return what a hostile encoder sends for a message of a kind: `text` wherever there is one.

    With `name_text`, that is what names and addresses are, which have a pattern and are refused whole.
    """
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = [forged(hints[name], text, name_text) for name in kind.__struct_fields__]
        tag = kind.__struct_config__.tag
        return [tag, *fields] if tag is not None else fields
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        meta = [each for each in args[1:] if isinstance(each, msgspec.Meta)]
        if args[0] is bytes and meta and meta[0].min_length:
            return bytes(meta[0].min_length)
        if name_text is not None and meta and meta[0].pattern:
            return name_text
        return forged(args[0], text, name_text)
    if origin is tuple:
        return (
            [forged(args[0], text, name_text)]
            if args[-1] is Ellipsis
            else [forged(each, text, name_text) for each in args]
        )
    if origin is not None and type(None) in args:
        return None
    plain = {str: text, bytes: b"", int: 1, float: 1.0, bool: True}
    return plain.get(kind, 1)


def texts(value: Any, owner: str = "", field: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield every text in a decoded message, with the type and the field that hold it."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from texts(getattr(value, name), type(value).__name__, name)
    elif isinstance(value, tuple):
        for each in value:
            yield from texts(each, owner, field)
    elif isinstance(value, str):
        yield owner, field, value


def decode(kind: Any, data: bytes) -> Any:
    if kind in typing.get_args(messages.HandshakeMessage):
        return messages.decode_handshake(data)
    if kind in typing.get_args(formation.Formation):
        return formation.decode_formation(data)
    return store.decode_body(data) if kind is store.Refused else messages.decode_control(data)


@pytest.mark.parametrize("text", [EVIL, EVIL * 20, "x" * 900_000, "\n" * 300], ids=["evil", "more", "long", "lines"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_text_of_a_peer_gets_past_the_decoder_that_is_not_printable_and_short(kind: Any, text: str) -> None:
    for name_text in (None, "1"):
        complaint = ""
        try:
            decoded = decode(kind, msgspec.msgpack.encode(forged(kind, text, name_text)))
        except RemoteProtocolError as error:
            complaint, decoded = str(error), None
        assert complaint.isprintable()
        assert len(complaint) < 500
        for owner, field, found in texts(decoded):
            assert len(found) <= LONGEST
            assert found.isprintable() or (owner, field) in RAW, (owner, field)


def test_the_fuzz_reaches_texts_in_messages_of_many_kinds() -> None:
    found = set()
    for kind in KINDS:
        with contextlib.suppress(RemoteProtocolError):
            decoded = decode(kind, msgspec.msgpack.encode(forged(kind, EVIL, "1")))
            found |= {(owner, field) for owner, field, _ in texts(decoded)}
    assert len(found) > 40
    assert {("Revoke", "text"), ("Tell", "run"), ("Reached", "problems"), ("Refusal", "reason")} <= found


def test_a_message_made_of_a_hostile_text_is_clean() -> None:
    for message in (
        messages.Revoke(1, "PeerLostError", EVIL * 1000, ()),
        messages.Refusal(EVIL, retry=False),
        messages.NoLane(1, "messages", EVIL),
        messages.Announce(1, 1, 1, EVIL),
        messages.SecretKept(EVIL),
        messages.Reached((1.0,), (EVIL,)),
    ):
        again = messages.encode(message)
        decoded = messages.decode_handshake(again) if isinstance(message, messages.Refusal) else None
        assert (decoded or messages.decode_control(again)) == message
        assert all(text.isprintable() and len(text) <= LONGEST for _, _, text in texts(message))


def test_a_hostile_rank_does_not_write_to_the_terminals_of_the_others() -> None:
    """It revokes the group, refuses a lane and answers what it called, with texts of its own."""
    errors: dict[int, BaseException] = {}
    is_out, is_over = threading.Event(), threading.Event()

    def attack(group: Group) -> None:
        engine = engine_of(group)
        assert engine.node is not None
        group.all_reduce(1)
        if group.rank:
            is_out.set()
        else:
            assert is_out.wait(DEADLINE)  # the attack is on its next operation
        if group.rank == 0:
            link = engine.node.peers[Seat(1)].link
            assert link is not None
            raw = [
                [11, engine.id, "messages", EVIL, 0],
                [9, engine.id, 5, 5, 77, EVIL],
                [8, engine.id, 5, 78, EVIL],
                [10, engine.id, "PeerLostError", EVIL * 50, [0]],
            ]
            for each in raw:
                call_on_loop(link.send, msgspec.msgpack.encode(each))
            assert is_over.wait(DEADLINE)
        else:
            try:
                group.barrier(timeout=DEADLINE / 2)
            except CoveyError as error:
                errors[group.rank] = error
            finally:
                is_over.set()

    run_nodes(new_cluster(), attack)
    assert "owned" in str(errors[1])
    assert str(errors[1]).isprintable()
    assert len(str(errors[1])) <= LONGEST + 500


@pytest.mark.parametrize("text", [EVIL, "x" * 900], ids=["evil", "long"])
def test_a_hostile_member_writes_nothing_of_its_own_into_logs_or_what_is_told(
    prey: Victim, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "covey")
    for kind in typing.get_args(messages.Control):
        with contextlib.suppress(*BROKEN), Insider(prey) as insider:
            insider.link.sendall(decoding.frame(msgspec.msgpack.encode(forged(kind, text))))
            insider.ping()
    for kind in typing.get_args(formation.Formation):
        with contextlib.suppress(*BROKEN), Insider(prey) as insider:
            insider.say(messages.Forming(msgspec.msgpack.encode(forged(kind, text))))
            insider.ping()
    told = call_on_loop(
        lambda: [prey.joiner.situation(), *prey.node.report_problems(), *prey.node.report_problems().values()]
    )
    told += [record.getMessage() for record in caplog.records if record.name.startswith("covey")]
    assert [line for line in told if not line.isprintable()] == []
    assert max(map(len, told)) < LONGEST


# Before a peer has proved anything


@contextlib.contextmanager
def stranger(serve: Any) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))

    def main() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(*BROKEN):
            sock.settimeout(DEADLINE)
            serve(sock)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        thread.join(DEADLINE)
        listener.close()


def talk(sock: socket.socket) -> None:
    sock.sendall(EVIL.encode()[: door.CHALLENGE_BYTES].ljust(door.CHALLENGE_BYTES, b"\x1b"))
    read(sock, door.DOOR_ANSWER_BYTES)
    sock.sendall(EVIL.encode() * 1000)


def alert(sock: socket.socket) -> None:
    sock.sendall(bytes(door.CHALLENGE_BYTES))
    read(sock, door.DOOR_ANSWER_BYTES)
    sock.sendall(b"\x15\x03\x03\x00\x02\x02\x28")


def other_protocol(sock: socket.socket) -> None:
    sock.sendall(bytes(door.CHALLENGE_BYTES))
    read(sock, door.DOOR_ANSWER_BYTES)
    own = Ed25519PrivateKey.generate()
    context = Credentials(own.private_bytes_raw(), own).accepting
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(sock, server_side=True) as secured:
        secured.sendall(EVIL.encode())


@pytest.mark.parametrize("serve", [talk, alert, other_protocol, lambda sock: sock.sendall(EVIL.encode())])
def test_a_stranger_that_is_dialled_writes_nothing_of_its_own_into_the_error(serve: Any) -> None:
    with stranger(serve) as address, pytest.raises(CoveyError) as caught:
        handshake_with(address, new_cluster())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_a_stranger_that_dials_writes_nothing_of_its_own_into_the_log(
    prey: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "covey")
    before = prey.acceptor.turned_away
    with socket.create_connection(prey.address, timeout=DEADLINE) as sock:
        read(sock, door.CHALLENGE_BYTES)
        sock.sendall(EVIL.encode() * 10)
        with contextlib.suppress(*BROKEN):
            sock.recv(1)
    secret = prey.cluster.secret
    for context in (odd_protocol(secret.derive("node-ca")), dialling_context(secret.derive("mdns"))):
        with contextlib.suppress(*BROKEN), dial_tls(prey.address, secret.derive("door"), context) as secured:
            secured.sendall(EVIL.encode())
            hear(secured)
    until(lambda: prey.acceptor.turned_away >= before + 3)
    lines = [record.getMessage() for record in caplog.records if record.name == "covey"]
    assert lines
    assert all(line.isprintable() and len(line) < 500 for line in lines)


def odd_protocol(seed: bytes) -> ssl.SSLContext:
    context = dialling_context(seed)
    context.set_alpn_protocols(["\x1b[2J\n"])
    return context
