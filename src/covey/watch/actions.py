"""What a person can do from a view: request a checkpoint, stop a run, approve or deny a machine, show the join code.

Each function returns a sentence about what was done, or raises a CoveyError that says why not. What was done is in the
audit log of this machine, with where it came from. Not for the event loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from covey.base.errors import ConfigError, CoveyError
from covey.net.audit import audit_log as audit
from covey.net.discovery.interfaces import current_seeds
from covey.net.host.settings_files import effective_environment
from covey.net.keys import charter, clusters, owner
from covey.net.keys.identity import machine_name, own_machine, resolve_id, short_id
from covey.watch.cluster_source import ClusterSource
from covey.watch.local_source import LocalSource
from covey.wire.secret import MAX_RELAYS, encode_join_code

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster
    from covey.watch.collector import Collector
    from covey.watch.overview import Applicant, RunSeen


class Actions:
    """The actions of one view. On any thread."""

    def __init__(self, collector: Collector, origin: str) -> None:
        """`origin` says in the audit log where an action came from, such as "from the page"."""
        self._collector, self._origin = collector, origin

    def checkpoint(self, run_id: str) -> str:
        """Ask all ranks of a run to save a checkpoint.

        Raises:
            ConfigError: there is no such run, or it refuses.
            DeadlineError: none of its ranks answers.
        """
        run, source = self._run(run_id)
        progress = source.request_checkpoint(self._collector.books.key_of(run.id))
        if progress.state == "refused":
            raise ConfigError(f"the run {run.name!r} refuses the request: {progress.text}")
        self._note("checkpoint-requested", run.name)
        return f"Checkpoint {progress.id} of {run.name!r} is {progress.state or 'requested'}."

    def stop(self, run_id: str, *, kill: bool = False) -> str:
        """Ask a run to end: SIGTERM to its processes, with `kill` SIGKILL.

        Raises:
            ConfigError: there is no such run, or it cannot be stopped from here.
        """
        run, source = self._run(run_id)
        if isinstance(source, LocalSource):
            keeper = source.keeper_of(self._collector.books.key_of(run.id))
            self._note("run-stopped", run.name)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(keeper, signal.SIGKILL if kill else signal.SIGTERM)
            return f"The processes of {run.name!r} were {'killed' if kill else 'asked to end'}."
        assert isinstance(source, ClusterSource)
        programs = source.agents_of(run.name)
        if not programs:
            raise ConfigError(
                f"no agent of a trusted machine has started {run.name!r}: stop it where it was started (Ctrl-C)"
            )
        self._note("run-stopped", run.name)
        done, problems = [], []
        for agent, number in programs:
            try:
                agent.call("send_signal", number, int(signal.SIGKILL if kill else signal.SIGTERM), 0)
                done.append(agent.name)
            except CoveyError as error:  # the others are told all the same
                problems.append(str(error))
        if not done:
            raise ConfigError("; ".join(problems))
        text = f"The processes of {run.name!r} were {'killed' if kill else 'asked to end'} on {', '.join(done)}."
        return " ".join([text, *problems])

    def approve(self, applicant_id: str) -> str:
        """Let a machine into the cluster; it is the owner's right.

        Raises:
            ConfigError: the owner key is not here, or no such machine asks to join.
        """
        cluster, applicant = self._applicant(applicant_id)
        private = owner.require(cluster, "approving machines")
        machine = resolve_id(applicant.id, {})
        name = {machine: machine_name(applicant.name, machine)} if applicant.name else {}
        charter.amend(cluster, private, lambda now: (now[0] - {machine}, (now[1] or frozenset()) | {machine}), name)
        clusters.forget_waiting(cluster.name, [machine])
        headline = f"{applicant.name} ({short_id(machine)}) may be in {cluster.name!r}."
        audit.note(cluster.name, "list-changed", node=machine, reason=f"{headline} {self._origin}")
        return headline

    def deny(self, applicant_id: str) -> str:
        """Keep a machine out of the cluster; it is the owner's right.

        Raises:
            ConfigError: the owner key is not here, or no such machine asks to join.
        """
        cluster, applicant = self._applicant(applicant_id)
        private = owner.require(cluster, "denying machines")
        machine = resolve_id(applicant.id, {})
        if machine == own_machine():
            raise ConfigError("that is this machine itself")
        charter.amend(cluster, private, lambda now: (now[0] | {machine}, now[1]))
        clusters.forget_waiting(cluster.name, [machine])
        audit.note(
            cluster.name, "denied", node=machine, name=applicant.name, reason=f"in the whole cluster, {self._origin}"
        )
        return f"{applicant.name} ({short_id(machine)}) is denied in {cluster.name!r}."

    def join_code(self) -> str:
        """Return the join code of the cluster. It is the secret: any machine that has it can join.

        Raises:
            ConfigError: this machine is in no cluster.
        """
        cluster = self._cluster()
        seeds = current_seeds(effective_environment())
        audit.note(cluster.name, "code-shown", reason=self._origin)
        return encode_join_code(cluster.secret, seeds, cluster.owner, cluster.relays[:MAX_RELAYS])

    def _run(self, run_id: str) -> tuple[RunSeen, Any]:
        """Return a run that goes on, and the source that knows it."""
        run = next((run for run in self._collector.newest().runs if run.id == run_id), None)
        if run is None or run.state in ("ended", "failed"):
            raise ConfigError(f"there is no run {run_id!r} now")
        here = [source for source in self._collector.sources if isinstance(source, LocalSource)]
        key = self._collector.books.key_of(run_id)
        for source in here:
            with contextlib.suppress(ConfigError):
                source.keeper_of(key)
                return run, source
        others = [source for source in self._collector.sources if isinstance(source, ClusterSource)]
        if not others:
            raise ConfigError(f"the run {run_id!r} is over")
        return run, others[0]

    def _cluster(self) -> Cluster:
        for source in self._collector.sources:
            if isinstance(source, ClusterSource):
                found: Cluster = source.cluster
                saved = clusters.cluster_path(found.name).exists()
                return clusters.load(found.name) if saved else found
        raise ConfigError(clusters.NO_CLUSTER)

    def _applicant(self, applicant_id: str) -> tuple[Cluster, Applicant]:
        cluster = self._cluster()
        for applicant in self._collector.newest().applicants:
            if applicant.id == applicant_id:
                return cluster, applicant
        raise ConfigError("no such machine asks to join now")

    def _note(self, event: str, run: str) -> None:
        audit.note(self._collector.newest().cluster, event, run=run, reason=self._origin)
