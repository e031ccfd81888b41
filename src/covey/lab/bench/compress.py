"""`covey bench compress`: what each codec saves, costs and loses, and what that makes of an all_reduce over slow links.

The links are TCP connections of this machine that the kernel slows down: each rank sends at most so many bits a second
to each other rank. In the ring that an all_reduce runs on, a rank sends to one other only, as over a network card of
that speed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

import numpy as np

from covey.base.errors import ConfigError
from covey.base.lane_kinds import LANE_KINDS
from covey.cli.layout import Column
from covey.cli.status.drawing import DARK, STYLE
from covey.cli.terminal import FittedTable
from covey.compress.codec import Codec
from covey.compress.low_rank import PowerSGD
from covey.compress.parsing import parse
from covey.compress.sparse import Sparsifier
from covey.lab.bench.sweep import MAX_RANKS
from covey.runtime.joining.node import node_of
from covey.runtime.keeper.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from covey.runtime.group.group import Group

KERNEL_ELEMENTS: Final = 1 << 22
"""The array on which the speed of a codec is measured: 16 MiB, more than a cache holds."""
KERNEL_ROUNDS: Final = 5
MEASURED_ONCE_SECONDS: Final = 2.0
"""An operation that takes longer than this is measured once."""
FAR_TOO_LONG: Final = 3600.0
BAR_WIDTH: Final = 560
BAR_HEIGHT: Final = 15
LEFT_MARGIN: Final = 150


@dataclass(frozen=True, kw_only=True)
class CodecTrial:
    """What is measured; checked when built."""

    codecs: tuple[str, ...]
    links: tuple[float, ...]
    """Megabits per second."""
    size: int = 4
    nbytes: int = 64 << 20
    lanes: str = "tcp"
    rounds: int = 3

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MAX_RANKS:
            raise ConfigError(f"-n must be from 2 to {MAX_RANKS}, not {self.size}")
        kind = LANE_KINDS.get(self.lanes)
        if kind is None or not (kind.is_of_network and kind.is_automatic):
            raise ConfigError(f"--lanes is tcp or secure here, not {self.lanes!r}: others have no link to slow down")
        if self.links and sys.platform != "linux":
            raise ConfigError("links can only be slowed down on Linux; pass --links ''")
        if any(link <= 0 for link in self.links):
            raise ConfigError("--links are speeds in Mbit/s, above 0")
        if self.rounds < 1 or self.nbytes < 4096:
            raise ConfigError("at least one round is needed, and 4 KiB")
        for codec in self.codecs:
            parse(codec)


@dataclass(frozen=True)
class CodecOutcome:
    """What was measured of one codec."""

    codec: str
    ratio: float
    """Bytes of float32 for one byte that travels."""
    encode: float
    """GB of float32 per second, on one core; 0 if there is nothing to encode."""
    decode_add: float
    error: float
    """Root mean square of what one encoding loses, relative to that of normal numbers."""
    seconds: dict[float, float]
    """By link, in Mbit/s: how long an all_reduce takes."""


def measure(trial: CodecTrial, say: Callable[[str], None]) -> list[CodecOutcome]:
    """Return an outcome for each codec; `say` is told what is measured now."""
    os.environ["COVEY_LANES"] = trial.lanes  # the ranks inherit it
    say("codecs on one core")
    kernels = {codec: _kernel(codec) for codec in trial.codecs}
    seconds: dict[str, dict[float, float]] = {codec: {} for codec in trial.codecs}
    for link in trial.links:
        say(f"{trial.size} ranks at {link:g} Mbit/s")
        reports = launch(_rank, trial.size, trial, link, timeout=FAR_TOO_LONG)
        for codec in trial.codecs:
            slowest = [max(times) for times in zip(*(report[codec] for report in reports), strict=True)]
            seconds[codec][link] = statistics.median(slowest)
    return [CodecOutcome(codec, *kernels[codec], seconds[codec]) for codec in trial.codecs]


def _rank(group: Group, trial: CodecTrial, link: float) -> dict[str, list[float]]:
    """Time all_reduces as one rank; return the seconds of each round by codec."""
    node = node_of(group)
    assert node is not None
    node.lanes.factory.bytes_per_second = int(link * 1e6 / 8)
    times: dict[str, list[float]] = {codec: [] for codec in trial.codecs}
    with group.split(0) as slow:  # whose lanes are made from now on
        columns = 1024
        x = np.random.default_rng(group.rank).standard_normal(trial.nbytes // 4, np.float32)
        x = x[: x.size // columns * columns].reshape(-1, columns)
        for turn in range(trial.rounds):
            for codec in trial.codecs:
                if turn and max(times[codec], default=0.0) > MEASURED_ONCE_SECONDS:
                    continue
                y = x.copy()
                slow.barrier()
                began = time.perf_counter()
                slow.all_reduce(y, "mean", compress=codec)
                taken = slow.all_reduce(time.perf_counter() - began, "max")
                times[codec].append(taken)
    return times


def _kernel(name: str) -> tuple[float, float, float, float]:
    """Return ratio, speed of encoding, speed of decoding and adding, and error of a codec."""
    codec = parse(name)
    x = np.random.default_rng(0).standard_normal(KERNEL_ELEMENTS, np.float32)
    total = np.zeros_like(x)
    if codec is None:
        return 1.0, 0.0, _speed(x, lambda: np.add(total, x, out=total)), 0.0
    if isinstance(codec, Codec):
        wire = np.empty(codec.wire_bytes(x.size), np.uint8)
        encode = _speed(x, lambda: codec.encode(x, wire))
        add = _speed(x, lambda: codec.decode_add(wire, total))
        codec.decode(wire, total)
        return x.nbytes / wire.size, encode, add, _rms(x - total)
    if isinstance(codec, Sparsifier):
        chosen = codec.select(x, 0)
        encode = _speed(x, lambda: codec.select(x, 0))
        rest = x.copy()
        rest[chosen] = 0
        return x.nbytes / max(1, chosen.size * (4 if codec.is_shared else 8)), encode, 0.0, _rms(rest)
    assert isinstance(codec, PowerSGD)
    matrix = x.reshape(-1, 1024)
    q = codec.start(*matrix.shape)
    encode = _speed(x, lambda: matrix.T @ (matrix @ q)) / 2
    p = np.linalg.qr(matrix @ q)[0]
    return x.nbytes / (4 * codec.rank * sum(matrix.shape)), encode, 0.0, _rms(matrix - p @ (matrix.T @ p).T)


def _speed(x: NDArray[np.float32], run: Callable[[], Any]) -> float:
    """Return GB of `x` per second; the fastest of some runs, since nothing makes one faster than it is."""
    run()
    times = []
    for _ in range(KERNEL_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return x.nbytes / min(times) / 1e9


def _rms(x: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def table(trial: CodecTrial, outcomes: Sequence[CodecOutcome]) -> FittedTable:
    """Return what was measured as a table; a time stands beside how much faster it is than that of none."""
    plain = next((each.seconds for each in outcomes if each.codec == "none"), {})

    def timed(each: CodecOutcome, link: float) -> str:
        seconds = each.seconds[link]
        gain = f" ({plain[link] / seconds:.1f}x)" if link in plain and each.codec != "none" else ""
        return f"{1e3 * seconds:,.0f} ms{gain}"

    def speed(rate: float) -> str:
        return f"{rate:.1f}" if rate else ""

    columns = [
        Column("codec", tuple(each.codec for each in outcomes)),
        Column("ratio", tuple(f"{each.ratio:.2f}" for each in outcomes), is_right=True),
        Column("encode GB/s", tuple(speed(each.encode) for each in outcomes), is_right=True),
        Column("decode+add", tuple(speed(each.decode_add) for each in outcomes), is_right=True),
        Column("error", tuple(f"{each.error:.4f}" if each.error else "0" for each in outcomes), is_right=True),
    ]
    columns += [
        Column(_speed_text(link), tuple(timed(each, link) for each in outcomes), is_right=True) for link in trial.links
    ]
    return FittedTable(columns)


def _speed_text(megabits: float) -> str:
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits:g} Mbit/s"


def as_json(trial: CodecTrial, outcomes: Sequence[CodecOutcome], facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything as plain values."""
    return {"machine": facts, "trial": asdict(trial), "codecs": [asdict(each) for each in outcomes]}


