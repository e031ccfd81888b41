"""`covey deny` and `covey allow` as people use them: machines that run hear of it, and a run goes on without a node."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from tests.e2e.test_cluster_commands import Terminal
from tests.e2e.test_cluster_elastic import NodeHome
from tests.support import pipes
from tests.support.machines import Lab, Machine, end, heard, wait_until_joined
from tests.support.members import check_same_end, together
from tests.support.waiting import DEADLINE

from covey.net.keys.identity import id_text, node_name

if TYPE_CHECKING:
    import subprocess

KEY = secrets.token_bytes(32)
MEMBER = """
import json, sys, time
import covey
print(json.dumps("joining"), flush=True)
try:
    with covey.join(sys.argv[1], size=int(sys.argv[2]), on_loss="continue", timeout=500, patience=500) as group:
        print(json.dumps(group.rank), flush=True)
        while True:
            if group.all_reduce(1) < int(sys.argv[2]):  # on all of them in the same operation
                print(json.dumps(["without", sorted(set(range(int(sys.argv[2]))) - set(group.live))]), flush=True)
                break
            time.sleep(0.05)
        sys.stdin.readline()
        assert group.all_reduce(1) == len(group.contributors)  # not `live`: the other rank may leave at once
        print(json.dumps("went on"), flush=True)
except covey.CoveyError as error:
    print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


def ok(machine: Machine, *words: str, stdin: str = "") -> str:
    ended = machine.covey(*words, stdin=stdin)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def node_id(machine: Machine) -> str:
    """Return the id of a machine's first node, once it has one."""
    path, deadline = machine.home / "identities" / "0.key", time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return path.read_text().split()[1]


def members(*machines: Machine) -> tuple[list[subprocess.Popen[str]], list[int]]:
    nodes = [machine.start("-c", MEMBER, "mine", str(len(machines))) for machine in machines]
    assert [heard(node) for node in nodes] == ["joining"] * len(nodes)
    return nodes, [heard(node) for node in nodes]


def words_of(process: subprocess.Popen[str]) -> list[Any]:
    code, out, err = end(process)
    assert code == 0, out + err
    return [json.loads(line) for line in out.splitlines()]


def told_while_waiting(node: subprocess.Popen[str], text: str) -> str:
    """Return what a node says of why it waits, once that has a text in it, and end the node."""
    assert heard(node) == "joining"
    err = pipes.read_until(pipes.stderr(node), text)
    node.send_signal(signal.SIGINT)
    assert end(node)[0] != 0
    return err


def test_a_run_goes_on_without_a_node_that_the_owner_denies(lab: Lab) -> None:
    one, two, outcast = lab.owned("lab", KEY, "one", "two", "outcast")
    nodes, ranks = members(one, two, outcast)
    told = json.loads(ok(one, "deny", node_id(outcast), "--json"))
    assert told["everywhere"]
    assert sorted(told["heard"]) == sorted([node_id(one), node_id(two)])
    assert told["not_heard"] == []
    for node in nodes:
        pipes.stdin(node).close()
    for node in nodes[:2]:
        assert words_of(node) == [["without", [ranks[2]]], "went on"]
    kind, words = words_of(nodes[2])[-1]
    assert kind == "ClosedError"
    assert "this process cannot be in the run any more: this node may not be in cluster 'lab'" in words
    # It may not come back, and is told why; and it is known on a machine that has only heard of it.
    assert json.loads(ok(two, "deny", "--list", "--json"))[0]["id"] == node_id(outcast)
    waiting = two.node("next", size=2)
    err = told_while_waiting(outcast.node("next", size=2, timeout=DEADLINE), "is denied by the owner of the cluster")
    assert "--undo`" in err
    ok(one, "deny", node_id(outcast), "--undo")
    wait_until_joined([waiting, outcast.node("next", size=2)])


def test_a_keeper_holds_no_denied_process_in_its_run(lab: Lab) -> None:
    machines = lab.owned("lab", KEY, "one", "two", "outcast")
    kept = [NodeHome(machine, index).keep("--min", "2", min_size=2) for index, machine in enumerate(machines)]
    before = together(kept)
    ok(machines[0], "deny", node_id(machines[2]))
    for member in kept[:2]:
        assert sorted(member.said("contributors")["hosts"]) == [0, 1]
    assert "may not be in cluster 'lab'" in kept[2].said("error")["text"]
    kept[0].ask_to_end()
    check_same_end(kept[:2])
    assert all(sorted(said["hosts"]) == [0, 1] for said in kept[0].all_said("generation")
               if said["number"] > before["number"])  # fmt: skip


