"""Members that are broken or hostile: they may end their own links, not the node, its memory, its files or others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import threading
import typing
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.attackers import (
    BROKEN,
    Insider,
    Victim,
    call_on_loop,
    dial_door,
    new_cluster,
    nonsense,
    read,
    resident_bytes,
    run_nodes,
    until,
    victim,
    welcomes_members,
)
from tests.support.seeds import seeds
from tests.support.waiting import DEADLINE

from covey.base.errors import ConnectError, CoveyError, PeerLostError
from covey.base.numbers import Seat
from covey.net.keys.identity import NodeIdentity
from covey.proto.health import ProcessState
from covey.runtime import loop as control
from covey.runtime.joining.node import node_of
from covey.runtime.links.limits import SOCKETS
from covey.runtime.peers.hints import HINTS_AT_ONCE
from covey.runtime.peers.mesh import LINKS_PER_KEY, VISITORS_LIMIT
from covey.runtime.peers.node_links import LINKS_LIMIT
from covey.runtime.peers.reach import NOT_TRIED
from covey.wire import decoding, door, formation, messages

if TYPE_CHECKING:
    from pathlib import Path

    from covey.runtime.group.group import Group

CONTROLS: list[Any] = list(typing.get_args(messages.Control))
FORMATIONS: list[Any] = list(typing.get_args(formation.Formation))
GROWTH = 30 << 20


def tasks() -> int:
    return call_on_loop(lambda: len(asyncio.all_tasks()))


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_messages_of_every_kind_with_random_content_do_no_harm(prey: Victim, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    with Insider(prey) as honest:
        before = resident_bytes()
        insider: Insider | None = None
        cut_off = 0
        try:
            for number in seeds(400):
                if insider is None:
                    insider = Insider(prey)
                kind = CONTROLS[number % len(CONTROLS)]
                try:
                    insider.say(nonsense(kind, rng))
                    if number % 50 == 0:
                        insider.ping()
                except BROKEN:
                    insider.link.close()
                    insider, cut_off = None, cut_off + 1
        finally:
            if insider is not None:
                insider.link.close()
        honest.ping()
        assert resident_bytes() - before < GROWTH
    assert welcomes_members(prey)
    assert errors_in(caplog) == []


def test_messages_of_a_formation_with_random_content_do_no_harm(prey: Victim, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(8)
    for _ in range(40):
        with Insider(prey) as insider, contextlib.suppress(*BROKEN):
            for kind in FORMATIONS * 10:
                insider.say(messages.Forming(messages.encode(nonsense_formation(kind, rng, insider, prey))))
            insider.ping()
    assert welcomes_members(prey)
    assert errors_in(caplog) == []


def nonsense_formation(kind: Any, rng: random.Random, insider: Insider, prey: Victim) -> Any:
    """Formation messages that come close to good ones."""
    ids = [insider.card.id, prey.node.card.id, rng.randbytes(32)]
    lives = [insider.card.life, prey.node.card.life, rng.randbytes(16)]

    def member() -> formation.FoundingMember:
        return formation.FoundingMember(rng.choice(ids), rng.choice(lives), "n" * rng.randrange(80), "host", b"")

    def terms() -> formation.Terms:
        return formation.Terms("run", "program", rng.choice([None, 2]), 2, None, "1", "secure")

    if kind is formation.Here:
        phase = rng.choice(list(formation.Phase))
        return formation.Here(terms(), member(), tuple(rng.sample(lives, rng.randrange(3))), phase, ("a", "b"))
    proposal = rng.choice([bytes(16), rng.randbytes(16)])
    if kind is formation.Propose:
        return formation.Propose(proposal, tuple(member() for _ in range(rng.choice([1, 2, 3, 128]))))
    rows = tuple(
        formation.Row(rng.choice(list(formation.Answer)), rng.getrandbits(31), rng.getrandbits(31), rng.random() < 0.5)
        for _ in range(rng.choice([1, 2, 128]))
    )
    return formation.Standing(proposal, rows, rng.choice(list(formation.Outcome)), (rng.getrandbits(31),))


@pytest.mark.parametrize("revokes", [False, True])
def test_nonsense_from_a_member_of_a_run_ends_it_with_an_error_or_not_at_all(
    revokes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [kind for kind in CONTROLS if revokes or kind not in (messages.Revoke, messages.Dial, messages.NewSecret)]

    def attack(group: Group) -> str:
        node, rng = node_of(group), random.Random(9)
        assert node is not None
        group.barrier()
        try:
            for number in range(40):
                if group.rank == 0:
                    for kind in kinds:
                        control.soon(node.peers.send, 1, nonsense(kind, rng))
                assert group.all_reduce(number + group.rank) == 2 * number + 1
        except CoveyError as error:
            return type(error).__name__
        return ""

    ends = run_nodes(new_cluster(), attack)
    assert ends[0] in ("", "PeerLostError", "ClosedError", "MismatchError", "RemoteProtocolError", "DeadlineError")
    assert errors_in(caplog) == []


@pytest.mark.parametrize(
    "what",
    [
        b"\xff\xff\xff\xff",
        decoding.FRAME_LENGTH.pack(decoding.CONTROL_LIMIT + 1),
        decoding.frame(b"\xc1"),
        decoding.frame(b""),
    ],
    ids=["4 GiB", "too long", "no msgpack", "empty"],
)
def test_a_member_whose_frames_are_broken_is_cut_off_and_may_come_again(prey: Victim, what: bytes) -> None:
    with Insider(prey) as insider:
        insider.ping()
        insider.link.sendall(what)
        with pytest.raises(BROKEN):
            insider.ping()
        with Insider(prey, insider.identity) as again:
            again.ping()


def test_a_member_that_goes_on_after_nonsense_is_parted_with(prey: Victim) -> None:
    """The end of a link must be noticed, whatever else has arrived on it: else a run waits for its dead."""
    with Insider(prey) as insider:
        insider.ping()
        insider.link.sendall(2 * decoding.frame(b"\xc1"))
        until(lambda: not prey.node.met)


def test_a_member_that_never_reads_takes_no_more_than_its_share_of_memory(prey: Victim) -> None:
    with Insider(prey) as insider:
        insider.ping()
        before = resident_bytes()
        burst = b"".join(decoding.frame(messages.encode(messages.Ping(number))) for number in range(200_000))
        insider.link.settimeout(2.0)
        with contextlib.suppress(*BROKEN):
            insider.link.sendall(burst)
        assert resident_bytes() - before - len(burst) < GROWTH
    assert welcomes_members(prey)


def test_early_words_about_a_run_take_no_more_than_their_share_of_memory(prey: Victim) -> None:
    body = decoding.frame(messages.encode(messages.Posting(0, 0, bytes(250_000))))
    with Insider(prey) as insider:
        before = resident_bytes()
        for _ in range(400):
            insider.link.sendall(body)
        with contextlib.suppress(*BROKEN):
            insider.ping()
        assert resident_bytes() - before < GROWTH


class Jam:
    """Something that many may begin at once and none ends before it is over; counts them."""

    def __init__(self) -> None:
        self.begun, self.over = 0, asyncio.Event()

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.begun += 1
        await self.over.wait()
        raise ConnectError("the way was jammed")


def test_questions_about_addresses_are_tried_a_few_at_a_time(prey: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question costs connections: one member must not make a node open hundreds."""
    jam = Jam()
    monkeypatch.setattr("covey.runtime.links.probe.to_dial", lambda *_, **__: [("127.0.0.1", 9)])
    monkeypatch.setattr("covey.runtime.links.probe.connect", jam)
    own = tuple(messages.Address("127.0.0.1", 9, f"lo{n}") for n in range(16))
    with Insider(prey, purpose="visitor") as insider:
        for _ in range(500):
            insider.say(messages.Reach(own))
        for _ in range(20):  # turns of the loop, in which all begins that is going to
            insider.ping()
        begun = call_on_loop(lambda: jam.begun)
        call_on_loop(jam.over.set)
    assert 1 <= begun <= 3 * len(own)


