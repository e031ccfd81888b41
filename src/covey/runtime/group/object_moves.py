"""The operations of a group that move values: encoded, and moved as arrays of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from covey.base.errors import ConfigError, MismatchError, RemoteProtocolError
from covey.base.numbers import NO_RANK
from covey.runtime.buffers import byte_operand
from covey.runtime.group import movements

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from covey.base.numbers import Rank
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.work import Work

T = TypeVar("T")


class ObjectOptions(TypedDict, total=False):
    """Further arguments of operations that move values, for type checkers."""

    allow_pickle: bool
    timeout: float | None


class ObjectMoves:
    """Operations that move values, as `Group` offers them."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._engine, self._facts = issuer, issuer.engine, issuer.engine.facts
        self.rank, self.size = issuer.rank, issuer.size

    @overload
    def broadcast_object(
        self,
        value: Any = ...,
        root: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> T: ...

    @overload
    def broadcast_object(
        self,
        value: Any = ...,
        root: int = ...,
        *,
        type: Any = ...,
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> Any: ...

    @overload
    def broadcast_object(
        self,
        value: Any = ...,
        root: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[T]: ...

    @overload
    def broadcast_object(
        self,
        value: Any = ...,
        root: int = ...,
        *,
        type: Any = ...,
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[Any]: ...

    @overload
    def broadcast_object(
        self, value: Any = ..., root: int = ..., *, type: Any = ..., async_op: bool, **options: Unpack[ObjectOptions]
    ) -> Any: ...

    def broadcast_object(
        self,
        value: Any = None,
        root: int = 0,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `value` of `root` on every rank.

        Values are JSON-like values, dataclasses, bytes and numpy arrays; a dataclass arrives as a dict unless `type`
        names its class. With `type`, on all ranks, values may also be sets, dates, decimals, UUIDs, enums and msgspec's
        structs. `allow_pickle=True` accepts any pickle, which can run any code in this process: use it only among ranks
        that you trust with your account.
        """
        root = self._issuer.check_rank(root, "root")
        codec = _ObjectCodec(type, allow_pickle)
        data = codec.encode(value) if self.rank == root else b""
        call = self._issuer.call("broadcast_object", None, None, root=root)
        return self._run_object(
            call,
            lambda attempt: movements.broadcast_bytes(attempt, data, attempt.slot_of(root)),
            codec,
            timeout,
            async_op,
            root,
        )

    @overload
    def all_gather_object(
        self, value: Any, *, type: builtins.type[T], async_op: Literal[False] = ..., **options: Unpack[ObjectOptions]
    ) -> list[T]: ...

    @overload
    def all_gather_object(
        self, value: Any, *, type: Any = ..., async_op: Literal[False] = ..., **options: Unpack[ObjectOptions]
    ) -> list[Any]: ...

    @overload
    def all_gather_object(
        self, value: Any, *, type: builtins.type[T], async_op: Literal[True], **options: Unpack[ObjectOptions]
    ) -> Work[list[T]]: ...

    @overload
    def all_gather_object(
        self, value: Any, *, type: Any = ..., async_op: Literal[True], **options: Unpack[ObjectOptions]
    ) -> Work[list[Any]]: ...

    @overload
    def all_gather_object(
        self, value: Any, *, type: Any = ..., async_op: bool, **options: Unpack[ObjectOptions]
    ) -> Any: ...

    def all_gather_object(
        self,
        value: Any,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `value` of every rank as a list by rank; see `broadcast_object` for what values may be."""
        return self.gather_all(value, type, allow_pickle, timeout, async_op)

    def gather_all(
        self,
        value: Any,
        type: Any,
        allow_pickle: bool,
        timeout: float | None,
        async_op: bool,
        most_bytes: int | None = None,
    ) -> Any:
        """Do what `all_gather_object` does; a rank whose encoded value has more than `most_bytes` ends the group."""
        codec = _ObjectCodec(type, allow_pickle)
        operand = byte_operand(codec.encode(value))
        call = self._issuer.call("all_gather_object", None, None)
        wanted = movements.ENCODED._replace(most_bytes=most_bytes)
        return self._run_object(
            call,
            lambda attempt: attempt.by_rank(movements.gather_all(attempt, operand, wanted=wanted)),
            codec,
            timeout,
            async_op,
        )

    @overload
    def gather_object(
        self,
        value: Any,
        root: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> list[T] | None: ...

    @overload
    def gather_object(
        self,
        value: Any,
        root: int = ...,
        *,
        type: Any = ...,
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> list[Any] | None: ...

    @overload
    def gather_object(
        self,
        value: Any,
        root: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[list[T] | None]: ...

    @overload
    def gather_object(
        self, value: Any, root: int = ..., *, type: Any = ..., async_op: Literal[True], **options: Unpack[ObjectOptions]
    ) -> Work[list[Any] | None]: ...

    @overload
    def gather_object(
        self, value: Any, root: int = ..., *, type: Any = ..., async_op: bool, **options: Unpack[ObjectOptions]
    ) -> Any: ...

    def gather_object(
        self,
        value: Any,
        root: int = 0,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `value` of every rank as a list by rank on `root`, None on other ranks; see `broadcast_object`."""
        root = self._issuer.check_rank(root, "root")
        codec = _ObjectCodec(type, allow_pickle)
        operand = byte_operand(codec.encode(value))
        call = self._issuer.call("gather_object", None, None, root=root)
        return self._run_object(
            call,
            lambda attempt: movements.gathered_by_rank(attempt, operand, root, movements.ENCODED),
            codec,
            timeout,
            async_op,
            root,
        )

    @overload
    def scatter_object(
        self,
        values: Sequence[Any] | None,
        root: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> T: ...

    @overload
    def scatter_object(
        self,
        values: Sequence[Any] | None,
        root: int = ...,
        *,
        type: Any = ...,
        async_op: Literal[False] = ...,
        **options: Unpack[ObjectOptions],
    ) -> Any: ...

    @overload
    def scatter_object(
        self,
        values: Sequence[Any] | None,
        root: int = ...,
        *,
        type: builtins.type[T],
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[T]: ...

    @overload
    def scatter_object(
        self,
        values: Sequence[Any] | None,
        root: int = ...,
        *,
        type: Any = ...,
        async_op: Literal[True],
        **options: Unpack[ObjectOptions],
    ) -> Work[Any]: ...

    @overload
    def scatter_object(
        self,
        values: Sequence[Any] | None,
        root: int = ...,
        *,
        type: Any = ...,
        async_op: bool,
        **options: Unpack[ObjectOptions],
    ) -> Any: ...

    def scatter_object(
        self,
        values: Sequence[Any] | None,
        root: int = 0,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's element of `values`, a list by rank that `root` passes; see `broadcast_object`."""
        root = self._issuer.check_rank(root, "root")
        operands = None
        codec = _ObjectCodec(type, allow_pickle)
        if self.rank == root:
            if values is None or len(values) != self.size:
                raise ConfigError(f"values must have one element for each of the {self.size} ranks")
            operands = [byte_operand(codec.encode(value)) for value in values]
        call = self._issuer.call("scatter_object", None, None, root=root)
        return self._run_object(
            call,
            lambda attempt: movements.scattered_from_rank(attempt, operands, root, movements.ENCODED).tobytes(),
            codec,
            timeout,
            async_op,
            root,
        )

    def _run_object(
        self,
        call: Call,
        body: Callable[[Attempt], Any],
        codec: _ObjectCodec,
        timeout: float | None,
        async_op: bool,
        root: Rank = NO_RANK,
    ) -> Any:
        def conclude(data: Any) -> Any:
            if codec.failure is not None:
                raise codec.failure
            if isinstance(data, list):
                return [
                    codec.decode(item if item is None else item.tobytes(), rank, call) for rank, item in enumerate(data)
                ]
            return codec.decode(data, root, call)

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=conclude, root=root)


class _ObjectCodec:
    """Encodes and decodes the values of one call, by the arguments of that call."""

    def __init__(self, type: Any, allow_pickle: bool) -> None:
        from covey.wire import objects  # slow to load, and many programs send no objects

        objects.check_allowed(allow_pickle)
        self._type, self._allow_pickle, self._objects = type, allow_pickle, objects
        self.failure: TypeError | None = None
        """Why a value of this rank could not be encoded; the first one."""

    def encode(self, value: Any) -> bytes:
        """Encode a value, or the error if that fails: the other ranks must learn of it before this rank raises."""
        try:
            return self._objects.encode(value, type=self._type, allow_pickle=self._allow_pickle)
        except TypeError as error:
            self.failure = self.failure or error
            return self._objects.encode_failure(str(error))

    def decode(self, data: bytes | None, rank: int, call: Call) -> Any:
        """Return the value that a rank sent; None if it sent none."""
        try:
            if data is None:
                return None
            return self._objects.decode(data, type=self._type, allow_pickle=self._allow_pickle)
        except (RemoteProtocolError, MismatchError) as error:
            raise error.__class__(f"rank {rank} sent {call.text} a value that cannot be used: {error}") from error