def draw(trial: CodecTrial, outcomes: Sequence[CodecOutcome]) -> str:
    """Return an SVG: for each link a bar for each codec, as long as its all_reduce takes."""
    links = [link for link in trial.links if all(link in each.seconds for each in outcomes)]
    height = 70 + len(links) * (40 + (BAR_HEIGHT + 5) * len(outcomes))
    width = LEFT_MARGIN + BAR_WIDTH + 170
    title = f"all_reduce of {trial.nbytes / 2**20:g} MiB, {trial.size} ranks, {trial.lanes}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' role="img" aria-labelledby="t">',
        f"<title id='t'>{escape(title)}</title>",
        f"<style>{STYLE} .bar {{ fill: #0f766e; }} .plain {{ fill: #94a3b8; }}"
        f" @media (prefers-color-scheme: dark) {{ {DARK} .bar {{ fill: #2dd4bf; }} .plain {{ fill: #475569; }} }}"
        "</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>',
        f'<text class="title" x="28" y="38">{escape(title)}</text>',
    ]
    down = 60
    for link in links:
        parts.append(f'<text class="heading" x="28" y="{down + 16}">{_speed_text(link)}</text>')
        down += 28
        longest = max(each.seconds[link] for each in outcomes)
        for each in outcomes:
            length = BAR_WIDTH * each.seconds[link] / longest
            kind = "plain" if each.codec == "none" else "bar"
            parts.append(f'<text text-anchor="end" x="{LEFT_MARGIN - 8}" y="{down + 12}">{escape(each.codec)}</text>')
            parts.append(
                f'<rect class="{kind}" x="{LEFT_MARGIN}" y="{down}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2"/>'
            )
            said = f"{1e3 * each.seconds[link]:,.0f} ms"
            parts.append(f'<text class="note" x="{LEFT_MARGIN + length + 8:.1f}" y="{down + 12}">{said}</text>')
            down += BAR_HEIGHT + 5
        down += 12
    return "\n".join([*parts, "</svg>", ""])
