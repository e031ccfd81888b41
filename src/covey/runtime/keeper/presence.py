"""Whether a machine takes part in its run now: not while it sleeps, and if the user says so, not on battery or in use.

`MachinePresence` looks at the machine and decides; the supervisor asks it, and has the processes leave and return. It
has no thread: the supervisor waits for its descriptor and its next look along with everything else.

Invariant: the system waits with a sleep only while processes of this machine are leaving.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.net.host.machine import waking_clock
from covey.net.host.power import LoginManager, SleepClock, has_power, mac_is_idle
from covey.net.host.system_bus import BusError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PRESENCE_EVERY: Final = 2.0
"""How often the machine is looked at: whether it has power, is idle, and has slept."""
STOOD_STILL: Final = 5.0
"""A wait that is so much too long, in seconds, means that this process was stopped, or the virtual machine paused."""
ON_BATTERY: Final = "is on battery"
IN_USE: Final = "is in use"
ABOUT_TO_SLEEP: Final = "is about to sleep"
CONDITIONS: Final = {ON_BATTERY: "has power", IN_USE: "is idle", ABOUT_TO_SLEEP: "is awake"}
"""What ends an absence."""


class PresenceTerms(NamedTuple):
    """When a machine takes part in a run."""

    only_on_power: bool = False
    while_idle: bool = False

    @classmethod
    def read(cls, env: Mapping[str, str]) -> PresenceTerms:
        """Return the terms from variables; ConfigError if one is malformed."""
        rows = [SETTINGS[name] for name in cls._fields]
        return cls(*(row.kind.read(row.variable, env.get(row.variable, row.default)) for row in rows))


class PresenceWatcher(Protocol):
    """Waits for descriptors."""

    def watch(self, source: int) -> None:
        """Let a descriptor that becomes readable end a wait."""

    def unwatch(self, source: int) -> None:
        """Forget a descriptor."""


class OwnMachine(NamedTuple):
    """How a machine is asked; tests give answers of their own."""

    has_power: Callable[[], bool | None] = has_power
    login: Callable[[], LoginManager] = LoginManager
    monotonic: Callable[[], float] = time.monotonic
    always: Callable[[], float] = waking_clock


class MachinePresence:
    """Decides whether the processes of this machine take part in their run. On one thread."""

    def __init__(self, name: str, terms: PresenceTerms = PresenceTerms(), machine: OwnMachine = OwnMachine()) -> None:  # noqa: B008 - immutable
        """`name` is what messages call the machine.

        Raises:
            ConfigError: the terms ask for something that this system does not say.
        """
        self.name, self._terms, self._machine = name, terms, machine
        self._login: LoginManager | None = None
        self._watcher: PresenceWatcher | None = None
        self._watched = -1
        self._had_login = self._is_asleep = False
        self._clock = SleepClock(machine.monotonic, machine.always)
        self.slept = 0.0
        """How long the machine has slept since `look` was called before."""
        self._battery: bool | None = None
        self._use: bool | None = None
        self.next_look = 0.0
        """When to call `look` at the latest, by the monotonic clock."""
        self._connect()
        self._ask()
        if terms.only_on_power and self._battery is None:
            self.close()
            raise ConfigError("--only-on-power: this system does not say whether it runs on battery; leave it out")
        if terms.while_idle and self._use is None:
            self.close()
            raise ConfigError(
                "--while-idle: this system does not say whether it is used, because systemd-logind does not answer on "
                "the system bus; leave it out"
            )

    @property
    def absence(self) -> str:
        """Why the machine should take no part now; "" if it should."""
        if self._is_asleep:
            return ABOUT_TO_SLEEP
        if self._terms.only_on_power and self._battery:
            return ON_BATTERY
        return IN_USE if self._terms.while_idle and self._use else ""

    @property
    def conditions(self) -> list[str]:
        """What must be true of the machine, apart from being awake."""
        asked = {ON_BATTERY: self._terms.only_on_power, IN_USE: self._terms.while_idle}
        return [CONDITIONS[why] for why, is_asked in asked.items() if is_asked]

    def watched_by(self, watcher: PresenceWatcher) -> None:
        """Have a sleep that is announced end the waits of its owner."""
        self._watcher = watcher
        self._watch()

    def look(self) -> None:
        """Find out how the machine is now: what was announced at once, the rest when it is due."""
        self.slept = self._clock.slept()
        self._hear()
        if (now := self._machine.monotonic()) >= self.next_look:
            self.next_look = now + PRESENCE_EVERY
            if self._login is None and self._had_login:
                self._connect()
            self._ask()

    def left(self) -> None:
        """Note that the processes have left, or do not leave: the machine may sleep."""
        if self._login is not None and self._is_asleep:
            self._login.let_sleep()

    def close(self) -> None:
        """Let the machine sleep when it likes. Closing twice is fine."""
        self._unwatch()
        if self._login is not None:
            self._login.close()
            self._login = None

    def _connect(self) -> None:
        with contextlib.suppress(BusError):  # a system without logind, or one whose bus is being restarted
            self._login = self._machine.login()
            self._had_login = True
            self._hold_sleep()
            self._watch()

    def _hold_sleep(self) -> None:
        with contextlib.suppress(BusError):  # logind may refuse: then the machine sleeps at once
            if self._login is not None:
                self._login.hold_sleep("covey", "the machine leaves its run first")

    def _hear(self) -> None:
        """Take what logind has announced."""
        if self._login is None:
            return
        try:
            announced = self._login.sleeps()
        except BusError:
            self._give_up_login()
            return
        for is_asleep in announced:
            self._is_asleep = is_asleep
            if not is_asleep:
                self._hold_sleep()

    def _ask(self) -> None:
        """Ask for what the terms need; an answer that is not known leaves the last one."""
        if self._terms.only_on_power and (power := self._machine.has_power()) is not None:
            self._battery = not power
        if not self._terms.while_idle:
            return
        if sys.platform == "darwin" and (is_idle := mac_is_idle()) is not None:
            self._use = not is_idle
        if self._login is not None:
            try:
                self._use = not self._login.is_idle()
            except BusError:
                self._give_up_login()

    def _give_up_login(self) -> None:
        """Do without logind until it answers again; whether it will wake the machine is not known any more."""
        self._unwatch()
        if self._login is not None:
            self._login.close()
        self._login, self._is_asleep = None, False

    def _watch(self) -> None:
        if self._watcher is not None and self._login is not None and self._watched < 0:
            with contextlib.suppress(BusError):
                self._watched = self._login.fileno()
                self._watcher.watch(self._watched)

    def _unwatch(self) -> None:
        if self._watcher is not None and self._watched >= 0:
            self._watcher.unwatch(self._watched)
        self._watched = -1
