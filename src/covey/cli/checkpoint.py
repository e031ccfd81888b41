"""The `covey checkpoint` command: asks a run to save a checkpoint, and waits for it if told to."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import check_timeout
from covey.base.errors import ClosedError, ConfigError, CoveyError, DeadlineError
from covey.cli.runs import find_run, visiting_members
from covey.cli.terminal import working
from covey.net.host.runs import LocalRunFound
from covey.wire import messages
from covey.wire.checkpoint import check_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[messages.RequestCheckpoint], messages.CheckpointProgress | None]

RANKS_ANSWER_SECONDS: Final = 35.0
"""How long ranks may take to answer: a little longer than they wait for each other."""
PROGRESS_ASK_EVERY: Final = 0.2
"""How often `--wait` asks how far the checkpoint is."""
LOST_ANSWERS: Final = 3
"""So many questions in a row may stay without an answer."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def checkpoint(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run on this machine or of the cluster.")],
    path: Annotated[
        str, typer.Option("--path", metavar="P", help="Where to save, as the program understands it.")
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when all ranks have saved.")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", help="With --wait: for how many seconds.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster, if this machine is in several.")
    ] = None,
    look: Annotated[float, typer.Option(metavar="S", help="Seconds to look for nodes of the cluster.")] = 1.5,
) -> None:
    """Ask all ranks of a run to save a checkpoint, after the same operation.

    The program decides how: it asks for group.checkpoint_pending. If a checkpoint is under way, the request is for that
    one. With --wait, the exit code is 1 if a rank could not save.
    """
    seconds = check_timeout(timeout, "--timeout")
    check_order(path, "")
    with _asking(run, cluster, check_timeout(look, "--look")) as ask:
        progress = ask(messages.RequestCheckpoint(secrets.token_hex(8), path))
        if progress is None:
            raise DeadlineError(
                f"the run {run!r} did not answer within the timeout of {RANKS_ANSWER_SECONDS:g} s: its ranks may be "
                "stopped, or may not have joined yet"
            )
        if progress.state == "refused":
            raise ConfigError(f"the run {run!r} refuses the request: {progress.text}")
        if wait:
            with working(f"waiting until all ranks have saved checkpoint {progress.id} ..."):
                progress = _await(ask, progress.id, seconds)
    failed = bool(progress.text)
    if as_json:
        facts = {"run": run, "id": progress.id, "path": path, "state": progress.state, "failed": progress.text}
        typer.echo(json.dumps(facts))
    elif failed:
        typer.echo(f"checkpoint {progress.id} failed: {progress.text}")
    else:
        typer.echo(f"checkpoint {progress.id} is {'saved' if progress.state == 'over' else progress.state}")
    raise typer.Exit(int(failed))


def _await(ask: Ask, checkpoint_id: str, seconds: float) -> messages.CheckpointProgress:
    """Return the last state of a checkpoint, once it is over.

    Raises:
        DeadlineError: it is not over within `seconds`.
        ClosedError: the run has ended before.
    """
    until, silent = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        time.sleep(PROGRESS_ASK_EVERY)
        progress = ask(messages.RequestCheckpoint(checkpoint_id, "", True))
        silent = silent + 1 if progress is None else 0
        if progress is not None and progress.state == "over":
            return progress
        if silent == LOST_ANSWERS or (progress is not None and not progress.state):
            raise ClosedError(f"the run ended before checkpoint {checkpoint_id} was known to be saved")
    raise DeadlineError(
        f"checkpoint {checkpoint_id} was not saved by all ranks within the timeout of {seconds:g} s; they go on with it"
    )


@contextlib.contextmanager
def _asking(run: str, cluster: str | None, look: float) -> Iterator[Ask]:
    """Yield a function that asks a member of the run; it returns None if no answer came."""
    found = find_run(run, cluster)
    if isinstance(found, LocalRunFound):
        from covey.runtime.peers.local_visit import visiting_ranks

        with visiting_ranks(found) as ranks:
            yield lambda question: ranks.ask_one(question, RANKS_ANSWER_SECONDS)
        return
    with visiting_members(run, found, look) as (visit, members, _):

        def ask(question: messages.RequestCheckpoint) -> messages.CheckpointProgress | None:
            for member in members:
                with contextlib.suppress(CoveyError):  # it has left; another one knows
                    answer = visit.ask(member.card, question, RANKS_ANSWER_SECONDS)
                    return answer if isinstance(answer, messages.CheckpointProgress) else None
            return None

        yield ask
