"""The point-to-point operations of a group: messages with tags."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.config import check_timeout
from covey.base.dtypes import DTYPES
from covey.base.errors import MismatchError, RemoteProtocolError
from covey.net.descriptors import explained
from covey.proto.matching import ANY
from covey.runtime.buffers import BYTES, readable, writable
from covey.runtime.group.issuer import Issuer, whole_number
from covey.wire import objects

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.buffers import Operand
    from covey.runtime.messages.messenger import Messenger
    from covey.runtime.work import Work
    from covey.wire.unpickling import AllowPickle

    Array = np.ndarray[Any, np.dtype[Any]]


class Messages(Issuer):
    """Operations that send and receive messages; a base of `Group`."""

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send an array to rank `dst`; return when `x` may be changed again.

        Messages of up to 64 KiB are sent at once, up to 4 MiB in all to a rank that does not receive them; larger
        ones wait for the matching `recv`. Messages between two ranks with the same tag arrive in order.
        """
        operand = readable(x)
        return self._send(
            operand.load().view(np.uint8), dst, tag, operand.code, operand.shape, False, timeout, async_op
        )

    def recv(
        self,
        src: int = ANY,
        tag: int = ANY,
        *,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the next array from rank `src` with `tag`, received into `out` if that is given.

        `covey.ANY`, the default of both, matches every rank or tag.

        Raises:
            MismatchError: `out` has another size or dtype than the message, or the message is an object. The
                message is dropped; the group stays usable.
        """
        target = writable(out) if out is not None else None

        def finish(message: Any) -> Any:
            if message.is_object:
                raise MismatchError(f"rank {message.source} sent an object with tag {message.tag}; use recv_object")
            if target is not None:
                target.store()
                return out
            return message.data.view(DTYPES[message.dtype_code]).reshape(message.shape)

        return self._recv(src, tag, target, finish, timeout, async_op)

    def send_object(
        self,
        value: Any,
        dst: int,
        tag: int = 0,
        *,
        allow_pickle: AllowPickle = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send a value to rank `dst`; see `broadcast_object` for what values may be."""
        data = np.frombuffer(objects.encode(value, allow_pickle=allow_pickle), np.uint8)
        return self._send(data, dst, tag, BYTES, data.shape, True, timeout, async_op)

    def recv_object(
        self,
        src: int = ANY,
        tag: int = ANY,
        *,
        type: Any = None,
        allow_pickle: AllowPickle = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the next value from rank `src` with `tag`; see `broadcast_object` for the arguments."""

        def finish(message: Any) -> Any:
            if not message.is_object:
                raise MismatchError(f"rank {message.source} sent an array with tag {message.tag}; use recv")
            try:
                return objects.decode(message.data.tobytes(), type=type, allow_pickle=allow_pickle)
            except (RemoteProtocolError, MismatchError) as error:
                raise error.__class__(f"rank {message.source} sent a value that cannot be used: {error}") from error

        return self._recv(src, tag, None, finish, timeout, async_op)

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
    ) -> Any:
        dst, tag = whole_number("dst", dst), whole_number("tag", tag)
        messenger, deadline = self._messages(timeout)
        work = messenger.start_send(memoryview(data), dst, tag, code, shape, is_object, deadline)
        return self._finish_message(work, deadline, async_op)

    def _recv(
        self,
        src: int,
        tag: int,
        target: Operand | None,
        finish: Callable[[Any], Any],
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        src, tag = whole_number("src", src), whole_number("tag", tag)
        messenger, deadline = self._messages(timeout)
        out = None if target is None else memoryview(target.flat.view(np.uint8))
        expect = None if target is None else (target.code, target.shape)
        work = messenger.start_receive(src, tag, out, expect, deadline, finish)
        return self._finish_message(work, deadline, async_op)

    def _finish_message(self, work: Work[Any], deadline: float, async_op: bool) -> Any:
        messenger = self._engine.routing.messenger()
        if async_op:
            messenger.progress_in_background(work, deadline)
            return work
        return messenger.wait(work, deadline)

    def _messages(self, timeout: float | None) -> tuple[Messenger, float]:
        engine = self._engine
        engine.failure.require_open()
        limit = engine.config.timeout if timeout is None else check_timeout(timeout)
        with explained("messages cannot be sent or received"):
            return engine.routing.messenger(), time.monotonic() + limit
