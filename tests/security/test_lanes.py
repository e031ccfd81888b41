"""An attacker that holds the wire of a lane can end it, and nothing else: no number is wrong, and no rank hangs."""

from __future__ import annotations

import contextlib
import secrets
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.attackers import (
    LOOPBACK,
    Detour,
    call_on_loop,
    dial_door,
    is_hung_up,
    new_cluster,
    read,
    run_nodes,
    until,
    victim,
)
from tests.support.waiting import DEADLINE

from covey.base.errors import CoveyError, PeerLostError
from covey.base.numbers import Seat
from covey.runtime import loop as control
from covey.runtime.joining.node import node_of
from covey.runtime.links.acceptor import PROBE_LIMIT
from covey.runtime.peers.peer_table import Routes
from covey.testing.proxy import Direction, Proxy
from covey.wire import door, messages
from covey.wire.seal import SEALED_RECORD_LIMIT

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from covey.runtime.group.group import Group

ELEMENTS = 50_001
PATIENCE = 3.0
"""The timeout of operations on lanes that never open."""
CLAIM = door.DOOR_ANSWER_BYTES + 16 + 1 + door.PROOF_BYTES
"""Where the first record of the dialler begins; of the acceptor, it is the challenge and a proof."""
GREETED = door.CHALLENGE_BYTES + door.PROOF_BYTES


@pytest.fixture
def detour(monkeypatch: pytest.MonkeyPatch) -> Iterator[Detour]:
    made = Detour()
    monkeypatch.setattr(Routes, "to", lambda routes, peer, kind="": made.to(routes, peer, kind))
    try:
        yield made
    finally:
        made.close()


def tensor(rank: int, number: int) -> Any:
    return np.random.default_rng((rank, number)).standard_normal(ELEMENTS).astype(np.float32)


def expected(number: int) -> Any:
    return tensor(0, number) + tensor(1, number)


def outcome(group: Group, number: int, timeout: float = DEADLINE) -> str:
    """Reduce until it fails; AssertionError for a single wrong bit. Returns the error's name and words."""
    for attempt in range(5):
        data = tensor(group.rank, number)
        try:
            group.all_reduce(data, timeout=timeout)
        except CoveyError as error:
            return f"{type(error).__name__}: {error}"
        assert data.tobytes() == expected(number).tobytes(), f"a wrong number in attempt {attempt}"
    return ""


def under_attack(
    detour: Detour, attacks: list[Callable[[Proxy], None]], timeout: float = DEADLINE, **options: Any
) -> list[list[str]]:
    """Let two nodes open a lane for each attack, and return by attack what came of it on each."""
    turn = threading.Barrier(2, timeout=DEADLINE)

    def rank_main(group: Group) -> list[str]:
        results = []
        for number, attack in enumerate(attacks):
            part = group.split(0)
            if turn.wait() == 0:
                detour.fresh(attack)
            turn.wait()
            with part:
                results.append(outcome(part, number, timeout))
        return results

    by_rank = run_nodes(new_cluster(), rank_main, config=replace(LOOPBACK, **options))
    return [list(pair) for pair in zip(*by_rank, strict=True)]


def flip(way: Direction, byte: int, bit: int = 0) -> Callable[[Proxy], None]:
    return lambda proxy: proxy.flip_bit(way, byte, bit)


PLACES = [
    *((Direction.TO_TARGET, CLAIM + at) for at in (0, 1, 3, 4, 40, 70, 90, 1000, 100_000, 200_000)),
    *((Direction.TO_CLIENT, GREETED + at) for at in (0, 2, 3, 4, 40, 70, 90, 1000, 100_000, 200_000)),
]


@pytest.mark.parametrize("streams", ["1", "3"])
def test_a_flipped_bit_anywhere_in_a_lane_is_noticed_by_all_and_never_a_wrong_number(
    detour: Detour, streams: str
) -> None:
    places = PLACES if streams == "1" else PLACES[::3]
    results = under_attack(detour, [flip(way, byte, byte % 8) for way, byte in places], streams=streams)
    for place, pair in zip(places, results, strict=True):
        assert all(pair), f"an end did not notice {place}: {pair}"
        assert any("altered" in words for words in pair), f"no end says what happened at {place}: {pair}"
    flipped = [proxy for proxy in detour.proxies if proxy.flips_done]
    assert len(flipped) == len(places)


