"""Findings about runs that wait, and why; `covey doctor` prints these first. Pure."""

from __future__ import annotations

import difflib
import itertools
import shlex
from typing import TYPE_CHECKING, Final

from covey.base.text import duration
from covey.cli.doctor.finding import Finding, Obstacle, cure, obstacle, some
from covey.cli.doctor.own_machine import connecting, is_on_no_network, physical_and_down

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.cli.doctor.facts import Facts, MetNode, WaitFacts

NEAR: Final = 0.75
"""Run names with at least this similarity are probably meant to be the same."""
SAME_SETTINGS: Final = (
    "Start both with the same settings and the same version of covey: the message names what differs."
)
HAS_LEFT: Final = "(it has left)"
"""A node appends this to the reason for a refusal when the refused node has left since."""
START_THERE: Final = (
    "Start the same command on the other machines. If it already runs there, run covey doctor here and there at the "
    "same time: the two look for each other."
)


def waiting_runs(facts: Facts) -> Iterator[Finding]:
    """Yield why runs wait; runs on this machine first."""
    runs: dict[str, list[MetNode]] = {}
    for node in sorted(facts.nodes, key=lambda node: not node.is_here):
        if node.wait is not None and node.state == "joining":
            runs.setdefault(node.run, []).append(node)
    others = {name: next(iter(nodes)) for name, nodes in runs.items()}
    misspelt: set[str] = set()
    for run, nodes in runs.items():
        twin = next((name for name in others if name not in (run, *misspelt) and _is_twin(run, name, others)), "")
        if run not in misspelt:
            found = list(_reasons(run, nodes, facts, others.get(twin)))
            headline = _headline(run, nodes)
            for number, finding in enumerate(found):
                text = f"{headline} {finding.text}" if number == 0 else f"Run {run!r}: {finding.text}"
                yield Finding(finding.weight, finding.code, text.rstrip(), finding.remedy)
        if twin:
            misspelt |= {run, twin}


def failed_wait(facts: Facts) -> Iterator[Finding]:
    """Yield why the latest wait on this machine was in vain, unless its run waits again, or has begun."""
    past = facts.last_wait
    if past is None or any(node.run == past.run for node in facts.nodes):
        return
    headline = (
        f"Run {past.run!r} gave up on this machine {duration(past.ago)} ago, after {duration(past.seconds)}: "
        f"{past.wait.text}."
    )
    explained = {node.name for node in facts.nodes}
    found = [*_refusals(past.wait, explained), *_unanswered_seeds(past.wait, facts.cluster)]
    found += _other_problems(past.wait, facts.cluster)
    for number, finding in enumerate(dict.fromkeys(found) or [_by_cause(past.wait)]):
        text = f"{headline} {finding.text}" if number == 0 else f"Run {past.run!r}: {finding.text}"
        yield Finding("problem", "gave-up", text.rstrip(), finding.remedy)


def silent_members(facts: Facts) -> Iterator[Finding]:
    """Yield which members of running runs the other members do not hear."""
    told: set[tuple[str, tuple[str, ...]]] = set()
    for node in facts.nodes:
        wait = node.wait
        if wait is None or node.state != "running" or (node.run, wait.missing) in told:
            continue
        told.add((node.run, wait.missing))
        yield Finding(
            "problem" if wait.cause == "quorum" else "warning",
            "no-quorum" if wait.cause == "quorum" else "member-unheard",
            f"Run {node.run!r}, as {node.name} sees it: {wait.text}.",
            f"Check that the machine of {some(wait.missing)} is on and connected, and run covey doctor there.",
        )


def _headline(run: str, nodes: list[MetNode]) -> str:
    places = list(dict.fromkeys(map(_host_of, nodes)))
    wait = nodes[0].wait
    assert wait is not None
    return f"Run {run!r} has waited {duration(max(each.since for each in nodes))} on {_and(places)}: {wait.text}."


def _and(places: list[str]) -> str:
    return " and ".join(places) if len(places) == 2 else some(places)


def _host_of(node: MetNode) -> str:
    return "this machine" if node.is_here else node.host_name or node.name


def _reasons(run: str, nodes: list[MetNode], facts: Facts, twin: MetNode | None) -> Iterator[Finding]:
    """Yield what keeps a run waiting. The first text is printed after the headline."""
    first, wait = nodes[0], nodes[0].wait
    assert wait is not None
    differing = {node.name: list(_differences(first, node)) for node in nodes[1:]}
    found = [finding for each in differing.values() for finding in each]
    if twin is not None:
        found.append(_other_name(first, twin))
    explained = {node.name for node in facts.nodes if node.run != run or differing.get(node.name)}
    found += _refusals(wait, explained)
    found += _unanswered_seeds(wait, facts.cluster)
    found += _other_problems(wait, facts.cluster)
    down = physical_and_down(facts)
    if not found and wait.cause == "nodes" and first.is_here and down and is_on_no_network(facts):
        names = some([each.name for each in down])
        text = f"This machine is on no network: {names} {'is' if len(down) == 1 else 'are'} down."
        found.append(Finding("problem", "waiting-no-network", text, connecting(down[0])))
    yield from dict.fromkeys(found) or (_by_cause(wait),)


