"""Invented generations: a node enters only those that members of its run tell of, under its own terms."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.attackers import BROKEN, Insider, Victim, call_on_loop, card_of, new_cluster, victim
from tests.support.runs import SURVIVING, ThreadRun, here
from tests.support.waiting import DEADLINE

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.net.keys.identity import NodeIdentity
from covey.wire import messages
from covey.wire.formation import Phase, Terms

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.group.group import Group

LINEAGE, OTHER = bytes(15) + b"l", bytes(15) + b"k"
PAIR = Terms("run", "program", 2, 2, 2, f"{messages.VERSION}", "secure")


def joining(size: int) -> contextlib.AbstractContextManager[Victim]:
    """A node in the middle of `join(size=...)`."""
    return victim(new_cluster(), terms=terms_of(size))


def terms_of(size: int, **changes: Any) -> Terms:
    return msgspec.structs.replace(PAIR, size=size, min_size=size, max_size=size, **changes)


def founded(members: list[messages.Card], *, seats: list[int] | None = None, **changes: Any) -> messages.Founded:
    """Return a generation that is in order, but for the changes."""
    seated = tuple(
        messages.SeatedMember(Seat(seat), card)
        for seat, card in zip(seats or range(len(members)), members, strict=True)
    )
    values: dict[str, Any] = {
        "generation": 1,
        "lineage": LINEAGE,
        "is_kept": False,
        "members": seated,
        "origin": LINEAGE,
    }
    values |= changes
    known = messages.Founded.__struct_fields__
    return messages.Founded(**{name: value for name, value in values.items() if name in known})


def formed(insider: Insider, terms: Terms = PAIR, lineage: bytes = LINEAGE) -> messages.Forming:
    return here(insider, terms, (), phase=Phase.FORMED, names=("other",), lineage=lineage)


def is_waiting(prey: Victim) -> bool:
    """Tell whether a node has not joined anything, after all that it heard."""
    joiner = prey.joiner
    return call_on_loop(lambda: not joiner._formed.done() and not joiner._founded.done())


def ghost(**changes: Any) -> messages.Card:
    return card_of(NodeIdentity.ephemeral(), **changes)


SAYS_NOTHING: dict[str, Callable[[Insider], list[messages.Control]]] = {
    "it said nothing of itself": lambda _: [],
    "it gathers": lambda liar: [here(liar, PAIR, ())],
    "it waits for that run": lambda liar: [here(liar, PAIR, (), lineage=LINEAGE)],
    "it has accepted a proposal": lambda liar: [here(liar, PAIR, (), phase=Phase.LOCKED, lineage=LINEAGE)],
    "its run has another name": lambda liar: [formed(liar, msgspec.structs.replace(PAIR, run="another"))],
    "its program is another": lambda liar: [formed(liar, msgspec.structs.replace(PAIR, program="other.py"))],
    "its size is another": lambda liar: [formed(liar, terms_of(3))],
    "it survives losses, and we do not": lambda liar: [formed(liar, msgspec.structs.replace(PAIR, on_loss="continue"))],
    "its run is of another lineage": lambda liar: [formed(liar, lineage=OTHER)],
}


@pytest.mark.parametrize("words", SAYS_NOTHING.values(), ids=SAYS_NOTHING)
@pytest.mark.parametrize("purpose", ["candidate", "visitor", "keeper"])
def test_a_generation_is_believed_only_from_a_member_that_is_formed_under_our_terms(
    words: Callable[[Insider], list[messages.Control]], purpose: str
) -> None:
    with joining(2) as prey, Insider(prey, purpose=purpose) as liar, contextlib.suppress(*BROKEN):
        for word in words(liar):
            liar.say(word)
        for members in ([prey.node.card], [liar.card, prey.node.card], [prey.node.card, ghost()]):
            liar.say(founded(members))
            liar.ping()
            assert is_waiting(prey)
    assert is_waiting(prey)


IMPOSSIBLE: dict[str, Callable[[messages.Card, messages.Card], messages.Founded]] = {
    "we are alone in it": lambda mine, _: founded([mine]),
    "its teller is not in it": lambda mine, _: founded([mine, ghost()]),
    "its teller is another life in it": lambda mine, liar: founded(
        [mine, msgspec.structs.replace(liar, life=bytes(16))]
    ),
    "we are another life in it": lambda mine, liar: founded([msgspec.structs.replace(mine, life=bytes(16)), liar]),
    "another node has our life in it": lambda mine, liar: founded([ghost(life=mine.life), liar]),
    "too many are in it": lambda mine, liar: founded([mine, liar, ghost()]),
    "a seat twice": lambda mine, liar: founded([mine, liar], seats=[4, 4]),
    "a node twice": lambda mine, liar: founded([mine, liar, msgspec.structs.replace(liar, life=b"x" * 16)]),
    "an id that is none": lambda mine, liar: founded([mine, liar, ghost(id=b"short")]),
    "a life that is none": lambda mine, liar: founded([mine, liar, ghost(life=b"short")]),
    "a keeper decides": lambda mine, liar: founded([mine, liar], is_kept=True),
    "its tie-breaker does not exist": lambda mine, liar: founded([mine, liar], tie_breaker=2),
    "it is the first": lambda mine, liar: founded([mine, liar], generation=0),
    "it is before the first": lambda mine, liar: founded([mine, liar], generation=-1),
    "its number fits into no message": lambda mine, liar: founded([mine, liar], generation=1 << 40),
    "its lineage is none": lambda mine, liar: founded([mine, liar], lineage=b"short"),
    "it is of another run": lambda mine, liar: founded([mine, liar], origin=OTHER),
}


@pytest.mark.parametrize("lie", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_generation_that_cannot_be_is_not_entered(lie: Callable[..., messages.Founded]) -> None:
    with joining(2) as prey, Insider(prey) as liar:
        liar.say(formed(liar))
        with contextlib.suppress(*BROKEN):
            liar.say(lie(prey.node.card, liar.card))
            liar.ping()
        assert is_waiting(prey)


def test_a_program_that_asked_for_three_is_not_in_a_generation_of_two() -> None:
    terms = terms_of(3)
    with joining(3) as prey, Insider(prey) as liar:
        liar.say(formed(liar, terms))
        with contextlib.suppress(*BROKEN):
            liar.say(founded([liar.card, prey.node.card]))
            liar.ping()
        assert is_waiting(prey)
    with joining(3) as prey, Insider(prey) as honest:
        honest.say(formed(honest, terms))
        honest.say(founded([honest.card, ghost(), prey.node.card]))
        honest.ping()
        assert not is_waiting(prey), "a whole one is entered, as members told"


NONSENSE: dict[str, Any] = {
    "nothing": None,
    "a number": 7,
    "an empty dictionary": {},
    "cards that are none": {"lobby": b"\xc1", "leaves": False, "next": 3, "late": False, "rival": ""},
    "a lobby of words": {"lobby": ["x"], "leaves": False, "next": 3, "late": False, "rival": ""},
    "a seat that is no number": {"lobby": b"\x90", "leaves": False, "next": "x", "late": False, "rival": ""},
    "a seat beyond all": {"lobby": b"\x90", "leaves": False, "next": 1 << 62, "late": False, "rival": ""},
    "a rival that is no text": {"lobby": b"\x90", "leaves": False, "next": 3, "late": False, "rival": [1]},
}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=() if name in ("nothing", "a seat beyond all") else pytest.mark.thorough)
        for name, words in NONSENSE.items()
    ],
)
def test_a_member_whose_words_about_the_next_generation_are_nonsense_is_not_in_it(words: Any) -> None:
    config = dataclasses.replace(SURVIVING, patience=2.0)
    with ThreadRun(new_cluster(), config, min_size=2, max_size=3) as thread_run:
        together = thread_run.steps(3)

        def work(groups: Any) -> Any:
            has_lied = False
            for group in groups:
                if has_lied:
                    return group.size, group.all_reduce(group.rank + 1)
                if group.size < 3:
                    continue  # two may begin without the third, which gets into the next generation
                together()
                has_lied = True
                if group.rank == 2:
                    lie(group, words)
            return None

        nodes = [thread_run.start(work, elastic=True) for _ in range(3)]
        ends = [outcome(node.result) for node in nodes]
        thread_run.forgive()
    assert sorted(map(str, ends))[:2] == ["(2, 3)", "(2, 3)"]


def lie(group: Group, words: Any) -> None:
    gather = group.all_gather_object

    def gather_lies(_mine: Any) -> Any:
        gather(words)
        time.sleep(0.1)
        raise RemoteProtocolError("the liar is done")

    group.all_gather_object = gather_lies  # type: ignore[assignment]


def outcome(result: Callable[[float], Any]) -> Any:
    try:
        return result(DEADLINE)
    except CoveyError as error:
        return error
