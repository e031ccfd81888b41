"""What all operations of a group share: the engine that runs them, descriptions of calls, checks of arguments, and
savings.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from covey.base.arithmetic import DTYPES
from covey.base.config import check_timeout
from covey.base.errors import ConfigError
from covey.base.numbers import NO_RANK
from covey.runtime.buffers import readable, writable
from covey.runtime.collectives.call_log import make_call
from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.numbers import Rank
    from covey.compress.policy import Policy
    from covey.runtime.buffers import Operand
    from covey.runtime.collectives.atomic import AtomicOperations
    from covey.runtime.collectives.attempt import Attempt, Shortcuts
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.native_executor import Shortcut
    from covey.runtime.collectives.operation import CurrentOperation
    from covey.runtime.collectives.roster import GroupFacts, GroupRoster
    from covey.runtime.compressed.automatic import Tuner
    from covey.runtime.counters import GroupCounters
    from covey.runtime.messages.routing import MessageRouting


MOST_PASSING: Final = 4096
"""Calls that are remembered."""


class Compression(NamedTuple):
    """What compressed operations of a group have sent from this rank."""

    operations: int
    sent_bytes: int
    plain_bytes: int
    """What would have been sent without compression."""
    codec: str
    """Codec of the last compressed operation; empty before the first."""
    reason: str
    """Why `compress="auto"` chose it."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0


class Savings:
    """The counters of one group."""

    def __init__(self, facts: GroupFacts, roster: GroupRoster, counters: GroupCounters) -> None:
        self._facts, self._roster, self._counters = facts, roster, counters
        self.total = Compression(0, 0, 0, "", "")
        self._passing: dict[tuple[Any, ...], tuple[dict[str, Any], float]] = {}
        """Calls that are sent as they are: what is noted of each, and how many more of them there may be."""

    @functools.cached_property
    def tuner(self) -> Tuner:
        """What `compress="auto"` has measured."""
        from covey.runtime.compressed.automatic import Tuner  # slow to load, and most programs do not need it

        return Tuner()

    def let_pass(self, key: tuple[Any, ...], info: dict[str, Any], times: float = math.inf) -> None:
        """Let the next `times` calls with this key be sent as they are, without asking again why."""
        if len(self._passing) > MOST_PASSING:
            self._passing.clear()
        self._passing[key] = info, times

    def passes(self, key: tuple[Any, ...] | None) -> bool:
        """Tell whether a call is one that is sent as it is, and count it."""
        passing = self._passing.get(key) if key is not None else None
        if passing is None or key is None:
            return False
        info, times = passing
        if times > 1:
            self._passing[key] = info, times - 1
        else:
            del self._passing[key]
        self.add(info)
        return True

    def add(self, info: dict[str, Any]) -> None:
        """Count an operation that is sent, or has succeeded; an event tells when "auto" chose another codec."""
        self._counters.compressed(info["codec"], info["sent_bytes"], info["plain_bytes"], info.get("reason", ""))
        last, reason = self.total, info.get("reason", "")
        self.total = Compression(
            last.operations + 1,
            last.sent_bytes + info["sent_bytes"],
            last.plain_bytes + info["plain_bytes"],
            info["codec"],
            reason,
        )
        facts, node = self._facts, self._roster.node
        if reason and info["codec"] != last.codec and node is not None:
            from covey.runtime.events import CODEC, Event  # loaded with the node

            node.events.add(Event(CODEC, time.time(), facts.generation, 0, text=f"{facts.name}: {reason}"))


CACHED_CALLS: Final = 4096
"""Cached descriptions of calls. A program with more different calls pays for describing them again."""


class IssuingEngine(Protocol):
    """What operations need of the engine that runs them (`collectives.engine`)."""

    facts: GroupFacts
    roster: GroupRoster
    operation: CurrentOperation
    failure: Failure
    counters: GroupCounters
    shortcuts: Shortcuts
    routing: MessageRouting
    atomic: AtomicOperations | None

    @property
    def attempt(self) -> Attempt: ...

    @property
    def contributors(self) -> tuple[Rank, ...]: ...

    def run(
        self,
        call: Call,
        body: Callable[[Attempt], Any],
        *,
        timeout: float | None,
        async_op: bool,
        then: Callable[[Any], Any] | None = None,
        root: Rank = NO_RANK,
    ) -> Any: ...


