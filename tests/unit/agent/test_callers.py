"""Which machines `--on` means, whatever names nodes claim."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.seeds import examples

from covey.agent.callers import Selection, select
from covey.base.errors import ConfigError
from covey.net.keys.identity import id_text, machine_name
from covey.net.keys.trust import TrustedMachine

NORTH, SOUTH, EVIL, OTHER = (bytes([number]) * 32 for number in (1, 2, 3, 4))


def called(name: str, machine: bytes) -> str:
    return machine_name(f"{name}-xxxx", machine)


def trusted(**machines: bytes) -> dict[bytes, TrustedMachine]:
    return {machine: TrustedMachine(called(name, machine)) for name, machine in machines.items()}


def claims(*machines: tuple[str, bytes]) -> dict[bytes, str]:
    return {machine: called(name, machine) for name, machine in machines}


def test_a_name_means_the_trusted_machine_of_that_name_whoever_else_claims_it() -> None:
    there = claims(("north", NORTH), ("north", EVIL), ("south", SOUTH))
    for word in ("north", "NORTH", "north.example.org", called("north", NORTH), id_text(NORTH), id_text(NORTH)[:6]):
        assert select([word], there, trusted(north=NORTH)) == Selection((NORTH,), ()), word
    assert select(["south", "north"], there, trusted(north=NORTH, south=SOUTH)).trusted == (SOUTH, NORTH)


def test_a_machine_that_claims_the_name_of_one_that_is_off_is_an_error_that_names_both_keys() -> None:
    with pytest.raises(ConfigError, match="Nothing was sent") as raised:
        select(["north"], claims(("north", EVIL)), trusted(north=NORTH))
    assert id_text(NORTH) in str(raised.value)
    assert id_text(EVIL) in str(raised.value)
    assert f"`covey trust {id_text(NORTH)} --undo`" in str(raised.value)
    by_owner = {NORTH: TrustedMachine(called("north", NORTH), by_owner=True)}
    with pytest.raises(ConfigError, match=f"`covey allow {id_text(NORTH)} --undo`"):
        select(["north"], claims(("north", EVIL)), by_owner)
    with pytest.raises(ConfigError, match=r"was not found; does `covey up` run there"):
        select(["north"], claims(("south", SOUTH)), trusted(north=NORTH))


def test_machines_that_are_not_trusted_are_new_and_two_of_one_name_are_told_apart_by_id() -> None:
    assert select(["north"], claims(("north", EVIL)), trusted(south=SOUTH)) == Selection((), (EVIL,))
    both = claims(("north", NORTH), ("north", EVIL))
    with pytest.raises(ConfigError, match="means several machines") as raised:
        select(["north"], both, {})
    assert id_text(NORTH) in str(raised.value)
    assert id_text(EVIL) in str(raised.value)
    for word in (id_text(NORTH), NORTH.hex()):
        assert select([word], both, {}) == Selection((), (NORTH,))
    with pytest.raises(ConfigError, match="means several machines"):
        select(["north"], {}, trusted(north=NORTH) | {EVIL: TrustedMachine(called("north", EVIL))})


def test_a_trusted_machine_that_calls_itself_otherwise_is_not_taken_for_another_one() -> None:
    with pytest.raises(ConfigError, match=f"is {called('south', SOUTH)} .* for this one; use that name, or the id"):
        select(["north"], claims(("north", SOUTH)), trusted(south=SOUTH))
    nameless = {SOUTH: TrustedMachine("", by_owner=True)}
    with pytest.raises(ConfigError, match=f"is {id_text(SOUTH)} for this one"):
        select(["north"], claims(("north", SOUTH)), nameless)
    assert select([id_text(SOUTH)], claims(("north", SOUTH)), nameless).trusted == (SOUTH,)


def test_what_is_not_there_is_named_with_what_is() -> None:
    with pytest.raises(ConfigError, match=rf"no agent 'west' was found \(there: {called('north', NORTH)} .*\)"):
        select(["west"], claims(("north", NORTH)), trusted(north=NORTH))
    with pytest.raises(ConfigError, match=r"no agent 'west' was found \(there: none\)"):
        select(["west"], {}, {})


HOSTS = st.sampled_from(("north", "south", "west"))
MACHINES = st.sampled_from((NORTH, SOUTH, EVIL, OTHER))


@given(st.dictionaries(MACHINES, HOSTS), st.dictionaries(MACHINES, HOSTS), HOSTS)
@settings(max_examples=examples(300))
def test_no_claim_makes_a_word_mean_another_machine_than_the_trusted_one(
    there: dict[bytes, str], bound: dict[bytes, str], word: str
) -> None:
    book = {machine: TrustedMachine(called(name, machine)) for machine, name in bound.items()}
    meant = [machine for machine, name in bound.items() if name == word]
    try:
        found = select([word], claims(*((name, machine) for machine, name in there.items())), book)
    except ConfigError:
        assert len(meant) != 1 or meant[0] not in there, "nobody can block a name that means one machine"
        return
    if meant:
        assert found == Selection((meant[0],), ())
    else:
        assert found.trusted == (), "a trusted machine is known by its own name only"
        assert [there[machine] for machine in found.new] == [word]
