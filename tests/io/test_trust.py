"""The file of trusted machines, and what the owner's charter adds."""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from covey.base.errors import AuthError, ConfigError
from covey.net.host import folders as private
from covey.net.keys import charter, clusters, owner, trust
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity, machine_name, own_machine
from covey.net.keys.trust import TrustedMachine
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("home")

NORTH, SOUTH, WEST = (secrets.token_bytes(32) for _ in range(3))


def a_cluster(name: str = "lab") -> Cluster:
    return Cluster(ClusterSecret(name, secrets.token_bytes(32)))


def path() -> Path:
    return private.home() / trust.TRUST_FILE


def others(cluster: Cluster) -> dict[bytes, TrustedMachine]:
    return {machine: known for machine, known in trust.trusted(cluster).items() if machine != own_machine()}


def test_trust_is_remembered_for_a_cluster_in_a_private_file_with_a_version() -> None:
    one, other = a_cluster(), a_cluster()
    assert trust.trusted(one) == {}, "a look makes no key"
    ensure_identity()
    assert list(trust.trusted(one)) == [own_machine()]
    trust.remember(one, {NORTH: "north-aaaa"})
    trust.remember(one, {SOUTH: "south-bbbb"}, has_had_files=True)
    trust.remember(other, {NORTH: "east-aaaa"})
    assert others(one) == {NORTH: TrustedMachine("north-aaaa"), SOUTH: TrustedMachine("south-bbbb", False, True)}
    assert others(other) == {NORTH: TrustedMachine("east-aaaa")}
    trust.remember(one, {SOUTH: "south-bbbb"})
    assert others(one)[SOUTH].has_had_files, "nothing is asked twice"
    assert path().stat().st_mode & 0o777 == 0o600
    assert json.loads(path().read_text())["version"] == 1
    trust.forget(one, NORTH)
    trust.forget(one, WEST)
    assert list(others(one)) == [SOUTH]
    assert list(others(other)) == [NORTH]


def test_changes_at_the_same_time_are_all_kept() -> None:
    cluster, machines = a_cluster(), [secrets.token_bytes(32) for _ in range(8)]
    threads = [threading.Thread(target=trust.remember, args=(cluster, {each: "x-aaaa"})) for each in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(others(cluster)) == set(machines)


def test_a_file_that_is_damaged_open_or_of_a_later_covey_is_an_error_and_never_overwritten() -> None:
    cluster = a_cluster()
    trust.remember(cluster, {NORTH: "north-aaaa"})
    whole = path().read_text()
    for text, words in (
        ("{", "is damaged; remove"),
        (whole.replace(NORTH.hex(), "00"), "is damaged"),
        (whole.replace('"version": 1', '"version": 2'), "format 2, and this release reads up to 1"),
    ):
        path().write_text(text)
        for use in (lambda: trust.trusted(cluster), lambda: trust.remember(cluster, {SOUTH: "south-bbbb"})):
            with pytest.raises(ConfigError, match=words):
                use()
        assert path().read_text() == text
    path().write_text(whole)
    path().chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        trust.trusted(cluster)


def owned() -> tuple[Cluster, owner.OwnerKey]:
    cluster = Cluster(ClusterSecret("lab", secrets.token_bytes(32)), owner=owner.make("lab"))
    clusters.save(cluster)
    key = owner.held(cluster)
    assert key is not None
    return cluster, key


def test_the_owner_binds_names_to_keys_at_approval_and_later_names_change_nothing() -> None:
    cluster, key = owned()
    trust.remember(cluster, {WEST: "west-cccc"}, has_had_files=True)
    listed = frozenset({own_machine(), NORTH})
    made = charter.amend(cluster, key, lambda _now: (frozenset(), listed), {NORTH: "north-aaaa"})
    assert others(made) == {NORTH: TrustedMachine("north-aaaa", by_owner=True)}, "who is not approved is not trusted"
    more = charter.amend(
        made,
        key,
        lambda now: (now[0], listed | {SOUTH, WEST}),
        {NORTH: "evil-aaaa", SOUTH: machine_name("north", SOUTH)},
    )
    assert {machine: known.name for machine, known in others(more).items()} == {
        NORTH: "north-aaaa",
        SOUTH: machine_name("north", SOUTH),
        WEST: "west-cccc",
    }
    trust.remember(more, {NORTH: "evil-aaaa"}, has_had_files=True)
    assert others(more)[NORTH] == TrustedMachine("north-aaaa", True, True), "the owner's name counts"
    assert clusters.load("lab") == more
    off = charter.amend(more, key, lambda now: (now[0], None))
    assert off.charter is not None
    assert off.charter.names == ()
    assert set(others(off)) == {NORTH, WEST}, "those that a person here has agreed to"


def test_names_that_the_owner_has_not_signed_are_refused_and_missing_ones_are_taken_later() -> None:
    cluster, key = owned()
    made = charter.amend(cluster, key, lambda _now: (frozenset(), frozenset({NORTH, SOUTH})), {NORTH: "north-aaaa"})
    signed = made.charter
    assert signed is not None
    change = msgspec.structs.replace
    forged = [
        change(signed, names=signed.names[::-1]),
        change(signed, names=("evil-aaaa", "evil-bbbb")),
        change(signed, names=signed.names[:1]),
        change(signed, names_signature=b""),
        change(signed, names_signature=signed.signature),
    ]
    for each in forged:
        with pytest.raises(AuthError, match="has not signed the names"):
            charter.is_news(cluster, each)
    bare = change(signed, names=(), names_signature=b"")  # as a node of an earlier release passes it on
    assert charter.is_news(cluster, bare)
    with_bare = replace(cluster, charter=bare)
    assert charter.bound_names(with_bare) == {each: "" for each in sorted((NORTH, SOUTH))}
    assert charter.is_news(with_bare, signed)
    assert not charter.is_news(with_bare, bare)
    assert not charter.is_news(made, bare)
    assert charter.latest(bare, signed) == charter.latest(signed, bare) == signed
