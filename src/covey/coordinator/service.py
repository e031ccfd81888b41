"""The gRPC service of the coordinator: passes calls to the runs, and tells workers what has changed.

On one asyncio loop. What a worker is told is on disk first. If the state cannot be written, the coordinator ends:
workers continue without it, and another start of it reads what is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc

from covey.base.errors import ConfigError
from covey.coordinator import answers, requests
from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator.coordinator_pb2_grpc import CoordinatorServicer
from covey.coordinator.records import RunRecord
from covey.coordinator.refusal import MAX_RUNS, Reason, RefusalError
from covey.coordinator.run import CoordinatedRun
from covey.coordinator.security import CHARTER_KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from covey.coordinator.records import Sizes
    from covey.coordinator.run import Outlook
    from covey.coordinator.state_file import StateFile

LONGEST_TICK: Final = 60.0
TELL_WAITING_EVERY: Final = 1.0
"""How often a worker that waits is told for what, and each one is checked against the list of denied machines.

Telling all of them of each other's arrival would be quadratic."""


def _refusing(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Let a handler get the identity of its caller, once it is proved, and answer refusals with their gRPC status."""

    async def answer(self: CoordinatorService, request: Any, context: Any) -> Any:
        try:
            caller = self._caller(context)
            self._heed(context)
            return await handler(self, request, caller)
        except RefusalError as refusal:
            await _abort(context, refusal)
        except ConfigError as error:
            self.fail(error)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot write its state, and ends")

    return answer


async def _abort(context: Any, refusal: RefusalError) -> NoReturn:
    await context.abort(getattr(grpc.StatusCode, refusal.reason.value), str(refusal))
    raise AssertionError("abort raises")


class CoordinatorService(CoordinatorServicer):
    """The runs of a coordinator. `failure` is done when the state could not be written."""

    def __init__(
        self,
        state: StateFile,
        identity: Callable[[str], str],
        hear: Callable[[bytes], None],
        sizes: Sizes | None,
    ) -> None:
        """`identity` returns that of the caller with a name of gRPC's, or raises RefusalError.

        `hear` takes a charter that a caller brought. `sizes` are those of runs whose workers declare none.
        """
        self._state, self._identity, self._hear, self._sizes = state, identity, hear, sizes
        self._runs = {record.name: CoordinatedRun(record, now=_now()) for record in state.load()}
        self._streams: dict[tuple[str, str], asyncio.Event] = {}
        """By run and worker: what wakes the stream that was opened last."""
        self._is_closing = False
        self._woken = asyncio.Event()
        """Wakes the task that begins rounds."""
        self.failure: asyncio.Future[ConfigError] = asyncio.get_running_loop().create_future()

    # Calls

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> AsyncIterator[pb.RunEvent]:  # noqa: N802
        name, worker = request.run, request.worker_id
        wake = asyncio.Event()
        try:
            identity = self._caller(context)
            self._heed(context)
            asked = requests.registration(request, identity, self._sizes)
            run = self._run_for(requests.name("run", name), asked.sizes)
            before = run.record.round
            run.register(asked, now=_now())
            earlier, self._streams[name, worker] = self._streams.get((name, worker)), wake
            if earlier is not None:
                earlier.set()
            self._changed(run, is_news=run.record.round != before)
        except RefusalError as refusal:
            await _abort(context, refusal)
        except ConfigError as error:
            self.fail(error)
        told: Outlook | None = None
        try:
            while not self._is_closing:
                wake.clear()
                if self._streams.get((name, worker)) is not wake:
                    await _abort(context, RefusalError(Reason.NOT_NOW, "this worker has opened another stream"))
                outlook = run.outlook(worker, request.life, now=_now())
                if outlook is None:
                    await _abort(context, RefusalError(Reason.NOT_FOUND, f"worker {worker!r} is not registered now"))
                if outlook != told:
                    yield answers.event(outlook, told)
                    told = outlook
                await self._until_news(wake, context, is_waiting=outlook.assignment is None)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator stops")
        except RefusalError as refusal:
            await _abort(context, refusal)
        finally:
            if self._streams.get((name, worker)) is wake:
                del self._streams[name, worker]
                run.disconnect(worker, request.life, now=_now())
                self._wake(run)

    @_refusing
    async def UnregisterWorker(self, request: pb.UnregisterWorkerRequest, caller: str) -> pb.UnregisterWorkerResponse:  # noqa: N802
        run = self._run(request.run)
        run.unregister(request.worker_id, caller, request.life, requests.view(request), now=_now())
        self._changed(run)
        return pb.UnregisterWorkerResponse()

    @_refusing
    async def Heartbeat(self, request: pb.HeartbeatRequest, caller: str) -> pb.HeartbeatResponse:  # noqa: N802
        run = self._run(request.run)
        view = requests.view(request)
        worker = request.worker_id
        if run.hear(worker, caller, request.life, view, request.view.sequence, now=_now()):
            self._changed(run)
        pending = run.checkpoints.pending
        if pending is not None and worker in pending.ended:
            pending = None
        return pb.HeartbeatResponse(
            checkpoint=None if pending is None else answers.checkpoint(pending), waiting=run.waiting
        )

    @_refusing
    async def StartCheckpoint(self, request: pb.StartCheckpointRequest, caller: str) -> pb.Checkpoint:  # noqa: N802
        run = self._run(request.run)
        started = run.checkpoints.start(requests.path(request.path), secrets.token_hex(8))
        self._changed(run)
        return answers.checkpoint(started)

    @_refusing
    async def EndCheckpoint(self, request: pb.EndCheckpointRequest, caller: str) -> pb.Checkpoint:  # noqa: N802
        run = self._run(request.run)
        error = requests.text("error", request.error)
        ended = run.end_checkpoint(request.worker_id, caller, request.life, request.id, error)
        self._changed(run)
        return answers.checkpoint(ended)

    @_refusing
    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, caller: str) -> pb.Checkpoint:  # noqa: N802
        return answers.checkpoint(self._run(request.run).checkpoints.get(request.id))

    @_refusing
    async def GetStatus(self, request: pb.GetStatusRequest, caller: str) -> pb.Status:  # noqa: N802
        runs = [self._run(request.run)] if request.run else list(self._runs.values())
        return pb.Status(runs=[answers.run_status(run, now=_now()) for run in runs])

    # Its own task

    async def begin_rounds(self) -> None:
        """Begin rounds whose workers have settled, until cancelled."""
        while True:
            self._woken.clear()
            now = _now()
            for run in self._runs.values():
                if run.tick(now):
                    try:
                        self._changed(run)
                    except ConfigError as error:
                        self.fail(error)
            deadlines = [at for run in self._runs.values() if (at := run.next_deadline(now)) is not None]
            pause = min([LONGEST_TICK, *(max(0.01, at - now) for at in deadlines)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()

    def close(self) -> None:
        """End all streams: the coordinator stops."""
        self._is_closing = True
        for wake in self._streams.values():
            wake.set()

    def fail(self, error: ConfigError) -> None:
        """End the coordinator: its state cannot be written."""
        if not self.failure.done():
            self.failure.set_result(error)
        self.close()

    # Helpers

    async def _until_news(self, wake: asyncio.Event, context: Any, *, is_waiting: bool) -> None:
        """Wait until a worker may have to be told something; RefusalError if its machine is denied meanwhile."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_WAITING_EVERY):
                    await wake.wait()
            self._caller(context)
            if is_waiting or wake.is_set():
                return

    def _heed(self, context: Any) -> None:
        """Take the charter that goes with a call of an accepted caller, if there is one."""
        for key, value in context.invocation_metadata() or ():
            if key == CHARTER_KEY:
                self._hear(value)

    def _caller(self, context: Any) -> str:
        return self._identity(context.peer())

    def _run(self, name: str) -> CoordinatedRun:
        run = self._runs.get(name)
        if run is None:
            raise RefusalError(Reason.NOT_FOUND, f"no worker has registered for a run of this name: {name[:100]!r}")
        return run

    def _run_for(self, name: str, sizes: Sizes) -> CoordinatedRun:
        """Return the run of that name, made if there is none; the oldest idle run makes room for it."""
        if name not in self._runs:
            if len(self._runs) >= MAX_RUNS:
                idle = next((run.record.name for run in self._runs.values() if run.is_idle), None)
                if idle is None:
                    raise RefusalError(Reason.FULL, f"this coordinator has {MAX_RUNS} runs already")
                del self._runs[idle]
                self._state.forget(idle)
            self._runs[name] = CoordinatedRun(RunRecord(name, sizes), now=_now())
        return self._runs[name]

    def _changed(self, run: CoordinatedRun, *, is_news: bool = True) -> None:
        """Write a run, then tell its workers if it is news for them; ConfigError if it cannot be written."""
        self._state.save(run.record)
        self._woken.set()
        if is_news:
            self._wake(run)

    def _wake(self, run: CoordinatedRun) -> None:
        self._woken.set()
        for (name, _), wake in self._streams.items():
            if name == run.record.name:
                wake.set()


def _now() -> float:
    return time.monotonic()
