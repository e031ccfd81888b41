"""The store of a run: asked over the links of members only, and made of bytes that covey does not open."""

from __future__ import annotations

import contextlib
import pickle
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.attackers import call_on_loop, new_cluster, until
from tests.support.runs import SURVIVING, ThreadRun, node_of, say
from tests.support.waiting import DEADLINE

from covey.base.numbers import Seat
from covey.runtime.group.internals import engine_of, open_group_store
from covey.wire import messages, store

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


MADE: list[str] = []


def make() -> None:
    MADE.append("something")


class Opened:
    """What must not be made of the bytes of a store."""

    def __reduce__(self) -> Any:
        return make, ()


def listening() -> set[str]:
    """Return the sockets of this process that others could connect to over a network."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            own.add(str(entry.readlink()))
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] in ("0A", "07") and f"socket:[{fields[9]}]" in own:
                found.add(f"{name} {fields[1]}")
    return found


def test_a_store_listens_at_no_port() -> None:
    with ThreadRun(new_cluster(), size=2) as thread_run:
        together = thread_run.steps(3)

        def work(group: Group) -> bytes:
            group.barrier()
            together()
            together()
            client = open_group_store(group)
            if group.rank == 0:
                client.ask(store.Put((("key", b"value"),)), DEADLINE)
            found = client.ask(store.Get(("key",)), DEADLINE).values[0]
            together()
            together()
            return found

        nodes = [thread_run.start(work) for _ in range(2)]
        together()
        before = listening()
        assert before, "nodes listen for links"
        together()
        together()
        assert listening() <= before
        together()
        assert [node.result() for node in nodes] == [b"value"] * 2


def test_a_store_gives_back_bytes_as_they_are() -> None:
    data = pickle.dumps(Opened())

    def work(group: Group) -> bytes:
        client = open_group_store(group)
        if group.rank == 1:
            client.ask(store.Put((("key", data),)), DEADLINE)
        return client.ask(store.Get(("key",)), DEADLINE).values[0]

    with ThreadRun(new_cluster(), size=2) as thread_run:
        nodes = [thread_run.start(work) for _ in range(2)]
        assert [node.result() for node in nodes] == [data] * 2
    assert MADE == []
    pickle.loads(data)
    assert MADE


def test_questions_to_a_store_of_an_excluded_member_are_not_answered() -> None:
    with ThreadRun(new_cluster(), SURVIVING, size=3) as thread_run:
        together = thread_run.steps(3)

        def work(group: Group) -> Any:
            node, generation = node_of(group), engine_of(group).generation
            assert generation is not None
            client = open_group_store(group)
            client.ask(store.Add("count", 1), DEADLINE)
            group.barrier()
            answers: list[Any] = []

            def listen(_seat: Seat, posting: messages.Posting) -> None:
                answers.append(store.decode_body(posting.body))

            call_on_loop(node.inbox.give, messages.Posting, listen)
            pongs: list[int] = []
            take = node.inbox.heard

            def note(rank: int, message: messages.Control) -> None:
                if isinstance(message, messages.Pong):
                    pongs.append(message.number)
                take(Seat(rank), message)

            call_on_loop(setattr, node.inbox, "heard", note)
            together()
            if group.rank == 2:
                call_on_loop(generation.withdraw)
            until(lambda: generation.is_over if group.rank == 2 else node.peers[Seat(2)].is_excluded)
            together()
            if group.rank == 2:
                for question in (store.Add("count", 100), store.Get(("count",)), store.Put((("key", b"poison"),))):
                    for config in (generation.view.number, generation.view.number + 1):
                        body = store.encode_body(store.Submit(config, 0, question))
                        say(group, 0, messages.Posting(client.store_id, secrets.randbits(40), body))
                say(group, 0, messages.Ping(1 << 50))
                until(lambda: 1 << 50 in pongs)
                together()
                together()
                return answers
            together()
            count = client.ask(store.Add("count", 0), DEADLINE).number
            known = client.ask(store.HasKeys(("key",)), DEADLINE).number
            together()
            return count, known

        results = [node.result() for node in [thread_run.start(work) for _ in range(3)]]
    assert sorted(results, key=str) == [(3, 0), (3, 0), []]
