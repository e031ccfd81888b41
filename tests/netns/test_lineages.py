"""One run never becomes two: machines that knew it wait for it, and of two that were founded apart the younger ends.

Several runs share each network and its cuts, so that their waits pass together.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from tests.support.members import ELASTIC, Member, check_same_end, start, start_with_keeper, together
from tests.support.nodes import Cluster
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "covey-lineages"
PATIENCE = 3.0
KNOWN = "a run of this name was begun before"
FAILING = ELASTIC.replace(
    "    except covey.CoveyError as error:\n",
    "    except covey.QuorumLostError:\n        raise\n    except covey.CoveyError as error:\n",
)
"""Fails when it has lost the quorum, so that its keeper starts it again."""


def part(lan: Lan, side: Iterable[int]) -> None:
    """Let nothing pass between these hosts and the others."""
    inside = set(side)
    for one in inside:
        for other in set(range(len(lan.hosts))) - inside:
            lan.switch.cut(f"host{one}", f"host{other}")
            lan.switch.cut(f"host{other}", f"host{one}")


def wait_for_line(member: Member, words: str) -> str:
    """Wait until a line with these words is in what a program or its keeper writes for people."""

    def found() -> list[str]:
        return [line for line in member.warnings if words in line]

    wait_until(found, lambda: f"no line with {words!r}\n{member.story()}")
    return found()[-1]


@pytest.mark.thorough
def test_machines_that_are_cut_off_wait_for_their_run_whether_they_gave_up_were_killed_or_only_heard_of_it() -> None:
    with Lan(hosts=5, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()

        def begin(run: str, *indexes: int) -> list[Member]:
            words, options = (
                ("--restarts", "9", "--min", "2"),
                {"min_size": 2, "patience": PATIENCE, "timeout": DEADLINE},
            )
            return [start_with_keeper(cluster, lan.hosts[index], run, FAILING, *words, **options) for index in indexes]

        five, told = begin("five", 0, 1, 2, 3, 4), begin("told", 0, 2, 3)
        before = [together(five)["number"], together(told)["number"]]
        part(lan, {0, 1})
        five[0].kill()
        told += begin("told", 1)  # on a machine that never heard of the run, beside one that gives up
        cut_off = [*five[:2], told[0], told[3]]
        counts = [len(member.all_said("generation")) for member in cut_off]
        for member in cut_off:
            wait_for_line(member, KNOWN)
        together(
            [start(cluster, host, "new", ELASTIC, min_size=2) for host in lan.hosts[:2]]
        )  # one may be founded here
        for member, count in zip(cut_off, counts, strict=True):
            assert len(member.all_said("generation")) == count, f"a second run was founded\n{member.story()}"
        lan.switch.mend()
        for members, number in zip((five, told), before, strict=True):
            together(members, after=number)
            members[0].ask_to_end()
            check_same_end(members)


def test_of_two_runs_that_were_founded_apart_the_younger_ends_and_its_state_is_saved() -> None:
    with Lan(hosts=4, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        part(lan, {0, 1})
        older = [start(cluster, host, "one", ELASTIC, min_size=2, patience=PATIENCE) for host in lan.hosts[:2]]
        together(older)
        code = "import os\nos.makedirs(os.environ['COVEY_HOME'], 0o700)\nos.chdir(os.environ['COVEY_HOME'])\n" + ELASTIC
        younger = [start(cluster, host, "one", code, min_size=2, patience=PATIENCE) for host in lan.hosts[2:]]
        together(younger)
        lan.switch.mend()
        states = []
        for member in younger:
            assert member.process.wait(DEADLINE) == 1, member.story()
            member.join()
            error = wait_for_line(member, "covey.SplitRunError: an older run of the name 'one' is running with")
            assert "this one is younger, so it ends here" in error
            saved = error.partition("Its state is in ")[2].partition(" (covey.load_state)")[0]
            states.append(covey.load_state(saved))
        for state in states:
            assert state["step"] == states[0]["step"] > 0, "all members end after the same step"
            assert state["w"].shape == (1000,)
            assert (state["w"] == states[0]["w"]).all()
        for member in older:
            assert "a second run of the name 'one', younger than this one" in wait_for_line(member, "a second run")
        back = [start(cluster, host, "one", ELASTIC, min_size=2, patience=PATIENCE) for host in lan.hosts[2:]]
        members = [*older, *back]
        assert together(members)["step"] > 0
        back[0].ask_to_end()
        check_same_end(members)


def test_a_machine_whose_run_is_gone_waits_for_it_until_a_person_begins_a_new_one() -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        pair = [start(cluster, host, "lost", ELASTIC, min_size=2, patience=PATIENCE) for host in lan.hosts[:2]]
        together(pair)
        tie_breaker = next(member for member in pair if member.all_said("generation")[-1]["rank"] == 0)
        other = next(member for member in pair if member is not tie_breaker)
        for member in pair:
            member.kill()
            member.process.wait(DEADLINE)
        here, third = lan.hosts[other.host.index], lan.hosts[2]
        waiting = [start(cluster, host, "lost", ELASTIC, min_size=2, timeout=9, patience=2) for host in (here, third)]
        for member in waiting:
            wait_for_line(member, KNOWN)
            member.process.wait(DEADLINE)
            assert member.process.returncode == 1
            member.join()
            assert "DeadlineError" in member.story()
            assert "--new gives it up and begins another" in member.story()
            assert member.all_said("generation") == []
        new = [
            start_with_keeper(cluster, host, "lost", ELASTIC, "--new", "--min", "2", min_size=2, patience=PATIENCE)
            for host in (here, third)
        ]
        assert together(new)["step"] == 0
        new[0].ask_to_end()
        check_same_end(new)


@pytest.mark.thorough
def test_a_process_that_is_started_again_after_the_others_have_finished_ends_quietly() -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        members = [
            start_with_keeper(cluster, host, "done", ELASTIC, "--restarts", "3", "--size", "3", patience=PATIENCE)
            for host in lan.hosts
        ]
        together(members)
        lost = members[2]
        lost.signal(signal.SIGSTOP)  # it says nothing, so the others go on without it
        for member in members[:2]:
            member.said("contributors")
        members[0].ask_to_end()
        check_same_end(members[:2])
        lost.kill()
        lost.join()
        assert lost.process.wait(DEADLINE) == 0, lost.story()
        assert "Traceback" not in "\n".join(lost.warnings)
