"""Benchmarks between machines: which pairs are measured when, what ranks agree on, and tables at every width."""

from __future__ import annotations

import io
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from tests.support.in_turn import in_turn
from tests.unit.cli.test_main import covey, home  # noqa: F401 - fixtures

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.lab.bench.network.pairs import LinkFigures, checked, slowest, turns_in, used_by
from covey.lab.bench.network.report import (
    bits,
    bits_per_second,
    case_line,
    collectives_view,
    headline,
    links_view,
    network_json,
    share,
    short_seconds,
)
from covey.lab.bench.network.session import CONTENDER, RankRounds, as_rounds
from covey.lab.bench.network.terms import NetworkTerms, RankOffer, agree, batches, pair_seconds, parse, rounds, writer
from covey.lab.bench.report import Measurement, Round
from covey.lab.bench.sweep import MEASURED_OPERATIONS, Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.text import Text

NAMES = ("north", "south", "a-machine-with-a-long-name.example.org", "laptop")


def offer(rank: int = 0, writes: tuple[str, ...] = (), **options: str) -> RankOffer:
    words = {f"--{name.replace('_', '-')}": text for name, text in options.items()}
    return RankOffer(words, f"host{rank}", NAMES[rank % len(NAMES)], {"cores": rank}, writes)


def terms_of(size: int) -> NetworkTerms:
    return agree([offer(rank) for rank in range(size)])


def link(sender: int, receiver: int, speed: float = 1e9, lane: str = "secure") -> LinkFigures:
    return LinkFigures(sender, receiver, lane, 2e-4, speed, speed / 2)


def all_links(size: int, slow: tuple[int, int] = (0, 1)) -> list[LinkFigures]:
    return [link(*pair, 6.25e6 if pair == slow else 1.25e9) for pair in itertools.permutations(range(size), 2)]


def measured(operation: str = "all_reduce", size: int = 1 << 20, ranks: int = 4, seconds: float = 0.1) -> Measurement:
    turn = Round(((int(seconds * 1e9),),) * ranks, (0.25,) * ranks)
    return Measurement(Case(MEASURED_OPERATIONS[operation], size, ranks, "float32"), CONTENDER, (turn,), "secure")


def shown(text: Text, *, is_terminal: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=is_terminal, width=200, _environ={"TERM": "xterm-256color"}).print(
        text, soft_wrap=True
    )
    return out.getvalue()


# The schedule


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 9, 16, 32])
def test_every_pair_is_measured_once_and_no_rank_is_in_two_pairs_of_a_round(size: int) -> None:
    found = rounds(size)
    assert sorted(pair for pairs in found for pair in pairs) == list(itertools.combinations(range(size), 2))
    for pairs in found:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_up_to_eight_ranks_every_pair_is_alone() -> None:
    hosts = [f"host{rank}" for rank in range(8)]
    for pairs in rounds(8):
        assert batches(pairs, hosts) == [[pair] for pair in pairs]


def test_beyond_eight_ranks_pairs_at_the_same_time_share_no_machine() -> None:
    hosts = [f"host{rank // 2}" for rank in range(12)]
    for pairs in rounds(12):
        found = batches(pairs, hosts)
        assert sorted(pair for batch in found for pair in batch) == sorted(pairs)
        for batch in found:
            used = [host for pair in batch for host in {hosts[rank] for rank in pair}]
            assert len(used) == len(set(used))
    assert max(len(batch) for pairs in rounds(12) for batch in batches(pairs, hosts)) > 2


def test_many_pairs_get_less_time_each() -> None:
    assert pair_seconds(["a", "b"]) == 0.6
    assert pair_seconds(["a"] * 32) == 0.3  # one after the other, because they share a machine
    assert pair_seconds([str(rank) for rank in range(32)]) == 0.6
    for seconds, turns, each in ((0.1, 2, 1 / 60), (0.6, 2, 0.1), (3.0, 10, 0.1)):
        found, of_stream = turns_in(seconds)
        assert found == turns
        assert of_stream == pytest.approx(each)


# What ranks agree on


def test_options_count_wherever_they_were_given() -> None:
    offers = [offer(0, sizes="4,64K"), offer(1, op="all", writes=("json",)), offer(2, sizes="4,64K", pair_seconds="2")]
    terms = agree(offers)
    assert terms.grid.sizes == (4, 64 << 10)
    assert terms.grid.operations == tuple(MEASURED_OPERATIONS)
    assert (terms.pair_seconds, terms.size, terms.grid.repetitions) == (2.0, 3, 7)
    assert (writer(offers, "json"), writer(offers, "plot")) == (1, None)
    quick, _ = parse({"--quick": "True"})
    assert (max(quick.sizes), quick.repetitions, quick.round_seconds) == (8 << 20, 3, 0.03)


