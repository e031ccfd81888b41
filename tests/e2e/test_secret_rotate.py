"""`covey secret rotate`: a new key for those who are there and wanted, and for nobody else."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING

import pytest
from tests.e2e.machines import Lab, end, heard, new_lab, wait_until_joined
from tests.e2e.test_cluster_commands import Terminal

from covey.net.identity import NodeIdentity
from covey.wire.secret import decode_join_code

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

KEY = secrets.token_bytes(32)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


def test_nodes_that_run_keep_the_new_secret_and_their_run_goes_on(lab) -> None:
    one, two, away = (lab.machine(name, "lab", KEY) for name in ("one", "two", "away"))
    nodes = [one.node("mine", size=2), two.node("mine", size=2)]
    wait_until_joined(nodes)
    ended = one.covey("secret", "rotate", "--yes", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    secret, _ = decode_join_code(report["join_code"])
    assert (report["cluster"], secret.name) == ("lab", "lab")
    assert [(node["kept"], node["problem"]) for node in report["nodes"]] == [(True, "")] * 2
    assert one.key("lab") == two.key("lab") == secret.key != KEY
    assert away.key("lab") == KEY
    for node in nodes:
        node.stdin.write("\n")
        node.stdin.flush()
    assert [heard(node) for node in nodes] == [11, 11]
    for node in nodes:
        code, _, err = end(node)
        assert code == 0
        assert "the secret of cluster 'lab' was changed" in err
    away.covey("enroll", "-", "--force", stdin=report["join_code"])
    wait_until_joined([machine.node("next", size=3) for machine in (one, two, away)])


def test_who_cannot_keep_it_says_why_and_is_named(lab) -> None:
    one, two = lab.machine("one", "lab", KEY), lab.machine("two")
    environment = {"COVEY_SECRET": KEY.hex(), "COVEY_CLUSTER": "lab"}
    nodes = [one.node("mine", size=2), two.node("mine", size=2, env=environment)]
    wait_until_joined(nodes)
    ended = one.covey("secret", "rotate", "--yes")
    assert ended.returncode == 1
    kept, _, failed = ended.stdout.partition("These nodes did NOT keep it")
    assert f" {nodes[0].pid} " in kept
    assert f" {nodes[1].pid} " not in kept
    assert "its secret was given by COVEY_SECRET, COVEY_SECRET_FILE or secret=; change it there" in failed
    (code,) = re.findall(r"^    (covey1-\S+)$", ended.stdout, re.MULTILINE)
    assert decode_join_code(code)[0].key == one.key("lab") != KEY
    assert "The join code is the cluster's key" in ended.stdout
    assert "covey enroll --force" in ended.stdout


def test_a_denied_node_gets_nothing(lab) -> None:
    one, two = (lab.machine(name, "lab", KEY) for name in ("one", "two"))
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
    one = lab.machine("one", "lab", KEY)
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
