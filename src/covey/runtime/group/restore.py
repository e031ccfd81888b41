"""Give newcomers and drifted ranks the state of the others, over the group's point-to-point lanes; and a state on disk.

All ranks tag the chunks of their states and exchange manifests. From these each rank computes which ranks are donors
and which are receivers; then `state_transfer` moves the chunks. If a restore fails, received chunks stay, and the next
restore does not transfer them again.

When a run has to end, covey saves what `group.restore` was given (`save_state`).
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import DTYPES
from covey.base.config import check_timeout
from covey.base.errors import ConfigError, CoveyError, MismatchError, PeerLostError, RemoteProtocolError
from covey.base.text import TEXT_LIMIT, printable
from covey.net.host import folders
from covey.proto.restore import StateChoice, differing, elect, listed, objection
from covey.runtime.buffers import readable
from covey.runtime.group.exchange import Exchange
from covey.runtime.group.object_moves import ObjectMoves
from covey.runtime.group.state_transfer import StateMemory, StateTransfer
from covey.wire import objects
from covey.wire.manifest import MANIFEST_BYTES, Manifest, Tagger

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from covey.runtime.group.issuer import Issuer


ON_DRIFT: Final = ("repair", "raise")
NONCE_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What a restore did. Ranks are in ascending order, and the same on every rank."""

    bytes_received: int = 0
    """Bytes of the state that this rank received."""
    bytes_sent: int = 0
    """Bytes of the state that this rank sent."""
    seconds: float = 0.0
    donors: tuple[int, ...]
    """The ranks that already had the state which all ranks have now."""
    receivers: tuple[int, ...] = ()
    """The ranks whose state was changed."""
    drifted: tuple[int, ...] = ()
    """The receivers that were not newcomers: their state should have been the same and was not."""
    first: bool
    """Whether all ranks were newcomers, so that the lowest rank's state was taken."""


@dataclass(frozen=True)
class _Terms:
    """The first message of each rank: a random part of the tags' key, and its `on_drift`."""

    nonce: bytes
    on_drift: str


@dataclass(frozen=True)
class _Outcome:
    """How a restore ended on one rank."""

    digest: bytes
    """The digest of its state."""
    lost: int
    """The lost rank because of which it failed, or -1."""
    text: str
    """Why it failed; empty if it did not."""
    is_broken: bool
    """Whether a rank broke the protocol."""


def restore(
    issuer: Issuer,
    state: MutableMapping[str, Any],
    *,
    fresh: bool = False,
    on_drift: str = "repair",
    timeout: float | None = None,
    progress: bool | None = None,
) -> RestoreReport:
    """Make `state` equal on all ranks: the state of most ranks that are not `fresh`, in a tie that of the lowest rank.

    Every live rank calls it, and no rank may change the state until it returns. Numpy arrays and torch CPU tensors are
    filled in place; other values (see `broadcast_object`) are replaced in the mapping. Names that a receiver lacks are
    added, arrays as numpy arrays. Names that only a receiver has are removed from its mapping, with a warning. Chunks
    that a receiver already has are not sent. If all ranks are fresh, all get the lowest rank's state. No receive with
    `tag=ANY` may be pending on this group.

    Args:
        fresh: this rank is a newcomer; its state does not count.
        on_drift: what to do with a rank that is not fresh and differs: "repair" or "raise". Equal on all ranks.
        progress: show a bar on receivers: always, never, or (None) on a terminal or in a notebook after one second.

    Raises:
        MismatchError: dtypes or shapes differ on a receiver, a state cannot be sent, or ranks have drifted and
            `on_drift` is "raise". All ranks raise it; the group is still usable.
        PeerLostError: no donor is left, or any rank is lost in a group that does not survive losses.
        DeadlineError: `timeout` passed.
    """
    began_at = time.monotonic()
    if on_drift not in ON_DRIFT:
        raise ConfigError(f"on_drift={on_drift!r} must be 'repair' or 'raise'")
    limit = issuer.engine.facts.config.timeout if timeout is None else check_timeout(timeout)
    if issuer.size == 1:
        return RestoreReport(donors=(issuer.rank,), first=fresh)
    call = _Restore(issuer, state, began_at + limit)
    manifests = call.compare(fresh, on_drift)
    election = elect(manifests)
    _check(manifests, election, on_drift)
    received = sent = 0
    if election.receivers:
        with Exchange(issuer, call.tagger.number, call.deadline) as exchange:
            transfer = StateTransfer(issuer.rank, call.memory, call.tagger, election, exchange, call.deadline)
            if issuer.rank in election.receivers:
                received = transfer.receive(manifests[issuer.rank], progress)
            else:
                sent = transfer.serve()
        call.conclude(election, transfer.failure)
    return RestoreReport(
        bytes_received=received,
        bytes_sent=sent,
        seconds=time.monotonic() - began_at,
        donors=election.donors,
        receivers=election.receivers,
        drifted=election.drifted,
        first=election.is_first,
    )


