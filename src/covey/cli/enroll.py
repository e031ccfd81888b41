"""`covey enroll`: puts this machine into a cluster, with a code of six digits or with the join code."""

from __future__ import annotations

import getpass
import json
import re
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from covey.base.config import group_config
from covey.base.errors import AuthError, ConfigError, ConnectError
from covey.base.text import listed
from covey.cli.doctor.finding import PORT_RANGE
from covey.cli.pair import run_command
from covey.cli.terminal import plural, say, working
from covey.net.audit import audit_log
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters, owner, trust
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity, id_text, machine_name, own_ids, short_id, stored_machine
from covey.proto.pairing import RefusedPairingError
from covey.runtime import loop as control
from covey.runtime.pairing.applicant import (
    APPLYING_SECONDS,
    BUSY_SECONDS,
    WHO_SECONDS,
    FoundInviter,
    addresses_at,
    ask_who,
    get_in,
    searching,
)
from covey.runtime.pairing.inviter import pairing_ports
from covey.wire.secret import JoinCode, decode_join_code, looks_like_join_code

if TYPE_CHECKING:
    from covey.proto.pairing import PairingMachine
    from covey.runtime.pairing.applicant import PairingSearch
    from covey.wire.pairing import Grant, PairingRefusal

LOOK_SECONDS: Final = 6.0
"""How long machines that show a code are looked for."""
MORE_SECONDS: Final = 0.6
"""How long it is looked on after the first one: several may show a code."""
FOUND_CHECK_EVERY: Final = 0.05
CODES_TYPED: Final = 4
"""How often a person is asked for a code."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Enrolled(NamedTuple):
    """What came of it."""

    cluster: str
    how: str
    """What has happened, as in "This machine HOW the cluster"."""
    by: str = ""
    """The machine that let this one in; empty with a join code."""
    waits_at: str = ""
    """The machine where the owner has to approve this one."""
    by_id: str = ""
    """The id of the machine that let this one in."""


@app.command()
def enroll(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS] [CODE]",
            help="The machine that shows a code, if it is not found; a code or a join code: - reads it from stdin, and "
            "without it you are asked.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a cluster of the same name that has another key.")
    ] = False,
    stay_up: Annotated[
        bool,
        typer.Option(
            "--up",
            help="Then stay, as `covey up --allow`: the machine that let this one in can run anything as your user.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put this machine into a cluster: type it here while `covey init` or `covey pair` shows a code on another machine.

    This machine finds the other one on the network, and asks for the six digits. They are never sent: the two machines
    prove to each other that they know them, and a person who guesses has three tries.

    On another network, it takes the join code, which `covey init --show` prints. Either way this machine knows the
    owner of the cluster from now on: it takes a new secret only with the owner's signature.
    """
    done = _put_in(words or [], force=force)
    if as_json:
        typer.echo(json.dumps({**done._asdict(), "command": run_command(done.cluster)}))
        return _stay(done, as_json=True) if stay_up else None
    by = f", with {done.by}" if done.by else ""
    say(f"This machine {done.how} the cluster {done.cluster!r}{by}.")
    if done.waits_at:
        say(f"It waits for approval: on {done.waits_at} run `covey allow {short_id(stored_machine())}`.")
    if not stay_up:
        say(f"On each machine: {run_command(done.cluster)}")
    if clusters.default_name() != done.cluster:
        say(f"To make it the default cluster: covey clusters --default {done.cluster}")
    if stay_up:
        _stay(done)


def _stay(done: Enrolled, *, as_json: bool = False) -> None:
    """Make this machine available to the one that let it in."""
    from covey.cli.up import UpRequest, up

    if not done.by_id:
        raise ConfigError(
            "--up allows the machine that shows the six digits, and a join code comes from none: run `covey up --allow "
            "NODE`"
        )
    up(UpRequest(allow=[done.by_id], as_json=as_json, settings={"cluster": done.cluster}))


def _put_in(words: list[str], *, force: bool) -> Enrolled:
    """Put this machine into the cluster that a person means; what was not given is asked for."""
    codes = [word for word in words if word == "-" or looks_like_join_code(word) or six_digits(word)]
    places = [word for word in words if word not in codes]
    if len(codes) > 1 or len(places) > 1:
        raise ConfigError("use `covey enroll`, `covey enroll ADDRESS`, `covey enroll CODE` or `covey enroll ADDRESS -`")
    address = places[0] if places else ""
    if not codes:
        if not sys.stdin.isatty():
            raise ConfigError("there is no terminal to ask on; `covey enroll -` reads a code from stdin")
        return _ask(address, force=force)
    text = sys.stdin.read(4096) if codes[0] == "-" else codes[0]
    digits = six_digits(text)
    if codes[0] != "-":
        _warn_about_argument(*(("the code was", "type it") if digits else ("the join code was", "paste it")))
    return _with_digits(digits, address, force=force) if digits else _with_code(text, force=force)


