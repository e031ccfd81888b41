"""Two processes speak the highest version that both know, and are refused with words that name what to update."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.seeds import examples

from covey.base.errors import RemoteProtocolError
from covey.lab.fuzz.targets import ODD_VERSIONS, OF_LATER_RELEASES
from covey.wire import formation, messages, versions
from covey.wire.decoding import OPTIONAL_TAGS, SkippedMessageError, UnknownMessageError
from covey.wire.formation import Terms, difference
from covey.wire.versions import Agreement, Disagreement, Speaker, Versions, agree, common, fixed_by, objection, only

NAMES = ("breath", "echo", "lull", "tide")


@st.composite
def spoken(draw: st.DrawFn) -> Versions:
    oldest, newest = sorted((draw(st.integers(1, 9)), draw(st.integers(1, 9))))
    features = tuple(sorted(draw(st.sets(st.sampled_from(NAMES)))))
    required = tuple(sorted(draw(st.sets(st.sampled_from(features)) if features else st.just(set()))))
    return Versions(oldest, newest, features, required)


@given(spoken(), spoken())
@settings(max_examples=examples(300))
def test_two_processes_speak_the_highest_version_and_all_features_that_both_know(
    one: Versions, other: Versions
) -> None:
    found, mirrored = agree(one, other), agree(other, one)
    shared = set(range(one.oldest, one.newest + 1)) & set(range(other.oldest, other.newest + 1))
    features = set(one.features) & set(other.features)
    can_talk = bool(shared) and {*one.required, *other.required} <= features
    assert isinstance(found, Agreement) == can_talk
    if isinstance(found, Agreement):
        assert mirrored == found == Agreement(max(shared), frozenset(features))
        return
    assert isinstance(mirrored, Disagreement)
    assert (found.mine_is_old, found.theirs_is_old) == (mirrored.theirs_is_old, mirrored.mine_is_old)
    assert (found.i_lack, found.they_lack) == (mirrored.they_lack, mirrored.i_lack)
    assert found.mine_is_old or found.theirs_is_old
    if not shared:
        assert found.mine_is_old == (one.newest < other.newest)


@given(st.lists(spoken(), min_size=1, max_size=5))
@settings(max_examples=examples(300))
def test_members_that_can_talk_in_pairs_have_one_version_for_all_and_nobody_who_joins_changes_it(
    members: list[Versions],
) -> None:
    pairs = [agree(one, other) for one, other in itertools.combinations(members, 2)]
    if not all(isinstance(pair, Agreement) for pair in pairs):
        with pytest.raises(ValueError, match="not all members"):
            common(members)
        return
    run = common(members)
    assert run == common(reversed(members))
    assert all(each.oldest <= run.version <= each.newest for each in members)
    assert all(run.features <= set(each.features) for each in members)
    for each in members:
        assert agree(each, run.fixed()) == run


@given(spoken(), st.lists(spoken(), min_size=1, max_size=3))
@settings(max_examples=examples(200))
def test_a_newcomer_speaks_what_the_run_does_or_is_refused(newcomer: Versions, members: list[Versions]) -> None:
    try:
        run = common(members)
    except ValueError:
        return
    if isinstance(found := agree(newcomer, run.fixed()), Agreement):
        assert found == run
    else:
        is_in_range = newcomer.oldest <= run.version <= newcomer.newest
        assert not (is_in_range and set(newcomer.required) <= run.features <= set(newcomer.features))


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (
            Speaker("north", "0.2", Versions(2, 3)),
            Speaker("south", "0.4", Versions(4, 5)),
            "south speaks protocol 4 to 5 (covey 0.4), north speaks 2 to 3 (covey 0.2): update covey on north",
        ),
        (
            Speaker("north", "0.4", only(5)),
            Speaker("south", "", only(3)),
            "south speaks protocol 3 (covey of unknown release), north speaks 5 (covey 0.4): update covey on south",
        ),
        (
            Speaker("north", "0.4", Versions(3, 3, ("tide",), ("tide",))),
            Speaker("south", "0.2", only(3)),
            "north (covey 0.4) needs tide, which south (covey 0.2) does not know: update covey on south",
        ),
        (
            Speaker("north", "a", Versions(3, 3, ("tide",), ("tide",)), pid=1),
            Speaker("north", "b", Versions(3, 3, ("echo",), ("echo",)), pid=2),
            "north (covey a) needs tide, which north (covey b) does not know; north (covey b) needs echo, which north "
            "(covey a) does not know: update covey on north for process 2 and north for process 1",
        ),
        (Speaker("north", "0.2", Versions(2, 4)), Speaker("south", "0.4", Versions(4, 9)), ""),
    ],
)
def test_a_refusal_names_both_releases_and_the_machine_to_update(here: Speaker, there: Speaker, words: str) -> None:
    assert objection(here, there) == words


def test_a_peer_can_put_no_more_than_a_short_escaped_name_into_a_refusal() -> None:
    hostile = Speaker("\x1b[2J" + "x" * 500, "9\n" * 500, only(10**18))
    text = objection(Speaker("north", "0.2"), hostile)
    assert text.isprintable()
    assert len(text) < 4 * versions.RELEASE_LIMIT + 160


def test_impossible_ranges_and_features_are_refused_before_anything_is_compared() -> None:
    hello = [1, 3, b"", "", "", 0, 0, "", [b"", b"", "", "", 0, ["", [], ""]], "raise", None, "", None]
    *wrong, right = ODD_VERSIONS
    for said in wrong:
        with pytest.raises(RemoteProtocolError):
            messages.decode_handshake(msgspec.msgpack.encode([*hello, said]))
    assert isinstance(messages.decode_handshake(msgspec.msgpack.encode([*hello, right])), messages.Hello)


def test_what_does_not_negotiate_speaks_one_version() -> None:
    card = messages.Card(b"", b"", "", "north", 7, messages.Contact("", (), ""), version="0.1")
    assert messages.speaker_of(card, None, 5).versions == only(5)
    terms = Terms("run", "program", None, 1, None, "3", "auto")
    assert terms.speaks == only(3)
    assert msgspec.structs.replace(terms, version="x").speaks == only(0)
    assert fixed_by(None) == Agreement(versions.OLDEST)


def test_terms_of_a_run_say_what_a_newcomer_would_have_to_speak() -> None:
    newer = Terms("run", "p", None, 1, None, "3", "auto", versions=Versions(3, 5, ("tide",)), release="0.4")
    older = Terms("run", "p", None, 1, None, "3", "auto", versions=only(3), release="0.2")
    assert difference(newer, older) == difference(older, newer) == ""
    run = older.fixed(common((newer.speaks, older.speaks)).fixed())
    assert difference(run, newer) == ""
    later = newer.fixed(Agreement(5, frozenset({"tide"})).fixed())
    assert difference(older, later) == ("speaks protocol 5 (covey 0.4), this node 3 (covey 0.2); update covey here")
    using = newer.fixed(Agreement(3, frozenset({"tide"})).fixed())
    assert difference(using, older) == (
        "speaks protocol 3 (covey 0.2), this node 3 (covey 0.4); does not know tide, which this node needs; "
        "update covey there"
    )
    with pytest.raises(ValueError, match="speaks protocol 9"):
        fixed_by(only(9))


def test_messages_of_unknown_types_are_skipped_or_refused_by_their_number() -> None:
    for tag in (OPTIONAL_TAGS, OPTIONAL_TAGS + 7, 1 << 16, (1 << 32) - 1):
        for decode in (messages.decode_control, formation.decode_formation):
            with pytest.raises(SkippedMessageError):
                decode(msgspec.msgpack.encode([tag, "whatever"] * 20))
    for tag in (0, 99, 255, OPTIONAL_TAGS - 1):
        with pytest.raises(UnknownMessageError, match=f"unknown type, {tag}$"):
            messages.decode_control(msgspec.msgpack.encode([tag]))
    for data in OF_LATER_RELEASES[5:]:
        with pytest.raises(RemoteProtocolError) as raised:
            messages.decode_control(data)
        assert type(raised.value) is RemoteProtocolError


def test_no_message_of_this_release_has_a_number_that_others_skip() -> None:
    """Earlier releases would pass over what they must not. A message that they may is added with such a number."""
    known = [kind.__struct_config__.tag for kind in messages.Control.__args__]
    assert len(set(known)) == len(known)
    assert max(known) < OPTIONAL_TAGS


def test_a_refusal_on_a_link_is_an_error_with_its_words() -> None:
    with pytest.raises(messages.LinkRefusedError, match=r"^update covey$"):
        messages.decode_control(messages.encode(messages.Refusal("update covey", retry=False)))