@pytest.mark.parametrize("hosts", ["one", "many"])
def test_a_member_has_no_other_machine_scanned(prey: Victim, hosts: str) -> None:
    """It may ask for its own addresses only: those that it advertises and comes from, at the port where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as trap, socket.create_server(("127.0.0.77", 0)) as elsewhere:
        ports = [trap.getsockname()[1], elsewhere.getsockname()[1]]
        for listener in (trap, elsewhere):
            listener.setblocking(False)
        own = messages.Address("127.0.0.1", 9)
        foreign = messages.Address("127.0.0.77", ports[1])
        asked = (own, messages.Address("127.0.0.1", ports[0]), foreign)
        advertised = (own,) if hosts == "one" else asked
        contact = messages.Contact("elsewhere", advertised, "")
        with Insider(prey, purpose="visitor", card={"contact": contact}) as insider:
            insider.say(messages.Reach(asked))
            answer = insider.hear(messages.Reached)
            assert len(answer.problems) == 3
            assert answer.problems[1:] == (NOT_TRIED, NOT_TRIED)
        for listener in (trap, elsewhere):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_probe_proves_an_address_only_to_the_owner_of_its_token(prey: Victim) -> None:
    key, token = prey.cluster.secret.derive("door"), secrets.token_bytes(16)
    own, other = messages.Address("127.0.0.1", 9), messages.Address("127.0.0.77", 9)
    contact = messages.Contact("elsewhere", (own, other), "")
    with (
        Insider(prey, purpose="visitor", card={"contact": contact}) as visitor,
        Insider(prey, purpose="visitor", card={"contact": contact}) as thief,
        dial_door(prey.address, key, door.Purpose.PROBE, "127.0.0.77", token=token) as probe,
    ):
        probe.sendall(b"ping1234")
        assert read(probe, 8) == b"ping1234"
        for guess in (b"", door.bind(token), secrets.token_bytes(16)):  # what is seen on the wire is of no use
            thief.say(messages.Reach((other,), guess))
            assert thief.hear(messages.Reached).problems == (NOT_TRIED,)
        visitor.say(messages.Reach((other,), token))
        assert visitor.hear(messages.Reached).problems != (NOT_TRIED,)


def test_hints_of_a_member_open_a_few_sockets_at_a_time(prey: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    jam, before = Jam(), tasks()
    monkeypatch.setattr("covey.runtime.links.handshake.connect", jam)
    here = prey.node.card.contact.host
    with Insider(prey) as insider:
        for number in range(20):
            ports = [range(1 + 4 * n, 5 + 4 * n) for n in range(90 * number, 90 * number + 90)]
            cards = [card_at(here, tuple(messages.Address("127.0.0.1", port) for port in each)) for each in ports]
            insider.say(messages.Known(tuple(cards)))
        until(lambda: jam.begun >= SOCKETS)
        for _ in range(20):  # turns of the loop, in which all begins that is going to
            insider.ping()
        assert tasks() - before < 40 * HINTS_AT_ONCE
        assert call_on_loop(lambda: jam.begun) == SOCKETS
        call_on_loop(jam.over.set)
    assert welcomes_members(prey)


def card_at(host: str, addresses: tuple[messages.Address, ...]) -> messages.Card:
    contact = messages.Contact(host, addresses, "")
    return messages.Card(secrets.token_bytes(32), secrets.token_bytes(16), "n", "h", 1, contact)


def test_loopback_addresses_of_a_member_elsewhere_are_not_ours(prey: Victim) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap, Insider(prey) as insider:
        trap.setblocking(False)
        addresses = tuple(messages.Address(ip, trap.getsockname()[1]) for ip in ("127.0.0.1", "127.0.0.2", "::1"))
        insider.say(messages.Known((card_at("another host", addresses),)))
        with victim(prey.cluster) as friend:  # found after all of that was heard
            until(lambda: friend.node.card.id in prey.node.met)
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.parametrize("keys", ["one key", "many keys"])
def test_visitors_of_a_member_are_bounded_and_displace_no_keeper_and_no_member(prey: Victim, keys: str) -> None:
    keeper, same = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    most = LINKS_PER_KEY if keys == "one key" else VISITORS_LIMIT
    with contextlib.ExitStack() as stack:
        member = stack.enter_context(Insider(prey, card={"keeper": keeper.id}))
        until(lambda: prey.node.met)
        needed = stack.enter_context(Insider(prey, keeper, purpose="keeper"))
        needed.ping()
        crowd = [
            stack.enter_context(Insider(prey, same if keys == "one key" else None, purpose="visitor"))
            for _ in range(most + 20)
        ]
        until(lambda: len(prey.node.visitors) == most + 1)
        for each in crowd[:-most]:
            with pytest.raises(BROKEN):
                each.ping()
        for each in (*crowd[-most:], needed, member):
            each.ping()


def _answers(link: Insider) -> bool:
    try:
        link.ping()
    except BROKEN:
        return False
    return True


@pytest.mark.parametrize("is_larger", [True, False], ids=["larger id", "smaller id"])
def test_links_of_one_member_are_bounded(prey: Victim, is_larger: bool) -> None:
    """Two nodes may end up with two links; a member that opens more of them has the others closed.

    The node with the smaller id chooses which link is used: the victim keeps the one it has, unless that one is silent.
    """
    identity = NodeIdentity.ephemeral()
    while (identity.id > prey.node.card.id) is not is_larger:
        identity = NodeIdentity.ephemeral()
    with contextlib.ExitStack() as stack:
        links = []
        for _ in range(10 * LINKS_LIMIT):
            links.append(stack.enter_context(Insider(prey, identity)))
            assert call_on_loop(lambda: len(prey.node.met[identity.id].links) <= LINKS_LIMIT)
        answering = [number for number, link in enumerate(links) if _answers(link)]
        assert 1 <= len(answering) <= LINKS_LIMIT
        assert is_larger or len(links) - 1 in answering


def test_a_members_large_card_does_not_part_the_others(prey: Victim, caplog: pytest.LogCaptureFixture) -> None:
    """What a node passes on about two members must still fit into a frame, or the next one cuts it off."""
    with contextlib.ExitStack() as stack:
        contact = messages.Contact("h" * 100, (messages.Address("::" + "f" * 43, 65535, "i" * 100),) * 16, "s" * 1000)
        for _ in range(120):
            stack.enter_context(Insider(prey, card={"name": "n" * 100, "host_name": "h" * 100, "contact": contact}))
        with pytest.raises(EOFError):  # and what is larger is not taken
            stack.enter_context(Insider(prey, card={"name": "n" * 101}))
        with victim(prey.cluster) as newcomer:
            until(lambda: prey.node.card.id in newcomer.node.met)
            for node in (prey, newcomer):  # everything that was to be said has been said
                with Insider(node, purpose="visitor") as witness, contextlib.suppress(*BROKEN):
                    witness.ping()
    assert not any("nonsense" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("field", ["name", "host_name"])
def test_a_members_name_cannot_write_lines_or_colours_into_the_log(
    field: str, prey: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    forged = "x\n2026-01-01 ERROR forged line \x1b[31m"
    with contextlib.suppress(*BROKEN), Insider(prey, card={field: forged}) as insider:
        insider.link.sendall(decoding.frame(b"\xc1"))
        insider.ping()
    with contextlib.suppress(*BROKEN), Insider(prey, card={field: forged}, hello={"version": 9, "versions": None}):
        pass
    written = [record.getMessage() for record in caplog.records] + list(prey.node.problems.refusals)
    written += [call_on_loop(prey.joiner.situation)]
    assert [text for text in written if not text.isprintable()] == []


def test_a_member_that_comes_again_and_again_with_nonsense_leaves_few_lines(
    prey: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        with Insider(prey) as insider:
            insider.link.sendall(decoding.frame(b"\xc1"))
            with pytest.raises(BROKEN):
                insider.ping()
    assert len([record for record in caplog.records if record.name == "covey"]) <= 10


def test_nothing_that_a_member_says_names_a_file(prey: Victim, tmp_path: Path) -> None:
    bait = tmp_path / "bait.sock"
    contact = messages.Contact(prey.node.card.contact.host, (messages.Address("127.0.0.1", 9),), str(bait))
    with Insider(prey, card={"contact": contact, "name": "../../../../etc/x"}) as insider:
        insider.ping()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_a_member_of_a_run_cannot_make_another_open_lanes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    jam = Jam()

    def attack(group: Group) -> None:
        node = node_of(group)
        assert node is not None
        peer = node.peers[Seat(1 - group.rank)]
        group.barrier()
        if peer.is_dialled:
            marks: list[bytes] = []
            call_on_loop(setattr, node.lanes.dialler, "accepted", lambda _rank, lane, _udp_port: marks.append(lane))
            monkeypatch.setattr(node.lanes.dialler, "_connect", jam)
            group.barrier()
            until(lambda: marks)
            call_on_loop(node.tasks.spawn, asyncio.sleep(0))  # behind all that was begun
        else:
            group.barrier()
            for number in range(2000):
                control.soon(node.peers.send, peer.seat, messages.Dial(1000 + number, "collectives"))
            control.soon(node.peers.send, peer.seat, messages.Expect(b"the end"))
        group.barrier()

    try:
        run_nodes(new_cluster(), attack)
    finally:
        call_on_loop(jam.over.set)
    assert 1 <= jam.begun < 500


def test_a_keeper_is_believed_only_about_processes_that_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named, stranger, cluster = NodeIdentity.ephemeral(), NodeIdentity.ephemeral(), new_cluster()
    monkeypatch.setenv("COVEY_KEEPER_ID", named.id.hex())
    over = threading.Event()

    def attack(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            group.barrier()
            assert over.wait(DEADLINE)
            return
        node = node_of(group)
        assert node is not None
        address = ("127.0.0.1", node.card.contact.addresses[0].port)
        prey = Victim(cluster, None, node, address)  # type: ignore[arg-type]
        death = messages.Vouch(((node.peers[Seat(1)].life, ProcessState.EXITED),))
        try:
            for purpose, identity in (("keeper", stranger), ("candidate", stranger), ("visitor", named)):
                with Insider(prey, identity, purpose=purpose) as liar:
                    liar.say(death)
                    liar.ping()
            group.barrier()
            with Insider(prey, named, purpose="keeper") as keeper:
                keeper.say(death)
                with pytest.raises(PeerLostError, match="rank 1"):
                    group.barrier()
        finally:
            over.set()

    run_nodes(cluster, attack)


def test_offers_that_are_not_followed_up_take_little_memory() -> None:
    def attack(group: Group) -> int:
        node = node_of(group)
        assert node is not None
        group.barrier()
        peer, before = node.peers[Seat(1 - group.rank)], resident_bytes()
        if peer.is_dialled:
            for number in range(5000):
                offer = messages.Offer(
                    secrets.token_bytes(16), secrets.token_bytes(32), 5000 + number, "collectives", "secure", 0, 1
                )
                control.soon(node.peers.send, peer.seat, offer)
        group.all_gather_object("the offers came before this")
        return resident_bytes() - before

    assert max(run_nodes(new_cluster(), attack)) < GROWTH


def test_visitors_are_not_taken_into_a_run(prey: Victim) -> None:
    with Insider(prey, NodeIdentity.ephemeral(), purpose="visitor") as visitor:
        visitor.say(messages.Forming(b"\xc1"))
        visitor.say(messages.Revoke(0, "PeerLostError", "go away", (0, 1)))
        with contextlib.suppress(*BROKEN):
            visitor.ping()
        assert not prey.node.met
    assert welcomes_members(prey)