def _check(manifests: Mapping[int, Manifest], election: StateChoice, on_drift: str) -> None:
    """Raise if the winner's state cannot be given to the others. All ranks raise the same error."""
    if election.drifted and on_drift == "raise":
        said = (f"rank {rank} in {listed(differing(manifests[rank], election.winner))}" for rank in election.drifted)
        others = ", ".join(map(str, election.donors))
        raise MismatchError(
            f"restore: the state has drifted from that of rank{'s' * (len(election.donors) > 1)} {others}: "
            f"{'; '.join(said)}. Nothing was changed; on_drift='repair' makes them equal."
        )
    if (text := objection(manifests, election)) is not None:
        raise MismatchError(f"restore: {text}. Nothing was changed.")


class _Restore:
    """One call of `restore` on one rank of several."""

    def __init__(self, issuer: Issuer, state: MutableMapping[str, Any], deadline: float) -> None:
        self.issuer, self.deadline = issuer, deadline
        self.memory = StateMemory(state)
        self.tagger: Tagger

    def compare(self, fresh: bool, on_drift: str) -> dict[int, Manifest]:
        """Exchange manifests with all ranks and return them by rank."""
        terms: dict[int, _Terms] = self._gather(_Terms(secrets.token_bytes(NONCE_BYTES), on_drift), _Terms)
        for rank, said in terms.items():
            if len(said.nonce) != NONCE_BYTES or said.on_drift not in ON_DRIFT:
                raise RemoteProtocolError(f"restore: rank {rank} sent invalid terms")
        if len({said.on_drift for said in terms.values()}) > 1:
            passed = "; ".join(f"rank {rank} passed {said.on_drift!r}" for rank, said in terms.items())
            raise MismatchError(f"restore: on_drift must be the same on all ranks: {passed}")
        self.tagger = Tagger(said.nonce for said in terms.values())
        failure: Exception | None = None
        try:
            manifest = Manifest(is_fresh=fresh, entries=tuple(self.memory.survey(self.tagger)))
            manifest.check()
        except (TypeError, RemoteProtocolError) as error:  # the other ranks must learn of it before this one raises
            failure, manifest = error, Manifest(is_fresh=fresh, failure=_shown(str(error)))
        manifests: dict[int, Manifest] = self._gather(manifest, Manifest)
        for rank, each in manifests.items():
            try:
                each.check()
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"restore: rank {rank} sent an invalid manifest: {error}") from error
        if isinstance(failure, RemoteProtocolError):
            raise ConfigError(f"restore: this state is too large or its names are too long: {failure}") from failure
        if failure is not None:
            raise failure
        if failed := [f"rank {rank} has {each.failure}" for rank, each in manifests.items() if each.failure]:
            raise MismatchError(f"restore: a state cannot be sent: {'; '.join(failed)}")
        return manifests

    def conclude(self, election: StateChoice, failure: CoveyError | None) -> None:
        """Exchange how the restore ended; raise the same error on all ranks unless all have the winner's state."""
        digest = election.winner.digest
        if failure is None and self.issuer.rank in election.receivers and self.memory.has_overlaps():
            # A chunk that arrived later may have overwritten one that was checked before.
            digest = Manifest(is_fresh=False, entries=tuple(self.memory.survey(self.tagger))).digest
        lost = failure.rank if isinstance(failure, PeerLostError) else -1
        is_broken = isinstance(failure, RemoteProtocolError)
        mine = _Outcome(digest, lost, "" if failure is None else _shown(str(failure)), is_broken)
        outcomes: dict[int, _Outcome] = self._gather(mine, _Outcome)
        for rank, outcome in outcomes.items():
            text = _shown(outcome.text)
            if outcome.lost in range(self.issuer.size):
                text = f"restore: no rank is left that has what rank {rank} lacks: {text}"
                raise PeerLostError(text, rank=outcome.lost, operation="restore()")
            if outcome.is_broken:
                raise RemoteProtocolError(f"restore: rank {rank} reports: {text}")
            if text:
                raise MismatchError(f"rank {rank} could not be restored: {text}")
        if wrong := [rank for rank, outcome in outcomes.items() if outcome.digest != election.winner.digest]:
            raise MismatchError(
                f"restore: the states of ranks {wrong} differ from the others' afterwards. Did the program change "
                "them meanwhile, or do arrays share memory on some ranks only?"
            )

    def _gather(self, value: Any, type: Any) -> dict[int, Any]:
        """Return what every live rank passed, by rank. A value larger than a manifest may be ends the group."""
        left = max(self.deadline - time.monotonic(), 0.001)
        values = ObjectMoves(self.issuer).gather_all(value, type, False, left, False, most_bytes=MANIFEST_BYTES)
        return {rank: each for rank, each in enumerate(values) if each is not None}


