"""The `covey checkpoint` command: asks a run to save one; lists, checks and pulls those that are on this machine."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import typer.core

from covey.base.config import check_timeout
from covey.base.errors import ClosedError, ConfigError, CoveyError, DeadlineError
from covey.base.text import printable, size_text
from covey.cli.layout import Column, room, table
from covey.cli.runs import find_run, visiting_members
from covey.cli.terminal import say, working
from covey.net.host.runs import LocalRunFound
from covey.wire import messages
from covey.wire.checkpoint import check_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.shards.folder import ShardFolder

    Ask = Callable[[messages.RequestCheckpoint], messages.CheckpointProgress | None]

RANKS_ANSWER_SECONDS: Final = 35.0
"""How long ranks may take to answer: a little longer than they wait for each other."""
PROGRESS_ASK_EVERY: Final = 0.2
"""How often `--wait` asks how far the checkpoint is."""
LOST_ANSWERS: Final = 3
"""So many questions in a row may stay without an answer."""


class CheckpointGroup(typer.core.TyperGroup):
    """Takes `covey checkpoint RUN` for `covey checkpoint request RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help", "-h", "--traceback"}:
            args = ["request", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, cls=CheckpointGroup)

Folders = Annotated[
    list[Path] | None,
    typer.Option("--folder", metavar="F", help="A folder with checkpoints, instead of those of this machine's runs."),
]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="The checkpoint of this step, not the newest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def checkpoint() -> None:
    """Ask all ranks of a run to save a checkpoint (`covey checkpoint RUN`), or look at those on this machine.

    `list`, `pull` and `verify` are for what group.checkpoint.save writes, which is on the machines of a run.
    """


@app.command()
def request(
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
        f"checkpoint {checkpoint_id} was not saved by all ranks within the timeout of {seconds:g} s; "
        "they continue to save it"
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


@app.command(name="list")
def list_command(folder: Folders = None, as_json: AsJson = False) -> None:
    """List the checkpoints that this machine has parts of, the newest of each run first.

    A run keeps them on all of its machines: SHARDS says how many of its shards are here, which may be too few to
    load it. With several --folder, those are looked at together, as if they were the machines of one run.
    """
    from covey.runtime.shards.pulled import held_checkpoints

    rows: list[dict[str, Any]] = []
    for name, folders in _folders(folder):
        for held in held_checkpoints(folders):
            saved, found = held.saved, held.found
            rows.append(
                {
                    "run": name,
                    "step": saved.step,
                    "saved_at": saved.saved_at,
                    "bytes": sum(shard.nbytes for shard in saved.shards),
                    "arrays": len(saved.arrays),
                    "shards": len(found.holders),
                    "shards_here": len(found.holders) - len(found.missing),
                    "is_complete": found.is_complete,
                    "machines": sorted({host for shard in saved.shards for host in shard.hosts}),
                    "id": saved.id,
                }
            )
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows:
        say("No checkpoint is on this machine.")
    else:
        columns = [
            Column("RUN", [printable(str(row["run"])) for row in rows]),
            Column("STEP", [str(row["step"]) for row in rows], is_right=True),
            Column("SAVED", [time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved_at"])) for row in rows]),
            Column("SIZE", [size_text(row["bytes"]) for row in rows], is_right=True),
            Column("SHARDS", [f"{row['shards_here']} of {row['shards']}" for row in rows]),
            Column("MACHINES", [printable(", ".join(row["machines"])) for row in rows], leave_out=1, wraps=True),
        ]
        typer.echo(table(columns, room()))


@app.command()
def pull(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    step: Step = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="As `covey checkpoint list` names it.")
    ] = None,
    folder: Folders = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest complete checkpoint of a run as one file of safetensors, with whole arrays.

    covey.load_state returns its state; libraries that read safetensors read its arrays. All shards must be in the
    folders here; of other machines, copy the folders here and name each with --folder.
    """
    from covey.runtime.progress_bar import ProgressBar
    from covey.runtime.shards.pulled import pull as pull_from

    found = _folders(folder)
    if run is not None:
        found = [each for each in found if each[0] == run]
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise ConfigError(f"say which run is meant with --run, as `covey checkpoint list` names it; there are: {names}")
    held = pull_from(found[0][1], step, file, lambda total: ProgressBar("pulling", total))
    facts = {"file": str(file), "step": held.saved.step, "bytes": file.stat().st_size, "arrays": len(held.saved.arrays)}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        say(f"{file} has the checkpoint of step {held.saved.step}: {size_text(file.stat().st_size)}")


@app.command()
def verify(step: Step = None, folder: Folders = None, as_json: AsJson = False) -> None:
    """Read all files of checkpoints that are on this machine, and compare them with what was written.

    The exit code is 1 if a file is damaged. Another machine may have an intact copy, which group.checkpoint.load finds.
    """
    from covey.runtime.progress_bar import ProgressBar
    from covey.runtime.shards.pulled import damaged_files, held_checkpoints

    rows: list[dict[str, Any]] = []
    for name, folders in _folders(folder):
        for held in held_checkpoints(folders):
            if step not in (None, held.saved.step):
                continue
            sizes = [
                shard.nbytes * len(places) for shard, places in zip(held.saved.shards, held.found.holders, strict=True)
            ]
            with ProgressBar(f"reading step {held.saved.step}", sum(sizes)) as bar:
                wrong = damaged_files(held, bar.show)
            rows.append({"run": name, "step": held.saved.step, "bytes": sum(sizes), "damaged": wrong})
    if as_json:
        typer.echo(json.dumps(rows))
    for row in [] if as_json else rows:
        said = f"damaged: {', '.join(row['damaged'])}" if row["damaged"] else "intact"
        say(f"{row['run']}, step {row['step']}: {size_text(row['bytes'])} here, {said}")
    if not rows and not as_json:
        say("No checkpoint is on this machine.")
    raise typer.Exit(int(any(row["damaged"] for row in rows)))


def _folders(given: list[Path] | None) -> list[tuple[str, list[ShardFolder]]]:
    """Return the folders of each run, by its name: those that were given are of one."""
    from covey.runtime.shards.folder import ShardFolder, folders_of_runs

    if not given:
        return [(path.name, [ShardFolder(path)]) for path in folders_of_runs()]
    if missing := [str(path) for path in given if not path.is_dir()]:
        raise ConfigError(f"{missing[0]} is no folder")
    return [(", ".join(path.name for path in given), [ShardFolder(path) for path in given])]
