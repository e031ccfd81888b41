"""Newcomers and drifted ranks are brought to the state of the others: only what differs moves, and all is checked."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.ranks import Ranks, attempt, say
from tests.support.restoring import SECONDS, bits, give_one_chunk, leave_before_receiving, restore
from tests.support.sets import in_part
from tests.support.values import LANES
from tests.support.waiting import DEADLINE

import covey
from covey import ConfigError, DeadlineError, MismatchError, PeerLostError
from covey.testing.threads import run_threads
from covey.wire.manifest import STATE_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from covey import Group
    from covey.runtime.group.restore import RestoreReport

ROOT = Path(__file__).parents[2]


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch  # takes seconds, so only where it is needed

    return torch.from_numpy(bits(seed, 2 * int(np.prod(shape)))).view(torch.int16).reshape(shape).to(dtype)


def state(seed: int) -> dict[str, Any]:
    """Return everything that a state may hold, all of it different for another seed."""
    import torch

    strided = np.zeros((2 * 700, 3 * 500), np.float32)[::2, ::3]
    strided[...] = bits(seed, strided.size).reshape(strided.shape)
    return {
        "chunks": bits(seed, STATE_CHUNK_BYTES + 8).view(np.float64),
        "exactly one": bits(seed + 1, STATE_CHUNK_BYTES),
        "small": np.arange(7) + seed,
        "brain": (np.arange(100) + seed).astype(ml_dtypes.bfloat16),
        "empty": np.empty((0, 3), np.float32),
        "scalar": np.array(seed + 0.5),
        "flags": np.arange(9) % (seed + 2) == 0,
        "strided": strided,
        "weight": torch.nn.Parameter(tensor(seed, (30, 40), torch.float32)),
        "half": tensor(seed, (5, 6), torch.bfloat16).t(),
        "no tensor": torch.empty(0),
        "step": seed,
        "names": {"rate": 0.1 * seed, "list": [1, seed, None], "moments": np.arange(5.0) * seed, "é": b"\0" * seed},
    }


def plain(value: Any) -> Any:
    """Return something that compares by contents, dtype and shape."""
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().float().numpy()
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(got) == set(wanted)
    for name in wanted:
        assert plain(got[name]) == plain(wanted[name]), name


@in_part("lanes", LANES)
def test_a_newcomer_is_filled_in_place_with_everything_a_state_may_hold(lanes: str) -> None:
    def body(group: Group) -> RestoreReport:
        mine = state(5 if group.rank == 0 else 8)
        kept = dict(mine)
        report = restore(group, mine, fresh=group.rank == 1)
        check(mine, state(5))
        arrays = [name for name in kept if isinstance(kept[name], np.ndarray) or hasattr(kept[name], "detach")]
        assert all(mine[name] is kept[name] for name in arrays)
        assert mine["weight"].requires_grad
        assert (report.donors, report.receivers, report.drifted, report.first) == ((0,), (1,), (), False)
        assert group.all_reduce(group.rank + 1) == 3
        return report

    giver, taker = run_threads(2, body, lanes=lanes)
    assert giver.bytes_sent == taker.bytes_received > 2 * STATE_CHUNK_BYTES
    assert giver.bytes_received == taker.bytes_sent == 0
    assert 0 < taker.seconds < 30


def test_two_newcomers_get_the_state_from_three_donors_that_share_the_work() -> None:
    def body(group: Group) -> RestoreReport:
        newcomers = (1, 4)
        mine = {"w": bits(group.rank if group.rank in newcomers else 9, 3 * STATE_CHUNK_BYTES + 5)}
        report = restore(group, mine, fresh=group.rank in newcomers)
        check(mine, {"w": bits(9, 3 * STATE_CHUNK_BYTES + 5)})
        return report

    reports = run_threads(5, body)
    assert {(each.donors, each.receivers) for each in reports} == {((0, 2, 3), (1, 4))}
    assert [each.bytes_received for each in reports] == [0, 3 * STATE_CHUNK_BYTES + 5, 0, 0, 3 * STATE_CHUNK_BYTES + 5]
    sent = [each.bytes_sent for each in reports]
    assert sum(sent) == 2 * (3 * STATE_CHUNK_BYTES + 5)
    assert all(sent[rank] >= 2 * STATE_CHUNK_BYTES for rank in (0, 2, 3))


def test_only_what_a_newcomer_lacks_is_sent() -> None:
    size = 2 * STATE_CHUNK_BYTES + 100

    def body(group: Group) -> list[int]:
        whole = bits(1, size)
        mine: dict[str, Any] = {"w": whole.copy(), "read-only": np.broadcast_to(2.0, (3, 4)), "step": 4}
        received = []
        for damaged in (slice(STATE_CHUNK_BYTES + 1, STATE_CHUNK_BYTES + 2), slice(size - 1, size), slice(0, 0)):
            if group.rank == 1:
                mine["w"][damaged] += 1
            received.append(restore(group, mine, fresh=group.rank == 1).bytes_received)
            check(mine, {"w": whole, "read-only": np.full((3, 4), 2.0), "step": 4})
        return received

    assert run_threads(2, body) == [[0, 0, 0], [STATE_CHUNK_BYTES, 100, 0]]


def test_names_that_a_newcomer_lacks_are_added_and_those_that_only_it_has_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(group: Group) -> None:
        mine: dict[str, Any] = {"w": np.arange(6.0).reshape(2, 3), "b": (np.arange(3) > 0), "note": "hello"}
        if group.rank == 0:
            mine = {"old": np.ones(3), "older": 5, "note": None}
        restore(group, mine, fresh=group.rank == 0)
        check(mine, {"w": np.arange(6.0).reshape(2, 3), "b": np.arange(3) > 0, "note": "hello"})
        mine["w"] += 1

    with caplog.at_level(logging.WARNING, "covey"):
        run_threads(3, body)
    assert [each.getMessage() for each in caplog.records] == [
        "restore: rank 0 removes names that the others do not have: 'old', 'older'"
    ]


def test_one_drifted_rank_of_five_is_repaired_and_told(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Group) -> RestoreReport:
        mine: dict[str, Any] = {"w": np.arange(1000.0), "b": np.arange(5.0), "step": 3}
        if group.rank == 0:
            mine["w"][500] += 1e-9
            mine["step"] = 4
        report = restore(group, mine)
        check(mine, {"w": np.arange(1000.0), "b": np.arange(5.0), "step": 3})
        return report

    with caplog.at_level(logging.WARNING, "covey"):
        reports = run_threads(5, body)
    assert {(each.donors, each.receivers, each.drifted) for each in reports} == {((1, 2, 3, 4), (0,), (0,))}
    assert [each.getMessage() for each in caplog.records] == [
        "restore: rank 0 has drifted from the state of rank 1, 2, 3, 4 in 'step', 'w'; its state is replaced"
    ]


def test_drift_is_an_error_on_all_ranks_if_asked_for_and_the_group_goes_on() -> None:
    def body(group: Group) -> None:
        mine = {"w": np.arange(10.0), "b": np.zeros(2)}
        if group.rank == 2:
            mine["b"][1] = 7
            mine["extra"] = np.ones(1)
        with pytest.raises(MismatchError, match=r"drifted from that of ranks 0, 1: rank 2 in 'b', 'extra'\. Nothing"):
            restore(group, mine, on_drift="raise")
        assert (mine["b"][1] == 7) == (group.rank == 2)
        assert restore(group, mine).drifted == (2,)
        assert restore(group, mine, on_drift="raise").receivers == ()

    run_threads(3, body)


def test_the_lowest_ranks_side_wins_a_tie() -> None:
    def body(group: Group) -> None:
        mine = {"w": np.full(4, group.rank in (0, 3), np.int64)}
        assert restore(group, mine).drifted == (1, 2)
        assert mine["w"].tolist() == [1] * 4

    run_threads(4, body)


def test_if_all_are_fresh_every_rank_starts_with_the_lowest_ranks_state() -> None:
    def body(group: Group) -> None:
        mine = {"w": np.arange(4) + group.rank, "b": np.ones(2)}
        report = restore(group, mine, fresh=True, on_drift="raise")
        assert (report.donors, report.receivers, report.drifted, report.first) == ((0,), (1, 2), (), True)
        check(mine, {"w": np.arange(4), "b": np.ones(2)})
        again = restore(group, mine, fresh=True)
        assert (again.donors, again.receivers, again.first, again.bytes_received) == ((0, 1, 2), (), True, 0)

    run_threads(3, body)


def test_a_group_of_one_returns_at_once() -> None:
    report = run_threads(1, lambda group: restore(group, {"w": np.ones(3)}, fresh=True))[0]
    assert (report.donors, report.receivers, report.bytes_received, report.first) == ((0,), (), 0, True)


@pytest.mark.parametrize(
    ("newcomer", "text"),
    [
        ({"a": np.zeros(2), "b": np.zeros(3, np.float32), "c": 1}, "'b' is float64[3] on rank 0, but float32[3] on"),
        ({"a": np.zeros(2), "b": np.zeros((3, 1))}, "'b' is float64[3] on rank 0, but float64[3, 1] on rank 2"),
        ({"a": None, "b": np.zeros((3, 1))}, "'a' is float64[2] on rank 0, but a value on rank 2"),
        ({"a": np.broadcast_to(3.0, 2)}, "'a' is read-only on rank 2; pass a copy"),
        ({"a": np.zeros(2), "b": {1, 2}}, "rank 2 has 'b': cannot send a set"),
        ({"a": np.zeros(2), "b": np.array(["x"])}, "rank 2 has 'b': covey cannot move arrays of dtype('<U1')"),
        ({"a": np.zeros(2), 5: 1}, "rank 2 has a state whose names are not all strings"),
    ],
)
def test_what_cannot_be_filled_is_named_on_all_ranks_and_nothing_changes(newcomer: dict[str, Any], text: str) -> None:
    def body(group: Group) -> str:
        mine: dict[str, Any] = {"a": np.ones(2), "b": np.ones(3), "c": np.ones(1)}
        if group.rank == 2:
            mine = newcomer
        before = plain(mine)
        with pytest.raises((MismatchError, TypeError)) as caught:
            restore(group, mine, fresh=group.rank == 2)
        assert plain(mine) == before
        assert group.all_reduce(1) == 3
        return str(caught.value)

    texts = run_threads(3, body)
    assert text in texts[0]
    assert texts[1] == texts[0]
    assert texts[2] == texts[0] or texts[2] in texts[0]


def test_wrong_arguments_are_refused() -> None:
    def body(group: Group) -> None:
        with pytest.raises(ConfigError, match="on_drift='ignore' must be"):
            restore(group, {}, on_drift="ignore")
        with pytest.raises(MismatchError, match="rank 0 passed 'repair'; rank 1 passed 'raise'"):
            restore(group, {}, on_drift=("repair", "raise")[group.rank])
        assert restore(group, {}).receivers == ()

    run_threads(2, body)


def test_arrays_that_share_memory_are_fine_if_they_do_everywhere_and_told_if_not() -> None:
    def body(group: Group) -> None:
        mine = np.full(STATE_CHUNK_BYTES, group.rank, np.uint8)
        restore(group, {"embed": mine, "head": mine}, fresh=group.rank == 1)
        assert (mine == 0).all()
        apart = {"embed": np.zeros(9), "head": np.ones(9)}
        if group.rank == 1:
            apart["head"] = apart["embed"]
        with pytest.raises(MismatchError, match=r"states of ranks \[1\] differ from the others' afterwards"):
            restore(group, apart, fresh=group.rank == 1)

    run_threads(2, body)


class Watched(dict[str, Any]):
    """A state that calls `then` when room is made for a missing array: every rank has its manifest by then."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.then()


