"""The point-to-point operations of a group: messages with tags."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from covey.base.arithmetic import DTYPES
from covey.base.config import check_timeout
from covey.base.errors import ConfigError, MismatchError, RemoteProtocolError
from covey.base.numbers import ANY, BULK
from covey.base.setting_kinds import check_priority
from covey.net.host.descriptors import explained
from covey.runtime import tracing
from covey.runtime.buffers import BYTES, Operand, StagedOperand, readable, writable
from covey.runtime.group.issuer import whole_number
from covey.wire import message_header

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from covey.base.numbers import Priority
    from covey.proto.message import MessageInfo
    from covey.runtime.buffers import Memory, MemoryT, Values
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.group.object_moves import ObjectOptions
    from covey.runtime.messages.messenger import Messenger
    from covey.runtime.work import Work

    Array = np.ndarray[Any, np.dtype[Any]]
    Sent = Values | Sequence[Values]
    Received = Array | Any
    """An array, unless a list of arrays was sent."""

T = TypeVar("T")


class Messages:
    """Operations that send and receive messages, as `Group` offers them."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._engine, self._facts = issuer, issuer.engine, issuer.engine.facts
        self.rank, self.size = issuer.rank, issuer.size

    @overload
    def send(
        self,
        x: Sent,
        dst: int,
        tag: int = ...,
        *,
        priority: Priority | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...

    @overload
    def send(
        self,
        x: Sent,
        dst: int,
        tag: int = ...,
        *,
        priority: Priority | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[None]: ...

    @overload
    def send(
        self,
        x: Sent,
        dst: int,
        tag: int = ...,
        *,
        priority: Priority | None = ...,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Any: ...

    def send(
        self,
        x: Any,
        dst: int,
        tag: int = 0,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send an array, or a list of arrays as one message, to rank `dst`; return when `x` may be changed again.

        A list is copied; a list of numbers is one array. Messages of up to 64 KiB are sent at once, up to 4 MiB in all
        to a rank that does not receive them; larger ones wait for the matching `recv`. Messages between two ranks with
        the same tag and `priority` arrive in order. `critical` ones overtake `realtime` ones, and these `bulk`, which
        is the default unless the group has another one (`split`): those that wait to be sent.
        """
        if tracing.is_wanted():
            return self._traced("send", self.send, x, dst, tag, priority=priority, timeout=timeout, async_op=async_op)
        urgency = self._facts.priority if priority is None else check_priority(priority)
        if (
            urgency == BULK
            and type(dst) is int
            and not async_op
            and (short := self._engine.routing.short.get(dst)) is not None
        ):
            sent = short.send(x, tag, self._facts.config.timeout if timeout is None else check_timeout(timeout))
            if sent is True:
                return None
            if sent is not False:
                return self._engine.routing.messenger().go_on(short, sent, dst)
        data, code, shape, is_object = _payload(x)
        return self._send(data, dst, tag, code, shape, is_object, timeout, async_op, urgency)

    @overload
    def recv(
        self, src: int = ..., tag: int = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Received: ...

    @overload
    def recv(
        self,
        src: int = ...,
        tag: int = ...,
        *,
        out: MemoryT,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> MemoryT: ...

    @overload
    def recv(
        self, src: int = ..., tag: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[Received]: ...

    @overload
    def recv(
        self, src: int = ..., tag: int = ..., *, out: MemoryT, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[MemoryT]: ...

    @overload
    def recv(
        self, src: int = ..., tag: int = ..., *, out: Memory | None = ..., timeout: float | None = ..., async_op: bool
    ) -> Any: ...

    def recv(
        self,
        src: int = ANY,
        tag: int = ANY,
        *,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the next array, or list of arrays, from rank `src` with `tag`; one array may be received into `out`.

        `covey.ANY`, the default of both, matches every rank or tag.

        Raises:
            MismatchError: `out` has another size or dtype than the message, or the message is an object. The
                message is dropped; the group stays usable.
        """
        if tracing.is_wanted():
            return self._traced("recv", self.recv, src, tag, out=out, timeout=timeout, async_op=async_op)
        deadline = None
        if not async_op:
            received, deadline = self.receive_short(out, src, tag, timeout)
            if received is not False:
                return received
        target = writable(out, is_read=False) if out is not None else None
        return self.receive(src, tag, target, _finisher(out, target), timeout, async_op, deadline)

    @overload
    def sendrecv(
        self,
        x: Sent,
        dst: int,
        src: int = ...,
        tag: int = ...,
        *,
        recv_tag: int | None = ...,
        timeout: float | None = ...,
    ) -> Received: ...

    @overload
    def sendrecv(
        self,
        x: Sent,
        dst: int,
        src: int = ...,
        tag: int = ...,
        *,
        recv_tag: int | None = ...,
        out: MemoryT,
        timeout: float | None = ...,
    ) -> MemoryT: ...

    def sendrecv(
        self,
        x: Any,
        dst: int,
        src: int = ANY,
        tag: int = 0,
        *,
        recv_tag: int | None = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Send `x` to rank `dst` and return what comes from rank `src`, both at once; see `send` and `recv`.

        Ranks that exchange in a ring, or in pairs, cannot wait for each other in vain. The message that is received has
        the tag `recv_tag`; default: `tag`. `x` and `out` must not share memory. If the send fails, the message that was
        received goes to the next `recv`.
        """
        if tracing.is_wanted():
            return self._traced(
                "sendrecv", self.sendrecv, x, dst, src, tag, recv_tag=recv_tag, out=out, timeout=timeout
            )
        data, code, shape, is_object = _payload(x)
        target = writable(out, is_read=False) if out is not None else None
        if target is not None and np.may_share_memory(data, target.flat):
            raise ConfigError("x and out share memory, and out may be filled before x was sent; pass a copy")
        dst, src, tag = whole_number("dst", dst), whole_number("src", src), whole_number("tag", tag)
        wanted = tag if recv_tag is None else whole_number("recv_tag", recv_tag)
        messenger, deadline = self._messages(timeout)
        into = None if target is None else memoryview(target.flat.view(np.uint8))
        expect = None if target is None else (target.code, target.shape)
        receive = messenger.start_receive(src, wanted, into, expect, deadline, _finisher(out, target))
        _complete_on_wait(receive, target)
        try:
            send = messenger.start_send(memoryview(data), dst, tag, code, shape, is_object, deadline)
        except BaseException as error:
            messenger.abandon(receive, error)
            raise
        try:
            received = messenger.wait(receive, deadline)
        except BaseException as error:
            messenger.abandon(send, error)  # or else `x` would be read after this
            receive.forget_error()
            send.forget_error()
            raise
        try:
            messenger.wait(send, deadline)
        except BaseException:
            receive.release(is_taken=True)
            send.forget_error()
            raise
        return received

    @overload
    def probe(
        self, src: int = ..., tag: int = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> MessageInfo: ...

    @overload
    def probe(
        self, src: int = ..., tag: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[MessageInfo]: ...

    @overload
    def probe(self, src: int = ..., tag: int = ..., *, timeout: float | None = ..., async_op: bool) -> Any: ...

    def probe(self, src: int = ANY, tag: int = ANY, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait for a message from rank `src` with `tag`, and return its `MessageInfo`; `recv` still gets the message.

        If several threads receive, another one may take the message first.
        """
        src, tag = whole_number("src", src), whole_number("tag", tag)
        messenger, deadline = self._messages(timeout)
        return self._finish_message(messenger.start_probe(src, tag, deadline), deadline, async_op)

    def iprobe(self, src: int = ANY, tag: int = ANY) -> MessageInfo | None:
        """Return the `MessageInfo` of a message from rank `src` with `tag` that is here, or None. Does not wait."""
        src, tag = whole_number("src", src), whole_number("tag", tag)
        messenger, _ = self._messages(None)
        found: MessageInfo | None = messenger.look(src, tag)
        return found

    @overload
    def send_object(
        self,
        value: Any,
        dst: int,
        tag: int = ...,
        *,
        type: Any = ...,
        priority: Priority | None = ...,
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> None: ...

    @overload
    def send_object(
        self,
        value: Any,
        dst: int,
        tag: int = ...,
        *,
        type: Any = ...,
        priority: Priority | None = ...,
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[None]: ...

    @overload
    def send_object(
        self,
        value: Any,
        dst: int,
        tag: int = ...,
        *,
        type: Any = ...,
        priority: Priority | None = ...,
        async_op: bool,
        **options: Unpack[ObjectOptions],
    ) -> Any: ...

    def send_object(
        self,
        value: Any,
        dst: int,
        tag: int = 0,
        *,
        type: Any = None,
        priority: Priority | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send a value to rank `dst`; see `broadcast_object` for what values may be, and `send` for `priority`.

        With `type`, `recv_object` must be called with it as well.
        """
        if tracing.is_wanted():
            options = {"type": type, "priority": priority, "allow_pickle": allow_pickle, "timeout": timeout}
            return self._traced("send_object", self.send_object, value, dst, tag, async_op=async_op, **options)
        from covey.wire import objects  # slow to load, and many programs send no objects

        urgency = self._facts.priority if priority is None else check_priority(priority)
        data = np.frombuffer(objects.encode(value, type=type, allow_pickle=allow_pickle), np.uint8)
        return self._send(data, dst, tag, BYTES, data.shape, True, timeout, async_op, urgency)

    @overload
    def recv_object(
        self,
        src: int = ...,
        tag: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> T: ...

    @overload
    def recv_object(
        self,
        src: int = ...,
        tag: int = ...,
        *,
        type: Any = ...,
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> Any: ...

    @overload
    def recv_object(
        self,
        src: int = ...,
        tag: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[T]: ...

    @overload
    def recv_object(
        self,
        src: int = ...,
        tag: int = ...,
        *,
        type: Any = ...,
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[Any]: ...

    @overload
    def recv_object(
        self, src: int = ..., tag: int = ..., *, type: Any = ..., async_op: bool, **options: Unpack[ObjectOptions]
    ) -> Any: ...

    def recv_object(
        self,
        src: int = ANY,
        tag: int = ANY,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the next value from rank `src` with `tag`; see `broadcast_object` for the arguments."""
        if tracing.is_wanted():
            options = {"type": type, "allow_pickle": allow_pickle, "timeout": timeout}
            return self._traced("recv_object", self.recv_object, src, tag, async_op=async_op, **options)
        from covey.wire import objects  # slow to load, and many programs send no objects

        objects.check_allowed(allow_pickle)

        def finish(message: Any) -> Any:
            if not message.is_object or message_header.holds_arrays(message.data):
                raise MismatchError(f"rank {message.source} sent an array with tag {message.tag}; use recv")
            try:
                return objects.decode(message.data.tobytes(), type=type, allow_pickle=allow_pickle)
            except (RemoteProtocolError, MismatchError) as error:
                raise error.__class__(f"rank {message.source} sent a value that cannot be used: {error}") from error

        return self.receive(src, tag, None, finish, timeout, async_op)

    def _traced(self, name: str, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Perform an operation on a message with a span; the rank and the tag are its last positional arguments."""
        tracer, (peer, tag) = tracing.active, args[-2:]
        if tracer is None:  # closed meanwhile
            return operation(*args, **options)
        facts = {"covey.group": self._facts.name, "covey.rank": self.rank, "covey.peer": peer, "covey.tag": tag}
        attributes = {key: value for key, value in facts.items() if isinstance(value, int | str)}
        return tracer.message(name, lambda: operation(*args, **options), attributes)

    def _send(
        self,
        data: Array,
        dst: int,
        tag: int,
        code: int,
        shape: tuple[int, ...],
        is_object: bool,
        timeout: float | None,
        async_op: bool,
        priority: int = BULK,
    ) -> Any:
        dst, tag = whole_number("dst", dst), whole_number("tag", tag)
        messenger, deadline = self._messages(timeout)
        if priority < BULK:
            self._engine.routing.note_urgent(dst)
        work = messenger.start_send(memoryview(data), dst, tag, code, shape, is_object, deadline, priority)
        return self._finish_message(work, deadline, async_op, dst)

    def receive_short(self, out: Any, src: int, tag: int, timeout: float | None) -> tuple[Any, float | None]:
        """Receive an array without the messenger, into `out` unless that is None.

        Return the array, or False if the messenger has to receive it: then until the deadline that is returned, too.
        """
        short = self._engine.routing.short.get(src) if type(src) is int else None
        if short is None:
            return False, None
        deadline = time.monotonic() + (self._facts.config.timeout if timeout is None else check_timeout(timeout))
        received = short.receive(out, tag, deadline)
        if type(received) is tuple:
            received = self._engine.routing.messenger().go_on(short, received, src)
        return received, deadline

    def receive(
        self,
        src: int,
        tag: int,
        target: Operand | None,
        finish: Callable[[Any], Any],
        timeout: float | None,
        async_op: bool,
        deadline: float | None = None,
    ) -> Any:
        """Receive a message into `target`, or into new memory, and return what `finish` makes of it."""
        src, tag = whole_number("src", src), whole_number("tag", tag)
        messenger, latest = self._messages(timeout)
        deadline = latest if deadline is None else deadline
        out = None if target is None else memoryview(target.flat.view(np.uint8))
        expect = None if target is None else (target.code, target.shape)
        work = messenger.start_receive(src, tag, out, expect, deadline, finish)
        _complete_on_wait(work, target)
        return self._finish_message(work, deadline, async_op, src)

    def _finish_message(self, work: Work[Any], deadline: float, async_op: bool, peer: int | None = None) -> Any:
        messenger = self._engine.routing.messenger()
        if async_op:
            messenger.progress_in_background(work, deadline)
            return work
        try:
            return messenger.wait(work, deadline, peer)
        finally:
            work.forget_error()

    def _messages(self, timeout: float | None) -> tuple[Messenger, float]:
        engine = self._engine
        engine.failure.require_open()
        limit = engine.facts.config.timeout if timeout is None else check_timeout(timeout)
        with explained("messages cannot be sent or received"):
            return engine.routing.messenger(), time.monotonic() + limit


def _payload(x: Any) -> tuple[Array, int, tuple[int, ...], bool]:
    """Return the bytes of what is sent, with dtype and shape of an array, and whether it travels like an object."""
    is_list = isinstance(x, list | tuple) and not isinstance(x, Operand)
    if is_list and any(_is_array(each) for each in x):
        arrays = [operand.load().reshape(operand.shape) for operand in map(readable, x)]
        data = message_header.pack_arrays(arrays)
        return data, BYTES, data.shape, True
    operand = readable(x)
    return operand.load().view(np.uint8), operand.code, operand.shape, False


def _is_array(x: Any) -> bool:
    return not isinstance(x, list | tuple | int | float | complex | np.generic)


def _complete_on_wait(work: Work[Any], target: Operand | None) -> None:
    """Let the thread that asks for the result put it on its device: the thread that receives has no time for that."""
    if isinstance(target, StagedOperand) and target.is_ordered:
        work.complete_with(target.deliver)


def _finisher(out: Any, target: Operand | None) -> Callable[[Any], Any]:
    """Return the function that makes the result of a receive from the message."""

    def finish(message: Any) -> Any:
        if message.is_object:
            if message.data is None or not message_header.holds_arrays(message.data):
                raise MismatchError(f"rank {message.source} sent an object with tag {message.tag}; use recv_object")
            try:
                return message_header.unpack_arrays(message.data)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"rank {message.source} sent arrays that cannot be used: {error}") from error
        if target is not None:
            if not isinstance(target, StagedOperand):
                target.store()
            return out
        return message.data.view(DTYPES[message.dtype_code]).reshape(message.shape)

    return finish
