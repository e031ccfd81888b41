"""What sealed lanes promise beyond other lanes: an attacker that holds the wire can end a lane, and nothing else."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.test_lanes import End, Reader, Transfer, carry, outgoing, transfer
from tests.io.test_messenger import MessengerGroup, content
from tests.support.in_turn import in_turn
from tests.support.seeds import examples
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.net.lanes.lane import LaneClosedError
from covey.net.lanes.sealed import JOINED_BYTES, SealedLane, SealedSocket
from covey.runtime.messages import message_lane
from covey.wire.header import TRANSFER_HEADER_BYTES
from covey.wire.seal import (
    DIALLER,
    NEXT_KEY,
    RECORD_OVERHEAD_BYTES,
    REKEY_SECONDS,
    SEALED_RECORD_LIMIT,
    Sealer,
    lane_keys,
    record_length,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET, LANE = bytes(range(32)), b"\x07lane"
KIB, MIB = 1 << 10, 1 << 20
LARGE = 2 * SEALED_RECORD_LIMIT + 16
"""Bytes of a transfer that has three records besides its header."""

Sockets = list[socket.socket]
Records = list[list[bytes]]
"""By stream."""


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def unix_pairs(stack: contextlib.ExitStack, streams: int) -> tuple[Sockets, Sockets]:
    pairs = [socket.socketpair() for _ in range(streams)]
    for sock in [sock for pair in pairs for sock in pair]:
        stack.callback(sock.close)
        sock.setblocking(False)
    return [near for near, _ in pairs], [far for _, far in pairs]


def narrow_pairs(stack: contextlib.ExitStack, streams: int) -> tuple[Sockets, Sockets]:
    """TCP connections of which the kernel buffers next to nothing, so that all records are split."""
    near, far = [], []
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen()
        for _ in range(streams):
            dialled = socket.socket()
            stack.callback(dialled.close)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                dialled.setsockopt(socket.SOL_SOCKET, option, 4096)
            dialled.connect(server.getsockname())
            accepted, _ = server.accept()
            stack.callback(accepted.close)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            near.append(dialled)
            far.append(accepted)
    return near, far


def dialler(stack: contextlib.ExitStack, socks: Sockets, secret: bytes = SECRET, lane: bytes = LANE) -> SealedLane:
    (sock,) = socks
    made = SealedLane(sock, secret, lane, dialler=True)
    stack.callback(made.close)
    return made


def acceptor(stack: contextlib.ExitStack, socks: Sockets) -> SealedLane:
    (sock,) = socks
    made = SealedLane(sock, SECRET, LANE, dialler=False)
    stack.callback(made.close)
    return made


def record_sizes(nbytes: int, streams: int = 1) -> list[int]:
    """Return the plaintext lengths of the records of a transfer over so many streams, in their order."""
    if nbytes <= 2048:
        return [TRANSFER_HEADER_BYTES + nbytes]
    limit = 2 * MIB if streams <= 2 else 64 * KIB
    return [TRANSFER_HEADER_BYTES, *(min(limit, nbytes - at) for at in range(0, nbytes, limit))]


def sealed_records(transfers: list[Transfer], streams: int = 1, *, renews: bool = False) -> Records:
    """Return the records of `transfers` on a lane of so many streams; with `renews`, each has other keys."""
    sealers = [Sealer(lane_keys(SECRET, LANE, stream)[DIALLER], LANE, stream, DIALLER) for stream in range(streams)]
    records: Records = [[] for _ in sealers]
    turn = 0
    for each in transfers:
        plain = each.header + each.payload.tobytes()
        for sealer in sealers if renews else ():
            sealer.renew()
        for size in record_sizes(each.payload.nbytes, streams):
            record = memoryview(bytearray(size + RECORD_OVERHEAD_BYTES))
            sealers[turn % streams].seal(plain[:size], record)
            records[turn % streams].append(bytes(record))
            plain, turn = plain[size:], turn + 1
        assert not plain
    return records


def drain(socks: Sockets, into: list[bytearray]) -> bool:
    """Read what is there from each of `socks`; tell whether anything was."""
    before = sum(map(len, into))
    for sock, data in zip(socks, into, strict=True):
        with contextlib.suppress(BlockingIOError):
            while chunk := sock.recv(MIB):
                data += chunk
    return sum(map(len, into)) > before


def capture(lane: SealedLane, socks: Sockets, transfers: list[Transfer]) -> Records:
    """Send `transfers` and return the records that come out at the other end."""
    sender, wire = End(lane, transfers, []), [bytearray() for _ in socks]
    while sender.send() or sender.sending or drain(socks, wire):
        drain(socks, wire)
    return [split(data) for data in wire]


def split(data: bytearray) -> list[bytes]:
    records = []
    while data:
        end = record_length(data) + RECORD_OVERHEAD_BYTES
        assert end <= len(data), "a part of a record"
        records.append(bytes(data[:end]))
        del data[:end]
    return records


def feed(lane: SealedLane, socks: Sockets, wire: list[bytes], readers: list[Reader]) -> None:
    """Put `wire` on the streams, end them, and receive until all is there or the lane says that it is closed."""
    left = [memoryview(data) for data in wire]
    for reader in readers:
        deadline = time.monotonic() + DEADLINE
        while not reader.done:
            for stream, sock in enumerate(socks):
                with contextlib.suppress(BlockingIOError):
                    while left[stream]:
                        left[stream] = left[stream][sock.send(left[stream]) :]
                    sock.shutdown(socket.SHUT_WR)
            lane.receive(reader.incoming)
            assert time.monotonic() < deadline, "the lane neither moves nor says why"


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_records_that_are_split_anywhere_arrive_whole(ends: contextlib.ExitStack) -> None:
    near, far = narrow_pairs(ends, 1)
    one, other = dialler(ends, near), acceptor(ends, far)
    sizes = [
        0,
        1,
        2047,
        2048,
        2049,
        70_000,
        SEALED_RECORD_LIMIT - 1,
        SEALED_RECORD_LIMIT,
        SEALED_RECORD_LIMIT + 1,
        2 * SEALED_RECORD_LIMIT + 5,
    ]
    there = [transfer(number, size) for number, size in enumerate(sizes)]
    back = [transfer(50 + number, size) for number, size in enumerate(sizes[4:7])]
    carry(End(one, there, back), End(other, back, there))


class Clock:
    """What sealed lanes take for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("covey.net.lanes.sealed.monotonic", lambda: self.now)


