"""A hostile rank claims shapes, counts, lengths, names and numbers that cannot be.

The honest ranks get an error that names it, in time, and take no memory for what it claims.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.hostile_ranks import HOSTILE, SIZE, attack
from tests.support.waiting import DEADLINE

from covey.base.arithmetic import dtype_code
from covey.base.config import GroupConfig
from covey.base.errors import MismatchError, RemoteProtocolError
from covey.base.numbers import Rank, Slot
from covey.runtime.buffers import Operand, readable
from covey.runtime.group import movements, restore
from covey.runtime.group.internals import engine_of, issuer_of
from covey.runtime.group.state_transfer import REQUEST, StateTransfer
from covey.testing import run_threads
from covey.wire import objects
from covey.wire.manifest import (
    ENTRY_NAME_LIMIT,
    MANIFEST_BYTES,
    MANIFEST_ENTRIES_LIMIT,
    STATE_CHUNK_BYTES,
    Manifest,
    ManifestEntry,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.group.group import Group

FLOAT64, BYTE = dtype_code(np.dtype(np.float64)), dtype_code(np.dtype(np.uint8))


# Shapes that travel before contents

WORDS = movements.META_WORDS
CLAIMS: dict[str, list[int]] = {
    "dtype": [255, 1, 3],
    "huge dtype": [2**63, 1, 3],
    "dimensions": [FLOAT64, 65],
    "huge dimensions": [FLOAT64, 2**63],
    "one length": [FLOAT64, 1, 2**62],
    "overflow": [FLOAT64, 3, 2**40, 2**40, 2**40],
    "overflow hidden by a zero": [FLOAT64, 3, 2**62, 2**62, 0],
    "beyond all memory": [FLOAT64, 2, 2**30, 2**25],
    "lengths beyond the dimensions": [FLOAT64, 1, 3, 7],
}


def liar(claim: list[int]) -> Callable[..., Any]:
    """Return what describes arrays on the hostile rank."""

    def records(attempt: Any, operands: dict[int, Operand]) -> Any:
        rows = describe(attempt, operands)
        if attempt.roster.rank == HOSTILE:
            for row in operands:
                rows[row] = 0
                rows[row, : len(claim)] = claim
        return rows

    describe = movements._records
    return records


def by_name(operation: str) -> Callable[[Group], Any]:
    x = np.arange(6.0)
    calls: dict[str, Callable[[Group], Any]] = {
        "all_gather": lambda group: group.all_gather(x),
        "gather": lambda group: group.gather(x, root=0) if group.rank != 2 else (group.gather(x), group.barrier()),
        "scatter": lambda group: group.scatter([x] * SIZE, root=HOSTILE),
        "all_to_all": lambda group: group.all_to_all([x] * SIZE),
        "all_gather_object": lambda group: group.all_gather_object({"a": 1}),
        "gather_object": lambda group: (group.gather_object([1]), group.barrier()),
        "scatter_object": lambda group: group.scatter_object([[1]] * SIZE, root=HOSTILE),
        "split": lambda group: group.split(0),
        "restore": lambda group: restore.restore(issuer_of(group), {"w": np.arange(3.0)}),
        "sync_gradients": lambda group: group.sync_gradients({f"w{group.rank}": x}),
    }
    return calls[operation]


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("operation", ["all_gather", "gather", "scatter", "all_to_all", "all_gather_object", "split"])
def test_a_shape_that_cannot_be_ends_the_operation_and_names_its_rank(
    operation: str, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movements, "_records", liar(CLAIMS[claim]))
    attack(by_name(operation), by_name(operation))


@pytest.mark.parametrize("operation", ["gather_object", "scatter_object", "restore", "sync_gradients"])
def test_an_encoded_value_that_is_no_row_of_bytes_is_refused(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movements, "_records", liar([FLOAT64, 2, 3, 4]))
    attack(by_name(operation), by_name(operation))


def test_where_operations_are_all_or_nothing_all_honest_ranks_are_told_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(movements, "_records", liar(CLAIMS["overflow"]))
    monkeypatch.setattr(GroupConfig, "__init__", surviving(GroupConfig.__init__))
    told = attack(by_name("all_gather"), by_name("all_gather"), (RemoteProtocolError,))
    assert len(set(told)) == 1


def surviving(init: Any) -> Any:
    def __init__(self: Any, **settings: Any) -> None:  # noqa: N807
        init(self, **{**settings, "on_loss": "continue"})

    return __init__


@pytest.mark.parametrize("length", [2**63 + 5, 2**64 - 1, 2**50], ids=["2^63", "2^64", "a petabyte"])
def test_a_root_whose_value_has_an_absurd_length_is_named(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.array

    def lying(values: Any, *args: Any, **options: Any) -> Any:
        made = array(values, *args, **options)
        if made.dtype == np.uint64 and made.shape == (1,) and made[0] == 77:
            made[0] = length
        return made

    monkeypatch.setattr(np, "array", lying)
    value = "x" * 74  # encoded: 77 bytes
    assert len(objects.encode(value)) == 77

    def call(group: Group) -> None:
        group.broadcast_object(value if group.rank == HOSTILE else None, root=HOSTILE)

    attack(call, call)


# Values


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "no form": b"\x09abc",
    "no msgpack": b"\x01\xc1",
    "cut off": b"\x01\xdd\xff\xff\xff\xff\x01",
    "nested too deeply": b"\x01" + b"\x91" * 100_000 + b"\xc0",
    "an array of no dtype": b"\x01\xc7\x03\x01\xff\x00\x00",
    "an array without elements": b"\x01\xc7\x0a\x01\x00\x01" + (2**62).to_bytes(8, "little"),
    "an array as a key": b"\x01\x81\xc7\x03\x01" + bytes((BYTE, 0, 7)) + b"\x01",
    "another extension": b"\x01\xc7\x03\x63abc",
    "no text": b"\x01\xa3\xff\xfe\xfd",
}


@pytest.mark.parametrize("operation", ["all_gather_object", "broadcast_object", "recv_object"])
def test_bytes_that_are_no_value_name_their_sender_and_leave_the_group_whole(operation: str) -> None:
    def say(group: Group, garbage: bytes) -> None:
        data = np.frombuffer(garbage, np.uint8)
        operand = Operand(data, data.shape, BYTE)
        engine = engine_of(group)
        if operation == "all_gather_object":
            call = issuer_of(group).call("all_gather_object", None, None)
            engine.run(call, lambda c: movements.gather_all(c, operand), timeout=None, async_op=False)
        elif operation == "broadcast_object":
            call = issuer_of(group).call("broadcast_object", None, None, root=HOSTILE)
            engine.run(call, lambda c: movements.broadcast_bytes(c, data.tobytes(), Slot(HOSTILE)),
                       timeout=None, async_op=False, root=Rank(HOSTILE))  # fmt: skip
        else:
            for rank in (0, 2):
                group._messages._send(data, rank, 0, BYTE, data.shape, True, None, False)

    def body(group: Group) -> list[str]:
        calls: dict[str, Callable[[], Any]] = {
            "all_gather_object": lambda: group.all_gather_object(1),
            "broadcast_object": lambda: group.broadcast_object(root=HOSTILE),
            "recv_object": lambda: group.recv_object(src=HOSTILE),
        }
        told = []
        for name, garbage in GARBAGE.items():
            group.barrier()
            if group.rank == HOSTILE:
                say(group, garbage)
            else:
                with pytest.raises((RemoteProtocolError, MismatchError), match=f"rank {HOSTILE}"):
                    calls[operation]()
            assert objects.encode(1)
            assert group.all_reduce(1) == SIZE
            told.append(name)
        return told

    assert run_threads(SIZE, body, timeout=DEADLINE) == [list(GARBAGE)] * SIZE


def test_a_value_of_another_type_than_asked_for_names_its_sender() -> None:
    def body(group: Group) -> None:
        if group.rank != HOSTILE:
            with pytest.raises(MismatchError, match=f"rank {HOSTILE}"):
                group.all_gather_object(1, type=int)
        else:
            with contextlib.suppress(MismatchError):
                group.all_gather_object("one", type=int)
        group.barrier()

    run_threads(SIZE, body, timeout=DEADLINE)


# Manifests


def entry(**changes: Any) -> ManifestEntry:
    good = ManifestEntry(name="w", is_array=True, dtype_code=FLOAT64, shape=(3,), tags=bytes(16))
    return replace(good, **changes)


MANY = tuple(entry(name=f"{number:06}", shape=(), tags=bytes(16)) for number in range(1500))
MANIFESTS: dict[str, Manifest] = {
    "dtype": Manifest(is_fresh=False, entries=(entry(dtype_code=200),)),
    "negative dtype": Manifest(is_fresh=False, entries=(entry(dtype_code=-1),)),
    "dimensions": Manifest(is_fresh=False, entries=(entry(shape=(1,) * 65),)),
    "negative length": Manifest(is_fresh=False, entries=(entry(shape=(-3,)),)),
    "overflow": Manifest(is_fresh=False, entries=(entry(shape=(2**40, 2**40)),)),
    "no tags": Manifest(is_fresh=False, entries=(entry(tags=b""),)),
    "half a tag": Manifest(is_fresh=False, entries=(entry(tags=bytes(7)),)),
    "a terabyte each": Manifest(is_fresh=False, entries=tuple(replace(each, shape=(2**37,)) for each in MANY)),
    "twice the same name": Manifest(is_fresh=False, entries=(entry(), entry())),
    "not sorted": Manifest(is_fresh=False, entries=(entry(name="b"), entry(name="a"))),
    "a long name": Manifest(is_fresh=False, entries=(entry(name="n" * (ENTRY_NAME_LIMIT + 1)),)),
    "a name for a terminal": Manifest(is_fresh=False, entries=(entry(name="w\x1b[2J\n"),)),
    "a value with a dtype": Manifest(is_fresh=False, entries=(entry(is_array=False),)),
    "a value with a shape": Manifest(is_fresh=False, entries=(entry(is_array=False, dtype_code=BYTE, shape=(2, 2)),)),
    "too many": Manifest(
        is_fresh=False,
        entries=tuple(
            ManifestEntry(name=f"{n:x}".rjust(6, "0"), is_array=True, dtype_code=0, shape=(0,), tags=b"")
            for n in range(MANIFEST_ENTRIES_LIMIT + 1)
        ),
    ),
    "a failure with entries": Manifest(is_fresh=False, entries=(entry(),), failure="x"),
    "a failure for a terminal": Manifest(is_fresh=False, failure="\x1b[2J" + "x" * 5000),
}


def lying_manifest(manifest: Any) -> Callable[..., Any]:
    """Return what gathers in a restore: on the hostile rank it says what the attacker likes."""
    gather = restore._Restore._gather

    def lie(self: Any, value: Any, type: Any) -> Any:
        is_hostile = self.issuer.rank == HOSTILE and isinstance(value, Manifest)
        return gather(self, manifest if is_hostile else value, type)

    return lie


def restoring(group: Group) -> Any:
    return restore.restore(issuer_of(group), {"w": np.arange(3.0) + group.rank}, timeout=DEADLINE)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_that_is_none_is_refused_before_it_is_used(manifest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore._Restore, "_gather", lying_manifest(MANIFESTS[manifest]))
    attack(restoring, restoring, (RemoteProtocolError,))


def test_a_manifest_that_is_too_large_is_not_even_received(monkeypatch: pytest.MonkeyPatch) -> None:
    bulk = Manifest(is_fresh=False, failure="x" * (MANIFEST_BYTES + 1))
    monkeypatch.setattr(restore._Restore, "_gather", lying_manifest(bulk))
    attack(restoring, restoring, (RemoteProtocolError,))


@pytest.mark.parametrize("what", [["x", 1], {"nonce": "x"}, {"is_fresh": 1, "entries": [{}]}, None, "x" * 1000])
def test_words_in_a_restore_that_are_something_else_are_refused(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore._Restore, "_gather", lying_manifest(what))
    attack(restoring, restoring, (MismatchError, RemoteProtocolError))


@pytest.mark.parametrize("terms", [restore._Terms(b"", "repair"), restore._Terms(bytes(16), "x" * 10**6)])
def test_terms_of_a_restore_that_are_none_are_refused(terms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = restore._Restore._gather

    def lie(self: Any, value: Any, type: Any) -> Any:
        is_hostile = self.issuer.rank == HOSTILE and isinstance(value, restore._Terms)
        return gather(self, terms if is_hostile else value, type)

    monkeypatch.setattr(restore._Restore, "_gather", lie)
    attack(restoring, restoring, (RemoteProtocolError,))


def test_a_state_for_which_there_is_no_memory_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hostile rank is the only one with a state, so it is the donor of the others, which come anew."""
    shape = (movements.PHYSICAL_BYTES // 8 + 1,)
    count = -(-8 * shape[0] // STATE_CHUNK_BYTES)
    huge = Manifest(is_fresh=False, entries=(entry(name="v", shape=shape, tags=secrets.token_bytes(16 * count)),))
    monkeypatch.setattr(restore._Restore, "_gather", lying_manifest(huge))

    def come(group: Group) -> None:
        restore.restore(issuer_of(group), {"w": np.arange(3.0)}, fresh=True, timeout=DEADLINE)

    assert "no memory" in attack(come, restoring, (MismatchError,))[0]


@pytest.mark.parametrize("numbers", [b"abc", bytes((255,)) * 4, bytes(8000), bytes(4) * 600], ids=len)
def test_a_receiver_that_asks_for_chunks_that_are_none_is_named_and_others_are_served(
    numbers: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = StateTransfer._fetch

    def lie(self: Any, *args: Any) -> int:
        if self._rank != HOSTILE:
            return int(fetch(self, *args))
        self._exchange.send(np.frombuffer(numbers, np.uint8), 0, REQUEST)
        return 0

    monkeypatch.setattr(StateTransfer, "_fetch", lie)

    def body(group: Group) -> Any:
        state = {"w": np.arange(5.0) * group.rank}
        group.barrier()
        with pytest.raises((RemoteProtocolError, MismatchError)) as caught:
            restore.restore(issuer_of(group), state, fresh=True, timeout=DEADLINE)
        assert f"rank {HOSTILE}" in str(caught.value)
        return state["w"].tolist()

    states = run_threads(SIZE, body, timeout=DEADLINE)
    assert states[0] == states[2] == [0.0] * 5


def test_a_donor_that_sends_chunks_of_another_size_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = StateTransfer.serve

    def shorter(self: Any) -> int:
        if self._rank == HOSTILE:
            memory_of = self._memory.of
            self._memory = types.SimpleNamespace(of=lambda chunk: memory_of(chunk)[:-8])
        return serve(self)

    monkeypatch.setattr(StateTransfer, "serve", shorter)
    right = np.random.default_rng(1).normal(size=3 * STATE_CHUNK_BYTES // 8)

    def body(group: Group) -> Any:
        state = {"w": right.copy() if group.rank < 2 else np.zeros_like(right)}
        restore.restore(issuer_of(group), state, fresh=group.rank == 2, timeout=DEADLINE)
        return bool((state["w"] == right).all())

    assert run_threads(SIZE, body, timeout=DEADLINE) == [True] * SIZE


# Numbers that other things are made of


def test_a_rank_that_shrinks_with_something_else_than_a_number_is_named() -> None:
    def honest(group: Group) -> None:
        group.all_gather_object("ready")
        from covey.runtime.group.survival import _numbers

        _numbers(group.all_gather(np.array([3])))

    def hostile(group: Group) -> None:
        group.all_gather_object("ready")
        group.all_gather(np.zeros((2, 0), np.int64))

    attack(honest, hostile, (RemoteProtocolError,))


def test_a_list_of_gradients_that_is_not_the_one_announced_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.runtime.buffers import byte_operand as listed
    from covey.runtime.group import gradients

    def lie(data: bytes) -> Operand:
        return readable(np.frombuffer(b"\xff\xfe not what was announced", np.uint8)) if b"w1" in data else listed(data)

    monkeypatch.setattr(gradients, "byte_operand", lie)
    attack(by_name("sync_gradients"), by_name("sync_gradients"), (RemoteProtocolError,))


def test_a_message_for_which_there_is_no_memory_names_its_sender_and_others_arrive() -> None:
    from covey.wire import message_header as wire

    heard: list[Any] = []

    def body(group: Group) -> None:
        if group.rank == HOSTILE:
            messenger = engine_of(group).routing.messenger()
            messenger._opening.open(messenger, 0, time.monotonic() + DEADLINE)
            with messenger._lock:
                header = wire.MessageHeader(wire.RTS, 0, 8 << 58, 7, False, FLOAT64, (1 << 58,))
                link = messenger._matcher.link(0)
                link.push(header)
                link._next_id += 1
                messenger._lanes.flush_ready()
            group.send(np.arange(3.0), dst=0, tag=8)
        elif group.rank == 0:
            with pytest.raises(MismatchError, match=f"rank {HOSTILE}.*no memory"):
                group.recv(src=HOSTILE, tag=7)
            heard.append(group.recv(src=HOSTILE, tag=8).tolist())
        over.wait()

    over = threading.Barrier(SIZE, timeout=DEADLINE)
    run_threads(SIZE, body, lanes="unix", timeout=DEADLINE)
    assert heard == [[0.0, 1.0, 2.0]]
