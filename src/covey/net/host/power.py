"""What the system says about this machine: whether it has power, whether a person uses it, and when it sleeps.

Each question has three answers: yes, no, and None for "not known". Linux is asked through /sys (power) and logind on
the system bus (use, sleep), macOS by `pmset` and `ioreg`, which say nothing of a sleep before it begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.net.host.system_bus import BusError, SystemBus

if TYPE_CHECKING:
    from collections.abc import Callable

SUPPLIES: Final = Path("/sys/class/power_supply")
LOGIN: Final = "org.freedesktop.login1"
LOGIN_PATH: Final = "/org/freedesktop/login1"
MANAGER: Final = "org.freedesktop.login1.Manager"
TOOL_SECONDS: Final = 2.0
"""How long a command of macOS may take to answer."""
UNUSED_SECONDS: Final = 300.0
"""After how long without input a Mac counts as unused; logind has the same limit for terminals."""
SLEPT_LEAST: Final = 1.0
"""Seconds by which two clocks must differ more than before, so that the machine has slept."""


def has_power(folder: Path = SUPPLIES) -> bool | None:
    """Tell whether this machine runs on mains. One without a battery does."""
    if sys.platform == "darwin":
        said = _said(["pmset", "-g", "batt"])
        return None if "drawing from" not in said else "'Battery Power'" not in said
    try:
        supplies = [_Supply(path) for path in sorted(folder.iterdir())]
    except FileNotFoundError:
        return True  # a kernel without power supplies: a container, a virtual machine
    except OSError:
        return None
    if any(each.is_source and each.says("online") == "1" for each in supplies):
        return True
    states = [each.says("status") for each in supplies if each.is_battery]
    if not states:
        return True
    if "Discharging" in states:
        return False
    return None if set(states) <= {"", "Unknown"} else True


class _Supply:
    """One folder below /sys/class/power_supply."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_of_machine = self.says("scope") != "Device"  # else a mouse
        self.is_battery = self.says("type") == "Battery" and self._is_of_machine
        self.is_source = self.says("type") in ("Mains", "USB", "Wireless") and self._is_of_machine

    def says(self, name: str) -> str:
        """Return what a file of the folder says; "" if it cannot be read."""
        try:
            return (self._path / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""


class LoginManager:
    """logind, as far as covey asks it: whether the machine is idle, and to wait a moment before it sleeps."""

    def __init__(self) -> None:
        """Connect and ask to be told of sleep; BusError if there is no logind."""
        self._bus = SystemBus()
        self._hold = -1
        """While it is open, logind waits before the machine sleeps, five seconds at most unless it is set otherwise."""
        try:
            self._bus.subscribe(LOGIN, MANAGER, "PrepareForSleep")
            self.is_idle()
        except BusError:
            self._bus.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that is readable when `sleeps` may have something; BusError after one."""
        return self._bus.fileno()

    def is_idle(self) -> bool:
        """Tell whether no session of this machine is used; BusError."""
        return bool(self._bus.property(LOGIN, LOGIN_PATH, MANAGER, "IdleHint"))

    def hold_sleep(self, who: str, why: str) -> None:
        """From now on, let the machine wait for `let_sleep` before it sleeps; BusError.

        logind refuses that to some users: then the machine does not wait.
        """
        if self._hold < 0:
            answer = self._bus.call(LOGIN, LOGIN_PATH, MANAGER, "Inhibit", "sleep", who, why, "delay")
            self._hold = answer[0] if answer and isinstance(answer[0], int) else -1

    def let_sleep(self) -> None:
        """Let the machine sleep."""
        hold, self._hold = self._hold, -1
        if hold >= 0:
            os.close(hold)

    def sleeps(self) -> list[bool]:
        """Return what was announced since the last call: True for a sleep, False for its end; BusError."""
        signals = [each for each in self._bus.signals() if each.member == "PrepareForSleep"]
        return [bool(each.body[0]) for each in signals if each.body]

    def close(self) -> None:
        """End the connection. Closing twice is fine."""
        self.let_sleep()
        self._bus.close()


def mac_is_idle() -> bool | None:
    """Tell whether a Mac had no input for a while."""
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', _said(["ioreg", "-c", "IOHIDSystem", "-d", "4"]))
    return None if found is None else int(found[1]) / 1e9 >= UNUSED_SECONDS


class SleepClock:
    """Tells how long this machine has slept, by a clock that runs on meanwhile and one that does not."""

    def __init__(self, awake: Callable[[], float], always: Callable[[], float]) -> None:
        """`awake` stops while the machine sleeps, `always` does not; neither clock is ever set."""
        self._awake, self._always = awake, always
        self._before = always() - awake()

    def slept(self) -> float:
        """Return for how many seconds it has slept since the last call; 0 if it has not."""
        difference = self._always() - self._awake()
        slept, self._before = difference - self._before, difference
        return slept if slept >= SLEPT_LEAST else 0.0


def _said(argv: list[str]) -> str:
    """Return what a command of the system prints; "" if there is none, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS)
        return done.stdout if done.returncode == 0 else ""
    return ""