def test_a_denial_on_another_machine_holds_there_and_for_what_runs_there(lab: Lab) -> None:
    one, two, three = lab.owned("lab", KEY, "one", "two", "three")
    waiting = two.node("mine", size=3, timeout=DEADLINE)
    assert heard(waiting) == "joining"
    third = three.node("mine", size=3, timeout=DEADLINE)
    assert heard(third) == "joining"
    deadline = time.monotonic() + DEADLINE
    while node_id(three) not in (two.home / "clusters" / "lab.json").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    out = ok(two, "deny", node_id(three))
    assert "running nodes within two seconds" in out
    assert "on the machine with the owner key" in out
    listed = json.loads(ok(two, "deny", "--list", "--json"))
    assert [(row["id"], row["everywhere"]) for row in listed] == [(node_id(three), False)]
    assert json.loads(ok(one, "deny", "--list", "--json")) == []
    ok(two, "deny", node_id(three), "--undo")
    wait = [waiting, third, one.node("mine", size=3)]
    assert heard(wait[2]) == "joining"
    assert sorted(heard(node) for node in wait) == [[0, 3], [1, 3], [2, 3]]


def test_a_machine_does_not_deny_itself(lab: Lab) -> None:
    (one,) = lab.owned("lab", KEY, "one")
    assert heard(one.node("mine", size=2)) == "joining"
    ended = one.covey("deny", node_id(one))
    assert ended.returncode == 2
    assert "is this machine itself" in ended.stderr


def test_with_the_list_on_a_new_machine_waits_until_it_is_approved(lab: Lab) -> None:
    one, two, late = lab.owned("lab", KEY, "one", "two", "late")
    first = [one.node("first", size=2), two.node("first", size=2)]
    wait_until_joined(first)
    assert "add --yes" in one.covey("allow", "--ask", "on").stderr
    assert "not on this machine" in two.covey("allow", "--ask", "on", "--yes").stderr
    switched = json.loads(ok(one, "allow", "--ask", "on", "--yes", "--json"))
    assert sorted(switched["allowed"]) == sorted([node_id(one), node_id(two)])
    assert sorted(switched["heard"]) == sorted([node_id(one), node_id(two)])
    assert "No machine waits" in ok(one, "allow")
    # Two processes of the new machine, of which the second has another key; and commands of a machine on the list.
    waiting = [late.node("next", size=3, timeout=DEADLINE), late.node("next", size=3, timeout=DEADLINE)]
    assert [heard(node) for node in waiting] == ["joining"] * 2
    third = two.node("next", size=3, timeout=DEADLINE)
    assert heard(third) == "joining"
    assert json.loads(ok(two, "status", "--json"))
    for node in waiting:
        pipes.read_until(pipes.stderr(node), "is waiting for approval: on")
    rows = json.loads(ok(one, "allow", "--json"))
    assert [row["id"] for row in rows] == [node_id(late)]
    terminal = Terminal(one, "allow")
    try:
        terminal.answer("[y/N]: ", "y")
        assert terminal.finish() == 0, terminal.screen
    finally:
        terminal.close()
    assert sorted(heard(node) for node in (*waiting, third)) == [[0, 3], [1, 3], [2, 3]]
    assert {row["id"] for row in json.loads(ok(one, "allow", "--list", "--json"))} == {
        node_id(machine) for machine in (one, two, late)
    }


def test_an_unapproved_machine_is_told_where_to_ask(lab: Lab) -> None:
    one, late = lab.owned("lab", KEY, "one", "late")
    ok(one, "allow", "--ask", "on", "--yes")
    assert heard(one.node("mine", size=2, timeout=DEADLINE)) == "joining"
    err = told_while_waiting(late.node("mine", size=2, timeout=DEADLINE), "is waiting for approval: on")
    assert "run `covey allow" in err
    asked = one.covey("allow", node_id(late)[:12])
    assert f"has the id {id_text(late.identity())}" in asked.stderr
    assert "there is no terminal to ask on; add --yes" in asked.stderr
    out = ok(one, "allow", node_id(late)[:12], "--yes")
    assert "may be in 'lab'" in out
    bound = {row["id"]: row for row in json.loads(ok(one, "trust", "--json"))}[node_id(late)]
    assert bound["by_owner"]
    assert bound["name"] == node_name(socket.gethostname(), late.identity())
    ok(one, "allow", node_id(late), "--undo")
    assert [row["id"] for row in json.loads(ok(one, "allow", "--list", "--json"))] == [node_id(one)]
    assert "this machine itself stays" in one.covey("allow", node_id(one), "--undo").stderr
    ok(one, "allow", "--ask", "off")
    assert json.loads(ok(one, "allow", "--list", "--json")) == []
    assert "`covey allow --ask on` makes a list" in ok(one, "allow")
    assert ok(one, "allow", "--json") == "[]\n"
    assert "no list of approved machines" in one.covey("allow", node_id(late)).stderr


def test_a_charter_is_kept_although_no_other_node_can_be_told(lab: Lab) -> None:
    (one,) = lab.owned("lab", KEY, "one")
    ended = one.covey("deny", "ab" * 32, "--json", COVEY_INTERFACES="no-such-interface")
    assert ended.returncode == 0, ended.stderr
    assert "the running nodes could not be told" in ended.stderr
    assert json.loads(ended.stdout)["heard"] == []
    assert json.loads(ok(one, "deny", "--list", "--json"))[0]["everywhere"]