def _warn_about_argument(what: str, instead: str) -> None:
    typer.echo(
        f"warning: {what} typed as an argument, where the shell's history and `ps` show it to others; next time run "
        f"`covey enroll` and {instead} when asked",
        err=True,
    )


def six_digits(text: str) -> str:
    """Return the six digits of a code, which people write with blanks and dashes; or ""."""
    plain = re.sub(r"[\s-]", "", text)
    return plain if re.fullmatch(r"[0-9]{6}", plain) else ""


# With a join code


def _with_code(text: str, *, force: bool) -> Enrolled:
    code = decode_join_code(text)
    return Enrolled(code.secret.name, store(code, force=force))


def store(code: JoinCode, *, force: bool) -> str:
    """Store the secret of a cluster and what else a join code has; return what that means for this machine.

    Raises:
        ConfigError: this machine is in another cluster of that name, and not `force`.
    """
    secret, seeds, owned_by, relays = code
    old = clusters.load(secret.name) if clusters.cluster_path(secret.name).exists() else None
    is_same = old is not None and (
        old.owner == owned_by if old.owner and owned_by else old.secret == secret  # the owner may have changed it
    )
    if old is not None and not is_same and not force:
        raise ConfigError(
            f"this machine is in another cluster {secret.name!r}, with another key. --force replaces it: this machine "
            "then no longer meets machines that have the old key"
        )
    if old is not None and is_same:
        joined = "stays in"
        kept = replace(old, seeds=seeds or old.seeds, owner=owned_by or old.owner, relays=relays or old.relays)
        if old.secret != secret:  # nodes that run here may meet nodes that still have the old secret
            kept, joined = clusters.with_secret(kept, secret, kept.serial, clusters.GRACE), "has the new secret of"
        clusters.save(kept)
    else:
        denied = old.denied if old is not None else frozenset()  # denied nodes stay denied under a new key
        clusters.save(Cluster(secret, seeds, denied, owned_by, relays=relays))
        joined = "is now in"
    audit_log.note(secret.name, "secret-enrolled", reason=f"this machine {joined} the cluster")
    ensure_identity()
    return joined


# With six digits


def _ask(address: str, *, force: bool) -> Enrolled:
    """Find the machine that shows a code, and ask for it; or for a join code if there is none."""
    found = _find(address)
    while not isinstance(found, FoundInviter):
        say(found, err=True)
        text = getpass.getpass("Enter looks again; or type an address, or paste the join code (not shown): ").strip()
        if looks_like_join_code(text):
            return _with_code(text, force=force)
        if digits := six_digits(text):
            return _with_digits(digits, address, force=force)
        found = _find(text)
    say(f"{found.host_name} ({found.address}) shows a code of six digits.")
    gives_up = _ask_to_give_up(found) if not force else []
    for tries_left in reversed(range(CODES_TYPED)):
        text = typer.prompt("Code")
        if looks_like_join_code(text):
            return _with_code(text, force=force)
        if not (digits := six_digits(text)):
            say("A code has six digits, like 123 456.", err=True)
            continue
        try:
            return _pair(found, digits, force=force, gives_up=gives_up)
        except _WrongCodeError as error:
            if not tries_left:
                raise ConfigError(f"{error}; look at the screen there, and run `covey enroll` again") from None
            say(f"{error}.", err=True)
    raise ConfigError("no code was typed; run `covey enroll` again")


def _ask_to_give_up(found: FoundInviter) -> list[Cluster]:
    """Return the clusters of this machine that a person gives up: most likely `covey init` was typed on both machines.

    These are clusters that were made here, and that no other machine was in.
    """
    alone = [
        each
        for each in clusters.list_clusters()
        if owner.held(each) is not None and not set(clusters.known(each.name)) - own_ids()
    ]
    if alone:
        names = listed(repr(each.name) for each in alone)
        say(
            f"`covey init` was typed on this machine, too: it has a cluster of its own, {names}, in which no other "
            "machine has ever been. Machines meet only in one cluster."
        )
        typer.confirm(f"Give {names} up, and join the cluster of {found.host_name}?", default=True, abort=True)
    return alone


def _with_digits(digits: str, address: str, *, force: bool) -> Enrolled:
    """Pair without questions: with the machine at an address, or the one that shows a code."""
    found = _find(address, asks=False)
    if not isinstance(found, FoundInviter):
        raise ConfigError(found)
    try:
        return _pair(found, digits, force=force, gives_up=[])
    except _WrongCodeError as error:
        raise ConfigError(str(error)) from None


class _WrongCodeError(Exception):
    """The code was wrong."""


