"""The store on covey's control plane, beside torch's own: the same answers, from Python and from C++."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.relinking import wait_for_links
from tests.support.torch_ranks import Lost, run_torch_ranks
from tests.support.waiting import DEADLINE

from covey.base.config import group_config
from covey.base.errors import ConfigError, DeadlineError, PeerLostError
from covey.base.numbers import Seat
from covey.net.discovery.host_rendezvous import rendezvous_folder
from covey.runtime import loop as control
from covey.runtime.environment import LaunchedRank
from covey.runtime.joining.bootstrap import join_at
from covey.runtime.joining.node import node_of
from covey.runtime.state.store import StoreClient
from covey.torch.backend.rendezvous import CoveyStore, open_store
from covey.wire import messages
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.base.config import GroupConfig
    from covey.runtime.group.group import Group

MOMENT, LONG = timedelta(milliseconds=200), timedelta(seconds=DEADLINE)
CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("set", lambda store: store.set("k", "text")),
    ("get", lambda store: store.get("k")),
    ("bytes", lambda store: (store.set("b", b"\xff\x00"), store.get("b"))),
    ("empty", lambda store: (store.set("e", ""), store.get("e"))),
    ("add", lambda store: (store.add("n", 5), store.add("n", -7), store.get("n"))),
    ("no number", lambda store: store.add("k", 1)),
    ("check", lambda store: (store.check(["k", "n"]), store.check(["k", "missing"]))),
    ("wait", lambda store: (store.wait(["k", "n"]), store.wait(["k"], LONG))),
    ("wait in vain", lambda store: store.wait(["missing"], MOMENT)),
    ("shorter", lambda store: store.set_timeout(MOMENT)),
    ("get in vain", lambda store: store.get("missing")),
    ("longer", lambda store: store.set_timeout(LONG)),
    ("swap missing", lambda store: store.compare_set("c", "expected", "new")),
    ("swap in", lambda store: store.compare_set("c", "", "new")),
    ("swap wrong", lambda store: store.compare_set("c", "other", "newer")),
    ("swap right", lambda store: (store.compare_set("c", "new", "newer"), store.get("c"))),
    ("append", lambda store: (store.append("a", "one"), store.append("a", "two"), store.get("a"))),
    ("several", lambda store: (store.multi_set(["x", "y"], ["1", "2"]), store.multi_get(["y", "x"]))),
    ("delete", lambda store: (store.delete_key("x"), store.delete_key("x"), store.check(["x"]))),
    ("extended", lambda store: store.has_extended_api()),
    ("clone", lambda store: store.clone().get("k")),
    ("timeout", lambda store: (store.set_timeout(MOMENT), store.timeout)),
]


def outcomes(store: Any) -> list[Any]:
    """Return what came of each call: the result, or that it failed."""
    store.set_timeout(LONG)
    found: list[Any] = []
    for name, call in CALLS:
        try:
            found.append((name, call(store)))
        except (RuntimeError, ValueError):
            found.append((name, "failed"))
    return found


@contextlib.contextmanager
def store_of(
    rank: int, size: int, path: str, timeout: float = DEADLINE, config: GroupConfig | None = None
) -> Iterator[tuple[Group, CoveyStore]]:
    place = LaunchedRank(rank=rank, size=size, name=path, folder=str(rendezvous_folder(path)) if size > 1 else "")
    with join_at(place, config, timeout=DEADLINE) as group:
        yield group, open_store(group, timedelta(seconds=timeout))


def use(rank: int, size: int, path: str) -> None:
    with store_of(rank, size, path) as (group, store):
        expected = outcomes(dist.HashStore())
        nested = dist.PrefixStore("outer", dist.PrefixStore(f"rank {rank}", store))
        assert outcomes(nested) == expected
        group.barrier()
        store.set_timeout(timedelta(seconds=DEADLINE))
        assert store.num_keys() == nested.num_keys() == size * 7
        assert f"rank {size - 1}/outer/k" in store.list_keys()
        group.barrier()
        wake_each_other(rank, size, store)
        push_and_pop(rank, size, store)
        refuse_what_is_too_large(rank, store)
        if rank == size - 1:
            interrupt_a_wait(store)
        group.barrier()
        assert store.get("still") == b"here"
        if size > 1:
            carry_gloo(rank, size, store)


def wake_each_other(rank: int, size: int, store: CoveyStore) -> None:
    """Several threads wait, each for another rank's key; nobody sets one before all of its threads wait or run."""
    found: dict[int, bytes] = {}

    def get(other: int) -> None:
        found[other] = store.get(f"of {other}")

    threads = [threading.Thread(target=get, args=(other,)) for other in range(size)]
    for thread in threads:
        thread.start()
    store.set(f"of {rank}", f"{rank * 10}")
    for thread in threads:
        thread.join(DEADLINE)
    assert found == {other: b"%d" % (other * 10) for other in range(size)}
    store.barrier("everyone", size)


