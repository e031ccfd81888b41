"""What a waiting node tells a command that asks: the cause, its terms, and what is in its way, all of it bounded."""

from __future__ import annotations

import random
from typing import Any

from covey.proto.formation import Formation
from covey.proto.lineages import Lineages
from covey.runtime.joining.situation import bare_reason, of_joiner
from covey.wire import messages
from covey.wire.formation import FoundingMember, Here, Phase, Remembered, Terms, new_lineage

TERMS = Terms("train", "train.py", 3, 2, None, "1", "auto")
LINEAGE = new_lineage(1000.0, b"l" * 10)


def member(name: str, host: str = "north") -> FoundingMember:
    return FoundingMember(name[0].encode() * 32, name.encode().ljust(16, b"."), name, host, b"")


def formation(terms: Terms = TERMS, **options: Any) -> Formation:
    return Formation(member("a"), terms, random.Random(1), 0.0, **options)


def meet(core: Formation, name: str, terms: Terms = TERMS, **said: Any) -> None:
    other = member(name)
    core.link_up(other.id, other.life, 0.0)
    hears = said.pop("hears", (member("a").life,))
    core.received(other.id, Here(terms, other, hears, said.pop("phase", Phase.JOINING), **said), 0.0)


def wait_of(core: Formation, problems: dict[str, str] | None = None, seeds: tuple[str, ...] = ()) -> messages.Wait:
    wait = of_joiner(core, TERMS, problems or {}, seeds)
    assert wait is not None
    return wait


def test_a_node_with_too_few_others_waits_for_nodes_and_tells_its_terms() -> None:
    core = formation()
    meet(core, "b")
    wait = wait_of(core)
    assert (wait.cause, wait.here) == ("nodes", ("a", "b"))
    assert (wait.program, wait.size, wait.min_size, wait.max_size) == ("train.py", 3, 2, None)
    assert (wait.version, wait.lanes, wait.on_loss) == ("1", "auto", "raise")
    assert wait.text


def test_seeds_refused_nodes_and_other_problems_are_told_apart() -> None:
    core = formation()
    meet(core, "b", Terms("train", "other.py", 3, 2, None, "1", "auto"))
    problems = {
        "10.0.0.1": "cannot be reached: 10.0.0.1:47700: Connection refused",
        "b": "old",
        "c (10.0.0.3)": "denied",
    }
    wait = wait_of(core, problems, ("10.0.0.1", "10.0.0.2"))
    assert wait.seeds == (messages.AddressTrouble("10.0.0.1", "10.0.0.1:47700: Connection refused"),)
    assert [trouble.where for trouble in wait.refused] == ["b"]
    assert "other.py" in wait.refused[0].why
    assert wait.problems == (messages.AddressTrouble("c (10.0.0.3)", "denied"),)


def test_what_is_told_is_bounded_and_fits_into_a_message_whatever_was_heard() -> None:
    seeds = tuple(f"10.0.0.{number}" for number in range(100))
    problems = {where: "\x1b[31m" + "x" * 9999 for where in (*seeds, *(f"node {number}" for number in range(100)))}
    wait = wait_of(formation(), problems, seeds)
    assert len(wait.seeds) == len(wait.problems) == messages.TROUBLES_LIMIT
    assert all("\x1b" not in trouble.why and len(trouble.why) <= 1000 for trouble in (*wait.seeds, *wait.problems))
    tell = messages.Tell("train", "joining", b"", b"", 1.0, (), wait=wait)
    assert messages.decode_control(messages.encode(tell)) == tell


def test_nodes_that_do_not_hear_each_other_are_the_cause_when_enough_are_here() -> None:
    core = formation()
    meet(core, "b")
    meet(core, "c")
    assert wait_of(core).cause == "links"


def test_an_earlier_run_and_one_that_goes_on_are_causes_of_their_own() -> None:
    lineages = Lineages(Remembered())
    lineages.learn(LINEAGE, ("a", "z"), is_ours=True)
    core = formation(lineages=lineages)
    assert (wait_of(core).cause, wait_of(core).missing) == ("earlier-run", ("a", "z"))
    meet(core, "z", phase=Phase.FORMED, names=("a", "z"), lineage=LINEAGE)
    assert wait_of(core).cause == "run"


def test_a_node_that_is_in_a_view_waits_for_nothing() -> None:
    core = formation(Terms("train", "train.py", 1, 1, None, "1", "auto"))
    core.tick(10.0)
    assert core.formed is not None
    assert of_joiner(core, TERMS, {}, ()) is None


def test_a_reason_does_not_name_its_place_twice() -> None:
    why = "cannot be reached: 10.0.0.1:47700: Connection refused"
    assert bare_reason("10.0.0.1:47700", why) == "Connection refused"
    assert bare_reason("10.0.0.1", why) == "10.0.0.1:47700: Connection refused"
    assert bare_reason("10.0.0.1", "the disk is full") == "the disk is full"
