"""A laptop among the machines of a run: it is unplugged from its charger, moves to another address, and is back."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from tests.support.jobs import SOURCE
from tests.support.members import ELASTIC, Member, start_with_keeper, together
from tests.support.nodes import Cluster
from tests.support.waiting import wait_until

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from pathlib import Path

    from covey.testing.netns import Host

PREFIX = "covey-laptops"
WITH_BATTERY = 'mount --bind "$0" /sys/class/power_supply && exec "$@"'


def charge(folder: Path, is_plugged_in: bool) -> None:
    """Make what the kernel says about a battery and its charger."""
    facts = {
        "AC": {"type": "Mains", "online": str(int(is_plugged_in))},
        "BAT0": {"type": "Battery", "status": "Charging" if is_plugged_in else "Discharging"},
        "hidpp_battery_0": {"type": "Battery", "scope": "Device", "status": "Discharging"},
    }
    for supply, values in facts.items():
        (folder / supply).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / supply / name).write_text(f"{value}\n")


def start_on_power(cluster: Cluster, host: Host, supplies: Path) -> Member:
    """Start `covey run --only-on-power` on a host with a battery."""
    home = host.home / "mine"
    home.mkdir(mode=0o700, exist_ok=True)
    script = home / "train.py"
    script.write_text(ELASTIC)
    words = ["mine", "--min", "1", "--only-on-power", str(script), str(host.index), "mine", json.dumps({"min_size": 1})]
    argv = ["sh", "-c", WITH_BATTERY, str(supplies), sys.executable, "-m", "covey", "run", *words]
    env = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET": cluster.secret, "COVEY_HOME": str(home)}
    return Member(host, host.popen(argv, env=env))


def test_a_laptop_takes_part_while_it_has_power_and_from_whichever_address_it_has_then() -> None:
    with Lan(hosts=2, prefix=PREFIX, names=("laptop", "desktop")) as lan:
        laptop, desktop = lan.hosts
        supplies = laptop.temp / "supplies"
        charge(supplies, is_plugged_in=True)
        cluster = Cluster()
        moving = start_on_power(cluster, laptop, supplies)
        stayer = start_with_keeper(cluster, desktop, "mine", ELASTIC, "--min", "1", min_size=1)
        number = together([moving, stayer])["number"]
        charge(supplies, is_plugged_in=False)
        alone = together([stayer], after=number)
        assert alone["hosts"] == [desktop.index]
        assert not stayer.all_said("contributors"), "it has left in order: no operation lost it"
        wait_until(lambda: any("laptop has left the run" in line for line in moving.warnings), moving.story)
        assert any(line == "covey: laptop is on battery: its processes leave the run" for line in moving.warnings)

        laptop.run(["sh", "-c", "ip address flush dev eth0 && ip address add 10.213.0.77/24 dev eth0"])  # another Wi-Fi
        charge(supplies, is_plugged_in=True)
        together([moving, stayer], after=alone["number"])
        assert any("covey: laptop has power again after" in line for line in moving.warnings)
        stayer.ask_to_end()
        for member in (moving, stayer):
            member.end()
