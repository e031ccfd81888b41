"""The drawing of a run's links: from what its nodes tell, for terminals of any width, and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import msgspec
import pytest
from tests.support.in_turn import in_turn

from covey.cli.doctor.facts import Facts, Machine
from covey.cli.doctor.findings import findings
from covey.cli.doctor.limits import limit_of, limiting_links
from covey.cli.status.drawing import graph, svg
from covey.cli.status.network import RunNetwork, combined
from covey.wire.reports import MeasuredNetwork, NetworkMember, decode_network, encode_network

FAST, SLOW, THIN = 118e6, 22.5e6, 5e6
NAMES = ("anna", "bert", "a-laptop-with-a-long-name")


def told(speeds: tuple[float, ...], sites: tuple[int, ...], medium: str = "wired", sender: int = 0) -> MeasuredNetwork:
    """Return what a node tells of machines with these speeds, and of 40 Mbit/s between sites."""
    members = tuple(
        NetworkMember(
            bytes([slot]) * 32,
            f"{NAMES[slot]}-node",
            NAMES[slot],
            slot,
            sites[slot],
            speed,
            speed,
            tuple(0.0 if other == slot else min(speed, each) for other, each in enumerate(speeds)),
            (0.0,) * slot + (1e-3,) * (len(speeds) - slot),
        )
        for slot, speed in enumerate(speeds)
    )
    number = max(sites) + 1
    trunks = tuple(tuple(0.0 if a == b else THIN for b in range(number)) for a in range(number))
    return MeasuredNetwork(members, trunks, 12.0, f"{NAMES[sender]}-node", medium, "ring: fits")


def found(speeds: tuple[float, ...] = (FAST, FAST, SLOW), sites: tuple[int, ...] = (0, 0, 0)) -> RunNetwork:
    all_told = [told(speeds, sites), told(speeds, sites, "wireless", sender=2)]
    made = combined(all_told)
    assert made is not None
    return made


@pytest.mark.parametrize("width", [60, 80, 120, None])
@pytest.mark.parametrize("sites", [(0, 0, 0), (0, 0, 1)])
def test_the_graph_fits_its_terminal_and_shows_machines_and_speeds(width: int | None, sites: tuple[int, ...]) -> None:
    text = graph("train", found(sites=sites), width).plain
    for line in text.splitlines():
        assert width is None or len(line) <= width, line
        assert width is not None or line.isascii()
    for word in ("run train", "3 machines", "measured 12 s ago", *NAMES, "944 Mbit/s", "180 Mbit/s", "ring: fits"):
        assert word in text, word
    if width is None or width >= 80:
        assert "wireless" in text
    assert ("site 0 to site 1: 40 Mbit/s" in text) == (1 in sites)


def test_the_graph_tells_how_old_the_figures_of_each_machine_are() -> None:
    one = told((FAST, FAST, SLOW), (0, 0, 0))
    ages = ((0.0, 0.0, 0.0), (-8.0, 0.0, 588.0), (-9.0, -10.0, 0.0))
    members = tuple(msgspec.structs.replace(each, ages=row) for each, row in zip(one.members, ages, strict=True))
    made = combined([msgspec.structs.replace(one, members=members)])
    assert made is not None
    lines = graph("train", made, 100).plain.splitlines()
    shown = [next(line for line in lines if name in line) for name in NAMES]
    assert [line.split("  ")[-1].strip() for line in shown] == ["12 s", "10 min", "10 min"]
    short = msgspec.structs.replace(one.members[0], ages=(0.0,))
    assert combined([msgspec.structs.replace(one, members=(short, *one.members[1:]))]) is None


def test_a_run_that_has_not_measured_says_when_it_will() -> None:
    assert "third large all_reduce" in graph("train", combined([]), 60).plain.replace("\n", " ")


def test_the_picture_is_well_formed_whatever_nodes_are_called() -> None:
    one = told((FAST, FAST, SLOW), (0, 0, 1))
    hostile = msgspec.structs.replace(one.members[0], host_name="<script>&'\"")
    made = combined([msgspec.structs.replace(one, members=(hostile, *one.members[1:]))])
    assert made is not None
    root = ET.fromstring(svg([("train<", made), ("other", found())]))
    texts = "".join(root.itertext())
    for word in ("run train<", "run other", "<script>&'\"", "180 Mbit/s", "40 Mbit/s"):
        assert word in texts, word


@pytest.mark.parametrize(
    "change",
    [
        {"members": ()},
        {"trunks": ((0.0, 1.0), (1.0, 0.0))},
        {"trunks": ((0.0, 1.0),)},
        {"trunks": ()},
    ],
)
def test_a_network_whose_parts_do_not_fit_together_is_left_out(change: dict[str, object]) -> None:
    bad = msgspec.structs.replace(told((FAST, SLOW, SLOW), (0, 0, 0)), **change)
    assert combined([bad]) is None
    ragged = told((FAST, SLOW, SLOW), (0, 0, 0))
    ragged = msgspec.structs.replace(
        ragged, members=(msgspec.structs.replace(ragged.members[0], rates=(1.0,)), *ragged.members[1:])
    )
    assert combined([bad, ragged]) is None
    assert combined([bad, ragged, told((FAST, FAST), (0, 0))]) is not None


def test_what_a_node_tells_arrives_with_its_age_and_medium() -> None:
    one = told((FAST, SLOW), (0, 0))
    there = decode_network(encode_network(one, 7.5, "virtual"))
    assert there == msgspec.structs.replace(one, age=7.5, medium="virtual")


def test_the_doctor_names_the_machine_that_limits_a_run_and_what_a_cable_would_change() -> None:
    limits = limiting_links({"train": found(), "other": None})
    (limit,) = limits
    assert (limit.run, limit.host_name, limit.medium) == ("train", NAMES[2], "wireless")
    assert (limit.bytes_per_second, limit.next_bytes_per_second) == (SLOW, FAST)
    assert limit.seconds / limit.seconds_then == pytest.approx(FAST / SLOW, rel=0.4)
    facts = Facts(machine=Machine(host_name="here", system="Linux", versions={}, home="/"), limits=limits)
    (finding,) = [each for each in findings(facts) if each.code == "slow-link"]
    assert finding.weight == "note"
    assert f"{NAMES[2]} is on Wi-Fi and sends 180 Mbit/s" in finding.text
    assert "A cable there would make a large all_reduce up to" in finding.remedy


def test_the_doctor_says_nothing_of_equal_links_and_of_a_machine_that_is_slow_like_others() -> None:
    assert limit_of("train", found((FAST, FAST, FAST))) is None
    assert limit_of("train", found((FAST, SLOW, SLOW))) is None


def many(sites: tuple[int, ...], names: tuple[str, ...]) -> RunNetwork:
    """Return a run of machines at these sites."""
    size, number = len(sites), max(sites) + 1
    members = tuple(
        NetworkMember(
            bytes([slot]) * 32, f"{slot}", f"{names[slot % len(names)]}{slot}", slot, sites[slot], FAST, SLOW,
            (THIN,) * size, (1e-3,) * size,
        )
        for slot in range(size)
    )  # fmt: skip
    trunks = tuple((THIN,) * number for _ in range(number))
    plan = "ring: the order with the fastest slowest hop; slow ranks finish more: 5.92 s predicted"
    made = combined([MeasuredNetwork(members, trunks, 12.0, "0", "wireless", plan)])
    assert made is not None
    return made


@in_turn(
    sites=[(0, 1), (0, 0, 1, 1), (0,) * 8, (0, 0, 0, 1, 1, 1, 2, 2), (0,) * 16, tuple(range(16)), (0,) * 30 + (1,) * 3]
)
@in_turn(names=[("anna",), ("a-laptop-with-a-very-long-name.example.org",)])
def test_in_the_picture_no_text_leaves_its_place_and_no_boxes_overlap(
    sites: tuple[int, ...], names: tuple[str, ...]
) -> None:
    root = ET.fromstring(svg([("train", many(sites, names)), ("other", many((0, 1), names))]))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    space = "{http://www.w3.org/2000/svg}"
    texts = [each for each in root.iter(f"{space}text") if each.text]
    for text in texts:
        anchored = {"end": 1.0, "middle": 0.5}.get(text.attrib.get("text-anchor", ""), 0.0)
        left = float(text.attrib["x"]) - anchored * 6.4 * len(text.text or "")
        assert left >= 0, text.text
        assert left + 6.4 * len(text.text or "") <= width, text.text
        assert float(text.attrib["y"]) < height
    boxes = [
        tuple(float(each.attrib[name]) for name in ("x", "y", "width", "height"))
        for each in root.iter(f"{space}rect")
        if each.attrib.get("class") == "grid"
    ]
    assert len(boxes) == max(sites) + 3
    for at, (x, y, wide, high) in enumerate(boxes):
        assert x + wide <= width
        assert y + high <= height
        for a, b, wider, higher in boxes[:at]:
            assert x >= a + wider or a >= x + wide or y >= b + higher or b >= y + high
    shown = [text.text or "" for text in texts]
    assert sum("rank " in text for text in shown) == len(sites) + 2
    if max(sites) > 1:
        assert "from site 2" in shown
