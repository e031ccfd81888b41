"""What a stranger can do who sees a machine that shows a code, or sits between it and one on which it is typed."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.in_turn import in_turn
from tests.support.pairing import Applying, wait_for
from tests.support.waiting import DEADLINE

from covey.base.config import GroupConfig
from covey.base.errors import AuthError, CoveyError
from covey.base.pace import Growing
from covey.base.version import __version__
from covey.net.audit import audit_reader
from covey.net.host.machine import waking_clock
from covey.net.keys import charter, clusters, owner, trust
from covey.net.keys.identity import machine_name, node_name, own_machine
from covey.proto import pairing as rules
from covey.proto.pairing import RefusedPairingError
from covey.runtime.pairing import inviter
from covey.wire.decoding import FRAME_LENGTH, frame
from covey.wire.pairing import PAIRING_SPEAKS, PairingHello, PairingRefusal, decode_pairing
from covey.wire.secret import KEY_BYTES, ClusterSecret, decode_join_code
from covey.wire.signed import public_half

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from covey.net.keys.clusters import Cluster
    from covey.runtime.pairing.inviter import Pairing, PairingView

NAME = "lab"


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests show codes, too: this machine neither meets them nor is met by them on this host."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture
def cluster() -> Cluster:
    """A cluster that was made here."""
    made = clusters.Cluster(ClusterSecret(NAME, bytes(range(KEY_BYTES))), owner=owner.make(NAME))
    clusters.save(made)
    own_machine()
    return made


@pytest.fixture
def shown(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pairing]:
    """Codes of this machine, one after the other; after a wrong one it rests for a moment only."""
    monkeypatch.setattr(rules, "RESTS", Growing(0.01, 0.01))
    with inviter.pairing(cluster, GroupConfig(interfaces="lo")) as codes:
        yield codes


class Come(Protocol):
    """Makes connections of machines, which are closed at the end."""

    def __call__(
        self, where: Pairing | int, name: str = "south-test", private: Ed25519PrivateKey | None = None
    ) -> Applying: ...


@pytest.fixture
def come() -> Iterator[Come]:
    made: list[Applying] = []

    def connect(where: Pairing | int, name: str = "south-test", private: Ed25519PrivateKey | None = None) -> Applying:
        port = where if isinstance(where, int) else where.view().port
        made.append(applying := Applying(port, name, private))
        return applying

    yield connect
    for each in made:
        each.close()


def refusal_of(applying: Applying) -> PairingRefusal:
    message = decode_pairing(applying.receive())
    assert isinstance(message, PairingRefusal), message
    return message


def has_paired(count: int) -> Callable[[PairingView], bool]:
    return lambda view: len(view.paired) == count


def has_failed_again(before: PairingView) -> Callable[[PairingView], bool]:
    return lambda view: (view.code, view.failed) != (before.code, before.failed)


def wrong(code: str) -> str:
    return f"{(int(code) + 1) % 10**6:06d}"


def fail(shown: Pairing, come: Come, code: str) -> PairingRefusal:
    """Try a wrong code, and return what is said to it; wait while another attempt is rested after."""
    while True:
        stranger = come(shown, "stranger")
        with contextlib.suppress(RefusedPairingError):
            stranger.prove(wrong(code))
            return refusal_of(stranger)


# Getting in


def test_a_machine_that_knows_the_code_gets_the_secret_and_is_trusted_under_its_key(
    shown: Pairing, come: Come, cluster: Cluster
) -> None:
    code = shown.view().code
    south = come(shown, "south-abcd")
    grant = south.get_in(code)
    assert decode_join_code(grant.join_code).secret == cluster.secret
    assert decode_join_code(grant.join_code).owner == cluster.owner
    assert grant.waits_at == ""
    view = wait_for(shown, lambda view: view.paired)
    name = machine_name("south-abcd", south.own.id)
    assert [(each.name, each.id, each.has_stored) for each in view.paired] == [(name, south.own.id, True)]
    assert trust.trusted(cluster)[south.own.id].name == name
    assert view.code not in ("", code)


def test_a_code_lets_no_second_machine_in(shown: Pairing, come: Come) -> None:
    code = shown.view().code
    come(shown, "south").get_in(code)
    second = come(shown, "west")
    second.prove(code)
    assert refusal_of(second).kind == "wrong-code"
    assert len(wait_for(shown, lambda view: view.failed == 1).paired) == 1


def test_a_code_for_two_machines_lets_two_in_and_then_none(cluster: Cluster, come: Come) -> None:
    with inviter.pairing(cluster, GroupConfig(interfaces="lo"), machines=2) as codes:
        view = codes.view()
        for left in (1, 0):
            come(codes).get_in(view.code)
            assert wait_for(codes, has_paired(2 - left)).machines == left
        assert codes.view().over == rules.ALL_IN
        third = come(codes)
        assert refusal_of(third).kind == "no-code"


def test_where_the_owner_has_a_list_a_machine_that_knows_the_code_is_approved_under_its_key(
    shown: Pairing, come: Come, cluster: Cluster
) -> None:
    private = owner.require(cluster, "this test")
    charter.amend(cluster, private, lambda now: (now[0], frozenset([own_machine()])))
    south = come(shown, "south-abcd")
    assert south.get_in(shown.view().code).waits_at == ""
    known = clusters.load(NAME)
    assert charter.bound_names(known)[south.own.id] == machine_name("south-abcd", south.own.id)
    assert charter.machine_objection(known, south.own.id, "here") == ""


def test_without_the_owner_key_it_waits_for_the_owner_and_is_told_where(
    shown: Pairing, come: Come, cluster: Cluster
) -> None:
    private = owner.require(cluster, "this test")
    charter.amend(cluster, private, lambda now: (now[0], frozenset([own_machine()])))
    owner.forget(NAME)
    south = come(shown, "south-abcd")
    grant = south.get_in(shown.view().code)
    known = clusters.load(NAME)
    assert known.charter is not None
    assert grant.waits_at == known.charter.machine
    assert list(clusters.waiting(NAME)) == [south.own.id]
    assert "waiting for approval" in charter.machine_objection(known, south.own.id, "here")
    assert wait_for(shown, lambda view: view.paired).paired[0].waits_at == grant.waits_at


def test_a_machine_that_is_denied_gets_nothing_although_it_knows_the_code(
    shown: Pairing, come: Come, cluster: Cluster
) -> None:
    private = Ed25519PrivateKey.generate()
    clusters.update(NAME, lambda now: replace(now, denied=frozenset([public_half(private)])))
    south = come(shown, "south", private)
    south.prove(shown.view().code)
    refusal = refusal_of(south)
    assert refusal.kind == "refused"
    assert "is denied" in refusal.text
    assert "knew the code and was refused" in wait_for(shown, lambda view: view.refused).refused
    assert cluster.secret.key not in south.heard


# Guessing


def test_wrong_codes_are_counted_replaced_after_three_and_end_it_after_nine(shown: Pairing, come: Come) -> None:
    codes = []
    for number in range(9):
        view = shown.view()
        assert view.failed == number % 3
        codes.append(view.code)
        refusal = fail(shown, come, view.code)
        assert (refusal.kind, refusal.tries_left) == ("wrong-code", 2 - number % 3)
        wait_for(shown, has_failed_again(view))
    assert [len({*codes[at : at + 3]}) for at in (0, 3, 6)] == [1, 1, 1]
    assert len({*codes}) == 3
    view = shown.view()
    assert (view.code, view.over) == ("", rules.TOO_MANY_CODES)
    late = come(shown, "south")
    assert refusal_of(late).kind == "no-code"
    assert view.failed_from == "127.0.0.1"


def test_after_a_wrong_code_the_next_attempt_waits_longer_each_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, come: Come
) -> None:
    monkeypatch.setattr(rules, "RESTS", Growing(30.0, 60.0))
    with inviter.pairing(cluster, GroupConfig(interfaces="lo")) as codes:
        view = codes.view()
        first, second = come(codes), come(codes)
        first.prove(wrong(view.code))
        assert refusal_of(first).kind == "wrong-code"
        second.request(view.code)
        refusal = refusal_of(second)
        assert refusal.kind == "later"
        assert 20 < refusal.seconds <= 30
        assert codes.view().failed == 1
    assert [Growing(1.0, 8.0).after(count) for count in range(1, 6)] == [1, 2, 4, 8, 8]


def test_one_attempt_at_a_time_and_the_second_machine_gets_in_after_the_first(shown: Pairing, come: Come) -> None:
    code = shown.view().code
    first, second = come(shown, "south"), come(shown, "west")
    first.request(code)
    share = first.receive()
    second.request(code)
    refusal = refusal_of(second)
    assert refusal.kind == "later"
    assert 0 < refusal.seconds <= rules.CODE_ATTEMPT_SECONDS
    first.send(first.core.answered(share))
    first.core.granted(first.receive())
    first.send(first.core.stored())
    view = wait_for(shown, lambda view: view.paired)
    come(shown, "west").get_in(view.code)
    assert len(wait_for(shown, lambda view: len(view.paired) == 2).paired) == 2


def test_a_machine_that_asks_and_says_no_more_does_not_hold_up_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, come: Come
) -> None:
    monkeypatch.setattr(rules, "CODE_ATTEMPT_SECONDS", 0.2)
    monkeypatch.setattr(rules, "GUEST_SECONDS", 0.2)
    with inviter.pairing(cluster, GroupConfig(interfaces="lo")) as codes:
        view = codes.view()
        mute, asking = come(codes), come(codes)
        asking.request(view.code)
        asking.receive()
        assert asking.is_ended()
        mute.receive()
        assert mute.is_ended()
        come(codes).get_in(view.code)
        assert codes.view().failed == 0


# Replaying, sending back, and sitting in the middle


def test_what_was_recorded_lets_nobody_in(shown: Pairing, come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "CODE_ATTEMPT_SECONDS", 1.0)
    code = shown.view().code
    south = come(shown, "south")
    south.get_in(code)
    wait_for(shown, lambda view: view.paired)
    said = south.said
    for count in (1, 2, 3):
        stranger = come(shown, "stranger")
        stranger.receive()
        for body in said[:count]:
            with contextlib.suppress(OSError):
                stranger.send(body)
        answers = everything(stranger)
        assert all(not is_grant(each) for each in answers)
    assert len(shown.view().paired) == 1


def test_what_is_sent_back_lets_nobody_in(shown: Pairing, come: Come) -> None:
    stranger = come(shown, "stranger")
    hello = stranger.receive()
    stranger.send(hello)
    assert stranger.is_ended()
    stranger = come(shown, "stranger")
    stranger.request(shown.view().code)  # and the share of the other end is given as one's own proof
    share = stranger.receive()
    stranger.send(share)
    assert stranger.is_ended()
    assert shown.view().paired == ()


class Between:
    """Sits between a machine and the one that shows the code, and passes on what `change` makes of each message."""

    def __init__(self, port: int, change: Callable[[int, bytes], bytes]) -> None:
        """`change` gets the number of the message, of both directions together, and its bytes."""
        self._port, self._change = port, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.seen = b""
        self.passed = 0
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        applicant, _ = self._listener.accept()
        other = socket.create_connection(("127.0.0.1", self._port), DEADLINE)
        with applicant, other:
            back = threading.Thread(target=self._pass, args=(applicant, other), daemon=True)
            back.start()
            self._pass(other, applicant)
            back.join(DEADLINE)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                body = receive(source)
                self.seen += body
                self.passed += 1
                target.sendall(frame(self._change(self.passed, body)))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(DEADLINE)


def receive(sock: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = sock.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    return exactly(FRAME_LENGTH.unpack(exactly(FRAME_LENGTH.size))[0])


def everything(applying: Applying) -> list[bytes]:
    """Return all messages that come until the connection ends."""
    found = []
    with contextlib.suppress(OSError, EOFError):
        while True:
            found.append(applying.receive())
    return found


def is_grant(body: bytes) -> bool:
    return type(decode_pairing(body)).__name__ == "PairingGrant"


def test_one_in_the_middle_who_only_passes_on_sees_nothing_of_the_secret_or_the_code(
    shown: Pairing, cluster: Cluster, come: Come
) -> None:
    code = shown.view().code
    between = Between(shown.view().port, lambda _number, body: body)
    south = come(between.port)
    grant = south.get_in(code)
    south.close()
    between.close()
    assert decode_join_code(grant.join_code).secret == cluster.secret
    for secret in (cluster.secret.key, grant.join_code.encode(), code.encode()):
        assert secret not in between.seen


@in_turn(message=range(1, 6), bit=(0, 3, 77, -1))
def test_one_in_the_middle_who_changes_a_bit_of_any_message_lets_nobody_in(
    message: int, bit: int, shown: Pairing, come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine takes nothing, and is not let in; the sixth message only says that it has stored the secret."""

    def change(number: int, body: bytes) -> bytes:
        if number != message:
            return body
        at = bit % (8 * len(body))
        return bytes(byte ^ (1 << at % 8 if where == at // 8 else 0) for where, byte in enumerate(body))

    monkeypatch.setattr(rules, "FAILED_TRIES", 1000)
    passed = 0
    while passed < message:  # or it was told to come later, while the attempt before was not over
        between = Between(shown.view().port, change)
        south = come(between.port)
        with pytest.raises((CoveyError, OSError, EOFError)):
            south.get_in(shown.view().code)
        south.close()
        between.close()
        passed = between.passed
    assert not any(each.has_stored for each in shown.view().paired)


def test_one_in_the_middle_who_puts_in_its_own_key_is_not_let_in(shown: Pairing, come: Come) -> None:
    """It passes on the request of a machine as its own, with its key: the proofs of the machine are of another one."""
    import msgspec

    from covey.wire.pairing import PairingRequest, encode_pairing

    own = Ed25519PrivateKey.generate()

    def change(_number: int, body: bytes) -> bytes:
        message = decode_pairing(body)
        if isinstance(message, PairingRequest):
            return encode_pairing(msgspec.structs.replace(message, machine=public_half(own), name="north-evil"))
        return body

    between = Between(shown.view().port, change)
    south = come(between.port)
    with pytest.raises(RefusedPairingError):
        south.get_in(shown.view().code)
    south.close()
    between.close()
    assert shown.view().paired == ()
    assert wait_for(shown, lambda view: view.failed == 1).paired == ()


class Posing(rules.PairingInviter):
    """Gives something to whoever asks, without knowing the code that they prove."""

    def _check(self, connection: int, caller: Any, proof: Any, now: float) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.is_proved = True
        self._effects.append(rules.AdmitMachine(connection, attempt.machine))


def test_what_a_machine_gives_that_answers_in_place_of_the_other_is_not_taken(
    cluster: Cluster, come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns whether one code was right, its own, and a person types another."""
    monkeypatch.setattr(inviter, "PairingInviter", Posing)
    with inviter.pairing(cluster, GroupConfig(interfaces="lo")) as codes:
        south = come(codes)
        south.prove(wrong(codes.view().code))
        grant = south.receive()
        assert is_grant(grant)
        with pytest.raises(AuthError, match="does not know the code"):
            south.core.granted(grant)


# Bytes that no end of covey sends


@in_turn(
    sent=[
        b"\xff" * 64,
        FRAME_LENGTH.pack(1 << 20) + b"x" * 100,
        FRAME_LENGTH.pack(4097),
        frame(b""),
        frame(b"\x93\x02"),
        frame(b"\x00" * 4096),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
)
def test_bytes_that_are_no_message_end_the_connection_and_count_as_no_try(
    shown: Pairing, come: Come, sent: bytes
) -> None:
    stranger = come(shown, "stranger")
    stranger.receive()
    stranger.sock.sendall(sent)
    assert stranger.is_ended()
    assert shown.view().failed == 0


def test_half_a_message_holds_its_connection_for_seconds_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, come: Come
) -> None:
    monkeypatch.setattr(rules, "GUEST_SECONDS", 0.2)
    with inviter.pairing(cluster, GroupConfig(interfaces="lo")) as codes:
        stranger = come(codes)
        stranger.receive()
        stranger.sock.sendall(FRAME_LENGTH.pack(300) + b"x" * 10)
        assert stranger.is_ended()


def test_many_connections_keep_few_places_and_a_machine_gets_in_all_the_same(shown: Pairing, come: Come) -> None:
    crowd = [come(shown, "stranger") for _ in range(40)]
    come(shown, "south").get_in(shown.view().code)
    for each in crowd[: -rules.CONNECTIONS_OF_SOURCE]:
        each.receive()
        assert each.is_ended()


# Ends in the middle


def test_a_machine_that_leaves_before_its_proof_changes_nothing(shown: Pairing, come: Come) -> None:
    code = shown.view().code
    leaving = come(shown, "south")
    leaving.request(code)
    leaving.receive()
    leaving.close()
    come(shown, "west").get_in(code)
    assert [each.name[:4] for each in wait_for(shown, lambda view: view.paired).paired] == ["west"]


def test_of_a_machine_that_leaves_with_the_secret_it_is_said_that_it_may_not_have_stored_it(
    shown: Pairing, come: Come
) -> None:
    code = shown.view().code
    leaving = come(shown, "south")
    leaving.prove(code)
    leaving.receive()
    leaving.close()
    view = wait_for(shown, lambda view: view.paired)
    assert [each.has_stored for each in view.paired] == [False]
    assert view.code not in ("", code)


def test_the_one_that_shows_the_code_may_end_at_any_moment(cluster: Cluster, come: Come) -> None:
    for steps in range(3):
        with inviter.pairing(cluster, GroupConfig(interfaces="lo")) as codes:
            view = codes.view()
            south = come(codes)
            if steps:
                south.request(view.code)
            if steps == 2:
                south.core.answered(south.receive())
        everything(south)
        assert south.is_ended()
        assert codes.view().code == ""


def test_a_code_is_too_old_after_minutes_in_which_the_machine_slept(
    shown: Pairing, come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = shown.view().code
    asleep = rules.CODE_SECONDS + 1
    monkeypatch.setattr(inviter, "waking_clock", lambda: waking_clock() + asleep)
    late = come(shown)
    late.prove(code)
    assert refusal_of(late).kind == "wrong-code"
    assert shown.view().code != code
    if hasattr(time, "CLOCK_BOOTTIME"):  # which runs on in sleep, unlike that of `time.monotonic`
        assert abs(waking_clock() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 1.0


# What is told, and what stays


def test_who_connects_is_told_the_name_the_key_and_the_release_and_no_more(shown: Pairing, come: Come) -> None:
    hello = decode_pairing(come(shown).receive())
    assert isinstance(hello, PairingHello)
    here = own_machine()
    assert (hello.machine, hello.name) == (here, node_name(socket.gethostname(), here))
    assert (hello.release, hello.versions) == (__version__, PAIRING_SPEAKS)
    assert hello.__struct_fields__ == ("versions", "nonce", "machine", "name", "release")


def test_nothing_about_a_code_is_on_disk_and_the_next_start_shows_another(
    cluster: Cluster, home: Path, tmp_path: Path, come: Come
) -> None:
    codes = set()
    for _ in range(3):
        with inviter.pairing(cluster, GroupConfig(interfaces="lo")) as shown:
            view = shown.view()
            codes.add(view.code)
            come(shown).get_in(view.code)
            wait_for(shown, lambda view: view.paired)
    assert len(codes) == 3
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert not any(code.encode() in path.read_bytes() for code in codes), path


def test_who_got_in_is_in_the_audit_log(shown: Pairing, come: Come) -> None:
    south = come(shown, "south-abcd")
    south.get_in(shown.view().code)
    wait_for(shown, lambda view: view.paired)
    entries = [each for each in audit_reader.entries() if each.event == "machine-paired"]
    assert [(each.node, each.address) for each in entries] == [(south.own.id.hex(), "127.0.0.1")]


def test_a_share_that_makes_the_key_known_ends_the_attempt(shown: Pairing, come: Come) -> None:
    import msgspec

    from covey.wire.pairing import PairingRequest, encode_pairing

    stranger = come(shown, "stranger")
    stranger.core.heard_hello(stranger.receive())
    request = decode_pairing(stranger.core.request("000000"))
    assert isinstance(request, PairingRequest)
    stranger.send(encode_pairing(msgspec.structs.replace(request, share=bytes(32))))
    assert stranger.is_ended()
    assert shown.view().paired == ()
    with pytest.raises(AuthError):
        stranger.core.answered(b"\x92\x03\xc4\x20" + bytes(32))
