"""`covey coordinator`: runs a coordinator, shows what it knows, and asks its runs for checkpoints."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from covey.base.config import parse_seed
from covey.base.errors import ConfigError, CoveyError, DeadlineError
from covey.base.text import printable
from covey.cli.layout import Column, room, table
from covey.cli.terminal import say
from covey.net.host.folders import home
from covey.runtime.environment import ClusterOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.coordinator.client import CoordinatorClient
    from covey.coordinator.records import Sizes
    from covey.coordinator.security import Security

CHECKPOINT_ASK_EVERY: Final = 0.2
"""How often `checkpoint --wait` asks."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

TlsCa = Annotated[str | None, typer.Option(metavar="FILE", help="PEM file with the authority of the other end.")]
TlsCert = Annotated[str | None, typer.Option(metavar="FILE", help="PEM file with the certificate of this end.")]
TlsKey = Annotated[str | None, typer.Option(metavar="FILE", help="PEM file with the key of that certificate.")]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="Use the secret of this cluster, also on loopback.")
]
Address = Annotated[str, typer.Argument(metavar="ADDR", help="Where the coordinator listens, host:port.")]


@app.callback(invoke_without_command=True)
def coordinator(
    ctx: typer.Context,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDR", help="Where to listen, host:port; port 0 chooses a free one.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Workers of a run whose workers name no size.")] = None,
    min_size: Annotated[int | None, typer.Option(min=1, help="Instead of --size: the fewest workers.")] = None,
    max_size: Annotated[int | None, typer.Option(min=1, help="Instead of --size: the most workers.")] = None,
    settle: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long to wait for more than the fewest workers.")
    ] = 5.0,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where to keep the state.",
            show_default="coordinator/ in the configuration folder",
        ),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    cluster: ClusterName = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR", help="Also let programs in other languages be workers, at unix:PATH or HOST:PORT."
        ),
    ] = None,
) -> None:
    """Run a coordinator, at which the workers of runs register and get their ranks; or ask one, with a command below.

    Workers are programs that use covey.WorkerNode. The coordinator keeps its state in a file: it can be ended and
    started again at any time, and runs continue without it. SIGTERM and Ctrl-C end it.

    Beyond loopback it needs certificates (--tls-ca, --tls-cert, --tls-key) or the secret of a cluster. It also offers
    the standard health service of gRPC, and reflection. With --gateway, programs in other languages are workers, too,
    as with `covey gateway`.
    """
    if ctx.invoked_subcommand is not None:
        return
    if listen is None:
        raise ConfigError("say where to listen, as in `covey coordinator --listen 127.0.0.1:29300`")
    host, port = parts_of(listen, least=0)
    security = _security(host, tls_ca, tls_cert, tls_key, cluster)
    from covey.coordinator.server import serve
    from covey.coordinator.state_file import StateFile

    beside = None if gateway is None else _gateway(gateway, host, tls_ca, tls_cert, tls_key, cluster)
    folder = home() / "coordinator" if state is None else state.absolute()
    with closing(StateFile(folder)) as file:
        asyncio.run(
            serve(
                host,
                port,
                file,
                security,
                _sizes(size, min_size, max_size, settle),
                lambda bound: say(f"The coordinator listens at {_joined(host, bound)}, {security.words}."),
                beside,
            )
        )


@app.command()
def status(
    address: Address,
    run: Annotated[str, typer.Option(metavar="RUN", help="Only this run.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    cluster: ClusterName = None,
) -> None:
    """Show the runs of a coordinator, their workers, and the last view that a worker of each reported.

    The state of a worker is what the run's view says: active, or lost. A worker can also wait for a rank (waiting),
    have left (left), or be in the view without having been heard for half a minute (silent).
    """
    with _client(address, tls_ca, tls_cert, tls_key, cluster) as client:
        from covey.coordinator import coordinator_pb2 as pb

        runs = list(client.call("GetStatus", pb.GetStatusRequest(run=run)).runs)
    if as_json:
        typer.echo(json.dumps([_as_dict(each) for each in runs]))
    elif not runs:
        say("No worker has registered yet.")
    else:
        typer.echo("\n\n".join(_shown(each) for each in runs))


@app.command()
def checkpoint(
    address: Address,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run that should make one.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="Where to, as the program of the run understands it.")],
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Wait until all workers have ended it.")
    ] = 0.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    cluster: ClusterName = None,
) -> None:
    """Ask the workers of a run for a checkpoint.

    The program of the run sees it as group.checkpoint_pending, on all ranks after the same operation. With --wait, the
    command exits with 1 if the checkpoint is not done in time, failed, or was abandoned because the round ended.
    """
    with _client(address, tls_ca, tls_cert, tls_key, cluster) as client:
        from covey.coordinator import coordinator_pb2 as pb

        found = client.call("StartCheckpoint", pb.StartCheckpointRequest(run=run, path=path))
        deadline = time.monotonic() + wait
        while found.phase == pb.Checkpoint.PENDING and time.monotonic() < deadline:
            time.sleep(CHECKPOINT_ASK_EVERY)
            found = client.call("GetCheckpoint", pb.GetCheckpointRequest(run=run, id=found.id))
        phase = _phase(found)
    if phase == "failed":
        raise CoveyError(f"checkpoint {found.id} failed: {printable(found.error)}")
    if wait and phase != "done":
        raise DeadlineError(
            f"checkpoint {found.id} is {phase} after the timeout of --wait: {len(found.ended)} workers have ended it"
        )
    say(f"Checkpoint {found.id} to {printable(found.path)!r} is {phase}.")


