"""What programs are told of errors."""

from __future__ import annotations

import string
import urllib.parse

import grpc
from tests.support.in_turn import in_turn

from covey.base import errors
from covey.base.errors import CoveyError, DeadlineError, PeerLostError, QuorumLostError
from covey.base.text import printable
from covey.coordinator.refusal import Reason, RefusalError
from covey.gateway.failures import STATUS_TEXT_LIMIT, failure_of

PLAIN = " " + string.punctuation.replace("%", "")
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CoveyError)]


@in_turn(kind=KINDS)
def test_every_error_of_covey_has_a_status_and_says_what_to_do(kind: type[CoveyError]) -> None:
    error = kind.__new__(kind)
    error.args = ("x" * 10_000,)
    for name, value in (("rank", 1), ("late", (1,)), ("missing", (1,))):
        setattr(error, name, value)
    failure = failure_of(error, "open")
    assert hasattr(grpc.StatusCode, failure.status)
    assert failure.status not in ("OK", "UNKNOWN")
    details = dict(failure.details)
    assert (details["covey-error"], details["covey-group"]) == (kind.__name__, "open")
    assert details["covey-remedy"] == kind.remedy.name
    assert len(failure.text) <= STATUS_TEXT_LIMIT


def test_the_ranks_of_an_error_can_be_read_by_a_program() -> None:
    for error, status in (
        (PeerLostError("gone", rank=3), "ABORTED"),
        (DeadlineError("late", late=(3,)), "DEADLINE_EXCEEDED"),
        (QuorumLostError("few", missing=(3,)), "ABORTED"),
    ):
        failure = failure_of(error, "over")
        assert (failure.status, dict(failure.details)["covey-ranks"]) == (status, "3")
    failure = failure_of(DeadlineError("late", late=(1, 4)), "over")
    assert dict(failure.details)["covey-ranks"] == "1,4"
    assert "covey-ranks" not in dict(failure_of(PeerLostError("any", rank=-1), "over").details)


@in_turn(text=["plain " * 1000, "\u4e16" * 1000, "100 %" * 1000, "\u00e9\n" * 1000])
def test_a_text_of_any_alphabet_fits_into_a_status(text: str) -> None:
    """gRPC writes the bytes of a status that are no plain letters as %XX; a longer one is an error without details."""
    told = failure_of(PeerLostError(text, rank=1), "over").text
    assert STATUS_TEXT_LIMIT - 20 < len(urllib.parse.quote(told, safe=PLAIN)) <= STATUS_TEXT_LIMIT
    assert told[:9] == printable(text)[:9]
    assert told.endswith("...")


def test_each_reason_of_a_refusal_is_a_status() -> None:
    for reason in Reason:
        assert hasattr(grpc.StatusCode, failure_of(RefusalError(reason, "no"), "none").status)