def test_a_chunk_that_is_not_what_its_donor_announced_comes_from_another(caplog: pytest.LogCaptureFixture) -> None:
    right = bits(3, 2 * STATE_CHUNK_BYTES)
    states = [{"w": right.copy()}, {"w": right.copy()}]

    def corrupt() -> None:
        states[0]["w"][7] ^= 1

    def body(group: Group) -> RestoreReport:
        mine = states[group.rank] if group.rank < 2 else Watched(corrupt)
        report = restore(group, mine, fresh=group.rank == 2)
        if group.rank == 2:
            check(mine, {"w": right})
        return report

    with caplog.at_level(logging.WARNING, "covey"):
        reports = run_threads(3, body)
    assert [each.bytes_received for each in reports] == [0, 0, 3 * STATE_CHUNK_BYTES]
    span = f"bytes 0 to {STATE_CHUNK_BYTES} of 'w'"
    text = f"rank 0 sent {span} that differ from those it announced; they are fetched from another rank"
    assert [each.getMessage() for each in caplog.records] == [f"restore: {text}"]


def test_if_no_donor_keeps_its_word_all_ranks_raise_and_the_group_goes_on() -> None:
    given = {"w": np.arange(9)}

    def corrupt() -> None:
        given["w"][0] = 5

    def body(group: Group) -> None:
        mine = given if group.rank == 0 else Watched(corrupt)
        with pytest.raises(MismatchError, match="rank 1 could not be restored: rank 0 sent bytes 0 to 72"):
            restore(group, mine, fresh=group.rank == 1)
        assert restore(group, mine, fresh=group.rank == 1, on_drift="raise").receivers == ()  # it has what came
        check(mine, {"w": np.array([5, *range(1, 9)])})

    run_threads(2, body)