def _client(
    address: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, cluster: str | None
) -> CoordinatorClient:
    host, port = parts_of(address, least=1)
    security = _security(host, tls_ca, tls_cert, tls_key, cluster)
    from covey.coordinator.client import CoordinatorClient

    return CoordinatorClient(_joined(host, port), security, "operator")


def _security(
    host: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, cluster: str | None
) -> Security:
    from covey.coordinator.extra import require_grpc

    require_grpc()
    from covey.coordinator.security import choose_security
    from covey.net.keys.organisation import PemFiles

    return choose_security(host, PemFiles.of(tls_ca, tls_cert, tls_key), ClusterOptions(cluster))


def _gateway(
    listen: str, host: str, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, cluster: str | None
) -> Callable[[int, asyncio.Event], Coroutine[Any, Any, bool]]:
    """Return what runs a gateway beside the coordinator; its programs are workers of that."""
    from covey.cli.gateway import listening, told
    from covey.coordinator.worker import WorkerNodeConfig
    from covey.gateway.ranks import CoordinatedRanks
    from covey.gateway.server import serve
    from covey.gateway.service import Limits
    from covey.net.keys.organisation import PemFiles

    at = listening(listen, PemFiles.of(tls_ca, tls_cert, tls_key))

    async def run(port: int, stopping: asyncio.Event) -> bool:
        config = WorkerNodeConfig(
            coordinator=_joined(host, port), cluster=cluster, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
        )
        return await serve(at, CoordinatedRanks(config), Limits(), stopping, told)

    return run


def _sizes(size: int | None, min_size: int | None, max_size: int | None, settle: float) -> Sizes | None:
    from covey.coordinator.requests import sizes

    if size is not None and (min_size, max_size) != (None, None):
        raise ConfigError("--size says exactly how many; --min-size and --max-size say how many at least and at most")
    if (min_size is None) != (max_size is None):
        raise ConfigError("--min-size and --max-size belong together")
    if size is None and min_size is None:
        return None
    return sizes(size or min_size, size or max_size, settle)


def parts_of(address: str, *, least: int) -> tuple[str, int]:
    """Return the host and the port of an address; ConfigError if it is none, or its port is below `least`."""
    head, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and least <= int(port) < 1 << 16):
        raise ConfigError(f"{address!r} is not an address; write host:port, like 127.0.0.1:29300")
    return parse_seed(f"{head}:1").host, int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _phase(found: Any) -> str:
    from covey.coordinator import coordinator_pb2 as pb

    return str(pb.Checkpoint.Phase.Name(found.phase)).lower()


def _as_dict(run: Any) -> dict[str, Any]:
    view, last = run.view, run.checkpoint
    return {
        "run": run.run,
        "round": run.round,
        "size": run.size,
        "view": {
            "generation": view.generation,
            "number": view.number,
            "members": list(view.members),
            "sequence": view.sequence,
        }
        if run.HasField("view")
        else None,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "name": worker.name,
                "address": worker.address,
                "rank": worker.rank if worker.rank >= 0 else None,
                "state": worker.state,
                "heard_seconds_ago": round(worker.heard_seconds_ago, 3) if worker.heard_seconds_ago >= 0 else None,
            }
            for worker in run.workers
        ],
        "checkpoint": {
            "id": last.id,
            "path": last.path,
            "phase": _phase(last),
            "ended": list(last.ended),
            "error": last.error,
        }
        if run.HasField("checkpoint")
        else None,
    }


def _shown(run: Any) -> str:
    head = (
        f"{printable(run.run)}: round {run.round}, {run.size} ranks" if run.round else f"{printable(run.run)}: waiting"
    )
    if run.HasField("view"):
        head += f", view {run.view.number}, {run.view.sequence} operations"
    if run.HasField("checkpoint"):
        head += f"; checkpoint {printable(run.checkpoint.id)} is {_phase(run.checkpoint)}"
    workers = run.workers
    columns = [
        Column("RANK", [str(each.rank) if each.rank >= 0 else "-" for each in workers], is_right=True),
        Column("WORKER", [printable(each.worker_id) for each in workers], wraps=True),
        Column("STATE", [printable(each.state) for each in workers]),
        Column("HEARD", [_ago(each.heard_seconds_ago) for each in workers], leave_out=1, is_right=True),
        Column("HOST", [printable(each.name) for each in workers], leave_out=2),
        Column("ADDRESS", [printable(each.address) for each in workers], leave_out=3),
    ]
    return f"{head}\n{table(columns, room())}"


def _ago(seconds: float) -> str:
    return "-" if seconds < 0 else f"{seconds:.1f} s ago"
