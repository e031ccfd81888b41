"""A newcomer that a generation took in and lost before it heard of its seat waits for the next one, and is in it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.support.attackers import BROKEN, Insider, call_on_loop, hear, new_cluster, until
from tests.support.runs import SURVIVING, Participant, ThreadRun, here, ids_of
from tests.support.waiting import DEADLINE

from covey.net.keys.identity import NodeIdentity
from covey.proto.health import Cause
from covey.runtime.views import generation_table
from covey.wire import messages

if TYPE_CHECKING:
    import pytest


class Newcomer:
    """A node that waits for a run, and for which no news of a seat gets through. Its links stay."""

    def __init__(self, members: list[Participant], identity: NodeIdentity) -> None:
        self.links = [Insider(member.prey, identity) for member in members]
        self.seats: list[int] = []
        """The seats that the members gave it, one after the other."""
        for link in self.links:
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()

    def _listen(self, link: Insider) -> None:
        with contextlib.suppress(*BROKEN):
            while True:
                match messages.decode_control(hear(link.link)):
                    case messages.Ping(number):
                        link.say(messages.Pong(number, time.time()))
                    case messages.Founded(members=members):
                        own = [member.seat for member in members if member.card.id == link.card.id]
                        self.seats += [seat for seat in own if seat not in self.seats]


def test_a_newcomer_that_was_lost_before_it_heard_of_its_seat_is_in_a_later_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_table, "DEFER_SECONDS", 1.0)
    identity = NodeIdentity.ephemeral()

    def work(groups: Any) -> int:
        times = 0
        for group in groups:
            times += identity.id in ids_of(group)
            if times == 2:
                break
            while not group.change_pending:
                group.barrier()
                time.sleep(0.02)
        return times

    with ThreadRun(new_cluster(), SURVIVING) as thread_run, contextlib.ExitStack() as stack:
        members = [thread_run.start(work, elastic=True) for _ in range(2)]
        nodes = [until_formed(member) for member in members]
        lineage = call_on_loop(lambda: nodes[0].generation.founded.origin)
        lives = tuple(member.identity.life for member in members)
        newcomer = Newcomer(members, identity)
        for link in newcomer.links:
            stack.enter_context(link)

        def say_here() -> None:
            for link in newcomer.links:
                link.say(here(link, thread_run.terms(), lives, lineage=lineage))

        say_here()
        until(lambda: newcomer.seats and all(has_seat(node, newcomer.seats[0]) for node in nodes))
        for node in nodes:
            call_on_loop(lambda node=node: node.views.losses.silent(newcomer.seats[0], "it is not heard", Cause.SILENT))
        until(lambda: all(node.peers[newcomer.seats[0]].is_excluded for node in nodes))
        deadline = time.monotonic() + DEADLINE
        while len(newcomer.seats) < 2:
            assert time.monotonic() < deadline, "it waits for ever"
            say_here()  # as every node does that waits
            time.sleep(0.2)
        stack.close()
        assert [member.result() for member in members] == [2, 2]


def has_seat(node: Any, seat: int) -> bool:
    """Tell whether a node is in a generation with this seat; before, it has no opinion of the newcomer to change."""
    return any(member.seat == seat for member in node.generation.founded.members)


def until_formed(member: Participant) -> Any:
    until(lambda: member.joiner.member is not None and member.joiner.member.views.generation is not None)
    return member.node
