"""The `covey bench` command: options in, live progress, tables out."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from covey.base.config import split_list
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.cli.layout import room
from covey.cli.options import command_of
from covey.cli.terminal import is_lively, working
from covey.compress.policy import split_items
from covey.lab.bench.measure import Advanced, CaseDone, Started, Starting, counting, machine_facts, measure
from covey.lab.bench.network.command import (
    NetworkRequest,
    is_in_a_run,
    require_one_machine,
    require_run,
    run_network,
)
from covey.lab.bench.network.terms import DEFAULT_SIZES_TEXT, PAIR_SECONDS, QUICK_SIZES
from covey.lab.bench.plot import draw
from covey.lab.bench.processes import require_libraries, require_torch
from covey.lab.bench.report import Measurement, as_json, line, table
from covey.lab.bench.sweep import (
    MEASURED_LANES,
    Sweep,
    parse_names,
    parse_numbers,
    parse_operations,
    parse_size,
    parse_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

BETWEEN = "Between machines"
ONE_LANE = f"One of {', '.join(MEASURED_LANES)}."
CODECS = "none,fp16,bf16,fp8,int8,int4,onebit,topk(0.01),randomk(0.01),powersgd(4)"

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@dataclass(frozen=True)
class BenchRequest:
    """What was typed for `covey bench`."""

    ctx: typer.Context
    op: Annotated[
        str, typer.Option(help="Operations, separated by commas, or [bold]all[/].", show_default="all_reduce")
    ] = ""
    sizes: Annotated[
        str, typer.Option(help="Bytes per rank; K, M and G are binary.", show_default=DEFAULT_SIZES_TEXT)
    ] = ""
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.", show_default="2")] = ""
    lanes: Annotated[
        str | None,
        typer.Option(
            help=f"covey's lanes: {', '.join(MEASURED_LANES)}. In a run: one for all pairs, not the best of each.",
            show_default="shm,tcp",
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="Element type.", show_default="float32")] = ""
    against: Annotated[str, typer.Option(help="Opponents, interleaved: gloo, mpi, mpi-tcp.")] = ""
    torch: Annotated[bool, typer.Option("--torch", help="Call covey through torch.distributed.")] = False
    busy: Annotated[bool, typer.Option("--busy", help="Add a busy Python thread to every rank of every side.")] = False
    reps: Annotated[int | None, typer.Option(help="Rounds of each contender.", show_default="7")] = None
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and shorter rounds.")] = False
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number here.", dir_okay=False)] = None
    plot: Annotated[Path | None, typer.Option(help="Draw latency and bandwidth here, as SVG.", dir_okay=False)] = None
    run_name: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN", help="Measure between machines: join the run of this name.", rich_help_panel=BETWEEN
        ),
    ] = None
    pair_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds for each pair of ranks.",
            show_default=f"{PAIR_SECONDS:g}",
            rich_help_panel=BETWEEN,
        ),
    ] = None
    size: Annotated[
        int | None,
        typer.Option("--size", min=1, metavar="N", help="Exactly N nodes.", rich_help_panel=BETWEEN),
    ] = None
    min_size: Annotated[
        int | None,
        typer.Option(
            "--min",
            min=1,
            metavar="N",
            help="Begin when N nodes are there.",
            show_default=SETTINGS["run_min_size"].shown_default,
            rich_help_panel=BETWEEN,
        ),
    ] = None
    max_size: Annotated[
        int | None,
        typer.Option("--max", min=1, metavar="N", help="Take no more nodes than this.", rich_help_panel=BETWEEN),
    ] = None
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="S",
            help="Seconds to wait for the other nodes.",
            show_default=SETTINGS["join_timeout"].shown_default,
            rich_help_panel=BETWEEN,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The cluster, if this machine is in several.", rich_help_panel=BETWEEN),
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="host:port of nodes, for networks without multicast.", rich_help_panel=BETWEEN
        ),
    ] = None
    interfaces: Annotated[
        str | None,
        typer.Option(
            metavar="P", help="Network interfaces to use: eth*,!docker* or 10.0.0.0/8.", rich_help_panel=BETWEEN
        ),
    ] = None
    new: Annotated[
        bool,
        typer.Option(
            "--new", help="Give up an earlier run of this name that is not known to be over.", rich_help_panel=BETWEEN
        ),
    ] = False


def bench(asked: BenchRequest) -> None:
    """Measure the collectives on this machine, alone or side by side with gloo and Open MPI.

    Between machines, `covey bench --run RUN` on each of them, or `covey run --on all covey bench` from one, measures
    every pair of ranks and then the collectives among all of them. Rank 0 prints the results. Options that say what to
    measure need to be given on one machine only.
    """
    if asked.ctx.invoked_subcommand is not None:
        return
    files = {kind: path for kind, path in (("json", asked.json_file), ("plot", asked.plot)) if path is not None}
    for path in files.values():
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    if asked.run_name is not None or is_in_a_run(os.environ):
        _measure_between(asked, files)
    else:
        _measure_here(asked, files)


app.callback(invoke_without_command=True)(command_of(BenchRequest, "bench", bench))


def _measure_between(asked: BenchRequest, files: dict[str, Path]) -> None:
    """Measure in a run of several machines."""
    options = {"--ranks": asked.ranks, "--against": asked.against, "--torch": asked.torch, "--busy": asked.busy}
    require_one_machine(options)
    if asked.run_name is None:
        require_run(_of_nodes(asked))
    what: dict[str, Any] = {"--op": asked.op, "--sizes": asked.sizes, "--dtype": asked.dtype, "--reps": asked.reps}
    what |= {"--quick": asked.quick or None, "--pair-seconds": asked.pair_seconds}
    sought = {
        "run": asked.run_name,
        "size": asked.size,
        "min_size": asked.min_size,
        "max_size": asked.max_size,
        "timeout": asked.wait,
        "cluster": asked.cluster,
        "seeds": None if asked.seeds is None else split_list(asked.seeds),
        "interfaces": asked.interfaces,
        "lanes": asked.lanes,
        "new": asked.new or None,
    }
    given = {option: str(value) for option, value in what.items() if value not in (None, "")}
    run_network(NetworkRequest(options=given, join=sought, files=files))


def _of_nodes(asked: BenchRequest) -> dict[str, Any]:
    """Return the options that only a run of several machines has."""
    return {
        "--size": asked.size,
        "--min": asked.min_size,
        "--max": asked.max_size,
        "--wait": asked.wait,
        "--cluster": asked.cluster,
        "--seeds": asked.seeds,
        "--interfaces": asked.interfaces,
        "--new": asked.new,
    }


def _measure_here(asked: BenchRequest, files: dict[str, Path]) -> None:
    """Measure between processes of this machine."""
    require_run(_of_nodes(asked) | {"--pair-seconds": asked.pair_seconds})
    sweep = Sweep(
        operations=parse_operations(asked.op or "all_reduce"),
        sizes=parse_sizes(asked.sizes or (QUICK_SIZES if asked.quick else DEFAULT_SIZES_TEXT)),
        ranks=parse_numbers("--ranks", asked.ranks or "2"),
        lanes=parse_names("shm,tcp" if asked.lanes is None else asked.lanes),
        opponents=parse_names(asked.against),
        dtype=asked.dtype or "float32",
        repetitions=(3 if asked.quick else 7) if asked.reps is None else asked.reps,
        round_seconds=0.03 if asked.quick else 0.1,
        busy=asked.busy,
        through_torch=asked.torch,
    )
    require_libraries(sweep)
    console, facts = Console(), machine_facts()
    console.print(headline(facts, sweep), style="dim", highlight=False, soft_wrap=not console.is_terminal)
    with cleaning_up_on(signal.SIGTERM, signal.SIGHUP):
        measurements, versions = run_sweep(sweep, console)
    if asked.json_file is not None:
        asked.json_file.write_text(json.dumps(as_json(sweep, measurements, facts, versions), separators=(",", ":")))
    if asked.plot is not None:
        asked.plot.write_text(draw(measurements, headline(facts, sweep)))
    for path in files.values():
        console.print(f"wrote {path}", highlight=False)


@app.command()
def recovery(
    ranks: Annotated[int, typer.Option("-n", metavar="N", help="Ranks.")] = 3,
    kills: Annotated[int, typer.Option(help="Ranks that are killed, one after another.")] = 20,
    lanes: Annotated[str, typer.Option(help=ONE_LANE)] = "shm",
    size: Annotated[str, typer.Option(help="Bytes per rank; K, M and G are binary.")] = "64M",
    seed: Annotated[int, typer.Option(help="Decides which rank is killed, and when in the operation.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")] = False,
) -> None:
    """Kill ranks in the middle of all_reduce, and measure how soon the others have the exact result."""
    from covey.lab.bench import recovery as drills

    drill = drills.Drill(size=ranks, kills=kills, lanes=lanes, nbytes=parse_size(size), seed=seed)
    console, facts, found = Console(stderr=as_json), machine_facts(), list[drills.Kill]()
    spinner = working("starting", console=console)
    with cleaning_up_on(signal.SIGTERM, signal.SIGHUP), spinner as show, closing(drills.measure(drill)) as results:
        for kill in results:
            found.append(kill)
            text = f"kill {len(found)} of {kills}: rank {kill.victim}, {kill.total_ms:.1f} ms"
            if show is not None:
                show(text)
            elif not as_json:
                console.print(text, highlight=False)
    if as_json:
        print(json.dumps(drills.as_json(drill, found, facts)))
    else:
        console.print(drills.headline(drill, found), highlight=False)
        console.print(drills.table(found))
        console.print(*drills.histogram([kill.total_ms for kill in found]), sep="\n", highlight=False)
    wrong = sum(not kill.is_right for kill in found)
    if wrong:
        typer.echo(f"{wrong} of {kills} results were wrong", err=True)
        raise typer.Exit(1)


@app.command()
def ddp(
    ranks: Annotated[int, typer.Option("-n", metavar="N", help="Ranks.")] = 2,
    parameters: Annotated[int, typer.Option(help="Size of the model, in millions of parameters.")] = 25,
    rounds: Annotated[int, typer.Option(help="Turns of each side, three steps each.")] = 7,
    lanes: Annotated[str, typer.Option(help=ONE_LANE)] = "shm",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure the step time of PyTorch's DistributedDataParallel, on covey and on gloo in turns."""
    from covey.lab.bench import ddp as trials

    require_torch("covey bench ddp")
    trial = trials.Trial(size=ranks, parameters=parameters * 1_000_000, rounds=rounds, lanes=lanes)
    console, facts = Console(stderr=as_json), machine_facts()
    with working("training", console=console):
        outcomes = trials.measure(trial)
    if as_json:
        print(json.dumps(trials.as_json(trial, outcomes, facts)))
    else:
        console.print(f"{parameters} M parameters, {ranks} ranks, {lanes}", highlight=False)
        console.print(trials.table(outcomes))


