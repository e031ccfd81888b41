"""Which machines `--on` means: by keys that this machine trusts, never by the name that a node claims. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from covey.base.errors import ConfigError
from covey.net.keys.identity import id_text, is_whole_id, meant_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from covey.net.keys.trust import TrustedMachine


class Selection(NamedTuple):
    """The machines that are meant, by id."""

    trusted: tuple[bytes, ...]
    new: tuple[bytes, ...]
    """They were named, and a person has to confirm their keys first."""


def is_complete(words: Sequence[str], claimed: Mapping[bytes, str], book: Mapping[bytes, TrustedMachine]) -> bool:
    """Tell whether each word means one machine that is there, so that there is no need to look for more."""
    try:
        select(words, claimed, book)
    except ConfigError:
        return False
    return True


def select(words: Sequence[str], claimed: Mapping[bytes, str], book: Mapping[bytes, TrustedMachine]) -> Selection:
    """Return the machines that words mean: names, ids, or the beginnings of ids.

    `claimed` are the machines that are there, with the names that they claim. `book` are the trusted ones. A word that
    means a trusted machine means no other one, even if that one claims the same name.

    Raises:
        ConfigError: a word means no machine that is there, or several; or only one that has another key than the
            trusted machine of that name. The text has the ids.
    """
    chosen, new = dict[bytes, None](), dict[bytes, None]()
    for word in words:
        known = meant_ids(word, {machine: each.name for machine, each in book.items()})
        strangers = meant_ids(word, {machine: name for machine, name in claimed.items() if machine not in book})
        if len(known) > 1:
            raise _several(word, {each: book[each].name for each in known})
        if known and known[0] in claimed:
            chosen[known[0]] = None
        elif known and strangers:
            raise _changed(word, known[0], strangers, book[known[0]])
        elif known:
            raise ConfigError(f"{_label(known[0], book[known[0]].name)} was not found; does `covey up` run there?")
        elif len(strangers) == 1:
            new[strangers[0]] = None
        elif strangers:
            raise _several(word, {each: claimed[each] for each in strangers})
        else:
            raise _missing(word, claimed, book)
    return Selection(tuple(chosen), tuple(new))


def _label(machine: bytes, name: str) -> str:
    return f"{name} ({id_text(machine)})" if name else id_text(machine)


def _listed(machines: Mapping[bytes, str]) -> str:
    return ", ".join(_label(each, name) for each, name in sorted(machines.items())[:10])


def _several(word: str, machines: Mapping[bytes, str]) -> ConfigError:
    return ConfigError(f"{word!r} means several machines: {_listed(machines)}; write the id of one of them")


def _changed(word: str, known: bytes, strangers: Iterable[bytes], trusted: TrustedMachine) -> ConfigError:
    others = " and ".join(map(id_text, strangers))
    if trusted.by_owner:
        cure = (
            f"on the owner's machine, `covey allow {id_text(known)} --undo` takes the old key off the list, and "
            "`covey allow` with the new id approves the new one"
        )
    else:
        cure = (
            f"`covey trust {id_text(known)} --undo` here forgets the old key, and the next start asks about the new one"
        )
    return ConfigError(
        f"{word!r} is not the machine that this one trusts: its key was {id_text(known)}, and the machine that calls "
        f"itself so now has the key {others}. Nothing was sent. If you have set {word} up anew: {cure}"
    )


def _missing(word: str, claimed: Mapping[bytes, str], book: Mapping[bytes, TrustedMachine]) -> ConfigError:
    renamed = meant_ids(word, {machine: name for machine, name in claimed.items() if machine in book})
    if renamed and not is_whole_id(word):
        known = _label(renamed[0], book[renamed[0]].name)
        return ConfigError(f"the machine that calls itself {word!r} is {known} for this one; use that name, or the id")
    there = _listed(claimed) or "none"
    return ConfigError(f"no agent {word!r} was found (there: {there}); does `covey up` run on that machine?")