def lose_a_rank(group: Group, mine: dict[str, Any], *, fresh: bool, lost: int) -> None:
    """Take part in a restore in which a rank is lost."""
    with pytest.raises(PeerLostError) as caught:
        restore(group, mine, fresh=fresh, timeout=SECONDS)
    assert caught.value.rank == lost


def test_what_a_donor_that_leaves_has_not_given_comes_from_the_others() -> None:
    """The group is one that fails when a rank is missing, so it ends in an error; but the state is whole by then."""
    right = bits(4, 6 * STATE_CHUNK_BYTES)

    def body(group: Group) -> None:
        mine = {"w": right.copy()} if group.rank < 2 else {}
        if group.rank == 0:
            give_one_chunk(group, mine, 2)
            return
        lose_a_rank(group, mine, fresh=group.rank == 2, lost=0)
        check(mine, {"w": right})

    run_threads(3, body)


def test_if_the_only_donor_leaves_the_receiver_says_so_and_keeps_what_it_has() -> None:
    right = bits(4, 3 * STATE_CHUNK_BYTES)

    def body(group: Group) -> None:
        if group.rank == 0:
            give_one_chunk(group, {"w": right.copy()}, 1)
            return
        mine: dict[str, Any] = {}
        lose_a_rank(group, mine, fresh=True, lost=0)
        assert (mine["w"][:STATE_CHUNK_BYTES] == right[:STATE_CHUNK_BYTES]).all()
        assert not mine["w"][STATE_CHUNK_BYTES:].any()

    run_threads(2, body)