@app.command()
def compress(
    codecs: Annotated[str, typer.Option(help="Codecs, separated by commas; none is always there.")] = CODECS,
    links: Annotated[str, typer.Option(help="Speeds of links in Mbit/s, separated by commas.")] = "100,1000,10000",
    ranks: Annotated[int, typer.Option("-n", metavar="N", help="Ranks.")] = 4,
    size: Annotated[str, typer.Option(help="Bytes per rank; K, M and G are binary.")] = "64M",
    lanes: Annotated[str, typer.Option(help="tcp or secure.")] = "tcp",
    rounds: Annotated[int, typer.Option(help="Turns of each codec; one if it takes over two seconds.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the gain by link here, as SVG.", dir_okay=False)] = None,
) -> None:
    """Measure what codecs save, cost and lose, and how long a compressed all_reduce takes over slow links."""
    from covey.lab.bench import compress as trials

    trial = trials.CodecTrial(
        codecs=tuple(dict.fromkeys(("none", *split_items(codecs)))),
        links=tuple(float(word) for word in parse_names(links)),
        size=ranks,
        nbytes=parse_size(size),
        lanes=lanes,
        rounds=rounds,
    )
    console, facts = Console(stderr=as_json), machine_facts()
    with cleaning_up_on(signal.SIGTERM, signal.SIGHUP), working("starting", console=console) as show:
        outcomes = trials.measure(trial, show or (lambda text: None))
    if as_json:
        print(json.dumps(trials.as_json(trial, outcomes, facts)))
    else:
        console.print(f"all_reduce of {size}, {ranks} ranks, {lanes}; GB/s of float32 on one core", highlight=False)
        console.print(trials.table(trial, outcomes))
    if plot is not None:
        plot.write_text(trials.draw(trial, outcomes))
        console.print(f"wrote {plot}", highlight=False)