def _differences(one: MetNode, other: MetNode) -> Iterator[Finding]:
    """Yield why two nodes that wait for the same run cannot be in it together."""
    here, there = one.wait, other.wait
    assert here is not None
    assert there is not None
    both = (_host_of(one), _host_of(other)) if _host_of(one) != _host_of(other) else (one.name, other.name)

    def finding(what: str, mine: str, theirs: str, remedy: str) -> Finding:
        text = f"These cannot be in one run: {both[0]} {what} {mine} and {both[1]} {what} {theirs}."
        return Finding("problem", "waiting-differs", text, remedy)

    if _sizes(here) != _sizes(there):
        remedy = "Start all of them with the same --size, --min and --max (in a script: size=, min_size=, max_size=)."
        yield finding("was started with", _sizes(here), _sizes(there), remedy)
    if here.program != there.program:
        remedy = (
            "Start the same script on all machines. If these are two runs, name each of them: covey run NAME SCRIPT"
        )
        yield finding("runs", repr(here.program), repr(there.program), remedy)
    if here.on_loss != there.on_loss:
        remedy = "Start all of them with the same --on-loss (in a script: on_loss=)."
        yield finding("was started with", f"--on-loss {here.on_loss}", f"--on-loss {there.on_loss}", remedy)
    if here.version != there.version:
        remedy = "Update covey on the machine that has the older release."
        mine, theirs = (
            f"covey {node.version} (protocol {wait.version})" for node, wait in ((one, here), (other, there))
        )
        yield finding("has", mine, theirs, remedy)
    if here.lanes != there.lanes:
        yield finding(
            "uses lanes",
            repr(here.lanes),
            repr(there.lanes),
            "Start all of them with the same --lanes (or COVEY_LANES, or lanes in covey.toml).",
        )


def _sizes(wait: WaitFacts) -> str:
    if wait.size is not None:
        return f"--size {wait.size}"
    return f"--min {wait.min_size}" + (f" --max {wait.max_size}" if wait.max_size is not None else "")


def _is_twin(run: str, name: str, others: dict[str, MetNode]) -> bool:
    """Tell whether two runs that wait are probably meant to be one."""
    one, other = others[run], others[name]
    assert one.wait is not None
    assert other.wait is not None
    if one.is_here and other.is_here and one.wait.program != other.wait.program:
        return False
    is_near = difflib.SequenceMatcher(None, run.lower(), name.lower()).ratio() >= NEAR
    return is_near or one.wait.program == other.wait.program


def _other_name(one: MetNode, twin: MetNode) -> Finding:
    program = one.wait.program if one.wait is not None else ""
    command = f"covey run NAME {shlex.quote(program or 'SCRIPT')}"
    same = twin.wait is not None and twin.wait.program == program
    what = f"with the same program ({program})" if same else "with a name much like it"
    return Finding(
        "problem",
        "waiting-names",
        f"Another run {what} waits on {_host_of(twin)}: {twin.run!r}. Runs of different names do not meet.",
        f"If they are meant to be one run, start both under one name: {command}",
    )


def _refusals(wait: WaitFacts, explained: set[str]) -> Iterator[Finding]:
    """Yield the nodes that were refused, except those in `explained`."""
    for name, why in wait.refused.items():
        if name not in explained:
            yield Finding("problem", "waiting-refused", f"{name} cannot be in it: {why}.", SAME_SETTINGS)


def _unanswered_seeds(wait: WaitFacts, cluster: str) -> Iterator[Finding]:
    """Yield the seeds at which no node answers, unless the node has met others and needs no seed."""
    if len(wait.here) > 1 or wait.cause != "nodes":
        return
    by_obstacle = itertools.groupby(sorted(wait.seeds.items(), key=lambda each: obstacle(each[1]).value),
                                    key=lambda each: obstacle(each[1]))  # fmt: skip
    for kind, group in by_obstacle:
        seeds = dict(group)
        why = next(iter(seeds.values()))
        code = "wrong-secret-at-seed" if kind is Obstacle.SECRET else "waiting-seed"
        text = f"No covey node answered at {'its seed' if len(seeds) == 1 else 'its seeds'} {some(list(seeds))}: {why}."
        yield Finding("problem", code, text, cure(why, some(list(seeds)), cluster))


def _other_problems(wait: WaitFacts, cluster: str) -> Iterator[Finding]:
    """Yield what the node reports about nodes that it knows of and has no link with."""
    for where, why in wait.problems.items():
        kind = obstacle(why)
        if where in ("multicast", "this host") or kind in (Obstacle.REFUSED, Obstacle.SILENCE):
            continue  # the doctor looks at these itself
        if why.endswith(HAS_LEFT):
            yield Finding("warning", "waiting-refused", f"{where} could not be in it: {why}.", SAME_SETTINGS)
            continue
        text = f"{where}: {why}." if where == "this node" else f"No link with {where}: {why}."
        yield Finding("problem", "waiting-refused", text, cure(why, where, cluster))


def _by_cause(wait: WaitFacts) -> Finding:
    """Return the finding for a wait without a known problem."""
    if wait.cause == "links":
        remedy = "Run covey doctor at the same time on the machines that have no link."
        return Finding("problem", "waiting-links", "", remedy)
    if wait.cause == "earlier-run":
        remedy = (
            f"Start {some(wait.missing) or 'the nodes of that run'} again to continue it, or give it up on all "
            "machines: covey run --new ..."
        )
        return Finding("warning", "waiting-earlier-run", "", remedy)
    if wait.cause == "run":
        remedy = (
            "It joins when the members begin their next generation. Only programs with covey.generations or Elastic "
            "have further generations: for others, wait until they end, or use another run name."
        )
        return Finding("note", "waiting-for-run", "", remedy)
    if wait.cause == "agreement":
        return Finding(
            "note", "waiting-agreement", "", "This takes a few seconds. If it lasts, run covey doctor again."
        )
    return Finding("note", "waiting-nodes", "", START_THERE)
