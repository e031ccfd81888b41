"""What the system says about power, use and sleep; and what a bus may send that is no D-Bus."""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.in_turn import in_turn

from covey.net.host import power
from covey.net.host.power import SleepClock, has_power, mac_is_idle
from covey.net.host.system_bus import BusError, SystemBus

if TYPE_CHECKING:
    from pathlib import Path

MAINS_ON, MAINS_OFF = {"type": "Mains", "online": "1"}, {"type": "Mains", "online": "0"}
FULL, EMPTYING = {"type": "Battery", "status": "Full"}, {"type": "Battery", "status": "Discharging"}
MOUSE = {**EMPTYING, "scope": "Device"}
MACHINES: dict[str, tuple[dict[str, dict[str, str]], bool | None]] = {
    "a desktop": ({}, True),
    "a desktop with a wireless mouse": ({"hidpp": MOUSE}, True),
    "a laptop at its charger": ({"AC": MAINS_ON, "BAT0": FULL}, True),
    "a charger that is too weak": ({"AC": MAINS_ON, "BAT0": EMPTYING}, True),
    "a laptop without its charger": ({"AC": MAINS_OFF, "BAT0": EMPTYING}, False),
    "two batteries, the second in use": ({"AC": MAINS_OFF, "BAT0": FULL, "BAT1": EMPTYING}, False),
    "no charger in the list, and it charges": ({"BAT0": {**FULL, "status": "Charging"}}, True),
    "a battery that says nothing": ({"BAT0": {"type": "Battery", "status": "Unknown"}}, None),
    "a supply without files": ({"AC": {}}, True),
}  # fmt: skip


@in_turn(name=list(MACHINES))
def test_whether_a_machine_has_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    supplies, expected = MACHINES[name]
    folder = tmp_path / name
    folder.mkdir()
    for supply, files in supplies.items():
        (folder / supply).mkdir()
        for file, text in files.items():
            (folder / supply / file).write_text(f"{text}\n")
    assert has_power(folder) is expected


def test_a_kernel_without_power_supplies_is_one_without_a_battery(tmp_path: Path) -> None:
    assert has_power(tmp_path / "nothing") is True
    (tmp_path / "file").touch()
    assert has_power(tmp_path / "file") is None


def test_a_mac_is_asked_by_its_own_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "platform", "darwin")

    def says(command: str, text: str, code: int = 0) -> None:
        (tmp_path / command).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        (tmp_path / command).chmod(0o755)

    assert (has_power(), mac_is_idle()) == (None, None)
    says("pmset", "Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t100%; charged; 0:00 remaining")
    says("ioreg", '    |   "HIDIdleTime" = 300000000001')
    assert (has_power(), mac_is_idle()) == (True, True)
    says("pmset", "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t80%; discharging; 3:10 remaining")
    says("ioreg", '    |   "HIDIdleTime" = 1300000000')
    assert (has_power(), mac_is_idle()) == (False, False)
    says("pmset", "Now drawing from 'AC Power'", code=1)
    says("ioreg", "nothing")
    assert (has_power(), mac_is_idle()) == (None, None)


def test_a_sleep_shows_as_the_difference_of_two_clocks_and_no_other_pause_does() -> None:
    awake, asleep = 100.0, 0.0
    clock = SleepClock(lambda: awake, lambda: awake + asleep)
    awake += 1000.0  # a process that was stopped, or a busy machine
    assert clock.slept() == 0
    asleep += 180.0
    assert clock.slept() == pytest.approx(180.0)
    assert clock.slept() == 0
    asleep += power.SLEPT_LEAST / 2
    assert clock.slept() == 0


BEGUN = b"OK 1\r\nERROR\r\nl\x02\x00\x01" + bytes(4) + b"\1\0\0\0\x08\0\0\0"
"""A login, and a message whose header has a field of eight bytes."""
BROKEN = {
    "nothing": b"",
    "a refusal": b"REJECTED EXTERNAL\r\n",
    "a line without end": b"x" * 2000,
    "no byte order": b"OK 1\r\nAGREE_UNIX_FD\r\n" + b"z" * 64,
    "a message of two gigabytes": b"OK 1\r\nAGREE_UNIX_FD\r\nl\x02\x00\x01\xff\xff\xff\x7f" + bytes(8),
    "fields that end behind the message": BEGUN + b"\5\1u\0\1",
    "a text longer than its message": BEGUN + b"\1\1s\0\xff\xff\xff\x7f",
    "a variant in a variant": BEGUN + b"\1\1v\0\1v\0\0",
    "an array": BEGUN + b"\1\1a\0\1v\0\0",
}  # fmt: skip


@in_turn(name=list(BROKEN))
def test_a_bus_that_speaks_something_else_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / "bus"
    path.unlink(missing_ok=True)
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"tcp:host=1.2.3.4;unix:path=/nowhere;unix:path={path}")
    open_before = set(os.listdir("/proc/self/fd"))

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(BROKEN[name])
            client.shutdown(socket.SHUT_WR)
            while client.recv(4096):
                pass

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(BusError):
            SystemBus()
        thread.join()
    assert set(os.listdir("/proc/self/fd")) == open_before


def test_without_a_bus_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, reason in {
        "unix:path=/nowhere/bus": "/nowhere/bus: No such file",
        "tcp:host=127.0.0.1,port=1": "no unix socket in",
        "unix:abstract=covey-no-such-bus": "Connection refused",
    }.items():
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
        with pytest.raises(BusError, match=reason):
            SystemBus()