def push_and_pop(rank: int, size: int, store: CoveyStore) -> None:
    """Rank 0 gets what the others push, in the order of each."""
    for number in range(3):
        store.queue_push("letters", f"{rank}.{number}")
    if rank == 0:
        letters = [store.queue_pop("letters").decode() for _ in range(3 * size)]
        assert sorted(letters) == [f"{other}.{number}" for other in range(size) for number in range(3)]
        assert [letter for letter in letters if letter.startswith("0.")] == ["0.0", "0.1", "0.2"]
        with pytest.raises(dist.QueueEmptyError, match="letters"):
            store.queue_pop("letters", block=False)
        store.set("popped", "")
    store.wait(["popped"])
    assert store.queue_len("letters") == 0


def refuse_what_is_too_large(rank: int, store: CoveyStore) -> None:
    """What the keeper would take for nonsense does not get as far as that, and ends no link."""
    for call in (
        lambda: store.set("k" * (wire.KEY_LIMIT + 1), ""),
        lambda: store.set("k", bytes(wire.VALUE_LIMIT + 1)),
        lambda: store.add("k", 2**70),
        lambda: store.multi_set([f"{number}" for number in range(8)], [bytes(wire.VALUE_LIMIT)] * 8),
    ):
        with pytest.raises(ConfigError, match="store"):
            call()
    store.set(f"large of {rank}", bytes([rank]) * wire.VALUE_LIMIT)
    assert store.get(f"large of {rank}") == bytes([rank]) * wire.VALUE_LIMIT
    store.set("still", "here")


def interrupt_a_wait(store: CoveyStore) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def wait() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        dist.PrefixStore("through C++", store).get("never")

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert time.monotonic() - began < DEADLINE / 2