def test_a_receiver_that_leaves_does_not_keep_the_donors_from_the_others() -> None:
    right = bits(4, 3 * STATE_CHUNK_BYTES)

    def body(group: Group) -> None:
        mine = {"w": right.copy()} if group.rank == 0 else {}
        if group.rank == 1:
            leave_before_receiving(group)
            return
        lose_a_rank(group, mine, fresh=group.rank == 2, lost=1)
        check(mine, {"w": right})

    run_threads(3, body)


def test_a_rank_that_never_comes_ends_in_a_deadline_and_not_in_a_hang() -> None:
    done = threading.Barrier(3)

    def body(group: Group) -> None:
        if group.rank < 2:
            with pytest.raises(DeadlineError) as caught:
                restore(group, {"w": np.ones(4) * group.rank}, timeout=2.0)
            assert caught.value.late == (2,)
        done.wait(DEADLINE)

    run_threads(3, body)


def test_progress_is_shown_when_asked_for_and_never_otherwise(capfd: pytest.CaptureFixture[str]) -> None:
    def body(group: Group, progress: bool | None) -> None:
        restore(group, {"w": np.full(1 << 20, group.rank)}, fresh=group.rank == 1, progress=progress)

    for quiet in (None, False):
        run_threads(2, body, quiet)
        assert capfd.readouterr() == ("", "")
    run_threads(2, body, True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "restoring" in err
    assert "8.4/8.4 MB" in err


def restore_then_lose_a_donor(nbytes: int, on_loss: covey.OnLoss) -> None:
    from tests.support.restoring import bits, give_one_chunk, restore

    with covey.join(on_loss=on_loss) as group:
        right = bits(6, nbytes)
        mine = {"w": right.copy() if group.rank < 2 else bits(group.rank, nbytes), "step": group.rank // 2}
        report = restore(group, mine, fresh=group.rank == 2, timeout=DEADLINE)
        say("restored", whole=bool((mine["w"] == right).all()), step=mine["step"], received=report.bytes_received)
        mine = {"w": right if group.rank < 2 else np.zeros(nbytes, np.uint8)}
        if group.rank == 0:
            give_one_chunk(group, mine, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        told = attempt(lambda: restore(group, mine, fresh=group.rank == 2, timeout=DEADLINE).receivers)
        say("again", whole=bool((mine["w"] == right).all()), contributors=group.contributors, **told)


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_a_donor_that_is_killed_ends_the_restore_or_is_done_without(on_loss: str) -> None:
    nbytes = 4 * STATE_CHUNK_BYTES + 3
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    with Ranks(3, restore_then_lose_a_donor, nbytes, on_loss, lanes="unix", env={"PYTHONPATH": path}) as ranks:
        restored = ranks.hear("restored")
        assert [(each["whole"], each["step"], each["received"]) for each in restored] == [
            *[(True, 0, 0)] * 2,
            (True, 0, nbytes + 2),
        ]
        for again in ranks.hear("again", (1, 2)):
            if on_loss == "raise":
                assert (again["error"], again["rank"]) == ("PeerLostError", 0)
            else:
                assert again["error"] is None, again
                assert (again["result"], again["whole"], again["contributors"]) == ([2], True, [1, 2])