def test_a_stream_has_another_key_after_a_quarter_of_an_hour_and_nothing_is_lost(
    ends: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    near, far = unix_pairs(ends, 1)
    other_near, other_far = unix_pairs(ends, 1)
    sender, receiver = dialler(ends, near), acceptor(ends, other_far)
    sent, marked, wire = [], [], b""
    for number, seconds in enumerate((0.0, REKEY_SECONDS - 1, 1.0, 0.0, REKEY_SECONDS, 3 * REKEY_SECONDS)):
        clock.now += seconds
        sent.append(transfer(number, 2 * SEALED_RECORD_LIMIT + 5))  # four records
        (records,) = capture(sender, far, sent[-1:])
        marked.append(sum(map(is_marked, records)))
        wire += b"".join(records)
    assert marked == [0, 0, 1, 0, 1, 1]
    readers = [Reader(each) for each in sent]
    feed(receiver, other_near, [wire], readers)
    for reader in readers:
        reader.check()


def is_marked(record: bytes) -> bool:
    return bool(int.from_bytes(record[:4], "little") & NEXT_KEY)


def test_messages_cross_a_sealed_socket_whose_keys_change_with_every_record(
    ends: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    one, other = socket.socketpair()
    left = SealedSocket(one, SECRET, LANE, dialler=True)
    right = SealedSocket(other, SECRET, LANE, dialler=False)
    ends.callback(left.close)
    ends.callback(right.close)
    for number in range(50):
        clock.now += REKEY_SECONDS
        there, back = b"there %d" % number, b"and back %d" % number
        assert left.send(there) == len(there)
        assert right.recv(100) == there
        assert right.send(back) == len(back)
        assert left.recv(100) == back


def test_a_transfer_counts_as_sent_when_all_of_it_is_with_the_kernel(ends: contextlib.ExitStack) -> None:
    near, (far,) = narrow_pairs(ends, 1)
    far.setblocking(False)
    lane, whole = dialler(ends, near), transfer(1, 3 * SEALED_RECORD_LIMIT + 77)
    out, wire = outgoing(whole), bytearray()
    deadline = time.monotonic() + DEADLINE
    while out.sent < out.nbytes:
        lane.transmit(out)
        drain([far], [wire])
        assert time.monotonic() < deadline, "the lane is stuck"
    near[0].shutdown(socket.SHUT_WR)
    far.settimeout(DEADLINE)
    while chunk := far.recv(MIB):
        wire += chunk
    assert [split(wire)] == sealed_records([whole])


@pytest.mark.parametrize("nbytes", [0, 100, 2048])
def test_a_small_transfer_leaves_in_one_record_and_one_call(ends: contextlib.ExitStack, nbytes: int) -> None:
    near, far = unix_pairs(ends, 1)
    lane, message = dialler(ends, near), transfer(3, nbytes)
    out = outgoing(message)
    assert lane.transmit(out)
    assert out.sent == nbytes
    record = far[0].recv(MIB)
    assert record_length(record) == TRANSFER_HEADER_BYTES + nbytes
    assert len(record) == TRANSFER_HEADER_BYTES + nbytes + RECORD_OVERHEAD_BYTES


def test_records_are_those_of_the_format_and_show_nothing_of_what_they_carry(ends: contextlib.ExitStack) -> None:
    near, far = unix_pairs(ends, 1)
    header, payload = transfer(1, 5 * SEALED_RECORD_LIMIT // 2)[:2]
    payload[:] = np.resize(np.frombuffer(b"the gradients of some model.", np.uint8), payload.size)
    sent = [Transfer(header, payload), Transfer(header, payload[:9])]
    records = capture(dialler(ends, near), far, sent)
    assert records == sealed_records(sent)
    assert list(map(record_length, records[0])) == [*record_sizes(payload.size), *record_sizes(9)]
    wire = b"".join(records[0])
    assert b"gradients" not in wire
    assert header[:8] not in wire
    assert SECRET[:8] not in wire


def flip_length(records: Records) -> None:
    records[-1][1] = flipped(records[-1][1], 3)


def flip_high_bits_of_the_length(records: Records) -> None:
    records[-1][1] = flipped(records[-1][1], 0)


def flip_ciphertext(records: Records) -> None:
    records[-1][1] = flipped(records[-1][1], len(records[-1][1]) // 2)


def flip_tag(records: Records) -> None:
    records[-1][1] = flipped(records[-1][1], -1 + len(records[-1][1]))


def flip_first(records: Records) -> None:
    records[0][0] = flipped(records[0][0], 40)


def repeat(records: Records) -> None:
    records[-1].insert(1, records[-1][0])


def leave_out(records: Records) -> None:
    del records[-1][1]


def leave_out_the_first(records: Records) -> None:
    del records[0][0]


def reorder(records: Records) -> None:
    records[-1][1:3] = records[-1][2:0:-1]


def swap_streams(records: Records) -> None:
    records[0][1], records[-1][1] = records[-1][1], records[0][1]


def swap_whole_streams(records: Records) -> None:
    records[0], records[-1] = records[-1], records[0]


def cut_in_a_record(records: Records) -> None:
    records[-1][1:] = [records[-1][1][:-1]]


def cut_in_a_length(records: Records) -> None:
    records[-1][1:] = [records[-1][1][:3]]


def cut_between_records(records: Records) -> None:
    del records[-1][1:]


def claim_too_much(records: Records) -> None:
    records[-1][1] = (SEALED_RECORD_LIMIT + 1).to_bytes(4, "little") + records[-1][1][4:]


def claim_a_little_less(records: Records) -> None:
    length = record_length(records[-1][1])
    records[-1][1] = (length - 1).to_bytes(4, "little") + records[-1][1][4:]


def claim_nothing(records: Records) -> None:
    records[-1][1] = bytes(4) + records[-1][1][4:]


ALTERED = [flip_length, flip_high_bits_of_the_length, flip_ciphertext, flip_tag, flip_first, repeat, leave_out,
           leave_out_the_first, reorder, claim_too_much, claim_a_little_less, claim_nothing]  # fmt: skip
ENDED = [cut_in_a_record, cut_in_a_length, cut_between_records]
SPLICED = [swap_streams, swap_whole_streams]


@pytest.mark.parametrize("nbytes", [1600, LARGE])
@in_turn(alter=[*ALTERED, *ENDED])
def test_altering_the_stream_ends_the_lane_and_changes_no_number(alter: Callable[[Records], None], nbytes: int) -> None:
    with contextlib.ExitStack() as ends:
        source, far = unix_pairs(ends, 1)
        transfers = [transfer(number, nbytes) for number in range(7 if nbytes < SEALED_RECORD_LIMIT else 2)]
        records = sealed_records(transfers)
        assert len(records[0]) >= 3, "too little to alter"
        alter(records)
        readers = [Reader(each) for each in transfers]
        with pytest.raises(LaneClosedError) as told:
            feed(acceptor(ends, far), source, [b"".join(each) for each in records], readers)
        assert ("end" if alter in ENDED else "altered on the way") in str(told.value)
        for reader in readers:
            got = max(reader.incoming.got, 0)
            assert np.array_equal(reader.bytes[:got], reader.expected.payload[:got])
        assert not readers[-1].done


def test_records_that_are_not_altered_are_received(ends: contextlib.ExitStack) -> None:
    """The other side of the tests above: it is the alteration that ends the lane."""
    source, far = unix_pairs(ends, 1)
    transfers = [transfer(number, 5 * SEALED_RECORD_LIMIT) for number in range(3)]
    readers = [Reader(each) for each in transfers]
    feed(acceptor(ends, far), source, [b"".join(each) for each in sealed_records(transfers)], readers)
    for reader in readers:
        reader.check()


def test_a_lane_does_not_take_back_what_it_sent_itself(ends: contextlib.ExitStack) -> None:
    near, tap = unix_pairs(ends, 1)
    lane, message = dialler(ends, near), transfer(1, 100)
    records = capture(lane, tap, [message])
    with pytest.raises(LaneClosedError, match="altered on the way"):
        feed(lane, tap, [b"".join(each) for each in records], [Reader(message)])


@pytest.mark.parametrize(("secret", "lane"), [(SECRET[::-1], LANE), (SECRET, b"\x08lane")], ids=["secret", "lane"])
def test_both_ends_need_the_same_secret_and_lane(ends: contextlib.ExitStack, secret: bytes, lane: bytes) -> None:
    near, far = unix_pairs(ends, 1)
    one, other = dialler(ends, near, secret, lane), acceptor(ends, far)
    with pytest.raises(LaneClosedError, match="altered on the way"):
        carry(End(one, [transfer(1, 10)], []), End(other, [], [transfer(1, 10)]))


@pytest.mark.parametrize("lengths", [[63], [65], [64, 4097], [64, 4095, 1], [64 + 4096]])
def test_a_peer_that_cuts_its_payload_otherwise_is_refused(ends: contextlib.ExitStack, lengths: list[int]) -> None:
    (raw,), far = unix_pairs(ends, 1)
    message = transfer(1, 4096)
    plain = message.header + message.payload.tobytes() + bytes(5000)
    sealer = Sealer(lane_keys(SECRET, LANE, 0)[DIALLER], LANE, 0, DIALLER)
    for length in lengths:
        record = memoryview(bytearray(length + RECORD_OVERHEAD_BYTES))
        sealer.seal(plain[:length], record)
        plain = plain[length:]
        raw.sendall(record)
    reader = Reader(message)
    with pytest.raises(LaneClosedError, match="altered on the way"):
        feed(acceptor(ends, far), [raw], [b""], [reader])
    assert not reader.bytes.any()


def test_records_that_came_with_another_one_are_not_slept_on(ends: contextlib.ExitStack) -> None:
    near, far = unix_pairs(ends, 1)
    one, other = dialler(ends, near), acceptor(ends, far)
    first, second = transfer(1, 10), transfer(2, 20)
    sender = End(one, [first, second], [])
    while sender.sending:
        sender.send()
    reader = Reader(first)
    other.receive(reader.incoming)
    reader.check()
    assert select.select(far, [], [], 0)[0] == []
    assert other.park(sending=False, receiving=True) == 0
    other.unpark()
    reader = Reader(second)
    other.receive(reader.incoming)
    reader.check()


@settings(max_examples=examples(60), deadline=None)
@given(noise=st.binary(max_size=1500))
def test_noise_ends_a_lane_and_nothing_else(noise: bytes) -> None:
    with contextlib.ExitStack() as stack:
        near, far = unix_pairs(stack, 1)
        reader = Reader(transfer(1, 100))
        with pytest.raises(LaneClosedError):
            feed(acceptor(stack, far), near, [noise], [reader])
        assert not reader.bytes.any()


# Sockets


def sealed_pair(
    stack: contextlib.ExitStack, pairs: Callable[[contextlib.ExitStack, int], tuple[Sockets, Sockets]] = unix_pairs
) -> tuple[SealedSocket, SealedSocket]:
    (near,), (far,) = pairs(stack, 1)
    made = SealedSocket(near, SECRET, LANE, dialler=True), SealedSocket(far, SECRET, LANE, dialler=False)
    for sock in made:
        stack.callback(sock.close)
    return made


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(st.lists(st.one_of(st.integers(0, 100), st.integers(0, 500_000)), max_size=4), max_size=5),
    steps=st.lists(st.one_of(st.integers(1, 100), st.integers(1, 400_000)), min_size=1, max_size=6),
    narrow=st.booleans(),
)
def test_a_sealed_socket_carries_any_bytes_in_any_portions(
    sizes: list[list[int]], steps: list[int], narrow: bool
) -> None:
    with contextlib.ExitStack() as stack:
        near, far = sealed_pair(stack, narrow_pairs if narrow else unix_pairs)
        parts = [random.Random(len(sizes)).randbytes(size) for group in sizes for size in group]
        left, got, turn = [memoryview(part) for part in parts if part], bytearray(), 0
        total, deadline = sum(map(len, left)), time.monotonic() + DEADLINE
        while len(got) < total:
            if left:
                with contextlib.suppress(BlockingIOError):
                    sent = near.sendmsg(left[:3])
                    while left and sent >= len(left[0]):
                        sent -= len(left.pop(0))
                    if sent:
                        left[0] = left[0][sent:]
            first, second = bytearray(steps[turn % len(steps)]), bytearray(10)
            with contextlib.suppress(BlockingIOError):
                count, *rest = far.recvmsg_into([first, second])
                assert rest == [[], 0, None]
                assert count > 0
                got += (first + second)[:count]
            turn += 1
            assert time.monotonic() < deadline, "the sockets are stuck"
        assert got == b"".join(parts)
        assert not far.pending
        near.shutdown(socket.SHUT_WR)
        while True:
            with contextlib.suppress(BlockingIOError):
                assert far.recv(10) == b""
                break


def test_a_sealed_socket_tells_what_polling_does_not(ends: contextlib.ExitStack) -> None:
    near, far = sealed_pair(ends)
    assert near.sendmsg([b"one", b"two" * JOINED_BYTES]) == 3 + 3 * JOINED_BYTES
    assert near.send(b"three") == 5
    assert not far.pending
    assert far.recv(2) == b"on"
    assert select.select([far], [], [], 0)[0] == []
    assert far.pending
    assert far.recv(MIB) == b"e" + b"two" * JOINED_BYTES + b"three"
    assert not far.pending
    with pytest.raises(BlockingIOError):
        far.recv(1)


def test_small_messages_that_are_sent_together_share_a_record(ends: contextlib.ExitStack) -> None:
    (raw,), (far,) = unix_pairs(ends, 1)
    sender = SealedSocket(far, SECRET, LANE, dialler=True)
    assert sender.sendmsg([b"a" * 100, b"b" * 200, b"c" * JOINED_BYTES, b"d" * 50]) == 350 + JOINED_BYTES
    lengths = [record_length(record) for record in split(bytearray(raw.recv(MIB)))]
    assert lengths == [300, JOINED_BYTES, 50]


def test_a_sealed_socket_raises_when_its_bytes_were_altered_or_cut(ends: contextlib.ExitStack) -> None:
    (raw,), (near,) = unix_pairs(ends, 1)
    SealedSocket(near, SECRET, LANE, dialler=True).send(b"hello")
    record = raw.recv(100)
    (source, source2), (far, far2) = unix_pairs(ends, 2)
    source.sendall(flipped(record, 6))
    with pytest.raises(ConnectionError, match="altered on the way"):
        SealedSocket(far, SECRET, LANE, dialler=False).recv(100)
    source2.sendall(record[:-1])
    source2.close()
    with pytest.raises(ConnectionError, match="middle"):
        SealedSocket(far2, SECRET, LANE, dialler=False).recv(100)


def test_a_sealed_socket_never_blocks(ends: contextlib.ExitStack) -> None:
    near, _ = sealed_pair(ends)
    near.setblocking(False)
    with pytest.raises(ConfigError):
        near.setblocking(True)


# Messengers


@pytest.fixture
def group(ends: contextlib.ExitStack, request: pytest.FixtureRequest) -> MessengerGroup:
    def make_pair() -> Any:  # a SealedSocket has what a messenger uses of a socket
        return sealed_pair(ends, request.param)

    made = MessengerGroup(2, make_pair)
    ends.callback(made.close)
    return made


both_widths = pytest.mark.parametrize("group", [unix_pairs, narrow_pairs], ids=["wide", "narrow"], indirect=True)


@pytest.mark.parametrize("group", [unix_pairs], indirect=True)
def test_messages_of_any_size_cross_sealed_sockets_both_ways_at_once(group: MessengerGroup) -> None:
    sizes = [0, 1, JOINED_BYTES - 1, JOINED_BYTES, 64 * KIB, 64 * KIB + 1, SEALED_RECORD_LIMIT, MIB + 3, 20 * MIB, 5]

    def rank_body(rank: int) -> Callable[[], None]:
        def body() -> None:
            peer = 1 - rank
            sends = [
                group.start_send(rank, content(100 * rank + tag, size), peer, tag) for tag, size in enumerate(sizes)
            ]
            for tag in reversed(range(len(sizes))):
                assert group.recv(rank, peer, tag) == content(100 * peer + tag, sizes[tag])
            for work in sends:
                group.wait(rank, work)

        return body

    group.run(rank_body(0), rank_body(1))


@both_widths
def test_many_small_messages_cross_sealed_sockets_in_order(group: MessengerGroup) -> None:
    rng = random.Random(7)
    script = [(rng.randrange(3), rng.choice([0, 1, 10, 1000, 30_000])) for _ in range(150)]

    def sender() -> None:
        works = [group.start_send(0, content(at, size), 1, tag) for at, (tag, size) in enumerate(script)]
        for work in works:
            group.wait(0, work)

    def receiver() -> None:
        for wanted in (2, 0, 1):
            for at, (tag, size) in enumerate(script):
                if tag == wanted:
                    assert group.recv(1, 0, tag) == content(at, size)

    group.run(sender, receiver)


@pytest.mark.parametrize("group", [unix_pairs], indirect=True)
def test_messages_that_came_together_are_all_read_although_the_kernel_has_no_more(
    group: MessengerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_lane, "_CALLS_PER_TURN", 1)
    for at in range(9):
        group.send(0, content(at, 10_000), 1)
    for at in range(9):
        assert group.recv(1, 0, seconds=5.0) == content(at, 10_000)


@both_widths
def test_closing_first_sends_what_was_accepted(group: MessengerGroup) -> None:
    messages = [content(at, 60 * KIB) for at in range(30)]
    for message in messages:
        group.send(0, message, 1)

    def close() -> None:
        group.messengers[0].close(time.monotonic() + DEADLINE)

    def receive() -> None:
        for message in messages:
            assert group.recv(1, 0) == message

    group.run(close, receive)


@pytest.mark.parametrize("length", [7, 300_000])
def test_a_message_that_was_altered_is_sent_again_over_another_lane(ends: contextlib.ExitStack, length: int) -> None:
    (one,), (tap_in,) = unix_pairs(ends, 1)
    (tap_out,), (other,) = unix_pairs(ends, 1)
    pairs = [(SealedSocket(one, SECRET, LANE, dialler=True), SealedSocket(other, SECRET, LANE, dialler=False))]
    pairs.append(sealed_pair(ends))
    group = MessengerGroup(2, lambda: pairs.pop(0))  # type: ignore[arg-type,return-value]
    ends.callback(group.close)
    message = np.random.default_rng(3).bytes(length)
    send = group.start_send(0, message, 1)
    group.messengers[0].progress_in_background(send)
    receive = group.start_receive(1, 0)
    tap_out.sendall(flipped(tap_in.recv(MIB), 9))
    assert bytes(group.wait(1, receive).data) == message
    group.wait(0, send)
    assert group.renewed == [(1, 0)]