def test_options_that_differ_are_named_with_their_ranks_and_machines() -> None:
    with pytest.raises(ConfigError) as error:
        agree([offer(0, reps="3"), offer(1), offer(2, reps="4\x1b[2J")])
    assert str(error.value) == (
        "--reps differs between ranks: 3 on rank 0 (north) and 4\\x1b[2J on rank 2 "
        "(a-machine-with-a-long-name.example.org); give options on one machine only"
    )


@pytest.mark.parametrize(
    ("offers", "text"),
    [
        ([offer()], "at least two ranks, and this run has one"),
        ([offer(rank) for rank in range(33)], "2 to 32 ranks, not 33"),
        ([offer(), offer(1, op="sum")], "unknown operation"),
        ([offer(), offer(1, reps="many")], "--reps takes a number, not 'many'"),
        ([offer(), offer(1, pair_seconds="inf")], "--pair-seconds takes 0.1 to 60 seconds, not inf"),
    ],
    ids=["alone", "crowd", "operation", "reps", "seconds"],
)
def test_terms_that_cannot_be_measured_are_refused(offers: list[RankOffer], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        agree(offers)


# Figures from other ranks


def test_a_rank_reports_all_of_its_own_links_and_no_others() -> None:
    good = [[link(0, 1), link(0, 2)], [link(1, 0), link(1, 2)], [link(2, 0), link(2, 1)]]
    assert checked(good) == [each for figures in good for each in figures]
    for wrong in ([link(2, 0)], [link(2, 1), link(2, 0)], [link(1, 0), link(2, 1)], []):
        with pytest.raises(RemoteProtocolError, match="rank 2 sent figures"):
            checked([*good[:2], wrong])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_is_a_positive_number(value: float) -> None:
    with pytest.raises(ValueError, match="neither a time nor a speed"):
        link(0, 1, value)
    with pytest.raises(ValueError, match="the lane has no name"):
        link(0, 1, lane="\x1b[2J")


def test_rounds_of_all_ranks_have_one_shape() -> None:
    good = RankRounds(((5, 7), (6, 8)), (0.5, 0.25))
    other = RankRounds(((9, 1), (2, 3)), (1.0, 2.0))
    assert as_rounds([good, other]) == (Round(((5, 7), (9, 1)), (0.5, 1.0)), Round(((6, 8), (2, 3)), (0.25, 2.0)))
    for wrong in (RankRounds(((5, 7),), (0.5,)), RankRounds(((5,), (6, 8)), (0.5, 0.25)), RankRounds((), ())):
        with pytest.raises(RemoteProtocolError, match="rank 1 sent other rounds"):
            as_rounds([good, wrong])


def test_a_share_is_that_of_the_slowest_link_in_use() -> None:
    links = all_links(4, slow=(3, 1))
    assert slowest(links) == link(3, 1, 6.25e6)
    row = measured(seconds=1.5 * (1 << 20) / 5e6)
    assert share(row, links) == pytest.approx(0.8)
    assert share(measured("barrier", 0), links) is None
    assert {(each.sender, each.receiver) for each in used_by("send_recv", links, 4)} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert share(measured("send_recv", seconds=(1 << 20) / 1e9), links) == pytest.approx(0.8)


# Tables


@in_turn(width=[60, 80, 120, None])
@in_turn(size=[2, 4, 8, 32])
def test_matrices_fit_the_terminal_and_show_every_pair(size: int, width: int | None) -> None:
    terms, links = terms_of(size), all_links(size)
    text = shown(links_view(terms, links, width))
    for line in text.splitlines():
        assert width is None or len(line) <= width, line
        assert line == line.rstrip()
    assert "\x1b" not in text
    assert text.count("50.0M") == 1
    assert text.count("10.0G") == size * (size - 1) - 1
    assert text.count("25.0M") == 1
    assert text.count("200us") == size * (size - 1)
    titles = re.findall(r"to (\d+)", text.partition("both directions")[0])
    assert titles == [str(rank) for rank in range(size)]
    flat = re.sub(r"\s+", " ", text)
    assert "slowest link: 0 north to 1 south, 50.0 Mbit/s" in flat
    assert "lanes: secure" in flat
    assert "2 a-machine-with.." in text or size == 2


def test_matrices_have_a_row_for_each_sender() -> None:
    links = [LinkFigures(*pair, lane, 1e-3, speed, speed) for pair, lane, speed in (
        ((0, 1), "shm", 3e9), ((0, 2), "secure", 2e6), ((1, 0), "shm", 2.5e9),
        ((1, 2), "secure", 3e6), ((2, 0), "secure", 4e5), ((2, 1), "secure", 5e5))]  # fmt: skip
    text = shown(links_view(terms_of(3), links, 80))
    assert text.splitlines()[:5] == [
        "one stream, bit/s",
        "from                 to 0   to 1   to 2",
        "0 north                 -  24.0G  16.0M",
        "1 south             20.0G      -  24.0M",
        "2 a-machine-with..  3.20M  4.00M      -",
    ]
    assert "shm lanes: 0-1\nsecure lanes: 0-2 and 1-2\n" in text
    assert "slowest link: 2 a-machine-with-a-long-name.example.org to 0 north, 3.20 Mbit/s\n" in text


def test_a_terminal_shows_fast_links_green_and_slow_ones_red() -> None:
    text = shown(links_view(terms_of(3), all_links(3), 80), is_terminal=True)
    assert text.count("\x1b[31m50.0M\x1b[0m") == 1
    assert text.count("\x1b[32m10.0G\x1b[0m") == 5
    assert text.count("\x1b[32m200us\x1b[0m") == 6


@pytest.mark.parametrize("width", [30, 60, 80, 120, None])
def test_the_table_of_collectives_fits_the_terminal(width: int | None) -> None:
    rows = [measured(size=size, seconds=seconds) for size, seconds in ((4, 1e-4), (64 << 10, 0.02), (64 << 20, 20.0))]
    text = shown(collectives_view(rows, all_links(4), width))
    for line in text.splitlines():
        assert width is None or len(line) <= width, line
    assert "all_reduce, 4 ranks, float32" in text
    for key in ("64 MiB", "20.0 s", "40.3 Mbit/s", "81 %", "1.0 %", "of the slowest link"):
        assert key in text
    assert ("CPU s/GiB" in text) == (width is None or width > 60)


def test_a_case_in_a_pipe_is_one_line() -> None:
    links = all_links(4)
    assert case_line(measured(seconds=1.0), links) == (
        "all_reduce 1 MiB, 4 ranks: 1.00 s, 12.6 Mbit/s, 25 % of the slowest link"
    )
    assert case_line(measured("barrier", 0, seconds=1e-4), links) == "barrier, 4 ranks: 100 us"
    assert case_line(measured(size=4, seconds=0.01), links).endswith("4.80 kbit/s, <0.1 % of the slowest link")
    assert headline(terms_of(3), "2026-11-17T02:03:04+00:00") == "3 ranks on 3 machines, 2026-11-17 02:03"


def test_numbers_have_three_digits_and_one_letter() -> None:
    assert [bits(speed / 8) for speed in (12, 999.9e3, 4.7e7, 9.41e8, 1e11)] == [
        "12.0",
        "1.00M",
        "47.0M",
        "941M",
        "100G",
    ]
    assert [bits_per_second(speed / 8) for speed in (12, 9.41e8)] == ["12.0 bit/s", "941 Mbit/s"]
    assert [short_seconds(time) for time in (3.5e-6, 9.999e-4, 0.0123, 2.0)] == ["3.50us", "1.00ms", "12.3ms", "2.00s"]


def test_json_has_every_link_and_every_iteration() -> None:
    offers = [offer(rank) for rank in range(4)]
    document: dict[str, Any] = json.loads(
        json.dumps(network_json(agree(offers), offers, all_links(4), [measured()], "1.2"))
    )
    assert [each["machine"]["cores"] for each in document["ranks"]] == [0, 1, 2, 3]
    assert document["links"][0] == {
        "from": 0,
        "to": 1,
        "lane": "secure",
        "round_trip_seconds": 2e-4,
        "bytes_per_second": 6.25e6,
        "both_bytes_per_second": 3.125e6,
    }
    assert document["results"][0]["rounds"][0]["nanoseconds_by_rank"] == [[100_000_000]] * 4
    assert document["results"][0]["share_of_slowest_link"] == pytest.approx(1.5 * (1 << 20) / 0.1 / 6.25e6)


# The command


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--run net --against gloo", "--against is about processes that `covey bench` starts on one machine; leave it"),
        ("--run net --op sum", "unknown operation 'sum'"),
        ("--run net --pair-seconds nan", "--pair-seconds takes 0.1 to 60 seconds"),
        ("--run net --json no/such/out.json", "there is no folder"),
        ("--run net --size 2", "in no cluster"),
        ("--size 3", "--size is about the nodes of a run; name the run with --run"),
        ("--pair-seconds 3", "--pair-seconds is about the nodes of a run"),
    ],
)
def test_wrong_options_are_explained_before_anything_is_joined(
    covey: Callable[..., tuple[int, str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    text: str,
) -> None:
    for name in ("COVEY_SECRET", "COVEY_RUN", "COVEY_RANK"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = covey("bench", *words.split())
    assert (code, out) == (2, "")
    assert text in err
