"""The calls of this rank and of the others, as far as they are known: how a stall gets a rank and a reason."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.arithmetic import DTYPES
from covey.base.numbers import OPERATIONS, operation_name

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from covey.wire.header import TransferHeader

CALL_TEXT_LIMIT: Final = 2000
"""Characters of another rank's call that are stored."""
LOGGED: Final = 64
"""Past operations that can still be compared. Ranks that merely missed a call are closer together than this."""


class Call(NamedTuple):
    """One operation, as every rank must call it."""

    operation: int
    dtype: int
    fingerprint: int
    text: str


def make_call(operation: str, code: int | None, shape: tuple[int, ...] | None, **agreed: Any) -> Call:
    """Return the description of a call. Equal calls have equal fingerprints on all ranks."""
    words = []
    if code is not None:
        words.append(DTYPES[code].name + (str(list(shape)) if shape is not None else ""))
    words += [f"{name}={value}" for name, value in agreed.items() if value is not None]
    text = f"{operation}({', '.join(words)})"
    return Call(OPERATIONS.index(operation), 255 if code is None else code, fingerprint_of(text), text)


def fingerprint_of(text: str) -> int:
    """Return the fingerprint of a call with this text."""
    import hashlib  # slow to load: it loads OpenSSL

    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class HeardCalls(NamedTuple):
    """What another rank has reported about its calls."""

    entered: int
    spoke_of: int
    """The latest operation that it answered a question about. A live process answers in any operation."""
    calls: dict[int, tuple[int, str]]


class CallLog:
    """The recent calls of one group on this rank, and what the other ranks reported about theirs."""

    def __init__(self) -> None:
        self.entered = 0
        self.slots: list[tuple[int, Call] | None] = [None] * LOGGED
        """The recent calls of this rank, each in the slot of its number modulo LOGGED."""
        self._others: dict[int, HeardCalls] = {}
        self.compared = 0
        """The operation that ranks are known to have called differently, while its calls are compared; else 0."""
        self.words: Counter[int] = Counter()
        """The number of reports from each other rank."""

    def enter(self, sequence: int, call: Call) -> None:
        """Record that this rank starts operation `sequence`."""
        self.slots[sequence % LOGGED] = (sequence, call)
        self.entered = sequence

    def recent(self) -> list[tuple[int, Call]]:
        """Return the logged calls of this rank, in order."""
        return sorted((entry for entry in self.slots if entry is not None), key=lambda entry: entry[0])

    def at(self, sequence: int) -> Call | None:
        """Return what this rank called at `sequence`; None if it has not entered it, or it is no longer logged."""
        entry = self.slots[sequence % LOGGED]
        return entry[1] if entry is not None and entry[0] == sequence else None

    def heard(self, rank: int, entered: int, sequence: int, fingerprint: int, text: str) -> bool:
        """Record what `rank` reported; tell whether it differs from what this rank called."""
        known = self._others.get(rank)
        calls = known.calls if known is not None else {}
        if text:
            calls[sequence] = (fingerprint, text[:CALL_TEXT_LIMIT])
            while len(calls) > LOGGED:
                del calls[min(calls)]
        known = known or HeardCalls(0, 0, calls)
        self._others[rank] = HeardCalls(max(entered, known.entered), max(sequence, known.spoke_of), calls)
        self.words[rank] += 1  # last: a thread that sees it finds what was reported
        mine = self.at(sequence)
        return bool(text) and mine is not None and mine.fingerprint != fingerprint

    def knows(self, rank: int, sequence: int) -> bool:
        """Tell whether it is known what a rank called at `sequence`."""
        return rank in self._others and sequence in self._others[rank].calls

    def contradiction(self, upcoming: Call | None = None) -> int:
        """Return the first operation that another rank is known to have called differently, or 0.

        `upcoming` is what this rank is about to enter.
        """
        differing = [
            sequence
            for heard in self._others.values()
            for sequence, (fingerprint, _) in heard.calls.items()
            if (mine := upcoming if sequence == self.entered + 1 else self.at(sequence)) is not None
            and mine.fingerprint != fingerprint
        ]
        return min(differing, default=0)

    def reported(self, rank: int) -> tuple[int, dict[int, int]]:
        """Return the last operation that another rank is known to have entered, and its known calls by number."""
        heard = self._others.get(rank, HeardCalls(0, 0, {}))
        return heard.entered, {sequence: fingerprint for sequence, (fingerprint, _) in list(heard.calls.items())}

    def last_of(self, rank: int) -> tuple[int, str]:
        """Return the last operation that another rank is known to have entered, and its call if that is known."""
        heard = self._others.get(rank, HeardCalls(0, 0, {}))
        return heard.entered, heard.calls.get(heard.entered, (0, ""))[1]

    def late(self, sequence: int, ranks: Sequence[int], me: int) -> tuple[int, ...]:
        """Return the ranks that keep `sequence` waiting: those that do not answer, or else those furthest behind."""
        others = {rank: self._others.get(rank, HeardCalls(0, 0, {})) for rank in ranks if rank != me}
        silent = tuple(rank for rank, heard in others.items() if heard.spoke_of < sequence)
        last = min((heard.entered for heard in others.values()), default=sequence)
        return silent or tuple(rank for rank, heard in others.items() if heard.entered == last < sequence)

    def excuse(self, sequence: int, late: Sequence[int]) -> str:
        """Return why `sequence` waits for the ranks that `late` returned, in words that follow their names."""
        heard = [self._others.get(rank, HeardCalls(0, 0, {})) for rank in late]
        one = len(late) == 1
        if all(each.entered >= sequence for each in heard):
            return f"{'has' if one else 'have'} called it, but {'its' if one else 'their'} data did not arrive"
        if any(each.spoke_of < sequence for each in heard):
            return f"{'does' if one else 'do'} not answer"
        return f"{'has' if one else 'have'} not called it yet"

    def heard_all(self, sequence: int, ranks: Sequence[int], known: Collection[int]) -> bool:
        """Tell whether every rank has reported what it called at `sequence`, except those of which all is known."""
        return all(rank in known or sequence in self._others.get(rank, HeardCalls(0, 0, {})).calls for rank in ranks)

    def story(self, sequence: int, ranks: Sequence[int], me: int, parted: Collection[int]) -> str:
        """Return what each rank called at `sequence`, with ranks of equal calls together.

        Those that have `parted` call nothing more.
        """
        said: dict[str, list[int]] = {}
        for rank in ranks:
            nothing = "nothing, and closed the group" if rank in parted else "nothing yet"
            mine = self.at(sequence)
            if rank == me:
                text = mine.text if mine else nothing
            else:
                heard = self._others.get(rank)
                text = heard.calls.get(sequence, (0, nothing))[1] if heard else nothing
            said.setdefault(text, []).append(rank)
        return "; ".join(
            f"rank{'s' if len(them) > 1 else ''} {', '.join(map(str, them))} called {text}"
            for text, them in said.items()
        )


def describe_header(header: TransferHeader) -> str:
    """Return the call of a rank, as far as a header tells it."""
    words = [DTYPES[header.dtype].name] if header.dtype < len(DTYPES) else []
    return f"{operation_name(header.operation)}({', '.join([*words, '...'])})"
