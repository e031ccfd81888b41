"""The gRPC service of the gateway: passes the calls of programs on to their ranks.

On one asyncio loop; what may block runs on other threads. Streams of operations are read and written as bytes
(`pieces`). A stream that does not move for `stall` seconds ends, so none holds memory for longer than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from covey.base.errors import ConnectError, CoveyError, DeadlineError, MismatchError
from covey.base.numbers import ANY
from covey.coordinator.refusal import MAX_WORKERS, Reason, RefusalError
from covey.coordinator.requests import name
from covey.gateway import gateway_pb2 as pb
from covey.gateway import pieces
from covey.gateway.failures import failure_of
from covey.gateway.pieces import ArrayKind, malformed
from covey.gateway.program import SESSION_BYTES, RegisteredProgram
from covey.gateway.ranks import LONGEST_JOIN, ProgramLostError, Wish
from covey.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

    import numpy as np

    from covey.gateway.program import CallTurn
    from covey.gateway.ranks import ProgramRank, ProgramRanks

    Array = np.ndarray[Any, np.dtype[Any]]

logger = logging.getLogger("covey")

T = TypeVar("T")

GATEWAY_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Gateway"].full_name
STOP_SECONDS: Final = 10.0
"""How long the other ranks may take to hear that those of this gateway are lost, when it stops."""
DETAILS_SECONDS: Final = 0.25
"""How long before the deadline of a call its operation ends: the program should hear which ranks are late."""
RANKLESS: Final = "none"
CALLS_OF_A_PROGRAM: Final = 8
"""That one caller may have open for each program there can be."""


@dataclass(frozen=True)
class Limits:
    """What programs can make the gateway hold."""

    programs: int = 16
    """That are registered at a time."""
    nbytes: int = 256 << 20
    """Most bytes of one array; a program has up to four."""
    stall: float = 30.0
    """Seconds for which a stream may stand still."""


def _answering(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Let a handler answer errors with a status and details. `handler(self, request, context, call)`."""

    @functools.wraps(handler)
    async def answer(self: GatewayService, request: Any, context: Any) -> Any:
        call = _Call()
        with contextlib.ExitStack() as counted:  # until the program has its status: what it does not read is kept
            try:
                counted.enter_context(self.counted(context))
                return await handler(self, request, context, call)
            except (CoveyError, RefusalError, MemoryError) as error:
                failure = failure_of(error, RANKLESS if call.program is None else call.program.state)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception:
                logger.exception("a call of the gateway failed")
                failure = failure_of(CoveyError("the gateway failed; its log has the reason"), RANKLESS)
            await context.abort(getattr(grpc.StatusCode, failure.status), failure.text, failure.details)
        raise AssertionError("abort raises")

    return answer


class _Call:
    """One call: which program made it, once that is known."""

    program: RegisteredProgram | None = None