def _shown(text: str) -> str:
    """Return a text for other ranks or from them, shortened and without control characters."""
    return printable(text)[:TEXT_LIMIT]


_FORMS: Final = "covey/forms"
"""The key of a table by name: dtype and shape of an array, None for a value."""


def save_state(state: Mapping[str, Any], name: str) -> str:
    """Write a state to `name`.npz in the working folder, else in covey's own folder; return the path.

    Raises:
        ConfigError: neither folder can be written to.
        TypeError: the state holds a value that `group.restore` does not accept either.
    """
    forms: dict[str, Any] = {}
    contents: dict[str, np.ndarray[Any, Any]] = {}
    for key, value in state.items():
        try:
            operand = readable(value)
        except TypeError:
            forms[key], contents[key] = None, np.frombuffer(objects.encode(value), np.uint8)
        else:
            forms[key] = [DTYPES[operand.code].name, list(operand.shape)]
            contents[key] = operand.load().view(np.uint8)
    contents[_FORMS] = np.frombuffer(objects.encode(forms), np.uint8)
    problem: OSError | None = None
    for folder in (Path.cwd(), folders.private_folder(folders.home() / "runs")):
        path = folder / f"{name}.npz"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                np.savez(file, **contents)  # type: ignore[arg-type]  # a name could be one of its options
            return str(path)
        except OSError as error:
            problem = error
    raise ConfigError(f"the state could not be saved: {problem}")


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a state that covey saved when a run had to end (`SplitRunError.saved`): arrays and values by name.

    Or that of a file of safetensors, such as `covey checkpoint pull` writes.
    """
    with open(path, "rb") as file:
        if file.read(2) != b"PK":  # no archive of numpy
            from covey.runtime.shards.pulled import load_pulled

            return load_pulled(path)  # type: ignore[no-any-return]
    by_name = {dtype.name: dtype for dtype in DTYPES}
    state: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as contents:
        for key, form in objects.decode(contents[_FORMS].tobytes()).items():
            if form is None:
                state[key] = objects.decode(contents[key].tobytes())
            else:
                state[key] = contents[key].view(by_name[form[0]]).reshape(form[1])
    return state
