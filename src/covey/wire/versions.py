"""Which versions of the protocol a process speaks, and which one two processes, or all members of a run, speak.

Every hello carries `Versions`: a range of protocol versions, and names of features. `agree` is the one check of them,
and `objection` the one wording of a refusal. Two processes speak the highest version that both know, and use the
features that both know. A run fixes one version and one set of features for all its members (`common`, `fixed`).

A feature is how a release adds something without a new version: it is used only where both ends, or all members, know
it. A release that cannot do without a feature lists it as required, and is refused by a release that does not know it.
docs/wire.md states the policy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from covey.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

OLDEST: Final = 3
NEWEST: Final = 3
"""The versions of the protocol that this release speaks."""
PASSED_HANDLES: Final = "passed-handles"
"""Handles of exported objects that a node passes on, and that calls list apart from their payload (`wire.calls`)."""
WIDE_STORE: Final = "wide-store"
"""Entries of stores that end, values of more than 256 KiB, and reads by prefix (`wire.store.is_wide`)."""
KEPT_STORE: Final = "kept-store"
"""The keeper of a run on one host orders the changes of its stores, and has their only copy (`proto.replication`)."""
QUORUM_STORE: Final = "quorum-store"
"""A store whose members vote on views answers what enough of them have or confirm (`proto.replication`)."""
FEATURES: Final[tuple[str, ...]] = (KEPT_STORE, PASSED_HANDLES, QUORUM_STORE, WIDE_STORE)
"""The features that this release knows, sorted. A name is never used again with another meaning."""
REQUIRED: Final[tuple[str, ...]] = ()
"""Those of them that every process must know that this release talks to."""

FEATURES_LIMIT: Final = 32
RELEASE_LIMIT: Final = 40
"""Characters of the name of a release, and of a machine, in a refusal."""

Protocol = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
Feature = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{0,23}\Z")]
Features = Annotated[tuple[Feature, ...], msgspec.Meta(max_length=FEATURES_LIMIT)]


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """The versions of the protocol that a process speaks, and the features that it knows.

    One value has one form: features are sorted, and none occurs twice.
    """

    oldest: Protocol
    newest: Protocol
    features: Features = ()
    required: Features = ()
    """Those of `features` that the other end must know, too."""

    def __post_init__(self) -> None:
        if self.oldest > self.newest:
            raise ValueError(f"versions {self.oldest} to {self.newest} are no range")
        for names in (self.features, self.required):
            if any(names[at] >= names[at + 1] for at in range(len(names) - 1)):
                raise ValueError("features are not in order, or not all different")
        if not set(self.required) <= set(self.features):
            raise ValueError("a required feature is not among the known ones")

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


def only(version: int) -> Versions:
    """Return what a process speaks that does not negotiate: one version, and no feature."""
    return Versions(version, version)


OURS: Final = Versions(OLDEST, NEWEST, FEATURES, REQUIRED)
"""What this release speaks."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two processes, or all members of a run, speak."""

    version: int
    features: frozenset[str] = frozenset()

    def fixed(self) -> Versions:
        """Return what a process has to speak to join the processes that have agreed on this: they use all of it."""
        names = tuple(sorted(self.features))
        return Versions(self.version, self.version, names, names)


def fixed_by(versions: Versions | None) -> Agreement:
    """Return what the members of a run speak, from what `Agreement.fixed` made; None: what those speak that made none.

    Raises:
        ValueError: this release cannot speak it.
    """
    found = agree(OURS, only(OLDEST) if versions is None else versions)
    if isinstance(found, Disagreement):
        raise ValueError(f"the run speaks protocol {versions}, and this process {OURS}")
    return found


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Why two processes cannot talk, and which of them is too old; both are if each lacks something."""

    mine_is_old: bool
    theirs_is_old: bool
    i_lack: tuple[str, ...] = ()
    """Features that the other one requires."""
    they_lack: tuple[str, ...] = ()


def agree(mine: Versions, theirs: Versions) -> Agreement | Disagreement:
    """Return what two processes speak: the highest version and all features that both know; or why they cannot talk."""
    if mine.newest < theirs.oldest or theirs.newest < mine.oldest:
        is_mine = mine.newest < theirs.oldest
        return Disagreement(is_mine, not is_mine)
    i_lack = tuple(sorted(set(theirs.required) - set(mine.features)))
    they_lack = tuple(sorted(set(mine.required) - set(theirs.features)))
    if i_lack or they_lack:
        return Disagreement(bool(i_lack), bool(they_lack), i_lack, they_lack)
    return Agreement(min(mine.newest, theirs.newest), frozenset(mine.features) & frozenset(theirs.features))


def common(speakers: Iterable[Versions]) -> Agreement:
    """Return what all of these speak. Ranges of which each two overlap have a version in common.

    Raises:
        ValueError: two of them cannot talk.
    """
    speakers = tuple(speakers)
    version = min(each.newest for each in speakers)
    features = functools.reduce(frozenset.__and__, (frozenset(each.features) for each in speakers))
    if any(version < each.oldest or not features.issuperset(each.required) for each in speakers):
        raise ValueError("not all members of the run can talk to each other")
    return Agreement(version, features)


@dataclass(frozen=True, slots=True)
class Speaker:
    """A process as a refusal names it. Machine and release are what it says of itself."""

    machine: str
    release: str
    versions: Versions = OURS
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.name} (covey {printable(self.release, RELEASE_LIMIT) or 'of unknown release'})"

    @property
    def name(self) -> str:
        """The machine, made printable and short."""
        return printable(self.machine, RELEASE_LIMIT) or "an unnamed machine"


def objection(here: Speaker, there: Speaker) -> str:
    """Return why these two cannot talk, with both releases and the machine to update; empty if they can."""
    found = agree(here.versions, there.versions)
    if isinstance(found, Agreement):
        return ""
    older = [each for each, is_old in ((there, found.theirs_is_old), (here, found.mine_is_old)) if is_old]
    if found.i_lack or found.they_lack:
        said = [
            f"{one} needs {', '.join(names)}, which {other} does not know"
            for one, other, names in ((here, there, found.they_lack), (there, here, found.i_lack))
            if names
        ]
        return f"{'; '.join(said)}: update covey on {_machines(older, here, there)}"
    speaks = f"{there.name} speaks protocol {there.versions} {_release(there)}, "
    speaks += f"{here.name} speaks {here.versions} {_release(here)}"
    return f"{speaks}: update covey on {_machines(older, here, there)}"


def unknown_message(here: Speaker, there: Speaker, what: str) -> str:
    """Return why the link ends on which `there` sent a message that `here` does not know and may not skip."""
    return f"{there} sent {what}, which {here} does not know: update covey on {_machines([here], here, there)}"


def _release(speaker: Speaker) -> str:
    return str(speaker)[len(speaker.name) + 1 :]


def _machines(older: list[Speaker], here: Speaker, there: Speaker) -> str:
    is_one = here.name == there.name
    return " and ".join(f"{each.name} for process {each.pid}" if is_one else each.name for each in older)
