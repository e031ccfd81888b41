"""Each finding of `covey doctor` appears when its facts are there, says what to do, and only then."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from covey.base.config import EffectiveSetting
from covey.cli.doctor.facts import (
    ConnectionTry,
    Facts,
    Machine,
    MetNode,
    NetworkFacts,
    PastWait,
    PrivatePath,
    SeedFacts,
    WaitFacts,
)
from covey.cli.doctor.finding import WEIGHTS, Finding
from covey.cli.doctor.findings import findings
from covey.cli.doctor.report import as_json, as_text

CABLE = NetworkFacts(
    name="eth0",
    kind="wired",
    is_up=True,
    addresses=("10.0.0.1", "fe80::1"),
    networks=("10.0.0.1/24", "fe80::1/64"),
    mtu=1500,
    has_multicast=True,
    is_used=True,
    sent=5,
    came_back=5,
    heard=7,
    heard_from=("10.0.0.2",),
)
WIFI = replace(CABLE, name="wlan0", kind="wireless", addresses=("10.0.9.1",), networks=("10.0.9.1/24",))
LOOPBACK = replace(
    CABLE, name="lo", kind="loopback", addresses=("127.0.0.1",), networks=("127.0.0.1/8",), is_used=False
)
WAY = ConnectionTry(
    address="10.0.0.2:47700", interface="eth0", local="10.0.0.1", local_interface="eth0", round_trip=0.001
)
CLOSED = replace(WAY, round_trip=-1.0, problem="no answer in time")
BACK = ConnectionTry(address="10.0.0.1:47731", interface="eth0", round_trip=0.001)
BACK_CLOSED = replace(BACK, round_trip=-1.0, problem="no answer in time")
BETA = MetNode(
    name="beta-x7a2",
    id="ab" * 32,
    host_name="beta",
    pid=4242,
    version="1.0",
    purpose="candidate",
    run="my-run",
    state="joining",
    is_here=False,
    found_by=("multicast",),
    addresses=("10.0.0.2", "fe80::2"),
    ways_there=(WAY, replace(CLOSED, address="[fe80::2]:47700")),
    ways_back=(BACK,),
    chosen_way="10.0.0.2:47700",
    chosen_interface="eth0",
    round_trip=0.001,
    bytes_per_second=1.2e8,
    path_mtu=1500,
    clock_offset=0.01,
)
MACHINE = Machine(
    host_name="alpha",
    system="Linux",
    versions={"covey": "1.0"},
    home="/home/me/.config/covey",
    clusters=("home",),
    default_cluster="home",
    settings=(EffectiveSetting(name="interfaces", value="", source="default", variable="COVEY_INTERFACES"),),
)
WELL = Facts(machine=MACHINE, cluster="home", interfaces=(LOOPBACK, CABLE), looked=True, nodes=(BETA,))
ALONE = replace(WELL, nodes=())


def found(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.weight, finding.code) for finding in findings(facts)]


def only(facts: Facts) -> Finding:
    (finding,) = findings(facts)
    return finding


def with_path(**differs: Any) -> Facts:
    path = PrivatePath(
        path="/home/me/my keys/0.key", mode="0600", owner="me", is_folder=False, is_ours=True, is_loose=False
    )
    return replace(WELL, machine=replace(MACHINE, paths=(path, replace(path, **differs))))


def with_beta(**differs: Any) -> Facts:
    return replace(WELL, nodes=(replace(BETA, **differs),))


def test_where_all_is_well_there_is_nothing_to_say() -> None:
    assert findings(WELL) == []
    assert findings(with_path()) == []


def test_a_key_that_others_may_read_is_a_problem_with_the_command_that_mends_it() -> None:
    finding = only(with_path(mode="0644", is_loose=True))
    assert (finding.weight, finding.code) == ("problem", "permissions")
    assert finding.remedy.startswith("chmod 600 '/home/me/my keys/0.key'")


def test_a_folder_that_others_may_enter_is_a_problem_with_the_command_that_mends_it() -> None:
    assert only(with_path(mode="0755", is_loose=True, is_folder=True)).remedy.startswith("chmod 700 ")


def test_a_file_of_another_user_is_a_problem() -> None:
    finding = only(with_path(is_ours=False, owner="root"))
    assert (finding.weight, finding.code) == ("problem", "owner")
    assert "belongs to root" in finding.text


@pytest.mark.parametrize(("meant", "advice"), [("COVEY_SEEDS", "Rename it to COVEY_SEEDS"), ("", "unset COVEY_SEED")])
def test_a_variable_that_is_never_read_is_a_problem(meant: str, advice: str) -> None:
    finding = only(replace(WELL, machine=replace(MACHINE, unknown_variables={"COVEY_SEED": meant})))
    assert (finding.weight, finding.code) == ("problem", "unknown-variable")
    assert advice in finding.remedy


def test_outside_of_any_cluster_the_remedy_is_how_to_get_into_one() -> None:
    facts = Facts(machine=MACHINE, interfaces=(LOOPBACK, CABLE), cluster_problem="this machine is in no cluster")
    finding = only(facts)
    assert (finding.weight, finding.code) == ("problem", "no-cluster")
    assert "covey init" in finding.remedy
    assert "covey enroll" in finding.remedy


def test_a_cluster_that_cannot_be_read_because_of_its_permissions_is_one_finding_not_two() -> None:
    facts = replace(with_path(is_loose=True), nodes=(), looked=False, cluster="", cluster_problem="others may read it")
    assert found(facts) == [("problem", "permissions")]


@pytest.mark.parametrize(("source", "named"), [("environment", "COVEY_INTERFACES"), ("argument", "--interfaces")])
def test_a_pattern_that_leaves_no_interface_is_a_problem_and_named_where_it_comes_from(source: str, named: str) -> None:
    setting = EffectiveSetting(name="interfaces", value="eth9", source=source, variable="COVEY_INTERFACES")
    unused = replace(CABLE, is_used=False, reason="excluded")
    facts = replace(ALONE, machine=replace(MACHINE, settings=(setting,)), interfaces=(LOOPBACK, unused), looked=False)
    finding = only(replace(facts, interfaces_problem='interfaces="eth9" matches nothing'))
    assert (finding.weight, finding.code) == ("problem", "interfaces-excluded")
    assert f"Change {named} " in finding.remedy


def test_a_machine_with_nothing_but_loopback_is_told_so() -> None:
    down = replace(CABLE, is_up=False, is_used=False)
    assert found(replace(ALONE, interfaces=(LOOPBACK,)))[0] == ("problem", "only-loopback")
    assert found(replace(with_beta(is_here=True), interfaces=(LOOPBACK,))) == [("warning", "only-loopback")]
    assert found(replace(ALONE, interfaces=(LOOPBACK, down))) == [("problem", "interface-down")]


def test_a_machine_without_ipv4_gets_a_note() -> None:
    six = replace(CABLE, addresses=("fd00::1", "fe80::1"), networks=("fd00::1/64", "fe80::1/64"))
    finding = only(replace(WELL, interfaces=(LOOPBACK, six)))
    assert (finding.weight, finding.code) == ("note", "only-ipv6")
    assert "link-local" not in finding.text
    local = replace(six, addresses=("fe80::1",), networks=("fe80::1/64",))
    assert "link-local" in only(replace(WELL, interfaces=(LOOPBACK, local))).text


@pytest.mark.parametrize("heard", [0, 7])
def test_no_node_found_is_a_problem_that_two_doctors_solve(heard: int) -> None:
    finding = only(replace(ALONE, interfaces=(LOOPBACK, replace(CABLE, heard=heard, heard_from=()))))
    assert (finding.weight, finding.code) == ("problem", "nobody")
    assert ("not one multicast packet" in finding.text) == (heard == 0)
    assert "at the same time" in finding.remedy


def test_a_machine_that_is_heard_but_not_reached_is_named_before_what_follows_from_it() -> None:
    facts = replace(ALONE, unreachable=dict.fromkeys(("10.0.0.7", "fe80::7"), "cannot be reached: no answer in time"))
    assert found(facts) == [("problem", "unreachable")]
    assert "10.0.0.7, fe80::7" in findings(facts)[0].text
    assert "47700-47731/tcp" in findings(facts)[0].remedy


def test_an_announced_node_that_refuses_connections_has_most_likely_ended() -> None:
    finding = only(replace(WELL, unreachable={"10.0.0.7:47700": "cannot be reached: Connection refused"}))
    assert (finding.weight, finding.code) == ("note", "gone")
    assert "10.0.0.7:47700" in finding.text


@pytest.mark.parametrize(("nodes", "weight"), [((), "problem"), ((BETA,), "warning")])
def test_a_silent_seed_weighs_more_where_no_node_was_found(nodes: tuple[MetNode, ...], weight: str) -> None:
    seeds = (SeedFacts(text="10.0.0.5:47700", answered=False, problem="Connection refused"),)
    finding = findings(replace(WELL, nodes=nodes, seeds=seeds))[0]
    assert (finding.weight, finding.code) == (weight, "seed-silent")
    assert "10.0.0.5:47700: Connection refused" in finding.text


def test_a_seed_that_answered_after_all_is_no_finding() -> None:
    assert (
        findings(replace(WELL, seeds=(SeedFacts(text="10.0.0.2:47700", answered=True, problem="refused at first"),)))
        == []
    )


def test_a_seed_that_hangs_up_has_another_secret() -> None:
    facts = replace(ALONE, seeds=(SeedFacts(text="10.0.0.5:47700", answered=False, hung_up=True, problem="x"),))
    assert found(facts) == [("problem", "wrong-secret-at-seed")]
    assert "`covey pair` on the one that has the right secret" in findings(facts)[0].remedy


@pytest.mark.parametrize(("nodes", "weight"), [((), "problem"), ((BETA,), "note")])
def test_another_secret_nearby_matters_where_no_node_was_found(nodes: tuple[MetNode, ...], weight: str) -> None:
    stranger = replace(CABLE, foreign=("10.0.0.9:47700",))
    finding = findings(replace(WELL, nodes=nodes, interfaces=(LOOPBACK, stranger)))[0]
    assert (finding.weight, finding.code) == (weight, "wrong-secret-nearby")
    assert "10.0.0.9:47700" in finding.text


def test_init_typed_on_both_machines_is_told_with_what_to_type_on_which() -> None:
    stranger = replace(CABLE, foreign=("10.0.0.9:47700",))
    facts = replace(ALONE, interfaces=(LOOPBACK, stranger), is_owner=True)
    finding = only(facts)
    assert (finding.weight, finding.code) == ("problem", "two-clusters")
    assert "10.0.0.9:47700" in finding.text
    assert "`covey init` was probably typed on both" in finding.text
    assert "`covey pair` on one" in finding.remedy
    assert "`covey enroll` on the other" in finding.remedy
    assert only(replace(facts, nodes=(BETA,))).code == "wrong-secret-nearby"
    assert findings(replace(facts, is_owner=False))[0].code == "wrong-secret-nearby"


@pytest.mark.parametrize("is_owner", [False, True])
def test_a_machine_that_missed_a_new_secret_is_told_so(is_owner: bool) -> None:
    stranger = replace(CABLE, foreign=("10.0.0.9:47700",))
    finding = only(replace(ALONE, interfaces=(LOOPBACK, stranger), is_owner=is_owner, knows_others=True))
    assert (finding.weight, finding.code) == ("problem", "old-secret")
    assert "covey secret rotate" in finding.text
    assert "`covey enroll` on the one that has the old" in finding.remedy


def test_another_secret_is_one_finding_also_where_links_are_refused_for_it() -> None:
    stranger = replace(CABLE, foreign=("10.0.0.9:47700", "10.0.0.8:47700"))
    refusals = {
        "10.0.0.9:47700": "10.0.0.9:47700 did not accept this cluster's secret",
        "10.0.0.7:47700": "says: denied",
    }
    facts = replace(ALONE, interfaces=(LOOPBACK, stranger), knows_others=True, refusals=refusals)
    assert sorted(found(facts)) == [("problem", "old-secret"), ("problem", "refused")]
    assert "10.0.0.8:47700, 10.0.0.9:47700 have another secret" in findings(facts)[0].text + findings(facts)[1].text
    wait = WaitFacts(cause="nodes", text="1 of 2 nodes so far", problems=refusals)
    waits = replace(facts, last_wait=PastWait(run="train", node="alpha", ago=9.0, seconds=60.0, wait=wait))
    (told,) = [finding for finding in findings(waits) if "did not accept this cluster's secret" in finding.text]
    assert told.code == "gave-up"
    assert "on the one that has the old" in told.remedy
    assert "old-secret" not in [code for _, code in found(waits)]


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("says: node a (k) is denied on beta", "covey deny --undo"),
        ("identity k is in use by process 3 on beta (10.0.0.2)", "Remove the `identities` folder"),
        ("south speaks protocol 2 (covey 9.0), north speaks 1 (covey 8.0): update covey on north", "Update covey"),
    ],
)
def test_a_refusal_is_a_problem_with_its_reason(reason: str, advice: str) -> None:
    finding = only(replace(WELL, refusals={"10.0.0.2:47700": reason}))
    assert (finding.weight, finding.code) == ("problem", "refused")
    assert reason in finding.text
    assert advice in finding.remedy


def test_one_reason_of_several_is_told_once() -> None:
    finding = only(replace(WELL, refusals=dict.fromkeys(("10.0.0.2:47700", "[fe80::2]:47700"), "says: denied")))
    assert "10.0.0.2:47700, [fe80::2]:47700: says: denied" in finding.text


def test_a_refusal_at_a_seed_is_not_told_twice() -> None:
    seeds = (SeedFacts(text="10.0.0.2:47700", answered=False, hung_up=True),)
    facts = replace(WELL, seeds=seeds, refusals={"10.0.0.2:47700": "hung up"})
    assert found(facts) == [("problem", "wrong-secret-at-seed")]


@pytest.mark.parametrize("how", ["seed", "others"])
def test_a_node_on_the_same_network_that_was_not_heard_means_that_multicast_is_blocked(how: str) -> None:
    finding = only(with_beta(found_by=(how,)))
    assert (finding.weight, finding.code) == ("warning", "multicast-blocked")
    assert "beta-x7a2" in finding.text
    assert "5353/udp" in finding.remedy


def test_a_node_on_another_network_or_on_this_machine_need_not_be_heard_by_multicast() -> None:
    assert findings(with_beta(found_by=("seed",), addresses=("172.16.0.2", "fe80::2"))) == []
    assert findings(with_beta(found_by=("same host",), is_here=True)) == []


def test_multicast_that_does_not_come_back_or_reports_errors_is_broken_here() -> None:
    assert found(replace(WELL, interfaces=(LOOPBACK, replace(CABLE, came_back=0)))) == [("warning", "multicast-broken")]
    error = "another program keeps UDP port 5353 to itself"
    assert error in only(replace(WELL, interfaces=(LOOPBACK, replace(CABLE, errors=(error,))))).text
    assert "no such thing" in only(replace(WELL, multicast_problem="no such thing")).text


def test_without_any_interface_that_can_do_multicast_seeds_are_advised() -> None:
    finding = only(replace(WELL, interfaces=(LOOPBACK, replace(CABLE, has_multicast=False))))
    assert (finding.weight, finding.code) == ("warning", "no-multicast")
    assert "COVEY_SEEDS" in finding.remedy


def test_if_we_reach_it_and_it_not_us_our_firewall_is_to_be_opened() -> None:
    finding = only(with_beta(ways_back=(BACK_CLOSED,)))
    assert (finding.weight, finding.code) == ("warning", "one-way-firewall")
    assert "this machine reaches beta-x7a2, but not vice versa" in finding.text
    assert "allow 47700-47731/tcp in the firewall of this machine:" in finding.remedy


def test_if_it_reaches_us_and_we_not_it_its_firewall_is_to_be_opened() -> None:
    finding = only(with_beta(ways_there=(CLOSED, CLOSED)))
    assert (finding.weight, finding.code) == ("warning", "one-way-firewall")
    assert "beta-x7a2 reaches this machine, but not vice versa" in finding.text
    assert "allow 47700-47731/tcp in the firewall of beta-x7a2 (10.0.0.2):" in finding.remedy


def test_no_firewall_is_blamed_while_one_side_has_not_said_whether_it_reaches_the_other() -> None:
    assert findings(with_beta(ways_back=(), ways_back_problem="it did not answer")) == []
    assert findings(with_beta(ways_back=(BACK_CLOSED,), is_here=True)) == []


def test_wifi_used_although_a_cable_leads_there_is_a_warning_with_the_pattern_that_leaves_it_out() -> None:
    facts = replace(with_beta(chosen_interface="wlan0"), interfaces=(LOOPBACK, WIFI, CABLE))
    finding = only(facts)
    assert (finding.weight, finding.code) == ("warning", "wireless-used")
    assert "'!wlan0'" in finding.remedy
    assert "cable (eth0)" in finding.text


def test_wifi_is_fine_where_no_cable_leads_there() -> None:
    facts = replace(with_beta(chosen_interface="wlan0", addresses=("10.0.9.2",)), interfaces=(LOOPBACK, WIFI, CABLE))
    assert findings(facts) == []
    unplugged = replace(CABLE, is_up=False, is_used=False)
    assert findings(replace(with_beta(chosen_interface="wlan0"), interfaces=(LOOPBACK, WIFI, unplugged))) == []


def test_different_releases_are_noted_by_machine() -> None:
    finding = only(with_beta(version="1.1", protocol=3))
    assert (finding.weight, finding.code) == ("note", "versions")
    assert "this machine has 1.0, beta has 1.1 (protocol 3)" in finding.text


@pytest.mark.parametrize(("offset", "words"), [(3600.0, "3,600 s ahead of"), (-6.0, "6 s behind")])
def test_a_clock_far_off_is_a_note_that_says_it_is_harmless(offset: float, words: str) -> None:
    finding = only(with_beta(clock_offset=offset))
    assert (finding.weight, finding.code) == ("note", "clock")
    assert words in finding.text
    assert "covey works, but logs are hard to compare" in finding.text


def test_a_clock_a_little_off_is_no_finding() -> None:
    assert findings(with_beta(clock_offset=4.9)) == []


def test_findings_come_by_weight() -> None:
    facts = with_beta(clock_offset=99.0, chosen_interface="wlan0")
    facts = replace(facts, interfaces=(LOOPBACK, WIFI, CABLE), refusals={"gamma": "says: denied"})
    weights = [WEIGHTS.index(finding.weight) for finding in findings(facts)]
    assert weights == [0, 1, 2]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_report_names_everything_and_fits_the_width(width: int) -> None:
    facts = replace(with_beta(clock_offset=99.0, ways_back=(BACK_CLOSED,)), interfaces=(LOOPBACK, CABLE, WIFI))
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(as_text(facts, findings(facts), has_facts=True))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for word in ("alpha", "eth0", "wlan0", "beta-x7a2", "10.0.0.2:47700", "no answer in time", "960 Mbit/s", "1500"):
        assert word in words
    assert "warning" in words
    assert "1 warning, 1 note" in words


@pytest.mark.parametrize("width", [60, 80, 120])
def test_findings_alone_fit_the_width_and_say_where_the_facts_are(width: int) -> None:
    facts = with_beta(clock_offset=99.0, ways_back=(BACK_CLOSED,))
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(as_text(facts, findings(facts), has_facts=False))
    assert max(map(len, out.getvalue().splitlines())) <= width
    words = " ".join(out.getvalue().split())
    assert words.startswith("warning One-way firewall")
    assert words.endswith("1 warning, 1 note (covey doctor -v prints the facts); 0.0 s")
    assert "eth0" not in words
    assert "nothing is wrong" in _shown(WELL)


def _shown(facts: Facts) -> str:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(as_text(facts, findings(facts), has_facts=False))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_is_cut_and_no_fact_lost_where_there_is_little_room(width: int) -> None:
    local = ("10.123.123.101", "fd00:1234:5678::9c24:2aff:feea:7c4c", "fe80::9c24:2aff:feea:7c4c")
    cable = replace(
        CABLE, name="enp0s31f6", addresses=local, heard_from=("10.123.123.102",), errors=("no such device",)
    )
    setting = EffectiveSetting(name="join_timeout", value="60", source="environment", variable="COVEY_JOIN_TIMEOUT")
    machine = replace(MACHINE, settings=(setting,))
    wait = WaitFacts(
        cause="nodes", text="1 of 2 nodes", here=("beta-x7a2",), seeds={"10.0.0.9:47700": "Connection refused"}
    )
    facts = replace(with_beta(wait=wait, is_here=True), interfaces=(LOOPBACK, cable), machine=machine)

    def words(columns: int) -> set[str]:
        out = io.StringIO()
        Console(file=out, width=columns, highlight=False).print(as_text(facts, findings(facts), has_facts=True))
        assert max(map(len, out.getvalue().splitlines())) <= columns
        return {word.strip(",") for word in out.getvalue().split()}

    headings = {"name", "kind", "variable", "COVEY_JOIN_TIMEOUT"}
    assert words(200) - words(width) <= headings


def test_the_json_has_all_facts_and_findings() -> None:
    facts = with_beta(version="1.1")
    said = json.loads(json.dumps(as_json(facts, findings(facts))))
    assert said["format"] == 1
    assert said["nodes"][0]["ways_there"][0]["address"] == "10.0.0.2:47700"
    assert [finding["code"] for finding in said["findings"]] == ["versions"]
    assert set(said) == {
        *("format", "machine", "cluster", "cluster_problem", "interfaces", "interfaces_problem", "multicast_problem"),
        *("host_problem", "search_problem", "looked", "nodes", "other_processes", "unreachable", "seeds", "refusals"),
        *(
            "is_owner",
            "knows_others",
            "last_wait",
            "limits",
            "relays",
            "router",
            "router_ip",
            "router_problem",
            "seconds",
            "findings",
        ),
    }


def test_a_flood_of_multicast_is_noticed_and_a_few_packets_too_many_are_not() -> None:
    flooded = only(replace(WELL, interfaces=(LOOPBACK, replace(CABLE, dropped=12_345))))
    assert (flooded.weight, flooded.code) == ("warning", "multicast-flood")
    assert "12345 packets" in flooded.text
    assert "eth0" in flooded.text
    assert "tcpdump -ni eth0" in flooded.remedy
    assert found(replace(WELL, interfaces=(LOOPBACK, replace(CABLE, dropped=3)))) == []


def test_a_flood_at_the_door_of_a_node_is_told_with_its_numbers() -> None:
    flooded = only(with_beta(turned_away=123_456, too_many=120_000))
    assert (flooded.weight, flooded.code) == ("warning", "door-flood")
    assert "123,456 connections, 120,000 of them" in flooded.text
    assert found(with_beta(turned_away=500, too_many=49)) == []


def test_a_router_that_maps_ports_or_does_not_is_found() -> None:
    good = only(replace(WELL, router="PCP"))
    assert (good.weight, good.code) == ("note", "router")
    assert "with PCP" in good.text
    inner = only(replace(WELL, router="UPnP", router_ip="100.64.0.9"))
    assert (inner.weight, inner.code) == ("warning", "router-private")
    assert "with UPnP, but its own address, 100.64.0.9, is private" in inner.text
    assert "covey relay" in inner.remedy
    bad = only(replace(WELL, router_problem="the router 192.0.2.1 does not offer PCP or NAT-PMP"))
    assert (bad.weight, bad.code) == ("warning", "router-silent")
    assert "192.0.2.1 does not offer" in bad.text
    assert "covey relay" in bad.remedy


def test_a_relay_that_does_not_work_and_a_node_behind_one_are_found() -> None:
    silent = only(replace(WELL, relays={"r.org": "Connection refused", "s.org": ""}))
    assert (silent.weight, silent.code) == ("warning" if WELL.nodes else "problem", "relay-silent")
    assert "r.org" in silent.text
    assert "covey relay" in silent.remedy
    dropped = only(replace(WELL, relays={"r.org": "no answer in time"}))
    assert "47690" in dropped.remedy
    relayed = only(with_beta(relay="192.0.2.7:47690"))
    assert (relayed.weight, relayed.code) == ("note", "relayed")
    assert "192.0.2.7:47690" in relayed.text
