"""`covey secret rotate`: a new key for the nodes that are there and wanted, and for no other."""

from __future__ import annotations

import json
import re
import secrets
import signal

from tests.e2e.test_cluster_commands import Terminal
from tests.support import pipes
from tests.support.machines import end, heard, wait_until_joined

from covey.net.keys.identity import NodeIdentity
from covey.wire.secret import decode_join_code

KEY = secrets.token_bytes(32)


def test_nodes_and_agents_that_run_keep_the_new_secret_and_their_run_goes_on(lab) -> None:
    one, two, away, idle = lab.owned("lab", KEY, "one", "two", "away", "idle")
    agent = idle.start("-m", "covey", "up")
    assert "is up in the cluster 'lab'" in pipes.stdout(agent).readline()
    nodes = [one.node("mine", size=2), two.node("mine", size=2)]
    wait_until_joined(nodes)
    ended = one.covey("secret", "rotate", "--yes", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    secret, _, owner, _ = decode_join_code(report["join_code"])
    assert owner.hex() == json.loads(away.covey("secret", "show", "--json").stdout)["owner"]
    assert (report["cluster"], secret.name) == ("lab", "lab")
    assert [(node["kept"], node["problem"]) for node in report["nodes"]] == [(True, "")] * 3
    assert one.key("lab") == two.key("lab") == idle.key("lab") == secret.key != KEY
    assert away.key("lab") == KEY
    for node in nodes:
        node.stdin.write("\n")
        node.stdin.flush()
    assert [heard(node) for node in nodes] == [11, 11]
    for node in nodes:
        code, _, err = end(node)
        assert code == 0
        assert "the secret of cluster 'lab' was changed by its owner" in err
    enrolled = away.covey("enroll", "-", stdin=report["join_code"])
    assert "has the new secret of the cluster 'lab'" in enrolled.stdout, enrolled.stderr
    wait_until_joined([machine.node("next", size=3) for machine in (one, two, away)])
    assert len(json.loads(away.covey("status", "--json").stdout)["agents"]) == 1, "it is found by the new secret"
    agent.send_signal(signal.SIGTERM)
    end(agent)


def test_a_node_that_cannot_keep_it_says_why_and_is_named(lab) -> None:
    (one,), two = lab.owned("lab", KEY, "one"), lab.machine("two")
    environment = {"COVEY_SECRET": KEY.hex(), "COVEY_CLUSTER": "lab"}
    nodes = [one.node("mine", size=2), two.node("mine", size=2, env=environment)]
    wait_until_joined(nodes)
    ended = one.covey("secret", "rotate", "--yes")
    assert ended.returncode == 1
    kept, _, failed = ended.stdout.partition("These nodes did NOT store it")
    assert f" {nodes[0].pid} " in kept
    assert f" {nodes[1].pid} " not in kept
    assert "its secret was given by COVEY_SECRET, COVEY_SECRET_FILE or secret=; change it there" in failed
    (code,) = re.findall(r"^    (covey1-\S+)$", ended.stdout, re.MULTILINE)
    assert decode_join_code(code)[0].key == one.key("lab") != KEY
    assert "The join code is the cluster's key" in ended.stdout
    assert "needs it:  covey enroll\n" in ended.stdout


def test_a_machine_that_knows_no_owner_takes_no_new_secret(lab) -> None:
    (one,), two = lab.owned("lab", KEY, "one"), lab.machine("two", "lab", KEY)
    nodes = [one.node("mine", size=2), two.node("mine", size=2)]
    wait_until_joined(nodes)
    ended = one.covey("secret", "rotate", "--yes")
    assert ended.returncode == 1
    assert "it knows no owner of this cluster, so it takes no new secret from the network" in ended.stdout
    assert two.key("lab") == KEY != one.key("lab")


def test_the_secret_is_changed_only_where_the_owner_key_is(lab) -> None:
    one, two = lab.owned("lab", KEY, "one", "two")
    ended = two.covey("secret", "rotate", "--yes")
    assert ended.returncode == 2
    assert "run this on the machine where `covey init lab` was run" in ended.stderr
    assert "Another machine holds the owner key of 'lab'" in two.covey("secret", "show").stdout
    assert "This machine holds the owner key of 'lab'" in one.covey("secret", "show").stdout
    bare = lab.machine("bare", "lab", KEY)
    assert "knows no owner of 'lab'" in bare.covey("secret", "show").stdout
    assert "`covey init lab --passphrase --force`" in bare.covey("secret", "rotate", "--yes").stderr
    assert one.key("lab") == two.key("lab") == bare.key("lab") == KEY


def test_a_new_secret_goes_only_to_the_nodes_that_are_named(lab) -> None:
    one, two, three = lab.owned("lab", KEY, "one", "two", "three")
    nodes = [machine.node("mine", size=2) for machine in (two, three)]
    wait_until_joined(nodes)
    wanted = (two.home / "identities" / "0.key").read_text().split()[1]
    assert "does not run now" in one.covey("secret", "rotate", "--yes", "--to", "ab" * 32).stderr
    assert one.key("lab") == KEY
    ended = one.covey("secret", "rotate", "--yes", "--to", wanted, "--json")
    assert ended.returncode == 0, ended.stderr
    assert [node["id"] for node in json.loads(ended.stdout)["nodes"]] == [wanted]
    assert one.key("lab") == two.key("lab") != KEY
    assert three.key("lab") == KEY


def test_a_denied_node_gets_nothing(lab) -> None:
    one, two = lab.owned("lab", KEY, "one", "two")
    with NodeIdentity.acquire(two.home / "identities") as identity:
        denied = identity.id.hex()
    assert one.covey("deny", denied).returncode == 0
    node = two.node("mine", min_size=2)
    assert heard(node) == "joining"
    ended = one.covey("secret", "rotate", "--yes", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["nodes"] == []
    assert two.key("lab") == KEY != one.key("lab")


def test_nothing_changes_unless_the_person_says_yes(lab) -> None:
    (one,) = lab.owned("lab", KEY, "one")
    node = one.node("mine", min_size=2)
    assert heard(node) == "joining"
    assert "add --yes" in one.covey("secret", "rotate").stderr
    assert "add --yes" in one.covey("secret", "rotate", "--json").stderr
    assert "given by COVEY_SECRET" in one.covey("secret", "rotate", "--yes", COVEY_SECRET=KEY.hex()).stderr
    terminal = Terminal(one, "secret", "rotate")
    try:
        terminal.answer("[y/N]: ", "n")
        assert terminal.finish() == 1
        assert f" {node.pid} " in terminal.screen
    finally:
        terminal.close()
    assert one.key("lab") == KEY
    terminal = Terminal(one, "secret", "rotate")
    try:
        terminal.answer("[y/N]: ", "y")
        assert terminal.finish() == 0
    finally:
        terminal.close()
    assert one.key("lab") != KEY