@app.command()
def calls(
    in_flight: Annotated[int, typer.Option(help="Calls that are made at the same time.")] = 32,
    lanes: Annotated[str, typer.Option(help=ONE_LANE)] = "secure",
    size: Annotated[str, typer.Option(help="Bytes of the large payload; K, M and G are binary.")] = "64M",
    rounds: Annotated[int, typer.Option(help="Rounds of everything.")] = 5,
    small: Annotated[int, typer.Option("--calls", help="Small calls of a round, one after the other.")] = 1000,
    against: Annotated[str, typer.Option(help="Another library for the same small calls, in turns: grpc.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure calls between two processes: latency, calls a second, and a large payload beside its broadcast."""
    from covey.lab.bench import calls as trials

    rivals = tuple(parse_names(against)) if against else ()
    trial = trials.CallTrial(
        lanes=lanes, in_flight=in_flight, nbytes=parse_size(size), rounds=rounds, calls=small, against=rivals
    )
    console, facts = Console(stderr=as_json), machine_facts()
    with working("calling", console=console):
        figures = trials.measure(trial)
    if as_json:
        print(json.dumps(trials.as_json(trial, figures, facts)))
    else:
        console.print(trials.table(trial, figures))


@app.command()
def train(
    models: Annotated[str, typer.Option(help="mlp, attention, lora, separated by commas.", show_default="mlp")] = "",
    lines: Annotated[str, typer.Option(help="Mbit/s of lines, separated by commas.", show_default="100")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.", show_default="0")] = "",
    ways: Annotated[str, typer.Option(help="Ways to train, separated by commas.", show_default="all")] = "",
    ranks: Annotated[int, typer.Option("-n", metavar="N", help="Machines, a core each.")] = 2,
    seconds: Annotated[float | None, typer.Option(help="Of each training.", show_default="60")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short trainings: to try it, not to compare.")] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="The whole proof on two cores: also uneven machines, a loss, LoRA; two hours."),
    ] = False,
    add: Annotated[
        Path | None, typer.Option(help="Add each course to this JSON file; what it has is not measured again.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing: show what is in the file of --add.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses here, as SVG.", dir_okay=False)] = None,
) -> None:
    """Measure how much faster machines train together than one alone. Linux, as root."""
    from covey.lab.bench import train as trials
    from covey.lab.bench import train_courses as results
    from covey.net.host.folders import write_private

    require_torch("covey bench train")
    if show and add is None:
        raise ConfigError("--show needs the file of --add")
    if everything and (models or lines or seeds or ways or ranks != 2):
        raise ConfigError("--all has its own models, lines, seeds, ways and machines: leave these options out")
    lasting = seconds or (3.0 if quick else 60.0)
    trial = trials.TrainTrial(
        models=tuple(parse_names(models or "mlp")),
        lines=parse_numbers("--lines", lines or "100"),
        seeds=parse_numbers("--seeds", seeds or "0"),
        ways=parse_names(ways),
        seconds=lasting,
        size=ranks,
    )
    console = Console()
    courses = results.from_text(add.read_bytes()) if add is not None and add.exists() else []
    failures: list[str] = []
    if not show:
        has = {course.case for course in courses}
        cases = [case for case in (trials.proof(lasting) if everything else trial.cases()) if case not in has]
        with cleaning_up_on(signal.SIGTERM, signal.SIGHUP), working("starting", console=console) as tell:
            say = tell or (lambda text: console.print(text, highlight=False, soft_wrap=True))
            for course in trials.measure(cases, say, failures.append):
                courses.append(course)
                if add is not None:
                    write_private(add.absolute(), json.dumps(results.as_json(courses)).encode())
    console.print(results.table(results.rows(courses)))
    if plot is not None:
        plot.write_text(results.draw(courses))
        console.print(f"wrote {plot}", highlight=False)
    if failures:
        raise ConfigError("\n".join([f"{len(failures)} runs have no course:", *failures]))


@app.command()
def metrics(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure what counting and recording add to an operation, and what reading the numbers takes."""
    from covey.lab.bench import metrics as trials

    console, facts = Console(stderr=as_json), machine_facts()
    with working("measuring", console=console):
        costs = trials.measure()
    if as_json:
        print(json.dumps({"machine": facts, "costs": [cost._asdict() for cost in costs]}))
    else:
        console.print(trials.report(costs))


def run_sweep(sweep: Sweep, console: Console) -> tuple[list[Measurement], dict[str, str]]:
    """Measure everything and show results as they arrive; return them with the versions of the libraries used."""
    measurements: list[Measurement] = []
    versions: dict[str, str] = {}
    unprinted: list[Measurement] = []

    def print_table() -> None:
        if unprinted:
            console.print(table(unprinted, room()), highlight=False, soft_wrap=True)
            unprinted.clear()

    with progress(sweep, console) as say, closing(measure(sweep)) as events:
        for event in events:
            match event:
                case Starting():
                    say(f"starting {event.ranks} ranks of each contender", 0)
                case Started():
                    versions |= event.versions
                case Advanced():
                    last = unprinted[-1].case if unprinted else event.case
                    if (last.operation, last.ranks) != (event.case.operation, event.case.ranks):
                        print_table()
                    say(str(event.case), event.rounds)
                case CaseDone():
                    if not is_lively(console):
                        console.print(line(event.case, event.measurements), highlight=False, soft_wrap=True)
                    measurements += event.measurements
                    unprinted += event.measurements
    print_table()
    return measurements, versions


def progress(sweep: Sweep, console: Console) -> AbstractContextManager[Callable[[str, int], None]]:
    """Yield a function that shows what is measured and adds finished rounds; it does nothing without a terminal."""
    cases = sum(1 for ranks in sweep.ranks for _ in sweep.cases(ranks))
    return counting(cases * sweep.repetitions * len(sweep.contenders()), console)


@contextmanager
def cleaning_up_on(*signums: signal.Signals) -> Iterator[None]:
    """Turn signals that would end this process at once into an exit that ends the ranks first."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    with ExitStack() as stack:
        for signum in signums:
            if signal.getsignal(signum) != signal.SIG_IGN:  # under nohup it stays ignored
                stack.callback(signal.signal, signum, signal.signal(signum, leave))
        yield


def headline(facts: dict[str, Any], sweep: Sweep) -> str:
    """Return one line that says where and when this was measured."""
    busy = ", one busy thread a rank" if sweep.busy else ""
    busy += ", covey through torch.distributed" if sweep.through_torch else ""
    when = str(facts["date"])[:16].replace("T", " ")
    return f"{facts['cpu']}, {facts['usable_cores']} cores, {facts['system']} {facts['kernel']}, {when}{busy}"
