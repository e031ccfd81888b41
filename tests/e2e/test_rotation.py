"""A new secret while runs go on: they do not stop, newcomers bring the new one, and the old one is good for a while."""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING

from tests.e2e.test_cluster_elastic import NodeHome
from tests.support.members import check_same_end, together
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from tests.support.machines import Lab, Machine

KEY = secrets.token_bytes(32)


def rotate(machine: Machine, *words: str) -> tuple[int, str]:
    ended = machine.covey("secret", "rotate", "--yes", "--json", *words)
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)["join_code"]


def test_a_run_goes_on_through_a_new_secret_and_takes_in_a_newcomer_that_knows_only_that(lab: Lab) -> None:
    one, two, old = lab.owned("lab", KEY, "one", "two", "old")
    members = [NodeHome(machine, index).keep("--min", "2", min_size=2) for index, machine in enumerate((one, two))]
    before = together(members)
    code, join_code = rotate(one, "--grace", "1")
    assert code == 0
    rotated_at = time.monotonic()
    late = NodeHome(lab.machine("late"), 2)
    enrolled = late.machine.covey("enroll", "-", stdin=join_code)
    assert enrolled.returncode == 0, enrolled.stderr
    assert late.machine.key("lab") == one.key("lab") == two.key("lab") != KEY
    members.append(late.keep("--min", "2", min_size=2))
    after = together(members, after=before["number"])
    assert sorted(after["hosts"]) == [0, 1, 2]
    assert not any(member.all_said("changed") or member.all_said("error") for member in members)
    # The grace is over. A machine that has only the old secret reaches no member, and says so.
    time.sleep(max(0.0, rotated_at + 3.0 - time.monotonic()))
    outcast = NodeHome(old, 3).keep("--min", "2", min_size=2, timeout=6)
    assert outcast.process.wait(DEADLINE) != 0
    outcast.join()
    assert outcast.all_said("generation") == []
    members[0].ask_to_end()
    check_same_end(members)


def test_a_member_that_has_not_heard_of_a_new_secret_stays_in_its_run_during_the_grace(lab: Lab) -> None:
    """Lanes are opened anew after a loss: the nodes that have heard try the old secret towards the one that has not."""
    one, three = lab.owned("lab", KEY, "one", "three")
    deaf = lab.machine("deaf")
    deaf.env |= {"COVEY_SECRET": KEY.hex(), "COVEY_CLUSTER": "lab"}
    homes = [NodeHome(one, 0), NodeHome(deaf, 1), NodeHome(three, 2)]
    members = [home.start(min_size=2) for home in homes]
    together(members)
    code, _ = rotate(one)
    assert code == 1
    assert one.key("lab") == three.key("lab") != KEY
    members[2].kill()
    for member in members[:2]:
        assert sorted(member.said("contributors")["hosts"]) == [0, 1]
    members[0].ask_to_end()
    check_same_end(members[:2])