def carry_gloo(rank: int, size: int, store: CoveyStore) -> None:
    """gloo asks from C++, on threads of its own."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        x = torch.tensor([10.0**rank])
        dist.all_reduce(x)
        assert x.item() == int("1" * size)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 3])
def test_it_answers_as_torchs_own_stores_do_and_carries_gloo(size: int) -> None:
    run_torch_ranks(size, use)


def say_when_waiting(group: Group, store: CoveyStore, rank: int) -> None:
    """Tell rank 0 that this rank waits for an answer; rank 0 may die before it has answered this."""
    await_questions(group, 1)
    with contextlib.suppress(PeerLostError):
        store.set(f"waiting {rank}", "")


def await_questions(group: Group, count: int) -> None:
    """Wait until so many questions of this rank are without an answer."""
    node = node_of(group)
    assert node is not None
    until = time.monotonic() + DEADLINE
    while len(node.stores._outcomes) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def lose_the_keeper(rank: int, size: int, path: str) -> tuple[str, int, float]:
    with store_of(rank, size, path) as (group, store):
        store.barrier("here", size)
        if rank == 0:
            store.wait(["waiting 1", "waiting 2"])
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=say_when_waiting, args=(group, store, rank), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(PeerLostError) as raised:
            dist.PrefixStore("through C++", store).get("never")
        seconds = time.monotonic() - began
        assert isinstance(raised.value, dist.DistNetworkError)  # what torch's own stores raise
        with pytest.raises(PeerLostError):
            store.set("too", "late")
        return str(raised.value), raised.value.rank, seconds


def test_when_rank_0_is_killed_all_who_wait_are_told_so_at_once(promised: Callable[[float], float]) -> None:
    lost, *others = run_torch_ranks(3, lose_the_keeper)
    assert lost is Lost
    for text, rank, seconds in others:
        assert "rank 0" in text
        assert "orders the changes to the store" in text
        assert rank == 0
        assert seconds < promised(5)


def break_links(rank: int, size: int, path: str) -> None:
    """Under on_loss="continue" a link that breaks is made anew, and who waits is none the wiser."""
    wait_for_links()
    config = group_config({}, on_loss="continue")
    with store_of(rank, size, path, config=config) as (group, store):
        node = node_of(group)
        assert node is not None
        store.barrier("here", size)
        if rank == 0:
            assert store.queue_pop("broken") == b""
            store.set("late", "came")
            store.queue_push("pushed", "once")
            store.queue_push("pushed", "left")
            store.wait(["got it"])
            assert store.queue_pop("pushed") == b"left"  # the first was taken once, although it was asked for twice
        else:
            outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
            waits = threading.Thread(target=lambda: outcomes.put(store.get("late")))
            pops = threading.Thread(target=lambda: outcomes.put(store.queue_pop("pushed")))
            for thread in (waits, pops):
                thread.start()
            await_questions(group, 2)
            link = node.peers[Seat(0)].link
            assert link is not None
            control.soon(link.abort)
            store.queue_push("broken", "")
            assert {outcomes.get(timeout=DEADLINE) for _ in range(2)} == {b"came", b"once"}
            store.set("got it", "")
            for thread in (waits, pops):
                thread.join(DEADLINE)


def test_who_waits_is_answered_over_another_link_when_one_breaks() -> None:
    run_torch_ranks(2, break_links)


def talk_nonsense(rank: int, size: int, path: str) -> None:
    with store_of(rank, size, path) as (group, store):
        node = node_of(group)
        assert node is not None
        stranger = StoreClient(node.stores, 4711)
        with pytest.raises(ConfigError, match="closed"):
            stranger.ask(wire.Count(), 30)
        store.barrier("here", size)
        if rank == 1:
            node.peers.tell((Seat(0),), messages.Posting(1, 2, b"\xc1 no msgpack"))
            with pytest.raises(PeerLostError):
                store.get("never")
            return
        until = time.monotonic() + DEADLINE
        while rank == 0 and 1 in group.live:
            assert time.monotonic() < until
            time.sleep(0.01)
        if rank == 0:
            store.set("goes on", "")
            store.wait(["and on"])
        else:
            store.wait(["goes on"])
            store.set("and on", "")


def test_a_member_that_talks_nonsense_is_cut_off_and_the_others_are_served() -> None:
    run_torch_ranks(3, talk_nonsense)


@pytest.mark.parametrize("kind", [dist.DistStoreError, DeadlineError])
def test_a_wait_in_vain_is_torchs_error_and_coveys(kind: type[Exception]) -> None:
    with store_of(0, 1, "alone", timeout=0.001) as (_, store), pytest.raises(kind, match=r"get\(missing\)"):
        store.get("missing")


def make_groups_without_rank_0(rank: int, size: int, path: str) -> list[float]:
    """Rank 0, which orders the changes to the store, is killed; the others make a process group and use it."""
    with store_of(rank, size, path, config=group_config({}, on_loss="continue")) as (group, store):
        dist.init_process_group("covey", store=store, rank=rank, world_size=size)
        store.set(f"from {rank}", str(rank))
        store.barrier("here", size)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + DEADLINE
        while 0 in group.contributors:  # equal on all ranks after each operation, unlike `live`
            assert time.monotonic() < until
            group.all_reduce(np.zeros(1))
        assert store.get("from 0") == b"0"
        pair = dist.new_group([1, 2], use_local_synchronization=True)
        x = torch.tensor([10.0**rank])
        dist.all_reduce(x, group=pair)
        dist.destroy_process_group()
        return x.tolist()


def test_process_groups_can_be_made_after_rank_0_is_gone() -> None:
    lost, *others = run_torch_ranks(3, make_groups_without_rank_0)
    assert lost is Lost
    assert others == [[110.0], [110.0]]
