"""What strangers and hostile ranks can do to a collector: nothing is told without the token, and all is bounded."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from tests.io.test_local_runs import found_run

from covey.runtime.peers.local_visit import LocalVisit
from covey.testing.threads import run_threads
from covey.watch.asking import has_pages, read_progress, read_reports
from covey.wire import messages
from covey.wire.progress import RankProgress, encode

if TYPE_CHECKING:
    import covey

PROGRESS = messages.Inspect("progress")


def test_without_the_token_no_rank_tells_its_progress_and_with_it_each_does() -> None:
    def body(group: covey.Group) -> None:
        run = found_run(group)
        group.report(step=1, loss=0.5)
        group.barrier()
        if group.rank == 0:
            stranger = LocalVisit(run, secrets.token_bytes(32))
            stranger.link(20.0)
            assert stranger.ask(PROGRESS, 1.0) == {}
            known = LocalVisit(run, run.token())
            known.link(20.0)
            answers = known.ask(PROGRESS, 20.0)
            assert len(answers) == 2
            assert all(read_progress(answer) is not None for answer in answers.values())
            known.leave()
        group.barrier()

    run_threads(2, body)


def test_answers_that_cannot_be_read_are_no_answers() -> None:
    for body in (b"", b"\xc1", encode(["x"] * 5), encode([0] * 100_000), b"\xdc\xff\xff" + b"\x00" * 10):
        assert read_progress(messages.Inspected("progress", 0, 1, body)) is None
        assert read_reports(messages.Inspected("reports", 0, 1, body)) is None
    assert not has_pages(messages.Inspected("progress", 0, 0, b""))


def test_names_of_a_hostile_rank_are_shown_as_printable_text() -> None:
    told = RankProgress("\x1b[2J<img>", b"", 0, 0, 0, 1, 1, 0.0, 1, 0, 0, 0, 0, 0, 1, "host", "1")
    read = read_progress(messages.Inspected("progress", 0, 1, encode(told)))
    assert read is not None
    assert read.run == "\\x1b[2J<img>"
