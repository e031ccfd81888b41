"""Overviews of imagined runs, for tests of views: any number of ranks, and what can happen to them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from covey.watch.overview import (
    Applicant,
    GpuSeen,
    Happening,
    LinkSeen,
    MachineSeen,
    Moment,
    Overview,
    RankSeen,
    RunSeen,
    Sentence,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

START = 1_790_000_000.0
NAMES = ("attic", "barn", "cellar", "den", "eaves", "forge", "garage", "hall")
RUN = "r1"


def id_of(machine: int) -> str:
    return f"{machine:02x}" * 32


def machines(count: int) -> tuple[MachineSeen, ...]:
    """Return machines of two sites; from the third on they have a GPU."""
    return tuple(
        MachineSeen(
            id_of(at),
            NAMES[at % len(NAMES)] + (f"-{at // len(NAMES)}" if at >= len(NAMES) else ""),
            host=NAMES[at % len(NAMES)],
            address=f"192.0.2.{at + 1}:47700",
            version="0.3.0",
            site=f"site {at * 2 // max(count, 1)}" if count > 2 else "",
            state="running",
            is_here=at == 0,
            cores=8 + 4 * (at % 3),
            processor=0.35 + 0.07 * (at % 6),
            memory_used=(6 + at % 9) << 30,
            memory_total=32 << 30,
            temperature=51.0 + at % 9,
            gpus=(GpuSeen("RTX 4070", 0.81, 7 << 30, 12 << 30, 64.0),) if at % 3 == 2 else (),
        )
        for at in range(count)
    )


def links(count: int) -> tuple[LinkSeen, ...]:
    return tuple(
        LinkSeen(
            id_of(one),
            id_of(other),
            lane="tcp",
            interface="wlan0" if 1 in (one, other) else "eth0",
            medium="Wi-Fi" if 1 in (one, other) else "cable",
            bytes_per_second=(5e6 if one > other else 12e6) if 1 in (one, other) else 117e6 - one * 1e6,
            sent_per_second=3.1e6,
            round_trip=0.0004 * (1 + one + other),
        )
        for one in range(count)
        for other in range(count)
        if one != other
    )


def rank(number: int, machine: int) -> RankSeen:
    wobble = math.sin(number * 1.7)
    return RankSeen(
        number,
        id_of(machine),
        4000 + number,
        step=12_400,
        sequence=99_200,
        operation="all_reduce" if number % 2 else "",
        operation_age=0.03,
        compute=0.16 + 0.02 * wobble,
        sync=0.05 - 0.02 * wobble,
        sent_per_second=3.1e6,
        received_per_second=3.0e6,
        saved=0.74,
        codec="int8",
        codec_reason="the link is slower than the encoder",
    )


def happenings() -> tuple[Happening, ...]:
    return (
        Happening(START - 420, "joined", "rank 3 joined from cellar", (3,)),
        Happening(
            START - 200, "lost", "rank 3 (cellar) was lost: no answer for 5 s; recovered in 410 ms", (3,), "warning"
        ),
        Happening(START - 150, "joined", "rank 3 joined from cellar; the state came from rank 0", (3,)),
        Happening(START - 60, "checkpoint", "checkpoint at step 12 000 saved by all ranks"),
    )


def training(ranks: int, hosts: int, taken: float = START) -> Overview:
    """Return a run that goes well."""
    each = max(1, ranks // hosts)
    run = RunSeen(
        RUN,
        "train",
        "running",
        began=taken - 7980,
        program="train.py",
        sentence=Sentence(f"All {ranks} ranks train."),
        ranks=tuple(rank(number, min(number // each, hosts - 1)) for number in range(ranks)),
        links=links(hosts),
        reports={"loss": 1.93, "lr": 3e-4},
        step=12_400,
        step_seconds=0.22,
        compute_seconds=0.18,
        sync_seconds=0.04,
        samples_per_second=41_000.0,
        saved=0.74,
        happenings=happenings(),
        can_stop=True,
        can_checkpoint=True,
    )
    return Overview(1, taken, cluster="home", machines=machines(hosts), runs=(run,), can_approve=True)


def with_run(overview: Overview, **changes: object) -> Overview:
    """Return an overview whose run differs."""
    return replace(overview, runs=(replace(overview.runs[0], **changes),))  # type: ignore[arg-type]


def with_rank(overview: Overview, number: int, **changes: object) -> Overview:
    """Return an overview of which one rank differs."""
    ranks = overview.runs[0].ranks
    changed = tuple(replace(one, **changes) if one.rank == number else one for one in ranks)  # type: ignore[arg-type]
    return with_run(overview, ranks=changed)


def one_late(overview: Overview, number: int, behind: int = 2) -> Overview:
    """Return an overview in which all ranks wait for one."""
    name = {machine.id: machine.name for machine in overview.machines}
    ranks = tuple(
        replace(one, state="late", reason=f"{behind} operations behind", operation="")
        if one.rank == number
        else replace(one, state="waiting", waits_for=(number,), operation="all_reduce", operation_age=12.0)
        for one in overview.runs[0].ranks
    )
    where = name[ranks[number].machine]
    text = f"rank {number} ({where}) is {behind} operations behind; {len(ranks) - 1} ranks wait for it since 12 s"
    why = (
        "its last operation was all_reduce 99 198, 12 s ago",
        "its process answers",
        "its machine uses 98 % of its cores",
    )
    return with_run(overview, ranks=ranks, sentence=Sentence(text, "warning", why))


def applicant(number: int = 0) -> Applicant:
    return Applicant("k3f9x2" + f"{number:058x}", "k3f9-x2", "shed", "192.0.2.9", 42.0)


def history(seconds: int = 600, taken: float = START) -> Iterable[Moment]:
    """Yield a loss that falls, and steps that vary."""
    for ago in range(seconds, 0, -1):
        at = 1 - ago / max(seconds, 1)
        yield Moment(
            taken - ago,
            step=12_400 - ago * 4,
            reports={"loss": 1.9 + 2.2 * math.exp(-4 * at) + 0.04 * math.sin(ago * 0.9), "lr": 3e-4},
            step_seconds=0.22,
            compute_seconds=0.17 + 0.012 * math.sin(ago / 11),
            sync_seconds=0.05 + (0.09 if 190 < ago < 205 else 0.0) + 0.012 * math.sin(ago / 5),
            sent_per_second=3.1e6,
        )
