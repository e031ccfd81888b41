"""A run that waits is explained first: what it waits for, why, and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.in_turn import in_turn
from tests.unit.cli.test_doctor_findings import ALONE, BETA, CABLE, LOOPBACK, MACHINE, WELL, found, only

from covey.cli.doctor.facts import Facts, Folder, MetNode, PastWait, SeedFacts, WaitFacts
from covey.cli.doctor.finding import UNKNOWN_CURE, Obstacle, cure, obstacle
from covey.cli.doctor.findings import findings

WAIT = WaitFacts(
    cause="nodes",
    text="1 of 2 nodes so far",
    program="train.py",
    size=2,
    min_size=2,
    version="1.0",
    lanes="auto",
    on_loss="raise",
    here=("alpha-aaaa",),
)
HERE = replace(
    BETA, name="alpha-aaaa", host_name="alpha", is_here=True, run="train", state="joining", since=40.4, wait=WAIT
)
THERE = replace(HERE, name="beta-x7a2", host_name="beta", is_here=False, wait=replace(WAIT, here=("beta-x7a2",)))


def waiting(*nodes: MetNode, **differs: Any) -> Facts:
    return replace(WELL, nodes=nodes, **differs)


def with_wait(**differs: Any) -> Facts:
    return waiting(replace(HERE, wait=replace(WAIT, **differs)))


def test_a_run_that_simply_waits_is_a_note_with_how_long_and_for_what() -> None:
    finding = only(waiting(HERE))
    assert (finding.weight, finding.code) == ("note", "waiting-nodes")
    assert finding.text == "Run 'train' has waited 40 s on this machine: 1 of 2 nodes so far."
    assert "on the other machines" in finding.remedy
    assert "has waited 2 h 3 min on beta:" in only(waiting(replace(THERE, since=7400.0))).text


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("10.0.0.9:47700: Connection refused", "no covey node listens there"),
        ("10.0.0.9:47700: no answer in time", "firewall lets 47700-47731/tcp in"),
        ("10.0.0.9:47700: Network is unreachable", "has no route to"),
        ("nowhere: Name or service not known; write a numeric address", "numeric address"),
        ("seed 'x:y' is not host:port", "HOST:PORT"),
        ("10.0.0.9:47700: Something new", UNKNOWN_CURE),
    ],
)
def test_a_seed_that_nothing_answers_at_is_a_problem_whose_cure_follows_from_the_error(why: str, words: str) -> None:
    finding = only(with_wait(seeds={"10.0.0.9": why}))
    assert (finding.weight, finding.code) == ("problem", "waiting-seed")
    assert finding.text == (
        "Run 'train' has waited 40 s on this machine: 1 of 2 nodes so far. "
        f"No covey node answered at its seed 10.0.0.9: {why}."
    )
    assert words in finding.remedy
    assert ("firewall" in finding.remedy) == ("no answer" in why)


def test_seeds_with_the_same_error_are_one_finding_and_a_node_that_met_others_needs_none() -> None:
    refused = {f"10.0.0.{number}": f"10.0.0.{number}:47700: Connection refused" for number in (8, 9)}
    assert "its seeds 10.0.0.8, 10.0.0.9:" in only(with_wait(seeds=refused)).text
    assert found(with_wait(seeds=refused | {"x": "no answer in time"})) == [("problem", "waiting-seed")] * 2
    assert found(with_wait(seeds=refused, here=("alpha-aaaa", "gamma"))) == [("note", "waiting-nodes")]


@pytest.mark.parametrize(
    ("differs", "words", "advice"),
    [
        ({"size": 3}, "this machine was started with --size 2 and beta was started with --size 3", "--size"),
        ({"size": None}, "--size 2 and beta was started with --min 2", "--size"),
        ({"size": None, "max_size": 4}, "was started with --min 2 --max 4", "--max"),
        ({"program": "other.py"}, "this machine runs 'train.py' and beta runs 'other.py'", "same script"),
        ({"on_loss": "continue"}, "--on-loss raise and beta was started with --on-loss continue", "--on-loss"),
        ({"version": "1.1"}, "has covey 1.0 (protocol 1.0) and beta has covey 1.0 (protocol 1.1)", "Update covey"),
        ({"lanes": "tcp"}, "uses lanes 'auto' and beta uses lanes 'tcp'", "COVEY_LANES"),
    ],
)
def test_two_that_wait_for_each_other_on_different_terms_are_told_apart(
    differs: dict[str, Any], words: str, advice: str
) -> None:
    refused = {"beta-x7a2": "the terms differ"}
    here = replace(HERE, wait=replace(WAIT, refused=refused))
    finding = only(waiting(replace(THERE, wait=replace(WAIT, **differs)), here))
    assert (finding.weight, finding.code) == ("problem", "waiting-differs")
    assert finding.text.startswith("Run 'train' has waited 40 s on this machine and beta: 1 of 2 nodes so far.")
    assert words in finding.text
    assert advice in finding.remedy


def test_a_refused_node_that_the_doctor_did_not_meet_is_told_with_the_reason_as_it_is() -> None:
    finding = only(with_wait(refused={"gamma": "program is 'b.py' there and 'a.py' here"}))
    assert (finding.weight, finding.code) == ("problem", "waiting-refused")
    assert "gamma cannot be in it: program is 'b.py' there and 'a.py' here." in finding.text


def test_a_refused_node_whose_own_word_shows_no_difference_is_told_with_the_reason_as_it_is() -> None:
    here = replace(HERE, wait=replace(WAIT, refused={"beta-x7a2": "something is other there"}))
    finding = only(waiting(here, THERE))
    assert (finding.weight, finding.code) == ("problem", "waiting-refused")
    assert "beta-x7a2 cannot be in it: something is other there." in finding.text


def test_nodes_of_another_run_are_no_reason_to_wait() -> None:
    other = replace(BETA, run="other", state="running")
    here = replace(HERE, wait=replace(WAIT, refused={BETA.name: "run is 'other' there and 'train' here"}))
    assert found(waiting(here, other)) == [("note", "waiting-nodes")]


def test_two_waiting_runs_of_near_names_or_one_program_are_probably_one() -> None:
    misspelt = replace(THERE, run="trian", wait=replace(WAIT, program="x.py"))
    finding = only(waiting(HERE, misspelt))
    assert (finding.weight, finding.code) == ("problem", "waiting-names")
    assert "Another run with a name much like it waits on beta: 'trian'." in finding.text
    odd = replace(WAIT, program="a b; reboot")
    assert only(waiting(replace(HERE, wait=odd), replace(THERE, run="2", wait=odd))).remedy.endswith(
        "NAME 'a b; reboot'"
    )
    same = replace(THERE, run="second")
    assert "with the same program (train.py) waits on beta: 'second'" in only(waiting(HERE, same)).text
    stranger = replace(THERE, run="second", wait=replace(WAIT, program="x.py"))
    assert found(waiting(HERE, stranger)) == [("note", "waiting-nodes")] * 2


def test_an_earlier_run_missing_links_and_a_run_that_goes_on_have_remedies_of_their_own() -> None:
    earlier = only(with_wait(cause="earlier-run", text="a run was begun before", missing=("gamma-bbbb",)))
    assert (earlier.weight, earlier.code) == ("warning", "waiting-earlier-run")
    assert "Start gamma-bbbb again" in earlier.remedy
    assert "--new" in earlier.remedy
    assert found(with_wait(cause="links")) == [("problem", "waiting-links")]
    assert found(with_wait(cause="run")) == [("note", "waiting-for-run")]
    assert found(with_wait(cause="agreement")) == [("note", "waiting-agreement")]


def test_problems_of_the_waiting_node_itself_are_told_but_not_what_this_command_looks_at() -> None:
    problems = {"this node": "identity abcd is in use", "10.0.0.3:47701": "no answer in time", "multicast": "broken"}
    finding = only(with_wait(problems=problems))
    assert (finding.weight, finding.code) == ("problem", "waiting-refused")
    assert "identities" in finding.remedy
    left = only(with_wait(problems={"gamma": "size is 3 there and 2 here (it has left)"}))
    assert (left.weight, left.code) == ("warning", "waiting-refused")
    assert "same settings" in left.remedy


@pytest.mark.parametrize(
    ("cause", "expected"), [("members", ("warning", "member-unheard")), ("quorum", ("problem", "no-quorum"))]
)
def test_members_that_are_not_heard_are_told_once_for_all_that_miss_them(cause: str, expected: tuple[str, str]) -> None:
    wait = WaitFacts(cause=cause, text="rank 2 (gamma) cannot be heard", missing=("gamma",))
    running = replace(BETA, state="running", wait=wait)
    facts = replace(WELL, nodes=(running, replace(running, name="delta", id="cd" * 32)))
    assert found(facts) == [expected]
    assert "gamma" in findings(facts)[0].remedy


# Causes on this machine


def with_folder(**differs: Any) -> Facts:
    folder = Folder(role="temporary", path="/tmp", variable="TMPDIR", free_bytes=0, **differs)
    return replace(WELL, machine=replace(MACHINE, folders=(folder,)))


@pytest.mark.parametrize(
    ("problem", "words", "advice"),
    [
        ("No space left on device", "is full: No space left on device. It has 0 bytes free.", "Free some space"),
        ("Read-only file system", "cannot be written: Read-only file system.", "Mount it writable"),
        ("No such file or directory", "does not exist.", "mkdir -p /tmp"),
        ("Permission denied", "cannot be written: Permission denied.", "writable for this user"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_its_variable(problem: str, words: str, advice: str) -> None:
    facts = with_folder(problem=problem)
    finding = only(replace(facts, host_problem="cannot write", search_problem="cannot write"))
    assert (finding.weight, finding.code) == ("problem", "temporary-folder")
    assert finding.text == f"The temporary folder /tmp {words}"
    assert advice in finding.remedy
    assert "TMPDIR" in finding.remedy
    assert findings(with_folder()) == []
    alone = only(facts)  # Python takes another folder where one cannot be written
    assert alone.weight == ("problem" if "No space" in problem else "warning")
    home = replace(facts.machine.folders[0], role="configuration", variable="COVEY_HOME")
    broken = replace(facts, machine=replace(MACHINE, folders=(home,)), cluster_problem="cannot make the folder")
    assert found(broken) == [("problem", "configuration-folder")]


def test_what_keeps_this_command_from_looking_is_told_with_the_error_and_what_it_says_to_do() -> None:
    finding = only(replace(ALONE, looked=False, search_problem="cannot listen: in use; set COVEY_PORT"))
    assert (finding.code, finding.remedy) == ("search-failed", "Set COVEY_PORT.")
    finding = only(replace(WELL, host_problem="Input/output error"))
    assert (finding.code, finding.remedy) == ("this-host", UNKNOWN_CURE)
    assert "Input/output error" in finding.text


@pytest.mark.parametrize(
    ("problem", "text", "remedy"),
    [
        ("this machine is in no cluster: run `covey init` here", "this machine is in no cluster.", "covey init makes"),
        ("the cluster file x is damaged; enroll again", "the cluster file x is damaged.", "Enroll again."),
        ("a key in hexadecimal has 64 digits, not 63", "has 64 digits, not 63.", "covey clusters shows"),
    ],
)
def test_why_there_is_no_cluster_to_look_at_is_told_with_the_remedy_of_that_error(
    problem: str, text: str, remedy: str
) -> None:
    finding = only(replace(ALONE, looked=False, cluster="", cluster_problem=problem))
    assert finding.code == "no-cluster"
    assert finding.text.endswith(text)
    assert finding.remedy.startswith(remedy)


def test_a_node_of_another_cluster_here_is_pointed_to_where_none_of_this_one_is() -> None:
    finding = findings(replace(ALONE, other_processes=(4711,)))[-1]
    assert (finding.weight, finding.code) == ("note", "other-cluster")
    assert finding.text == "Process 4711 is a node of another cluster than 'home', on this machine."
    assert "covey doctor CLUSTER" in finding.remedy
    assert "Processes 1, 2 are nodes" in findings(replace(ALONE, other_processes=(1, 2)))[-1].text
    assert found(replace(waiting(HERE), other_processes=(4711,))) == [("note", "waiting-nodes")]


def test_connections_that_fail_one_way_with_an_error_are_not_blamed_on_a_firewall() -> None:
    closed = replace(BETA.ways_back[0], round_trip=-1.0, problem="10.0.0.1:47731: No route to host")
    finding = only(replace(WELL, nodes=(replace(BETA, ways_back=(closed,)),)))
    assert (finding.weight, finding.code) == ("warning", "one-way")
    assert "No route to host" in finding.text
    assert "firewall" not in finding.remedy


def test_a_clock_before_certificates_begin_explains_all_the_rest() -> None:
    machine = replace(MACHINE, clock=86400.0)
    refusals = {"10.0.0.2:47700": "the TLS handshake failed: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid"}
    finding = only(replace(ALONE, machine=machine, refusals=refusals))
    assert (finding.weight, finding.code) == ("problem", "clock-wrong")
    assert "it says 1970-01-02 00:00 UTC" in finding.text
    assert "at least 56 years behind" in finding.text
    assert "firewall" not in finding.remedy
    early = replace(MACHINE, clock=1.0e9)
    assert [each.weight for each in findings(replace(WELL, machine=early))] == ["warning"]
    assert (
        "the clock of beta-x7a2 is 7 s ahead"
        in findings(replace(WELL, machine=early, nodes=(replace(BETA, clock_offset=7.0),)))[0].text
    )
    assert findings(replace(WELL, machine=replace(MACHINE, clock=1.8e9))) == []


def test_a_node_that_rejects_our_certificate_has_a_wrong_clock() -> None:
    facts = replace(
        WELL, refusals={"10.0.0.2:47700, [::1]:1": "the TLS connection failed: SSLV3_ALERT_BAD_CERTIFICATE"}
    )
    finding = only(facts)
    assert "The node at 10.0.0.2:47700 holds the same secret" in finding.remedy
    assert "clock" in finding.remedy


@pytest.mark.parametrize(("is_on", "remedy"), [(False, "ip link set eth0 up"), (True, "Plug a cable into eth0")])
def test_an_interface_that_is_down_is_named_with_the_command_or_the_cable(is_on: bool, remedy: str) -> None:
    down = replace(CABLE, is_up=False, is_on=is_on, is_used=False)
    finding = only(replace(ALONE, interfaces=(LOOPBACK, down)))
    assert (finding.weight, finding.code) == ("problem", "interface-down")
    assert remedy in finding.remedy
    up = replace(CABLE, name="eth1")
    assert ("note", "interface-down") in found(replace(ALONE, interfaces=(LOOPBACK, down, up)))
    assert findings(replace(WELL, interfaces=(LOOPBACK, down, up))) == []
    local = replace(WELL, nodes=(replace(BETA, is_here=True, state="running"),))
    assert found(replace(local, interfaces=(LOOPBACK, down))) == [("warning", "interface-down")]
    cut_off = replace(waiting(HERE), interfaces=(LOOPBACK, down))
    assert found(cut_off) == [("problem", "waiting-no-network"), ("problem", "interface-down")]
    assert findings(cut_off)[0].text.endswith("This machine is on no network: eth0 is down.")
    assert remedy in findings(cut_off)[0].remedy


def test_a_wireless_interface_that_is_down_is_to_join_a_network() -> None:
    down = replace(CABLE, name="wlan0", kind="wireless", is_up=False, is_used=False)
    assert only(replace(ALONE, interfaces=(LOOPBACK, down))).remedy == "Join a Wi-Fi with wlan0."


# What an error shows


def test_a_seed_of_this_command_that_refuses_is_not_blamed_on_a_firewall() -> None:
    seed = SeedFacts(text="10.0.0.9", answered=False, problem="10.0.0.9:47700: Connection refused")
    finding = only(replace(WELL, seeds=(seed,)))
    assert (finding.weight, finding.code) == ("warning", "seed-silent")
    assert "firewall" not in finding.remedy


def test_an_announced_node_without_a_route_is_not_blamed_on_a_firewall() -> None:
    finding = only(replace(WELL, unreachable={"10.0.0.9:47700": "cannot be reached: 10.0.0.9:47700: No route to host"}))
    assert (finding.weight, finding.code) == ("problem", "unreachable")
    assert "firewall" not in finding.remedy
    assert "No route to host" in finding.text


def test_an_error_that_covey_does_not_know_gets_no_guessed_cure() -> None:
    assert obstacle("the TLS handshake failed: WEIRD") is Obstacle.UNKNOWN
    finding = only(replace(WELL, refusals={"gamma": "the TLS handshake failed: WEIRD"}))
    assert finding.remedy == UNKNOWN_CURE
    assert "WEIRD" in finding.text


@in_turn(kind=Obstacle)
def test_every_obstacle_has_a_cure(kind: Obstacle) -> None:
    from covey.cli.doctor.finding import _OBSTACLE_SIGNS

    sign = next(iter(_OBSTACLE_SIGNS.get(kind, ("?",))))
    assert obstacle(sign) is kind
    assert cure(sign, "10.0.0.9", "home")


def given_up(**differs: Any) -> Facts:
    past = PastWait(run="train", node="alpha-aaaa", ago=130.0, seconds=60.0, wait=replace(WAIT, **differs))
    return replace(ALONE, last_wait=past)


def test_a_wait_that_is_over_is_explained_afterwards() -> None:
    finding = only(given_up(seeds={"10.0.0.9": "10.0.0.9:47700: Connection refused"}))
    assert (finding.weight, finding.code) == ("problem", "gave-up")
    assert finding.text == (
        "Run 'train' gave up on this machine 2 min ago, after 60 s: 1 of 2 nodes so far. No covey node answered at its "
        "seed 10.0.0.9: 10.0.0.9:47700: Connection refused."
    )
    assert "no covey node listens there" in finding.remedy
    refused = given_up(refused={"beta-x7a2": "was started with --size 3, this node --size 2; use the same on both"})
    assert "beta-x7a2 cannot be in it: was started with --size 3" in only(refused).text
    assert "Start the same command on the other machines" in only(given_up()).remedy


def test_a_wait_that_is_over_is_not_told_of_a_run_that_waits_again_or_goes_on() -> None:
    assert [code for _, code in found(replace(given_up(), nodes=(HERE,)))] == ["waiting-nodes"]
    assert found(replace(given_up(), nodes=(replace(BETA, run="train", state="running"),))) == []
    assert [code for _, code in found(replace(given_up(), nodes=(BETA,)))] == ["gave-up"]


def test_a_seed_of_a_wait_that_is_over_is_told_once() -> None:
    silent = SeedFacts(text="10.0.0.9", answered=False, problem="10.0.0.9:47700: Connection refused")
    facts = replace(given_up(seeds={"10.0.0.9": "10.0.0.9:47700: Connection refused"}), seeds=(silent,))
    assert only(facts).code == "gave-up"