def test_a_lane_whose_greeting_is_altered_does_not_open(detour: Detour) -> None:
    places = [
        (Direction.TO_CLIENT, 5),
        (Direction.TO_TARGET, 20),
        (Direction.TO_TARGET, CLAIM - 1),
        (Direction.TO_CLIENT, GREETED - 1),
    ]
    results = under_attack(detour, [flip(way, byte) for way, byte in places], timeout=PATIENCE)
    for place, pair in zip(places, results, strict=True):
        assert all("DeadlineError" in words or "PeerLostError" in words for words in pair), (place, pair)


@pytest.mark.parametrize("reset", [False, True])
def test_a_lane_that_a_stranger_ends_is_a_lost_peer_at_once(detour: Detour, reset: bool) -> None:
    def rank_main(group: Group) -> str:
        assert group.all_reduce(group.rank + 1) == 3
        if group.rank == 0:
            threading.Timer(0.1, detour.proxy.end_all, kwargs={"reset": reset}).start()
        try:
            while group.all_reduce(group.rank + 1) == 3:
                pass
        except PeerLostError as error:
            return str(error)
        return "a wrong number"

    assert all("rank" in words for words in run_nodes(new_cluster(), rank_main))


def test_a_truncated_lane_ends_both_sides(detour: Detour) -> None:
    cuts = [(Direction.TO_TARGET, CLAIM + at) for at in (0, 2, 50, 150_000)] + [(Direction.TO_CLIENT, GREETED + 30)]
    results = under_attack(detour, [lambda proxy, cut=cut: proxy.truncate(*cut) for cut in cuts])  # type: ignore[misc]
    assert all(words for pair in results for words in pair), results


def test_records_repeated_or_put_in_between_are_noticed(detour: Detour) -> None:
    """The proxy says again what was said, in the same and in the other direction."""

    turn = threading.Barrier(2, timeout=DEADLINE)

    def rank_main(group: Group) -> list[str]:
        results = []
        ways = [
            (Direction.TO_TARGET, Direction.TO_TARGET),
            (Direction.TO_CLIENT, Direction.TO_CLIENT),
            (Direction.TO_TARGET, Direction.TO_CLIENT),
        ]
        for number, (source, target) in enumerate(ways):
            part = group.split(0)
            if turn.wait() == 0:
                detour.fresh()
            turn.wait()
            with part:
                data = tensor(part.rank, number)
                part.all_reduce(data)
                assert data.tobytes() == expected(number).tobytes()
                if turn.wait() == 0:
                    begin = {Direction.TO_TARGET: CLAIM, Direction.TO_CLIENT: GREETED}[source]
                    detour.proxy.inject(0, target, detour.proxy.recorded(0, source)[begin:])
                turn.wait()
                results.append(outcome(part, number))
        return results

    by_rank = run_nodes(new_cluster(), rank_main)
    assert all(words for results in by_rank for words in results), by_rank


def test_messages_through_altered_wires_are_right_or_errors(detour: Detour) -> None:
    """Every connection is altered at the same byte: what comes before it gets through, and is not sent again."""
    block = secrets.token_bytes(3 * SEALED_RECORD_LIMIT)

    def rank_main(group: Group) -> list[str]:
        results = []
        for byte in (0, 30, 1000, 2 * SEALED_RECORD_LIMIT):
            part = group.split(0)
            if turn.wait() == 0:
                way = Direction.TO_TARGET
                detour.fresh(lambda proxy, at=byte, way=way: proxy.flip_bit(way, CLAIM + at))  # type: ignore[misc]
            turn.wait()
            patience = PATIENCE if byte < 2 * SEALED_RECORD_LIMIT else DEADLINE
            with part:
                words = ""
                for _ in range(2):
                    try:
                        if part.rank == 0:
                            part.send_object(block, 1, timeout=patience)
                            assert part.recv_object(1, timeout=patience) == block
                        else:
                            assert part.recv_object(0, timeout=patience) == block
                            part.send_object(block, 0, timeout=patience)
                    except CoveyError as error:
                        words = str(error)
                        break
                results.append(words)
        return results

    turn = threading.Barrier(2, timeout=DEADLINE)
    *early, late = zip(*run_nodes(new_cluster(), rank_main), strict=True)
    for pair in early:  # nothing of the message gets through, again and again
        assert all(pair), pair
        assert any("altered on the way" in words for words in pair), pair
    assert late == ("", "")
    assert sum(proxy.flips_done > 0 for proxy in detour.proxies) == 4


# Claims of a lane


