"""`covey worker`: starts a script as a worker of a run that a coordinator keeps together, and again when it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
import typer.core

from covey.base.config import LAUNCHER_VARIABLES, RUN_VARIABLES, parse_seed
from covey.base.errors import ConfigError
from covey.base.pace import Growing
from covey.cli.coordinator import ClusterName, TlsCa, TlsCert, TlsKey  # noqa: TC001 - Typer reads the annotations
from covey.cli.options import command_of
from covey.cli.run import command_line
from covey.runtime.environment import ClusterOptions
from covey.runtime.joining.torch_env import without_rank
from covey.runtime.processes import Children, describe_end, exit_status
from covey.runtime.signals import signals_noted

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.runtime.processes import Child

WORKER_RESTARTS: Final = Growing(0.2, 5.0)
"""Pauses before the script is started again."""
KILL_AFTER: Final = 30.0
"""Seconds that the script has to save its work after Ctrl-C or SIGTERM; a second Ctrl-C kills it at once."""
PROGRAM: Final = "covey.coordinator.program"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class WorkerCommand(typer.core.TyperCommand):
    """Accepts --coordinator right behind the script, too: all else that follows belongs to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        after = given.get("arguments") or ()
        if given.get("coordinator") is None and after and isinstance(after[0], str):
            option, _, value = after[0].partition("=")
            words = 1 if value else 2
            if option == "--coordinator" and len(after) >= words:
                begin = len(args) - len(after)
                args = [*args[begin : begin + words], *args[:begin], *args[begin + words :]]
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class WorkerRequest:
    """What was typed for `covey worker`."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script.")]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None
    coordinator: Annotated[
        str | None, typer.Option(metavar="ADDR", help="Where `covey coordinator` listens, host:port.")
    ] = None
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The run of the coordinator.", show_default="the script's, without .py"),
    ] = None
    worker_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="NAME", help="What the coordinator calls this worker.", show_default="the name of the host"
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR",
            help="Where this worker listens if it gets rank 0, host:port.",
            show_default="an address towards the coordinator",
        ),
    ] = None
    size: Annotated[int | None, typer.Option(min=1, help="Workers of the run.")] = None
    min_size: Annotated[int | None, typer.Option(min=1, help="Instead of --size: the fewest workers.")] = None
    max_size: Annotated[int | None, typer.Option(min=1, help="Instead of --size: the most workers.")] = None
    settle: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long to wait for more than the fewest workers.")
    ] = 5.0
    restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Start a failed script again, up to N times: it joins the next round."),
    ] = 0
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a Python module, as in `python -m`.")] = False
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python that runs the script.", show_default="the one that runs covey"),
    ] = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    cluster: ClusterName = None


def worker(asked: WorkerRequest) -> None:
    """Start a script as a worker of a coordinator's run: covey worker train.py --coordinator 10.0.0.5:29300

    The script needs no change: covey.join() and init_process_group("covey") register it with the coordinator, and wait
    for its rank. Options stand before the script; --coordinator may also stand right behind it.

    When the round ends with an error, such as the loss of another worker, the script fails. With --restarts it is
    started again, and joins the next round with the same rank. A script that calls covey.join() again after the error
    is in the next round, too.

    Ctrl-C and SIGTERM are passed on to the script; a second Ctrl-C kills it. The exit code is that of the script.
    """
    if asked.coordinator is None:
        raise ConfigError(
            "say where the coordinator listens, as in `covey worker --coordinator 127.0.0.1:29300 train.py`"
        )
    from covey.coordinator.extra import require_grpc

    require_grpc()
    from covey.coordinator.security import choose_security
    from covey.coordinator.worker import WorkerNode, WorkerNodeConfig
    from covey.net.keys.organisation import PemFiles

    config = WorkerNodeConfig(
        coordinator=asked.coordinator,
        run=asked.run or (asked.script if asked.module else Path(asked.script).stem),
        worker_id=asked.worker_id or "",
        address=asked.address or "",
        size=asked.size,
        min_size=asked.min_size,
        max_size=asked.max_size,
        settle=asked.settle,
        cluster=asked.cluster,
        **{name: path and os.path.abspath(path) for name, path in _papers(asked.tls_ca, asked.tls_cert, asked.tls_key)},
    )
    pem = PemFiles.of(config.tls_ca, config.tls_cert, config.tls_key)
    choose_security(parse_seed(asked.coordinator).host, pem, ClusterOptions(asked.cluster))
    interpreter, *words = command_line(asked.script, asked.arguments or [], module=asked.module, python=asked.python)
    if not asked.module and (len(words) != 1 + len(asked.arguments or []) or words[0] != asked.script):
        raise ConfigError(
            f"{asked.script} is not a Python script; a program in another language is a rank through `covey gateway`"
        )
    kind = "module" if asked.module else "script"
    given = {each.name: value for each in fields(config) if (value := getattr(config, each.name)) is not None}
    command = [
        interpreter,
        "-m",
        PROGRAM,
        msgspec.json.encode(given).decode(),
        kind,
        asked.script,
        *(asked.arguments or []),
    ]
    own = {*LAUNCHER_VARIABLES, *RUN_VARIABLES}
    env = without_rank({name: value for name, value in os.environ.items() if name not in own})
    env |= {"COVEY_WORKER": WorkerNode(config).worker_id, "PYTHONUNBUFFERED": "1"}
    raise typer.Exit(run_again(command, env, asked.restarts))


app.command(cls=WorkerCommand, context_settings={"allow_interspersed_args": False})(
    command_of(WorkerRequest, "worker", worker)
)


def _papers(*paths: str | None) -> zip[Any]:
    return zip(("tls_ca", "tls_cert", "tls_key"), paths, strict=True)


def run_again(command: Sequence[str], env: dict[str, str], restarts: int) -> int:
    """Run a command until it succeeds, up to `restarts` times again; return its last exit code.

    Call it on the main thread: it takes over signal handling until it returns.
    """
    arrived: list[int] = []
    with signals_noted(arrived) as wake, Children() as children:
        children.watch(wake, tells_ends=True)
        asked = _Asked(wake, arrived)
        for again in range(restarts + 1):
            child = children.start(command, env=env, stdout=None, stderr=None)
            code = _await_end(children, child, asked)
            children.forget(child)
            if not code or asked.signum or again == restarts:
                if asked.signum and code < 0:
                    return 128 + asked.signum
                return exit_status(code)
            typer.echo(f"covey: the script {describe_end(code)}; it starts again ({again + 1} of {restarts})", err=True)
            until = time.monotonic() + WORKER_RESTARTS.after(again + 1)
            while not asked.signum and (left := until - time.monotonic()) > 0:
                children.outputs(left)
                asked.read(None)
            if asked.signum:
                return 128 + asked.signum
    raise AssertionError("a loop of at least one turn returns")


class _Asked:
    """The signals that have asked this process to end or to stand still."""

    def __init__(self, wake: socket.socket, arrived: list[int]) -> None:
        self._wake, self._arrived = wake, arrived
        self.signum = 0
        """The first signal that asked this process to end."""
        self.kill_at = float("inf")

    def read(self, child: Child | None) -> None:
        """Pass on to the script what has come since the last time."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while self._arrived:
            signum = self._arrived.pop(0)
            if signum == signal.SIGTSTP:
                self._stand_still(child)
                continue
            if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self.kill_at = time.monotonic() + (KILL_AFTER if not self.signum else 0.0)
                self.signum = self.signum or signum
            if child is not None:
                child.signal(signum)

    def _stand_still(self, child: Child | None) -> None:
        """Stop the script and this process, as a shell expects after Ctrl-Z, until this one is continued."""
        if child is not None:
            child.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if child is not None:
            child.signal(signal.SIGCONT)


def _await_end(children: Children, child: Child, asked: _Asked) -> int:
    """Wait for the end of the script, and return its code; pass on signals meanwhile."""
    while child.code is None:
        patience = asked.kill_at - time.monotonic()
        children.outputs(None if patience == float("inf") else max(0.0, patience))
        asked.read(child)
        if time.monotonic() >= asked.kill_at:
            child.signal(signal.SIGKILL)
            asked.kill_at = float("inf")
        children.ended()
    return child.code
