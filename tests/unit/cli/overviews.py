"""Overviews made by hand, for tests of views."""

from __future__ import annotations

import math

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

TAKEN = 1_700_000_000.0


def an_overview(ranks: int, late: int = 5, suffix: str = "", serial: int = 1) -> Overview:
    """Return a run on up to four machines in which all ranks wait for the rank `late`."""
    names = sorted(["north", "south", "attic", "cellar"][: max(1, min(4, ranks // 2))])
    gpus = (GpuSeen("GPU", 0.9, 4 << 30, 8 << 30, 70.0),)
    machines = tuple(
        MachineSeen(
            id=f"{name}-id", name=name + suffix, host=name, state="running", cores=8, processor=0.5 + 0.1 * at,
            memory_used=10 << 30, memory_total=16 << 30, temperature=60.0, gpus=gpus if at % 2 else (),
        )
        for at, name in enumerate(names)
    )  # fmt: skip
    seen = tuple(
        RankSeen(
            rank=rank, machine=machines[rank * len(machines) // ranks].id, pid=1000 + rank,
            state="late" if rank == late else "waiting", step=12400 + rank,
            operation="" if rank == late else "all_reduce" + suffix, operation_age=12.0, sequence=99,
            waits_for=() if rank == late else (late,), compute=0.18, sync=0.04, sent_per_second=1.2e6 * rank,
        )
        for rank in range(ranks)
    )  # fmt: skip
    links = tuple(
        LinkSeen(source=one.id, target=other.id, lane="tcp", bytes_per_second=1.2e8, round_trip=0.0003)
        for one in machines
        for other in machines
        if one is not other
    )
    events = tuple(Happening(TAKEN - 60 + at, "lost", f"attic-{at}{suffix}", (at,), "warning") for at in range(40))
    run = RunSeen(
        id="r1", name="train" + suffix, state="running", began=TAKEN - 8000, ranks=seen, links=links,
        sentence=Sentence(f"rank {late} is 2 operations behind{suffix}; {ranks - 1} ranks wait for it", "warning"),
        reports={"loss": 1.93}, step=12400, step_seconds=0.22, compute_seconds=0.18, sync_seconds=0.04,
        samples_per_second=41000.0, saved=0.74, happenings=events, can_stop=True, can_checkpoint=True,
    )  # fmt: skip
    applicants = (Applicant("k3f9x2" * 9, "k3f9-x2", "cabin" + suffix, "192.0.2.9"),)
    sentence = Sentence("This machine is in no cluster.", "note", (), ("covey demo", "covey init"))
    return Overview(
        serial, TAKEN, "home", sentence, machines, (run,) if ranks else (), applicants, can_approve=True
    )  # fmt: skip


def a_history(length: int = 600) -> tuple[Moment, ...]:
    """Return a loss that falls, with a NaN in it."""
    losses = [math.nan if at == 77 else 4.1 * math.exp(-at / 200) for at in range(length)]
    return tuple(Moment(TAKEN - length + at, at, {"loss": loss}, 0.22) for at, loss in enumerate(losses))