class Issuer:
    """Issues the operations of a group on this rank; all parts of a `Group` that have operations share it."""

    def __init__(self, engine: IssuingEngine) -> None:
        self.engine = engine
        self.rank: int = engine.roster.rank
        self.size = engine.roster.size
        self.calls: dict[Any, Call] = {}
        """Descriptions of calls, by what tells them apart."""
        self.policy: Policy | None = None
        """What is compressed of gradients, unless a call says something else. Nothing else is: see `all_reduce`."""
        if engine.facts.config.compress:
            from covey.compress.policy import make_policy  # slow to load, and most programs do not need it

            self.policy = make_policy(engine.facts.config.compress)
        self.savings = Savings(engine.facts, engine.roster, engine.counters)

    def call(self, operation: str, code: int | None, shape: tuple[int, ...] | None, **agreed: Any) -> Call:
        """Return the description of a call, from the cache if it is there."""
        key = (operation, code, shape, *agreed.values())
        call = self.calls.get(key)
        if call is None:
            if len(self.calls) > CACHED_CALLS:
                self.calls.clear()
            call = self.calls[key] = make_call(operation, code, shape, **agreed)
        return call

    def took_shortcut(
        self, shortcut: Shortcut, what: tuple[Any, ...], x: Any, out: Any = None, timeout: float | None = None
    ) -> bool:
        """Run an operation on `x`, and an output if there is one; return False if it needs the long way.

        `what` is the one object that stands for the operation: a constant, or what `shortcut.name` returns.
        """
        if timeout is not None:
            check_timeout(timeout)
        outcome = shortcut.run(x, what) if out is None else shortcut.run(x, what, out)
        if outcome is False:
            return False
        if outcome is not True:
            self.resume(x, outcome, timeout)
        return True

    def begin(self, shortcut: Shortcut, name: str, what: Any, x: Any, timeout: float | None) -> Work[Any] | None:
        """Begin an operation on `x` with the shortcut, and return its work; None if it needs the long way.

        What can be sent is sent at once. If the other ranks have sent their part before, the work is done; else the
        thread of the group goes on.
        """
        outcome = shortcut.begin(x, what)
        if outcome is False:
            return None
        if outcome is not True:
            resumed: Work[Any] = self.resume(x, outcome, timeout, async_op=True)
            return resumed
        work: Work[Any] = Work(f"{name} of group {self.engine.facts.name!r}")
        work.contributors = self.engine.contributors
        work.finish(x)
        return work

    def resume(self, x: Any, call: Call, timeout: float | None = None, *, async_op: bool = False) -> Any:
        """Go on with a call that the shortcut has begun, because it takes longer; return `x`, or a Work."""

        def body(attempt: Attempt) -> Any:
            attempt.resume()
            return x

        return self.engine.run(call, body, timeout=timeout, async_op=async_op)

    def check_rank(self, rank: int, what: str) -> Rank:
        """Return `rank` as a `Rank`; raise ConfigError if the group has no such rank."""
        try:
            index = operator.index(rank)
        except TypeError:
            index = -1
        if 0 <= index < self.size:
            return self.engine.roster.ranks[index]
        raise ConfigError(f"{what}={rank!r} is not a rank of this group; it has ranks 0 to {self.size - 1}")

    def output(self, out: Any, code: int, shape: tuple[int, ...]) -> Operand:
        """Return `out` as an operand; raise TypeError if it has another dtype or shape."""
        operand = writable(out, is_read=self.engine.facts.survives)  # what a lost rank should have filled stays
        if operand.shape != shape or operand.code != code:
            raise TypeError(
                f"out must be {DTYPES[code].name}{list(shape)}, not {DTYPES[operand.code].name}{list(operand.shape)}"
            )
        return operand

    def list_of_operands(self, xs: Any, what: str) -> list[Operand]:
        """Return a list by rank as operands; raise ConfigError if it has another length."""
        if xs is None or len(xs) != self.size:
            got = "None" if xs is None else f"{len(xs)} elements"
            raise ConfigError(f"{what} must have one array for each of the {self.size} ranks, not {got}")
        return [readable(x) for x in xs]


def whole_number(what: str, value: Any) -> int:
    """Return `value` as an int; raise ConfigError if it is not one, or exceeds 62 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what}={value!r} must be a whole number") from None
    if not -(1 << 62) < number < 1 << 62:
        raise ConfigError(f"{what}={value!r} must be between -2**62 and 2**62, both excluded")
    return number
