"""`covey relay`: runs a relay, at which nodes meet that cannot connect with each other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import parse_relay
from covey.base.errors import ConfigError
from covey.base.setting_kinds import Rate
from covey.base.settings import RELAY_PORT
from covey.cli.terminal import plural, tell
from covey.net.host.descriptors import explain

if TYPE_CHECKING:
    from covey.runtime.relaying.server import RelayCounts, RelayLimits

RELAY_BACKLOG: Final = 1024
_RATE: Final = Rate(8000, 10**12)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def relay(
    listen: Annotated[
        str,
        typer.Option(metavar="ADDR", help="Where to listen, host:port; port 0 chooses a free one."),
    ] = f"[::]:{RELAY_PORT}",
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Pass on at most this in all: 20M (bits a second) or 2.5MB (bytes).",
            show_default="no limit",
        ),
    ] = None,
    connections: Annotated[int, typer.Option(min=4, metavar="N", help="Connections in all.")] = 4096,
    of_source: Annotated[
        int, typer.Option("--per-source", min=2, metavar="N", help="Connections from one address.")
    ] = 1024,
    idle: Annotated[
        float,
        typer.Option(metavar="S", min=1.0, help="Seconds after which a connection that carries nothing is closed."),
    ] = 86400.0,
    every: Annotated[
        float, typer.Option("--report", metavar="S", min=1.0, help="Seconds between two lines about what it does.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print lines of JSON.")] = False,
) -> None:
    """Run a relay: nodes that cannot connect with each other, because of NAT or a firewall, meet here.

    It needs one port that all nodes reach, and no secret: nodes of a cluster prove to each other, through it, that they
    have the secret, and everything that it passes on is encrypted. It sees the addresses of nodes, which of them belong
    to the same cluster, and how much they send.

    On the nodes: covey run --relay HOST train.py, or COVEY_RELAYS, or `covey init --relay HOST` before they enroll.

    SIGTERM and Ctrl-C end it.
    """
    from covey.runtime.relaying.server import RelayLimits

    if of_source > connections:
        raise ConfigError(f"--per-source {of_source} is more than the {connections} connections in all")
    rate = float("inf") if limit is None else parse_rate(limit)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asyncio.run(serve(listen_at(listen), RelayLimits(connections, of_source, rate, idle), every, as_json=as_json))


def parse_rate(text: str, option: str = "--limit") -> float:
    """Return the bytes a second of a text like 20M; ConfigError, with the name of the option, if it is none."""
    return (_RATE.read(option, text) or float("inf")) / 8


def parse_relay_limit(text: str | None) -> float:
    """Return bytes a second for `covey run --relay-limit`, 0 for `off`, `0` and None; ConfigError if it is no rate."""
    return 0.0 if text in (None, "off", "0") else parse_rate(str(text), "--relay-limit")


def listen_at(text: str) -> socket.socket:
    """Return a listening socket; ConfigError if the address is none of this machine, or taken."""
    head, colon, port = text.rpartition(":")
    is_any = bool(colon) and port == "0"
    host, number = parse_relay(f"{head}:{RELAY_PORT}" if is_any else text)
    number = 0 if is_any else number
    try:
        found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        if family == socket.AF_INET6 and address[0] == "::" and not both:
            family, address = socket.AF_INET, ("0.0.0.0", number)
        listener = socket.create_server(address, family=family, backlog=RELAY_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"--listen {text}: {explain(error) or error}") from error
    listener.setblocking(False)
    return listener


async def serve(listener: socket.socket, limits: RelayLimits, every: float, *, as_json: bool = False) -> None:
    """Run a relay until SIGTERM or Ctrl-C; print where it listens, and now and then what it does."""
    from covey.runtime.relaying.server import RelayServer

    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    server = RelayServer([listener], limits)
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ending.set)
    host, port = listener.getsockname()[:2]
    server.open()
    try:
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        tell(f"The relay listens at {address}.", "listening", as_json=as_json, address=address)
        told = server.counts()
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await ending.wait()
            if (counts := server.counts()) != told:
                tell(describe(counts), "counts", as_json=as_json, **asdict(counts))
                told = counts
    finally:
        await server.close()
    tell("The relay has ended.", "ended", as_json=as_json)


def describe(counts: RelayCounts) -> str:
    """Return a line about what a relay does and has done."""
    now = (plural(counts.registrations, "node"), plural(counts.clusters, "cluster"), plural(counts.pipes, "pipe"))
    return (
        f"{now[0]} of {now[1]}, {now[2]} now; since the start {plural(counts.joined, 'pipe')}, "
        f"{counts.copied / 1e6:,.1f} MB passed on, {plural(counts.refused, 'connection')} refused"
    )
