"""What a person has chosen in `covey top`, and what each key does to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from covey.watch.output import OutputLine
    from covey.watch.overview import Applicant, MachineSeen, Overview, RankSeen, RunSeen

Panel = Literal["ranks", "links", "events", "logs"]
PANELS: Final[tuple[Panel, ...]] = ("ranks", "links", "events", "logs")
TYPED_LIMIT: Final = 100
"""Characters that a prompt takes."""
KILL_AFTER_SECONDS: Final = 30.0
"""How long after `s` a second one offers to kill the processes: they may be saving their work."""
LETTERS: Final = {
    "active": "A",
    "waiting": "W",
    "late": "B",
    "stopped": "S",
    "silent": "?",
    "lost": "L",
    "left": "X",
    "joining": "J",
}
"""What stands for the state of a rank: no state is told by its colour alone."""


class Prompt(NamedTuple):
    """A question at the bottom of the screen."""

    kind: Literal["filter", "stop", "kill", "approve"]
    subject: str = ""
    """The id of the run or of the applicant."""
    typed: str = ""


class Intent(NamedTuple):
    """What is to be done because of a key."""

    kind: Literal["quit", "stop", "kill", "checkpoint", "approve", "deny"]
    subject: str = ""
    name: str = ""


@dataclass(frozen=True)
class ViewState:
    """What is shown, and how."""

    now: float = 0.0
    """The wall-clock time at which the frame is drawn."""
    panel: Panel = "ranks"
    run: str = ""
    """The id of the run; empty for the first."""
    rank: int | None = None
    """The rank under the cursor."""
    is_open: bool = False
    """Whether that rank is shown alone."""
    scroll: int = 0
    """Rows that the panels other than the ranks are scrolled back from their end."""
    filter: str = ""
    by_waits: bool = False
    """Whether ranks are sorted by how many others wait for them."""
    is_paused: bool = False
    has_help: bool = False
    prompt: Prompt | None = None
    message: str = ""
    """What the last key has led to."""
    stopped_at: float | None = None
    """When the run was asked to stop from here."""
    output: tuple[OutputLine, ...] = ()
    """The last lines of output, the oldest first, for the panel of logs."""
    left_out: int = 0
    """Lines of output that were not read."""


def chosen_run(overview: Overview, state: ViewState) -> RunSeen | None:
    """Return the run that is shown: the chosen one, or the first one that runs; None if there is none."""
    found = next((run for run in overview.runs if run.id == state.run), None)
    running = next((run for run in overview.runs if run.state in ("running", "waiting")), None)
    return found or running or next(iter(overview.runs), None)


def machine_names(overview: Overview) -> dict[str, str]:
    """Return the names of machines by their ids."""
    return {machine.id: machine.name for machine in overview.machines}


def waiting_for(run: RunSeen) -> dict[int, int]:
    """Return how many ranks wait for each rank for which any waits."""
    counts: dict[int, int] = {}
    for rank in run.ranks:
        for other in rank.waits_for:
            counts[other] = counts.get(other, 0) + 1
    return counts


def shown_ranks(run: RunSeen, names: dict[str, str], state: ViewState) -> list[RankSeen]:
    """Return the ranks that pass the filter, by number, or by how many wait for each."""
    wanted = state.filter.casefold()
    ranks = [rank for rank in run.ranks if not wanted or _matches(rank, names, wanted)]
    if state.by_waits:
        counts = waiting_for(run)
        ranks.sort(key=lambda rank: (-counts.get(rank.rank, 0), rank.rank))
    return ranks


def _matches(rank: RankSeen, names: dict[str, str], wanted: str) -> bool:
    texts = (names.get(rank.machine, rank.machine), rank.state, rank.operation)
    return wanted == str(rank.rank) or any(wanted in text.casefold() for text in texts)


def machine_of(overview: Overview, rank: RankSeen) -> MachineSeen | None:
    """Return the machine of a rank, if it is known."""
    return next((machine for machine in overview.machines if machine.id == rank.machine), None)


def press(state: ViewState, key: str, overview: Overview) -> tuple[ViewState, Intent | None]:
    """Return the state after a key, and what is to be done."""
    if key == "ctrl-c":
        return state, Intent("quit")
    if state.prompt is not None:
        return _typed(state, state.prompt, key, overview)
    state = replace(state, message="")
    run = chosen_run(overview, state)
    match key:
        case "q":
            return state, Intent("quit")
        case "1" | "2" | "3" | "4":
            return _opened(state, PANELS[int(key) - 1]), None
        case "tab":
            return _opened(state, PANELS[(PANELS.index(state.panel) + 1) % len(PANELS)]), None
        case "?":
            return replace(state, has_help=not state.has_help), None
        case "escape" if state.has_help or state.is_open:
            return replace(state, has_help=False, is_open=False), None
        case "escape":
            return replace(state, filter="", scroll=0), None
        case " ":
            return replace(state, is_paused=not state.is_paused), None
        case "/":
            return replace(state, prompt=Prompt("filter", typed=state.filter)), None
        case "w":
            return replace(state, by_waits=not state.by_waits, panel="ranks"), None
        case "u":
            return replace(
                state, message="`covey ui` in another terminal opens the same as a page in your browser"
            ), None
        case "n" | "p" if overview.runs:
            return _other_run(state, overview, 1 if key == "n" else -1), None
        case "j" | "down" | "k" | "up" | "page-down" | "page-up" | "home" | "end":
            return _moved(state, key, overview), None
        case "enter":
            return _with_rank_open(state, overview), None
        case "c" | "s" | "a":
            return _asked(state, key, run, overview)
        case _:
            return state, None


def _opened(state: ViewState, panel: Panel) -> ViewState:
    return replace(state, panel=panel, scroll=0, has_help=False, is_open=False)


def _other_run(state: ViewState, overview: Overview, by: int) -> ViewState:
    current = chosen_run(overview, state)
    at = next(at for at, run in enumerate(overview.runs) if run is current)
    following = overview.runs[(at + by) % len(overview.runs)]
    return replace(state, run=following.id, rank=None, is_open=False, scroll=0, stopped_at=None)


def _moved(state: ViewState, key: str, overview: Overview) -> ViewState:
    by = {"j": 1, "down": 1, "k": -1, "up": -1, "page-down": 10, "page-up": -10, "home": -(1 << 20)}.get(key, 1 << 20)
    if state.panel != "ranks":
        return replace(state, scroll=max(state.scroll - by, 0))
    run = chosen_run(overview, state)
    ranks = shown_ranks(run, machine_names(overview), state) if run is not None else []
    if not ranks:
        return state
    numbers = [rank.rank for rank in ranks]
    if state.rank not in numbers:
        return replace(state, rank=numbers[0] if by > 0 else numbers[-1])
    at = min(max(numbers.index(state.rank) + by, 0), len(numbers) - 1)
    return replace(state, rank=numbers[at])


def _with_rank_open(state: ViewState, overview: Overview) -> ViewState:
    run = chosen_run(overview, state)
    ranks = shown_ranks(run, machine_names(overview), state) if run is not None else []
    if state.is_open or not ranks:
        return replace(state, is_open=False)
    known = state.rank in {rank.rank for rank in ranks}
    return replace(state, panel="ranks", has_help=False, is_open=True, rank=state.rank if known else ranks[0].rank)


def _asked(state: ViewState, key: str, run: RunSeen | None, overview: Overview) -> tuple[ViewState, Intent | None]:
    """Return the state after a key that acts on the run or the cluster."""
    if key == "a":
        return _approving(state, overview), None
    if run is None:
        return replace(state, message="there is no run"), None
    if key == "c":
        if not run.can_checkpoint:
            return replace(state, message=f"{run.name} cannot be asked for a checkpoint now"), None
        return replace(state, message="asking for a checkpoint ..."), Intent("checkpoint", run.id, run.name)
    if not run.can_stop:
        text = f"{run.name} cannot be stopped from here: stop it where it was started, with Ctrl-C"
        return replace(state, message=text), None
    is_second = state.stopped_at is not None and state.now - state.stopped_at > KILL_AFTER_SECONDS
    return replace(state, prompt=Prompt("kill" if is_second else "stop", run.id)), None


def _approving(state: ViewState, overview: Overview) -> ViewState:
    if not overview.applicants:
        return replace(state, message="no machine asks to join")
    if not overview.can_approve:
        where = f" on {overview.approver}" if overview.approver else ", on the machine with the owner key"
        return replace(state, message=f"machines are approved{where}, with `covey allow`")
    return replace(state, prompt=Prompt("approve", overview.applicants[0].id))


def applicant_of(overview: Overview, prompt: Prompt) -> Applicant | None:
    """Return the machine that a prompt is about; None if it does not ask any more."""
    return next((each for each in overview.applicants if each.id == prompt.subject), None)


def _typed(state: ViewState, prompt: Prompt, key: str, overview: Overview) -> tuple[ViewState, Intent | None]:
    """Return the state after a key at a prompt."""
    if key == "escape":
        return replace(state, prompt=None, filter="" if prompt.kind == "filter" else state.filter), None
    if prompt.kind == "approve":
        return _answered(state, prompt, key, overview)
    typed = prompt.typed
    if key == "enter":
        return _entered(state, prompt, overview)
    if key == "backspace":
        typed = typed[:-1]
    elif len(key) == 1 and key.isprintable():
        typed = (typed + key)[:TYPED_LIMIT]
    state = replace(state, prompt=prompt._replace(typed=typed))
    return (replace(state, filter=typed) if prompt.kind == "filter" else state), None


def _entered(state: ViewState, prompt: Prompt, overview: Overview) -> tuple[ViewState, Intent | None]:
    state = replace(state, prompt=None)
    if prompt.kind == "filter":
        return state, None
    run = next((run for run in overview.runs if run.id == prompt.subject), None)
    if run is None:
        return replace(state, message="that run is over"), None
    if prompt.typed.strip() != run.name:
        return replace(state, message=f"not stopped: that is not the name of the run, {run.name}"), None
    if prompt.kind == "kill":
        return replace(state, message=f"killing {run.name} ..."), Intent("kill", run.id, run.name)
    return replace(state, message=f"stopping {run.name} ...", stopped_at=state.now), Intent("stop", run.id, run.name)


def _answered(state: ViewState, prompt: Prompt, key: str, overview: Overview) -> tuple[ViewState, Intent | None]:
    found = applicant_of(overview, prompt)
    if found is None:
        return replace(state, prompt=None, message="that machine does not ask to join any more"), None
    if key == "y":
        return replace(state, prompt=None, message=f"approving {found.name} ..."), Intent(
            "approve", found.id, found.name
        )
    if key == "n":
        return replace(state, prompt=None, message=f"denying {found.name} ..."), Intent("deny", found.id, found.name)
    return state, None
