"""Questions about metrics and operations: what is answered, and to whom."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

import covey
from covey.runtime.joining.node import node_of
from covey.runtime.metrics.inspection import (
    INSPECTIONS_BURST,
    INSPECTIONS_TOTAL_BURST,
    PacedAnswers,
    answer,
    answer_keeper,
)
from covey.runtime.metrics.samples import samples
from covey.runtime.peers.peer_table import Inbox
from covey.testing.threads import run_threads
from covey.wire import messages, reports

METRICS, OPERATIONS = messages.Inspect("metrics"), messages.Inspect("operations")


def test_pages_hold_one_group_each() -> None:
    def work(group: covey.Group) -> list[reports.Flight]:
        with group.split(0) as other:
            group.all_reduce(np.ones(10))
            other.barrier()
            first = answer(OPERATIONS)
            group.barrier()
            pages = [answer(messages.Inspect("operations", page)) for page in range(first.pages + 1)]
            group.barrier()
        assert [page.pages for page in pages] == [first.pages] * len(pages)
        return [reports.decode_flight(page.body) for page in pages]

    *pages, beyond = run_threads(2, work)[0]
    assert [len(page.groups) for page in pages] == [1] * len(pages)
    assert beyond.groups == ()
    names = [(page.groups[0].name, page.groups[0].rank) for page in pages]
    assert len(names) == len(set(names)) == 4
    for page in pages:
        (group,) = page.groups
        kinds = {operation.operation for operation in group.operations}
        assert kinds <= ({10} if "/" in group.name else {0, 10, 15})
        assert all(operation.ended_ns >= operation.begun_ns > 0 for operation in group.operations if operation.outcome)


def test_what_is_told_has_names_and_numbers_only() -> None:
    secret = "the name of a private array"

    def work(group: covey.Group) -> None:
        group.all_reduce(np.full(100, 12345.678), name=secret)
        group.all_gather_object(secret)
        for question in (METRICS, OPERATIONS):
            told = answer(question).body
            assert secret.encode() not in told
            assert np.full(1, 12345.678).tobytes() not in told

    run_threads(2, work)
    assert reports.decode_samples(answer(METRICS).body).samples


def test_heartbeats_are_counted_and_compare_clocks() -> None:
    def work(group: covey.Group) -> None:
        node = node_of(group)
        assert node is not None
        deadline = time.monotonic() + DEADLINE
        while not node.views.clocks.offsets():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        group.barrier()
        (offset,) = node.views.clocks.offsets().values()
        assert abs(offset) < 1, "threads of one process have one clock"

    run_threads(2, work)
    values = {sample.name: sample.value for sample in reports.decode_samples(answer(METRICS).body).samples}
    assert values["covey_heartbeats_sent_total"] >= values["covey_heartbeats_answered_total"] >= 2


def test_calls_are_counted_where_they_are_made_and_where_they_are_served() -> None:
    def counts() -> list[float]:
        values = {sample.name: sample.value for sample in samples()}
        return [values[f"covey_{name}_total"] for name in ("calls", "call_failures", "calls_served")]

    def work(group: covey.Group) -> None:
        group.node.register("halve", lambda number: number / 2 if number else 1 / 0)
        group.barrier()
        if group.rank == 0:
            assert group.call(1, "halve", 8) == 4
            with pytest.raises(covey.RemoteCallError):
                group.call(1, "halve", 0)
        group.barrier()

    before = counts()
    run_threads(2, work)
    assert [after - old for after, old in zip(counts(), before, strict=True)] == [2, 1, 2]


def test_an_unknown_question_has_no_pages() -> None:
    assert answer(messages.Inspect("secrets")) == messages.Inspected("secrets", 0, 0, b"")


def told_to(answers: PacedAnswers, question: messages.Inspect, key: bytes) -> messages.Inspected:
    """Return what a node with this key is told."""
    told: list[messages.Inspected] = []
    answers.answer(question, key, told.append)
    return told[0]


def test_a_key_that_asks_too_often_is_told_nothing_and_others_are() -> None:
    answers = PacedAnswers()
    told = [told_to(answers, METRICS, b"a").pages for _ in range(int(INSPECTIONS_BURST) + 30)]
    assert told[: int(INSPECTIONS_BURST)] == [1] * int(INSPECTIONS_BURST)
    assert told[-1] == 0 or sum(told) < len(told)
    assert told_to(answers, METRICS, b"b").pages == 1


def test_many_keys_together_are_told_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    answers = PacedAnswers()
    told = [told_to(answers, METRICS, bytes([key])).pages for key in range(200)]
    assert sum(told) == INSPECTIONS_TOTAL_BURST


def test_ranks_of_one_machine_do_not_answer_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    taken = Inbox.heard

    def note(inbox: Inbox, seat: Any, message: Any) -> None:
        heard.append(message)
        taken(inbox, seat, message)

    monkeypatch.setattr(Inbox, "heard", note)

    def work(group: covey.Group) -> None:
        node = node_of(group)
        assert node is not None
        if group.rank == 0:
            others = tuple(node.peers)
            for question in (METRICS, OPERATIONS, messages.Ping(77)):
                node.peers.tell(others, question)
            deadline = time.monotonic() + DEADLINE
            while not any(isinstance(each, messages.Pong) and each.number == 77 for each in list(heard)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        group.barrier()

    run_threads(2, work)
    assert METRICS in heard
    assert not any(isinstance(each, messages.Inspected) for each in heard)


def test_checks_and_stacks_are_told_to_the_keeper_only() -> None:
    told: list[messages.Inspected] = []
    for what in ("stacks", "checks"):
        assert told_to(PacedAnswers(), messages.Inspect(what), b"key") == messages.Inspected(what, 0, 0, b"")
        answer_keeper(messages.Inspect(what), told.append)
    deadline = time.monotonic() + DEADLINE
    while len(told) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stacks, checks = told
    assert b"test_checks_and_stacks" not in stacks.body  # all threads but the one that tells
    assert b"covey-control" in stacks.body
    assert [each.name for each in reports.decode_checks(checks.body).results][:1] == ["joined"]