def _pair(found: FoundInviter, digits: str, *, force: bool, gives_up: list[Cluster]) -> Enrolled:
    """Get in with a code; forget the clusters that this machine gives up for it."""
    stored: list[tuple[str, str]] = []
    inviter: list[bytes] = []

    def keep(grant: Grant, machine: PairingMachine) -> None:
        code = decode_join_code(grant.join_code)
        names = {each.name for each in gives_up}
        how = store(code, force=force or code.secret.name in names)
        trust.remember(clusters.load(code.secret.name), {machine.id: machine_name(machine.name, machine.id)})
        inviter.append(machine.id)
        stored.append((code.secret.name, how))

    try:
        with working(f"asking {found.host_name} ..."):
            within = BUSY_SECONDS + APPLYING_SECONDS + control.LOOP_SECONDS
            grant = control.run(get_in(found, digits, keep), within)
    except RefusedPairingError as error:
        raise _explained(error.refusal, digits, found) from None
    except AuthError as error:
        raise AuthError(
            f"{found.host_name} at {found.address} has not proved that it knows the code: {error}. Nothing was stored, "
            "and the code was not sent; another machine of this network may answer in its place"
        ) from error
    name, how = stored[0]
    for each in gives_up:
        if each.name != name:
            clusters.remove(each.name)
            audit_log.note(each.name, "secret-removed", reason="no other machine was in it")
    return Enrolled(name, how, found.host_name, grant.waits_at, id_text(inviter[0]))


def _explained(refusal: PairingRefusal, digits: str, found: FoundInviter) -> Exception:
    """Return the error that says why the other machine does not go on, and what to do."""
    there = found.host_name
    match refusal.kind:
        case "wrong-code":
            left = refusal.tries_left
            more = f"; {plural(left, 'try', 'tries')} left" if left else f", and {there} shows another one now"
            return _WrongCodeError(f"{digits[:3]} {digits[3:]} is not the code that {there} shows{more}")
        case "later":
            return ConfigError(
                f"{there} is busy with another machine, or pauses after wrong codes; try again in a moment"
            )
        case "no-code":
            return ConfigError(f"{there} shows no code any more ({refusal.text}); run `covey pair` there")
        case "versions":
            return ConfigError(refusal.text)
        case _:
            return ConfigError(f"{there} refused this machine: {refusal.text}")


# Which machine


def _find(address: str, *, asks: bool = True) -> FoundInviter | str:
    """Return the machine that shows a code, at an address or found; of several, the one that a person chooses.

    If there is none, or there are several and no person may be asked: why, and what to do.
    """
    if address:
        return _find_at(address)
    interfaces = group_config(effective_environment()).interfaces
    with searching(interfaces) as search:
        with working("looking for a machine that shows a code ..."):
            found = _look(search)
        if not found:
            return _nobody(search)
    if len(found) == 1:
        return found[0]
    rows = [f"{at}  {each.host_name}  {each.address}" for at, each in enumerate(found, 1)]
    if not asks:
        return f"several machines show a code: {'; '.join(rows)}. Name one of them: covey enroll ADDRESS"
    say("Several machines show a code:\n" + "\n".join(rows))
    number = 0
    while not 0 < number <= len(found):
        number = typer.prompt("Which one", type=int)
    return found[number - 1]


def _look(search: PairingSearch) -> list[FoundInviter]:
    """Return the machines that are found within a few seconds."""
    until = time.monotonic() + LOOK_SECONDS
    while not search.found() and time.monotonic() < until:
        time.sleep(FOUND_CHECK_EVERY)
    if search.found():
        time.sleep(MORE_SECONDS)
    return search.found()


def _find_at(address: str) -> FoundInviter | str:
    """Return the machine that shows a code at an address; or why there is none, and what to do."""
    problem = ""
    with working(f"asking {address} ..."):
        for addresses in addresses_at(address, pairing_ports()):
            try:
                return control.run(ask_who(addresses), WHO_SECONDS * len(addresses) + control.LOOP_SECONDS)
            except ConnectError as error:
                problem = problem or str(error)
    return (
        f"No machine that shows a code answers at {address} ({problem}). Type `covey pair` there, or `covey init` if "
        f"it is in no cluster yet, and leave it open. A firewall on that machine has to let {PORT_RANGE} in."
    )


def _nobody(search: PairingSearch) -> str:
    """Return why no machine was found that shows a code, and what to do."""
    if search.is_here:
        return "This machine itself shows a code: type `covey enroll` on the other machine."
    if search.unreachable:
        where, why = next(iter(search.unreachable.items()))
        return (
            f"A machine announces that it shows a code, and cannot be reached ({why}). A firewall there, at {where}, "
            f"has to let {PORT_RANGE} in."
        )
    return (
        "No machine of this network shows a code. Type `covey init` on the other machine, or `covey pair` if it is in "
        "a cluster already, and leave it open. If it shows a code now, multicast does not reach this machine: the "
        "other one prints an address as well, to be typed here."
    )
