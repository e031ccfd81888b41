"""Ranks on the workers of an engine: which worker gets which, and what becomes of their reports."""

from __future__ import annotations

import os
import pickle
import socket
from typing import TYPE_CHECKING

import pytest

from covey.base.errors import ConfigError, DeadlineError, PeerLostError, RankFailedError
from covey.engines.seats import Site, collect, free_pair, need_workers, seat_workers, sit
from covey.net.keys import secret_sources
from covey.runtime.environment import find_launched_rank
from covey.runtime.keeper.reports import CallReport, report_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NORTH, SOUTH = Site("north", "192.0.2.1", 4000), Site("south", "192.0.2.2", 5000)


def test_workers_of_one_machine_get_consecutive_ranks_and_the_first_worker_rank_0() -> None:
    seats = seat_workers("ray", [NORTH, SOUTH, NORTH, SOUTH, SOUTH])
    assert [seat.rank for seat in seats] == [0, 2, 1, 3, 4]
    assert [(seat.local_rank, seat.local_size) for seat in seats] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert {(seat.size, seat.first, seat.run, seat.secret) for seat in seats} == {
        (5, NORTH, seats[0].run, seats[0].secret)
    }
    assert seats[0].secret not in repr(seats)
    assert seat_workers("ray", [NORTH])[0].secret != seats[0].secret


def test_join_reads_the_variables_of_a_seat() -> None:
    launched = [find_launched_rank(seat.variables) for seat in seat_workers("ray", [NORTH, SOUTH, SOUTH])]
    assert [(each.rank, each.size, each.local_rank) for each in launched] == [(0, 3, 0), (1, 3, 0), (2, 3, 1)]
    assert {each.addresses for each in launched} == {(("192.0.2.1", 4001),)}
    together = [find_launched_rank(seat.variables) for seat in seat_workers("ray", [NORTH, NORTH])]
    assert len({each.folder for each in together} - {""}) == 1
    assert {each.name.partition("-")[0] for each in (*launched, *together)} == {"ray"}


def test_a_process_sits_in_one_seat_at_a_time_and_gets_its_variables_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("COVEY_RUN", "another")
    before = dict(os.environ)
    [seat] = seat_workers("ray", [NORTH])

    def look(group: object, more: int) -> tuple[str, int, CallReport]:
        return os.environ["RANK"], more, sit(seat, look, (0,), {}, pickle.dumps)

    report = sit(seat, look, (3,), {}, pickle.dumps)
    rank, more, within = pickle.loads(report.body)
    assert (rank, more) == ("0", 3)
    assert isinstance(within.failure(0, 1), ConfigError)
    assert dict(os.environ) == before


def test_a_seat_leaves_no_secret_behind_with_which_the_process_would_join_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path))
    [seat] = seat_workers("ray", [NORTH])
    assert sit(seat, lambda group: group.all_reduce(3), (), {}, pickle.dumps).ok
    with pytest.raises(ConfigError, match="home"):
        secret_sources.find("home", {})


def test_two_ports_are_free() -> None:
    port = free_pair()
    with socket.create_server(("", port)), socket.create_server(("", port + 1)):
        pass


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "2"])
def test_a_number_of_workers_is_a_number(number: int) -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        need_workers(number)


def failing(error: Exception) -> CallReport:
    def call() -> bytes:
        raise error

    return report_of(call)


def done(value: object) -> CallReport:
    return CallReport(ok=True, body=pickle.dumps(value))


def collected(
    *rounds: Iterable[tuple[int, CallReport | str]], timeout: float | None = 30.0, tolerate: bool = False
) -> list[object]:
    left = list(rounds)

    def wait(seconds: float | None) -> Iterable[tuple[int, CallReport | str]]:
        return left.pop(0) if left else ()

    return collect(3, wait, pickle.loads, timeout=timeout, tolerate_losses=tolerate)


def test_results_come_by_rank_whichever_ends_first() -> None:
    assert collected([(2, done("c"))], [], [(0, done("a")), (1, done("b"))]) == ["a", "b", "c"]


def test_the_failure_that_explains_most_is_raised_with_its_rank() -> None:
    symptom = failing(PeerLostError("rank 2 is lost", rank=2))
    with pytest.raises(ValueError, match="cause") as caught:
        collected([(0, symptom)], [(2, failing(ValueError("cause")))], [(1, symptom)])
    assert "raised in rank 2 of 3" in caught.value.__notes__[0]


def test_a_lost_worker_is_a_failure_or_a_missing_result() -> None:
    ended: list[tuple[int, CallReport | str]] = [(0, done(1)), (1, "its machine is gone"), (2, done(3))]
    assert collected(ended, tolerate=True) == [1, None, 3]
    with pytest.raises(RankFailedError, match="rank 1 of 3 is lost: its machine is gone"):
        collected(ended)
    with pytest.raises(RankFailedError):
        collected([(rank, "gone") for rank in range(3)], tolerate=True)


def test_ranks_that_are_late_are_named() -> None:
    with pytest.raises(DeadlineError, match=r"rank 0, 2 of 3 within the timeout of 0\.01 s"):
        collected([(1, done(1))], timeout=0.01)
