"""A worker's registration with a coordinator: kept up, and reported on, until it is closed.

Two threads: one reads the stream of `RegisterWorker`, and registers again when it breaks; one sends heartbeats. A
coordinator that is away changes nothing but that: the group of the worker does not depend on it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import AuthError, CoveyError, DeadlineError
from covey.base.pace import Growing
from covey.base.text import printable
from covey.coordinator.client import PROMPT_CALL_SECONDS, CoordinatorClient, is_final
from covey.coordinator.extra import require_grpc
from covey.runtime.backoff import Backoff, LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.coordinator import coordinator_pb2 as pb
    from covey.coordinator.security import Security

REGISTRATION_PAUSES: Final = Growing(0.1, 2.0)
"""Seconds between attempts to register, shortened at random; below RECONNECT_SECONDS of the coordinator."""
STEADY_REGISTRATION_SECONDS: Final = 20.0
"""After a registration that held for so long, the next attempt counts as the first."""
UNREGISTER_SECONDS: Final = 3.0
SESSION_END_SECONDS: Final = 5.0
"""How long the threads may take to end."""


@dataclass(frozen=True)
class WorkerTerms:
    """What a worker registers with."""

    run: str
    worker_id: str
    name: str
    address: str
    min_size: int
    max_size: int
    settle: float


class Session:
    """One registration of a worker. `start` it, `wait` for a rank, `close` it."""

    def __init__(
        self,
        address: str,
        security: Security,
        terms: WorkerTerms,
        *,
        interval: float,
        report: Callable[[], pb.View | None],
        order: Callable[[pb.Checkpoint], str | None],
    ) -> None:
        """`report` returns the view of the group.

        `order` takes a checkpoint, and returns None until it is over: then "", or why it could not be saved.
        """
        self._address, self._security, self._terms, self._interval = address, security, terms, interval
        self._report, self._order = report, order
        self._grpc = require_grpc()
        self.life = secrets.token_bytes(16)
        self._changed = threading.Condition()
        self._assignment: pb.Assignment | None = None
        self._error: CoveyError | None = None
        """Why the coordinator will not register this worker."""
        self._progress = ""
        """What it waits for, in words."""
        self._waiting = 0
        self._client: CoordinatorClient | None = None
        self._is_registered = False
        self._closing = threading.Event()
        self._log = LimitedLog(30.0)
        self._threads = [
            threading.Thread(target=target, name=f"covey-{name}", daemon=True)
            for name, target in (("registration", self._keep_registered), ("heartbeat", self._keep_beating))
        ]

    def start(self) -> None:
        """Begin to register."""
        for thread in self._threads:
            thread.start()

    def wait(self, timeout: float) -> pb.Assignment:
        """Return the rank of this worker, once it has one.

        Raises:
            CoveyError: the coordinator refuses the worker.
            DeadlineError: it gave no rank in time; says what it waited for.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None or self._error is not None, timeout)
            if self._assignment is not None:
                return self._assignment
            if self._error is not None:
                raise self._error
            waited = self._progress or f"the coordinator at {self._address} was not reached"
            raise DeadlineError(
                f"worker {self._terms.worker_id!r} got no rank within the timeout of {timeout:g} s: {waited}"
            )

    def interrupt(self, error: CoveyError) -> None:
        """Let `wait` raise `error`, if it has not returned a rank yet. On any thread."""
        self._fail(error)

    @property
    def is_registered(self) -> bool:
        """Whether the coordinator knows this worker now, as far as this process can tell."""
        return self._is_registered

    @property
    def progress(self) -> str:
        """What the registration waits for, or why it failed, in words."""
        return self._progress

    @property
    def waiting(self) -> int:
        """How many workers wait for the next round, by the last heartbeat."""
        return self._waiting

    def close(self, view: pb.View | None = None) -> None:
        """Unregister, if the coordinator can be reached, and end the threads. A second call does nothing.

        `view` is the last view of the group.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        client = self._client
        if client is not None:
            from covey.coordinator import coordinator_pb2 as pb

            terms = self._terms
            request = pb.UnregisterWorkerRequest(run=terms.run, worker_id=terms.worker_id, life=self.life, view=view)
            with contextlib.suppress(CoveyError, ValueError):  # it notices by itself; ValueError: closed meanwhile
                client.call("UnregisterWorker", request, timeout=UNREGISTER_SECONDS)
        if client is not None:
            client.close()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(SESSION_END_SECONDS)

    # The thread of the registration

    def _keep_registered(self) -> None:
        tries = Backoff(
            f"the coordinator at {self._address}", REGISTRATION_PAUSES, jitter=0.5, level=logging.DEBUG
        )  # `_note` tells
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                with CoordinatorClient(self._address, self._security, self._role) as client:
                    self._client = client
                    if self._closing.is_set():
                        return
                    for event in client.stream("RegisterWorker", self._request()):
                        self._take(event)
            except self._grpc.RpcError as error:
                if self._closing.is_set():
                    return
                problem = client.explained(error)
                if (is_final(error) or isinstance(problem, AuthError)) and not self._was_assigned:
                    return self._fail(problem)
                self._note(problem)
            except CoveyError as error:  # the secret or the certificates cannot be read now
                if not self._was_assigned:
                    return self._fail(error)
                self._note(error)
            finally:
                self._is_registered = False
            if time.monotonic() - began > STEADY_REGISTRATION_SECONDS:
                tries.worked()
            tries.failed(self._progress)
            tries.rest_on(self._closing)

    def _request(self) -> pb.RegisterWorkerRequest:
        from covey.coordinator import coordinator_pb2 as pb

        terms = self._terms
        sizes = pb.Sizes(min_size=terms.min_size, max_size=terms.max_size, settle_seconds=terms.settle)
        return pb.RegisterWorkerRequest(
            run=terms.run,
            worker_id=terms.worker_id,
            life=self.life,
            name=terms.name,
            address=terms.address,
            sizes=sizes,
            assignment=self._assignment,
        )

    def _take(self, event: pb.RunEvent) -> None:
        with self._changed:
            self._is_registered = True
            if event.HasField("waiting"):
                found = event.waiting
                self._progress = f"{found.registered} of {found.needed} workers have registered"
                if found.reason:
                    self._progress += f"; {printable(found.reason)}"
            if event.HasField("assignment"):
                if self._assignment is None:
                    self._assignment = event.assignment
                self._progress = ""
            self._changed.notify_all()

    def _fail(self, error: CoveyError) -> None:
        with self._changed:
            self._error = error
            self._progress = str(error)
            self._changed.notify_all()

    def _note(self, problem: CoveyError) -> None:
        self._progress = str(problem)
        self._log.log(logging.WARNING, "worker %s: %s; trying again", self._terms.worker_id, problem)

    @property
    def _was_assigned(self) -> bool:
        return self._assignment is not None

    @property
    def _role(self) -> str:
        return f"worker/{self._terms.run}/{self._terms.worker_id}"

    # The thread of the heartbeats

    def _keep_beating(self) -> None:
        while not self._closing.wait(self._interval):
            client = self._client
            if client is not None and self._is_registered:
                # The other thread registers again. ValueError: the connection was closed meanwhile; TimeoutError: the
                # control loop is busy.
                with contextlib.suppress(CoveyError, ValueError, TimeoutError):
                    self.beat(client)

    def beat(self, client: CoordinatorClient) -> None:
        """Send one heartbeat, and do what the answer asks for."""
        from covey.coordinator import coordinator_pb2 as pb

        terms = self._terms
        worker: dict[str, Any] = {"run": terms.run, "worker_id": terms.worker_id, "life": self.life}
        request = pb.HeartbeatRequest(**worker, view=self._report())
        answer = client.call("Heartbeat", request, timeout=min(PROMPT_CALL_SECONDS, max(1.0, self._interval)))
        self._waiting = answer.waiting
        if answer.HasField("checkpoint"):
            error = self._order(answer.checkpoint)
            if error is not None:
                client.call("EndCheckpoint", pb.EndCheckpointRequest(**worker, id=answer.checkpoint.id, error=error))
