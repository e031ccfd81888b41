"""Runs of a cluster that lose and gain members, as processes of one host: restarts, records on disk, what people see.

Each node has a configuration folder of its own, as on machines of their own. Nothing leaves loopback.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from typing import Any

from tests.support.machines import Lab, Machine, end, heard
from tests.support.members import ELASTIC, PRELUDE, STEADY, Member, agree_on_loss, by_rank, check_same_end, together
from tests.support.waiting import DEADLINE

from covey.net.keys.identity import NodeIdentity

KEY = secrets.token_bytes(32)
FULL = STEADY.replace(
    """    say("joined",""",
    """    import resource
    if group.rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # its disk has no room any more
    say("joined",""",
)
"""Rank 2 can write no more files once it has joined."""


class NodeHome:
    """Where a node is at home."""

    def __init__(self, machine: Machine, index: int) -> None:
        self.machine, self.index = machine, index

    def start(self, code: str = ELASTIC, run: str = "mine", **options: Any) -> Member:
        """Start a node here."""
        return Member(self, self.machine.start("-c", code, str(self.index), run, json.dumps(options)))

    def keep(self, *words: str, code: str = ELASTIC, run: str = "mine", **options: Any) -> Member:
        """Start one by `covey run`."""
        script = self.machine.lab.folder / "train.py"
        script.write_text(code)
        argv = ["-m", "covey", "run", run, *words, str(script), str(self.index), run, json.dumps(options)]
        return Member(self, self.machine.start(*argv))

    def records(self) -> list[Any]:
        """Return the files in which its node wrote down what it promised."""
        return sorted((self.machine.home / "runs").glob("*.record"))


def homes_of(lab: Lab, count: int) -> list[NodeHome]:
    return [NodeHome(lab.machine(f"home{index}", "lab", KEY), index) for index in range(count)]


def kill_all(members: list[Member]) -> None:
    """Kill them, and wait until they have let go of their identities."""
    for member in members:
        member.kill()
    for member in members:
        member.process.wait(DEADLINE)


def test_when_all_nodes_die_at_once_those_that_are_started_again_form_the_run_anew_and_without_a_word(lab) -> None:
    homes = homes_of(lab, 3)
    members = [home.start(min_size=2) for home in homes]
    for count in (3, 2):
        assert together(members)["number"] <= 1  # the first two may begin without the third
        kill_all(members)
        assert all(len(home.records()) == 1 for home in homes[:count])
        # Two of three wait for the third for as long as their patience lasts: it may have gone on.
        patience = 1000.0 if count == 3 else 2.0
        members = [home.start(min_size=count, max_size=count, patience=patience) for home in homes[:count]]
        said = together(members)
        assert (said["number"], said["step"]) == (0, 0)
        for member in members:
            assert [line for line in member.warnings if "waiting for run" not in line] == []
    members[0].ask_to_end()
    check_same_end(members)


def test_a_run_that_begins_with_one_member_takes_in_a_second(lab) -> None:
    first, second = homes_of(lab, 2)
    members = [first.start(min_size=1)]
    assert together(members)["number"] == 0
    members.append(second.start(min_size=1))
    assert together(members)["number"] > 0
    members[0].ask_to_end()
    check_same_end(members)
    assert members[1].said("events")["kinds"][0] == ["generation", 0, []], "it was told how the run began"


def test_a_node_whose_record_is_damaged_says_which_file_to_remove(lab) -> None:
    homes = homes_of(lab, 2)
    members = [home.start(min_size=2) for home in homes]
    together(members)
    kill_all(members)
    (record,) = homes[0].records()
    record.write_bytes(record.read_bytes()[:-5])
    hurt = homes[0].start(min_size=2)
    assert hurt.process.wait(DEADLINE) == 1
    hurt.join()
    assert hurt.warnings[-1].startswith("covey.ConfigError")
    assert f"{record} is damaged" in hurt.warnings[-1]
    assert "remove it" in hurt.warnings[-1]
    record.unlink()
    members = [home.start(min_size=2) for home in homes]
    assert together(members)["number"] == 0
    members[1].ask_to_end()
    check_same_end(members)


def test_a_node_that_cannot_write_down_what_it_promises_says_so_and_the_others_go_on_without_it(lab) -> None:
    *left, full, killed = by_rank([home.start(FULL, size=4) for home in homes_of(lab, 4)])
    killed.kill()
    error = full.said("error")
    assert error["kind"] == "ClosedError"
    assert "cannot be in the run any more: cannot write " in error["text"]
    assert "make room, or set COVEY_HOME elsewhere" in error["text"]
    agree_on_loss(left)  # half of them, with the tie-breaker
    left[0].ask_to_end()
    for member in left:
        member.end()


def test_a_home_that_is_full_or_no_folder_is_named_before_anything_is_joined(lab) -> None:
    (home,) = homes_of(lab, 1)
    (home.machine.home / "runs").write_text("in the way")
    for code in (
        ELASTIC,
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)){PRELUDE}covey.join(run)",
    ):
        member = home.start(code)
        assert member.process.wait(DEADLINE) == 1
        member.join()
        assert member.warnings[-1].startswith("covey.ConfigError")
        assert str(home.machine.home) in member.warnings[-1]
        assert "COVEY_HOME" in member.warnings[-1]


def test_status_shows_leader_and_tie_breaker_and_follows_a_loss(lab) -> None:
    homes = homes_of(lab, 3)
    ranks = by_rank([home.start(STEADY, size=3) for home in homes])
    watch = homes[0].machine.start("-m", "covey", "status", "--watch", "--json")
    events_told: set[str] = set()

    def shown(pids: list[int], *told: str) -> list[dict[str, Any]]:
        """Wait until these are the live ranks of the run, one of them leads, and they have told of these events.

        That a process has ended is seen before its members agree on it. Return the ranks as `covey status` shows them.
        """
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            for run in heard(watch)["runs"]:
                live = [rank["pid"] for rank in run["ranks"] if rank["state"] not in ("lost", "left", "joining")]
                events_told.update(event["kind"] for event in run["happenings"])
                if live == pids and events_told.issuperset(told):
                    status = homes[0].machine.covey("status", "--json")
                    for found in json.loads(status.stdout)["runs"]:
                        nodes = found["nodes"]
                        if [node["pid"] for node in nodes] == pids and sum(node["is_leader"] for node in nodes) == 1:
                            return nodes
        raise AssertionError(f"{pids} were not shown")

    nodes = shown([member.pid for member in ranks])
    assert "lost" not in events_told
    assert [node["is_tie_breaker"] for node in nodes] == [True, False, False]
    ranks[0].kill()
    agree_on_loss(ranks[1:])
    nodes = shown([member.pid for member in ranks[1:]], "lost")
    assert [node["rank"] for node in nodes] == [1, 2]
    assert [node["is_tie_breaker"] for node in nodes] == [True, False]
    watch.send_signal(signal.SIGINT)
    assert end(watch)[0] == 0
    ranks[1].ask_to_end()
    for member in ranks[1:]:
        member.end()


def test_keepers_bring_a_killed_tie_breaker_back_whose_vote_lets_the_other_go_on_and_sigterm_lets_one_leave(
    lab,
) -> None:
    homes = homes_of(lab, 2)
    kept = [home.keep("--min", "2", "--restarts", "1", min_size=2, patience=1000) for home in homes]
    hosts = together(kept)["hosts"]
    first, other = (kept[host] for host in hosts)
    first.kill()
    went_on = other.said("contributors")
    assert went_on["hosts"] == [other.host.index]
    said = together(kept, after=0)
    assert said["hosts"] == [other.host.index, first.host.index]
    assert first.said("joining", 1)["pid"] != first.said("joining")["pid"]

    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(DEADLINE) == 0
    other.process.send_signal(signal.SIGTERM)
    assert other.process.wait(DEADLINE) == 0


def test_a_newcomer_that_one_of_the_members_denies_is_in_no_generation(lab) -> None:
    *settled, denied, welcome = homes_of(lab, 4)
    with NodeIdentity.acquire(denied.machine.home / "identities") as identity:
        assert settled[1].machine.covey("deny", identity.id.hex()).returncode == 0
    members = [home.start(min_size=2) for home in settled]
    before = together(members)
    outcast = denied.start(min_size=2)
    until = time.monotonic() + DEADLINE
    while not any("is denied on" in line for line in outcast.warnings):  # the other member has let it wait
        assert time.monotonic() < until, outcast.story()
        time.sleep(0.05)
    members.append(welcome.start(min_size=2))
    assert sorted(together(members, after=before["number"])["hosts"]) == [0, 1, 3]
    assert all(denied.index not in said["hosts"] for member in members for said in member.all_said("generation"))
    members[0].ask_to_end()
    check_same_end(members)
    assert outcast.all_said("generation") == []