def test_only_the_holder_of_a_lanes_secret_can_claim_it_and_only_once() -> None:
    cluster = new_cluster()
    key = cluster.secret.derive("door")

    def claim(address: tuple[str, int], lane: bytes, stream: int, proof: bytes) -> socket.socket:
        sock = dial_door(address, key, door.Purpose.LANE)
        sock.sendall(lane + bytes((stream,)) + proof)
        return sock

    def rank_main(group: Group) -> None:
        node = node_of(group)
        assert node is not None
        peer = node.peers[Seat(1 - group.rank)]
        offer = messages.Offer(secrets.token_bytes(16), secrets.token_bytes(32), 77, "collectives", "secure", 0, 2)
        group.barrier()
        if not peer.is_dialled:
            group.barrier()
            group.barrier()
            return
        assert peer.contact is not None
        address = ("127.0.0.1", peer.contact.addresses[0].port)
        claims = [door.lane_proof(offer.secret, b"dial", offer.lane, stream) for stream in range(3)]
        with claim(address, offer.lane, 0, claims[0]) as sock:  # before the offer
            assert is_hung_up(sock)
        expected: list[bytes] = []
        call_on_loop(setattr, node.lanes.dialler, "accepted", lambda _rank, lane, _udp_port: expected.append(lane))
        control.soon(node.peers.send, peer.seat, offer)
        until(lambda: expected == [offer.lane])
        group.barrier()
        other = door.lane_proof(secrets.token_bytes(32), b"dial", offer.lane, 0)
        mirrored = door.lane_proof(offer.secret, b"accept", offer.lane, 0)
        wrong = [
            (secrets.token_bytes(16), 0, claims[0]),
            (offer.lane, 0, bytes(32)),
            (offer.lane, 0, other),
            (offer.lane, 0, mirrored),
            (offer.lane, 0, claims[1]),
            (offer.lane, 1, claims[0]),
            (offer.lane, 2, claims[2]),
            (offer.lane, 255, claims[0]),
        ]
        for lane, stream, proof in wrong:
            with claim(address, lane, stream, proof) as sock:
                assert is_hung_up(sock), (stream, proof)
        with claim(address, offer.lane, 0, claims[0]) as first:
            assert read(first, 32) == door.lane_proof(offer.secret, b"accept", offer.lane, 0)
            with claim(address, offer.lane, 0, claims[0]) as again:
                assert is_hung_up(again)
            with claim(address, offer.lane, 1, claims[1]) as second:
                assert read(second, 32) == door.lane_proof(offer.secret, b"accept", offer.lane, 1)
            with claim(address, offer.lane, 1, claims[1]) as late:
                assert is_hung_up(late)
        group.barrier()

    run_nodes(cluster, rank_main)


def test_a_member_cannot_talk_another_into_a_lane_that_others_can_read() -> None:
    def rank_main(group: Group) -> list[str]:
        node = node_of(group)
        assert node is not None
        peer = node.peers[Seat(1 - group.rank)]
        group.barrier()
        if not peer.is_dialled:
            group.barrier()
            return []
        heard: list[str] = []
        refused = node.lanes.dialler.refused

        def note(key: Any, reason: str) -> None:
            heard.append(reason)
            refused(key, reason)

        call_on_loop(setattr, node.lanes.dialler, "refused", note)
        for kind, capacity, streams, lane, secret in [
            ("tcp", 0, 1, 16, 32),
            ("unix", 0, 1, 16, 32),
            ("shm", 2 << 20, 1, 16, 32),
            ("shm", 1 << 40, 1, 16, 32),
            ("secure", 0, 0, 16, 32),
            ("secure", 0, 65, 16, 32),
            ("secure", 2 << 20, 1, 16, 32),
            ("secure", 0, 1, 15, 32),
            ("secure", 0, 1, 16, 31),
            ("plain", 0, 1, 16, 32),
        ]:
            offer = messages.Offer(bytes(lane), bytes(secret), 99, "collectives", kind, capacity, streams)
            control.soon(node.peers.send, peer.seat, offer)
        until(lambda: len(heard) == 10)
        group.barrier()
        return heard

    assert sorted(map(len, run_nodes(new_cluster(), rank_main))) == [0, 10]


def test_probes_are_bounded() -> None:
    """The door's key alone buys an echo and a sink of so many bytes, for so long."""
    with contextlib.ExitStack() as stack:
        prey = stack.enter_context(victim(new_cluster()))
        sock = stack.enter_context(dial_door(prey.address, prey.cluster.secret.derive("door"), door.Purpose.PROBE))
        sock.sendall(b"sink" + (2**32 - 1).to_bytes(4, "little"))
        for _ in range(PROBE_LIMIT >> 20):
            sock.sendall(bytes(1 << 20))
        assert read(sock, 8)[:4] == b"sink"