class GatewayService:
    """The programs of a gateway. `ended` is done when a gateway for one program has no use any more."""

    def __init__(self, ranks: ProgramRanks, identity: Callable[[str], str], limits: Limits) -> None:
        """`identity` returns that of the caller with a name of gRPC's, or raises RefusalError."""
        self._ranks, self._identity, self._limits = ranks, identity, limits
        self._programs: dict[bytes, RegisteredProgram] = {}
        """By session: those that have a rank."""
        self._owners: dict[str, str] = {}
        """By name of a program: the identity that registered it first."""
        self._calls: Counter[str] = Counter()
        """By identity: its calls that are open."""
        self._taken: set[str] = set()
        """Names of programs that are registered, or whose ranks are being given up."""
        self._has_registered = False
        """Whether any program has been registered."""
        self.has_lost = False
        """Whether the rank of a program was lost with it."""
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        """Set when a name is free again."""
        self._tasks = Tasks("the gateway")
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the only program left in order."""

    def handler(self) -> Any:
        """Return what answers calls, for a gRPC server."""
        one, many = _unary, grpc.stream_stream_rpc_method_handler
        methods = {
            "Register": grpc.unary_stream_rpc_method_handler(
                self._register, pb.RegisterRequest.FromString, pb.RankEvent.SerializeToString
            ),
            "Leave": one(self._leave, pb.LeaveRequest),
            "AllReduce": many(self._all_reduce),
            "Reduce": many(self._reduce),
            "Broadcast": many(self._broadcast),
            "AllGather": many(self._all_gather),
            "Barrier": one(self._barrier, pb.BarrierRequest),
            "Send": grpc.stream_unary_rpc_method_handler(self._send, None, pb.SendResponse.SerializeToString),
            "Receive": grpc.unary_stream_rpc_method_handler(self._receive, pb.ReceiveRequest.FromString),
        }
        return grpc.method_handlers_generic_handler(GATEWAY_SERVICE, methods)

    async def close(self) -> None:
        """End all registrations, as the gateway stops; their ranks are lost. Returns when the other ranks are told."""
        self._stopping.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while self._taken:
                    self._freed.clear()
                    await self._freed.wait()
        await self._tasks.close()

    # From the registration to the end

    @_answering
    async def _register(self, request: pb.RegisterRequest, context: Any, call: _Call) -> None:
        identity = self._identity(context.peer())
        wish = _wish(request)
        rank = self._reserve(wish, identity)
        program = call.program = RegisteredProgram(wish, identity, rank, self._limits.nbytes)
        lost: Exception = ProgramLostError(f"program {wish.program!r} has ended, or its connection broke")
        try:
            group = await self._unless_stopped(program.join())
            self._programs[program.session] = program
            joined = pb.Joined(session=program.session, rank=group.rank, size=group.size, max_bytes=self._limits.nbytes)
            await self._told(context, pb.RankEvent(joined=joined))
            changes = program.changes()
            while (live := await self._unless_stopped(anext(changes, None))) is not None:
                await self._told(context, pb.RankEvent(members=pb.Members(live=live)))
        except CoveyError as error:
            lost = error
            raise
        finally:
            self._programs.pop(program.session, None)
            # On a task of its own: this one may be cancelled, and the rank must be given up all the same.
            await asyncio.shield(self._tasks.spawn(self._give_up(program, lost)))

    async def _unless_stopped(self, wanted: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns; ConnectError, and it is cancelled, if the gateway stops first."""
        found, stopping = asyncio.ensure_future(wanted), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([found, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                raise ConnectError("the gateway stops")
            return found.result()
        finally:
            stopping.cancel()
            if not found.done():
                found.cancel()
                await asyncio.wait([found])

    async def _give_up(self, program: RegisteredProgram, error: Exception) -> None:
        """Let the rank of a program be lost, unless it has left; then its name is free."""
        is_last = self._ranks.is_single
        try:
            if is_last and not program.has_joined:
                self.ended.set_result(False)  # the end of this process frees the join, which may wait for long
            await program.lose(error)
        finally:
            self.has_lost = self.has_lost or not program.has_left_in_order
            self._taken.discard(program.name)
            self._freed.set()
            if is_last and not self.ended.done():
                self.ended.set_result(program.has_left_in_order)

    @_answering
    async def _leave(self, request: pb.LeaveRequest, context: Any, call: _Call) -> pb.LeaveResponse:
        await self._program(request.session, context, call).leave()
        return pb.LeaveResponse()

    # Collectives

    @_answering
    async def _all_reduce(self, requests: AsyncIterator[bytes], context: Any, call: _Call) -> None:
        start, program = await self._begin(requests, context, call)
        async with program.collective.take() as turn:
            kind, array = await self._upload(turn, start, requests)
            work = await turn.carry_out(program.group.all_reduce, array, start.op or "sum", timeout=_timeout(context))
            await self._answer(context, kind, array, work.contributors)

    @_answering
    async def _reduce(self, requests: AsyncIterator[bytes], context: Any, call: _Call) -> None:
        start, program = await self._begin(requests, context, call)
        async with program.collective.take() as turn:
            group, root = program.group, pieces.number("root", start.root)
            kind, array = await self._upload(turn, start, requests)
            work = await turn.carry_out(group.reduce, array, root, start.op or "sum", timeout=_timeout(context))
            await self._answer(context, kind, array if root == group.rank else None, work.contributors)

    @_answering
    async def _broadcast(self, requests: AsyncIterator[bytes], context: Any, call: _Call) -> None:
        start, program = await self._begin(requests, context, call)
        async with program.collective.take() as turn:
            group, root = program.group, pieces.number("root", start.root)
            is_root = root == group.rank
            kind, array = await self._upload(turn, start, requests, is_sent=is_root)
            work = await turn.carry_out(group.broadcast, array, root, timeout=_timeout(context))
            await self._answer(context, kind, None if is_root else array, work.contributors)

    @_answering
    async def _all_gather(self, requests: AsyncIterator[bytes], context: Any, call: _Call) -> None:
        start, program = await self._begin(requests, context, call)
        async with program.collective.take() as turn, program.gathered.take() as rows:
            group = program.group
            kind = pieces.array_kind(start, program.most_bytes)
            whole = ArrayKind(kind.dtype, (group.size, *kind.shape))
            program.check_result(whole.nbytes)
            _, array = await self._upload(turn, start, requests)
            gathered = rows.array(whole)
            work = await turn.carry_out(group.all_gather, array, out=gathered, timeout=_timeout(context))
            for rank in set(range(group.size)).difference(work.contributors):
                gathered[rank] = 0
            await self._answer(context, whole, gathered, work.contributors)

    @_answering
    async def _barrier(self, request: pb.BarrierRequest, context: Any, call: _Call) -> pb.BarrierResponse:
        program = self._program(request.session, context, call)
        async with program.collective.take() as turn:
            await turn.carry_out(program.group.barrier, timeout=_timeout(context))
        return pb.BarrierResponse()

    # Messages

    @_answering
    async def _send(self, requests: AsyncIterator[bytes], context: Any, call: _Call) -> pb.SendResponse:
        start, program = await self._begin(requests, context, call)
        async with program.sending.take() as turn:
            to, tag = pieces.number("to", start.to), pieces.number("tag", start.tag)
            _, array = await self._upload(turn, start, requests)
            await turn.carry_out(program.group.send, array, to, tag, timeout=_timeout(context))
        return pb.SendResponse()

    @_answering
    async def _receive(self, request: pb.ReceiveRequest, context: Any, call: _Call) -> None:
        program = self._program(request.session, context, call)
        source = pieces.number("source", request.source) if request.HasField("source") else ANY
        tag = pieces.number("tag", request.tag) if request.HasField("tag") else ANY
        async with program.receiving.take() as turn:
            # The message is looked at first: how much memory it takes is for the gateway to say, not for its sender.
            found = await turn.withdrawable(program.group.probe, source, tag, timeout=_timeout(context))
            program.check_result(found.nbytes)
            if found.dtype is None:
                await turn.withdrawable(program.group.recv, found.source, found.tag, timeout=_timeout(context))
                raise MismatchError(
                    f"rank {found.source} sent an object or a list with tag {found.tag}, and it was dropped; a program "
                    "at a gateway receives single arrays"
                )
            kind = ArrayKind(found.dtype, found.shape)
            array = turn.array(kind)
            await turn.withdrawable(program.group.recv, found.source, found.tag, out=array, timeout=_timeout(context))
            await self._answer(context, kind, array, source=found.source, tag=found.tag)

    # Streams

    async def _begin(
        self, requests: AsyncIterator[bytes], context: Any, call: _Call
    ) -> tuple[pb.Start, RegisteredProgram]:
        """Return the start of a stream, and the program that sends it."""
        self._identity(context.peer())
        start = await self._next(requests)
        if not isinstance(start, pb.Start):
            raise malformed("the first message of the stream must be its start")
        return start, self._program(start.session, context, call)

    async def _upload(
        self, turn: CallTurn, start: pb.Start, requests: AsyncIterator[bytes], *, is_sent: bool = True
    ) -> tuple[ArrayKind, Array]:
        """Return the array of a stream, once all its chunks are here; without `is_sent` there must be none."""
        kind = pieces.array_kind(start, self._limits.nbytes)
        array = turn.array(kind)
        filling = pieces.Filling(array if is_sent else array.reshape(-1)[:0])
        while (chunk := await self._next(requests)) is not None:
            if isinstance(chunk, pb.Start):
                raise malformed("a stream has one start, and then only chunks")
            filling.add(chunk)
        filling.check_full()
        return kind, array

    async def _next(self, requests: AsyncIterator[bytes]) -> pb.Start | memoryview | None:
        """Return the next message of a stream, None at its end."""
        try:
            async with asyncio.timeout(self._limits.stall):
                data = await anext(requests, None)
        except TimeoutError:
            raise DeadlineError(f"the program sent nothing within the timeout of {self._limits.stall:g} s") from None
        return None if data is None else pieces.decode_piece(data)

    async def _answer(
        self,
        context: Any,
        kind: ArrayKind,
        array: Array | None,
        contributors: tuple[int, ...] = (),
        *,
        source: int = 0,
        tag: int = 0,
    ) -> None:
        """Send a result, and the array if this program gets it."""
        await self._told(context, pieces.result(kind, contributors, source=source, tag=tag))
        if array is not None:
            for chunk in pieces.chunks(array):
                await self._told(context, chunk)

    async def _told(self, context: Any, message: Any) -> None:
        """Send a message of a stream once the program has room for it."""
        try:
            async with asyncio.timeout(self._limits.stall):
                await context.write(message)
        except TimeoutError:
            raise DeadlineError(f"the program read nothing within the timeout of {self._limits.stall:g} s") from None

    # Who calls

    @contextlib.contextmanager
    def counted(self, context: Any) -> Iterator[None]:
        """Count a call of a caller while it is open; RefusalError if that caller has too many, or is no one's."""
        identity = self._identity(context.peer())
        most = CALLS_OF_A_PROGRAM * self._limits.programs
        if self._calls[identity] >= most:
            raise RefusalError(Reason.FULL, f"this caller has {most} calls open already")
        self._calls[identity] += 1
        try:
            yield
        finally:
            self._calls[identity] -= 1
            if not self._calls[identity]:
                del self._calls[identity]

    def _reserve(self, wish: Wish, identity: str) -> ProgramRank:
        """Take a name and a rank for a program; RefusalError or ConfigError if there is none."""
        program = wish.program
        owner = self._owners.get(program, identity)
        if owner != identity:
            raise RefusalError(
                Reason.NOT_YOURS, f"program {program!r} was registered by {owner}, and not by {identity}"
            )
        if program in self._taken:
            raise RefusalError(Reason.TAKEN, f"program {program!r} is registered; another one needs another name")
        if self._ranks.is_single and self._has_registered:
            raise RefusalError(
                Reason.FULL, "this gateway is one rank, and another program has taken it; start a gateway for each"
            )
        if len(self._taken) >= self._limits.programs:
            raise RefusalError(Reason.FULL, f"this gateway has {self._limits.programs} programs already")
        if program not in self._owners and len(self._owners) >= MAX_WORKERS:
            raise RefusalError(Reason.FULL, f"this gateway has had {MAX_WORKERS} programs of different names")
        rank = self._ranks.rank_for(wish)
        self._owners[program] = identity
        self._taken.add(program)
        self._has_registered = True
        return rank

    def _program(self, session: bytes, context: Any, call: _Call) -> RegisteredProgram:
        """Return the program that makes a call; RefusalError if it has no rank, or is another one's."""
        identity = self._identity(context.peer())
        program = self._programs.get(session) if len(session) == SESSION_BYTES else None
        if program is None or program.identity != identity:
            raise RefusalError(
                Reason.NOT_FOUND, "no program is registered with this session: its registration is over, or was never"
            )
        call.program = program
        return program


def _unary(handler: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(handler, request.FromString, lambda answer: answer.SerializeToString())


def _wish(request: pb.RegisterRequest) -> Wish:
    """Return what a program registers with, checked."""
    timeout = request.timeout_seconds or LONGEST_JOIN
    if not (math.isfinite(timeout) and 0 < timeout <= LONGEST_JOIN):
        raise malformed(f"timeout_seconds must be above 0 and at most {LONGEST_JOIN:g}, or 0 for that")
    if request.on_loss not in ("", "raise", "continue"):
        raise malformed("on_loss is raise or continue")
    if request.size > MAX_WORKERS:
        raise malformed(f"a run has at most {MAX_WORKERS} ranks")
    run = name("run", request.run) if request.run else ""
    return Wish(name("program", request.program), run, request.size, timeout, request.on_loss)


def _timeout(context: Any) -> float | None:
    """Return how long an operation may take, so that its call still gets the answer; None for the group's timeout."""
    left: float | None = context.time_remaining()
    return None if left is None else max(left - DETAILS_SECONDS, left / 2, 0.001)
