"""`covey gateway`: lets programs in any language be ranks through gRPC, and starts such a program as this rank."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from covey.base.config import LAUNCHER_VARIABLES, RUN_VARIABLES, parse_seed
from covey.base.errors import ConfigError
from covey.base.setting_kinds import ByteCount
from covey.cli.coordinator import TlsCa, TlsCert, TlsKey, parts_of
from covey.cli.options import command_of
from covey.cli.terminal import say
from covey.cli.worker import run_again
from covey.runtime.environment import is_loopback

if TYPE_CHECKING:
    from covey.gateway.ranks import ProgramRanks
    from covey.gateway.server import Listening
    from covey.gateway.service import Limits
    from covey.net.keys.organisation import PemFiles

GATEWAY_VARIABLE: Final = "COVEY_GATEWAY"
"""Where the program that a gateway has started finds it, as gRPC writes addresses."""
SMALLEST_ARRAY: Final = 1 << 16
LARGEST_ARRAY: Final = 1 << 36
DEFAULT_ARRAY: Final = "256MiB"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

MaxBytes = Annotated[
    str, typer.Option(metavar="SIZE", help="The most bytes of one array; a program has up to four at a time.")
]
MaxPrograms = Annotated[int, typer.Option(min=1, max=1024, help="The most programs at a time.")]
Stall = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, max=3600.0, help="For how long a stream may stand still.")
]


@dataclass(frozen=True)
class GatewayRequest:
    """What was typed for `covey gateway`."""

    program: Annotated[str | None, typer.Argument(metavar="PROGRAM", help="A program to start, in any language.")] = (
        None
    )
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the program.")] = None
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR", help="Where programs that are started elsewhere connect: unix:PATH, or HOST:PORT."
        ),
    ] = None
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="ADDR", help="Make each program a worker of the coordinator there, host:port."),
    ] = None
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The run to be in: of the coordinator, or of the cluster."),
    ] = None
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="The cluster whose secret is used.")] = None
    max_bytes: MaxBytes = DEFAULT_ARRAY
    max_programs: MaxPrograms = 16
    stall: Stall = 30.0
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None


def gateway(asked: GatewayRequest) -> None:
    """Let programs in any language be ranks of a run, through gRPC: covey gateway node train.js

    With a PROGRAM, this process is one rank, wherever a script with covey.join() could be: under `covey run`, torchrun,
    mpirun or Slurm, or in a run of the cluster (--run). It starts the program, which finds it with the variable
    COVEY_GATEWAY; the exit code is that of the program.

    With --listen, programs that are started elsewhere connect. With --coordinator, each that registers is a worker of
    the coordinator's run; without, the first that registers is this rank, and the gateway ends with it.

    A unix socket must be in a folder that only you can enter. At HOST:PORT both ends need certificates (--tls-ca,
    --tls-cert, --tls-key), which are also shown to a coordinator on another machine. SIGTERM and Ctrl-C end the
    gateway.
    """
    from covey.coordinator.extra import require_grpc

    require_grpc()
    from covey.gateway.server import BackgroundGateway, Listening, private_socket
    from covey.net.keys import secret_sources
    from covey.net.keys.organisation import PemFiles

    if (asked.program is None) == (asked.listen is None):
        raise ConfigError(
            "say either which program to start, as in `covey gateway node train.js`, or where programs that are "
            "started elsewhere connect, as in `covey gateway --listen unix:$HOME/gateway/socket`"
        )
    pem = PemFiles.of(asked.tls_ca, asked.tls_cert, asked.tls_key)
    limits = limits_of(asked.max_bytes, asked.max_programs, asked.stall)
    ranks = _ranks(asked, pem)
    if asked.listen is not None:
        raise typer.Exit(0 if asyncio.run(_serve(listening(asked.listen, pem), ranks, limits)) else 1)
    assert asked.program is not None
    secret_sources.take_secret(os.environ)
    own = {*LAUNCHER_VARIABLES, *RUN_VARIABLES}
    env = {name: value for name, value in os.environ.items() if name not in own}
    with private_socket() as path:
        with BackgroundGateway(Listening(path=path), ranks, limits) as background:
            code = run_again([asked.program, *(asked.arguments or ())], env | {GATEWAY_VARIABLE: background.address}, 0)
        if code == 0 and not background.is_in_order:
            say(f"{asked.program} ended without leaving the run: its rank is lost.")
            code = 1
    raise typer.Exit(code)


app.command(context_settings={"allow_interspersed_args": False})(command_of(GatewayRequest, "gateway", gateway))


def listening(text: str, pem: PemFiles | None) -> Listening:
    """Return where a gateway listens; ConfigError for a text that says no such thing."""
    from covey.gateway.server import UNIX, Listening

    if text.startswith(UNIX):
        return Listening(path=os.path.abspath(text.removeprefix(UNIX)))
    host, port = parts_of(text, least=0)
    return Listening(host=host, port=port, pem=pem)


def limits_of(nbytes: str, programs: int, stall: float) -> Limits:
    """Return the limits of a gateway as they were typed."""
    from covey.gateway.service import Limits

    size = ByteCount(SMALLEST_ARRAY, LARGEST_ARRAY).read("--max-bytes", nbytes)
    return Limits(programs=programs, nbytes=size, stall=stall)


def told(address: str) -> None:
    """Say where a gateway listens."""
    say(f"The gateway listens at {address}.")


def _ranks(asked: GatewayRequest, pem: PemFiles | None) -> ProgramRanks:
    from covey.gateway.ranks import CoordinatedRanks, JoinedRanks

    if asked.coordinator is None:
        given: dict[str, Any] = {"run": asked.run, "cluster": asked.cluster}
        return JoinedRanks({name: value for name, value in given.items() if value is not None})
    from covey.coordinator.worker import WorkerNodeConfig

    host = parse_seed(asked.coordinator).host
    is_for_programs = asked.listen is not None and not asked.listen.startswith("unix:") and is_loopback(host)
    papers: dict[str, Any] = {}
    if pem is not None and asked.cluster is None and not is_for_programs:
        papers = {"tls_ca": asked.tls_ca, "tls_cert": asked.tls_cert, "tls_key": asked.tls_key}
    return CoordinatedRanks(
        WorkerNodeConfig(coordinator=asked.coordinator, run=asked.run or "run", cluster=asked.cluster, **papers)
    )


async def _serve(at: Listening, ranks: ProgramRanks, limits: Limits) -> bool:
    from covey.gateway.server import serve

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    return await serve(at, ranks, limits, stopping, told)
