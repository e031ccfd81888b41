from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Piece(_message.Message):
    __slots__ = ("start", "chunk", "result")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    start: Start
    chunk: bytes
    result: Result
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., chunk: _Optional[bytes] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("session", "dtype", "shape", "op", "root", "to", "tag")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    op: str
    root: int
    to: int
    tag: int
    def __init__(self, session: _Optional[bytes] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., op: _Optional[str] = ..., root: _Optional[int] = ..., to: _Optional[int] = ..., tag: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("dtype", "shape", "contributors", "source", "tag")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    contributors: _containers.RepeatedScalarFieldContainer[int]
    source: int
    tag: int
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., contributors: _Optional[_Iterable[int]] = ..., source: _Optional[int] = ..., tag: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("program", "run", "size", "timeout_seconds", "on_loss")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ON_LOSS_FIELD_NUMBER: _ClassVar[int]
    program: str
    run: str
    size: int
    timeout_seconds: float
    on_loss: str
    def __init__(self, program: _Optional[str] = ..., run: _Optional[str] = ..., size: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., on_loss: _Optional[str] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("joined", "members")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    members: Members
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("session", "rank", "size", "max_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    rank: int
    size: int
    max_bytes: int
    def __init__(self, session: _Optional[bytes] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("live",)
    LIVE_FIELD_NUMBER: _ClassVar[int]
    live: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, live: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class BarrierResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReceiveRequest(_message.Message):
    __slots__ = ("session", "source", "tag")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    source: int
    tag: int
    def __init__(self, session: _Optional[bytes] = ..., source: _Optional[int] = ..., tag: _Optional[int] = ...) -> None: ...
