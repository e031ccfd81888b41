from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sizes(_message.Message):
    __slots__ = ("min_size", "max_size", "settle_seconds")
    MIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SIZE_FIELD_NUMBER: _ClassVar[int]
    SETTLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    min_size: int
    max_size: int
    settle_seconds: float
    def __init__(self, min_size: _Optional[int] = ..., max_size: _Optional[int] = ..., settle_seconds: _Optional[float] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("round", "rank", "size", "address")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    round: int
    rank: int
    size: int
    address: str
    def __init__(self, round: _Optional[int] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("run", "worker_id", "life", "name", "address", "sizes", "assignment")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    worker_id: str
    life: bytes
    name: str
    address: str
    sizes: Sizes
    assignment: Assignment
    def __init__(self, run: _Optional[str] = ..., worker_id: _Optional[str] = ..., life: _Optional[bytes] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., sizes: _Optional[_Union[Sizes, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("waiting", "assignment", "view", "checkpoint")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    waiting: Waiting
    assignment: Assignment
    view: View
    checkpoint: Checkpoint
    def __init__(self, waiting: _Optional[_Union[Waiting, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("registered", "needed", "reason")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    registered: int
    needed: int
    reason: str
    def __init__(self, registered: _Optional[int] = ..., needed: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("round", "generation", "number", "members", "sequence")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    round: int
    generation: int
    number: int
    members: _containers.RepeatedScalarFieldContainer[int]
    sequence: int
    def __init__(self, round: _Optional[int] = ..., generation: _Optional[int] = ..., number: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., sequence: _Optional[int] = ...) -> None: ...

class UnregisterWorkerRequest(_message.Message):
    __slots__ = ("run", "worker_id", "life", "view")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    run: str
    worker_id: str
    life: bytes
    view: View
    def __init__(self, run: _Optional[str] = ..., worker_id: _Optional[str] = ..., life: _Optional[bytes] = ..., view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class UnregisterWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("run", "worker_id", "life", "view")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    run: str
    worker_id: str
    life: bytes
    view: View
    def __init__(self, run: _Optional[str] = ..., worker_id: _Optional[str] = ..., life: _Optional[bytes] = ..., view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("checkpoint", "waiting")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    waiting: int
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., waiting: _Optional[int] = ...) -> None: ...

class StartCheckpointRequest(_message.Message):
    __slots__ = ("run", "path")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    run: str
    path: str
    def __init__(self, run: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class EndCheckpointRequest(_message.Message):
    __slots__ = ("run", "worker_id", "life", "id", "error")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    run: str
    worker_id: str
    life: bytes
    id: str
    error: str
    def __init__(self, run: _Optional[str] = ..., worker_id: _Optional[str] = ..., life: _Optional[bytes] = ..., id: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("run", "id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    id: str
    def __init__(self, run: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("id", "path", "phase", "ended", "error")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[Checkpoint.Phase]
        PENDING: _ClassVar[Checkpoint.Phase]
        DONE: _ClassVar[Checkpoint.Phase]
        ABANDONED: _ClassVar[Checkpoint.Phase]
        FAILED: _ClassVar[Checkpoint.Phase]
    PHASE_UNSPECIFIED: Checkpoint.Phase
    PENDING: Checkpoint.Phase
    DONE: Checkpoint.Phase
    ABANDONED: Checkpoint.Phase
    FAILED: Checkpoint.Phase
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    path: str
    phase: Checkpoint.Phase
    ended: _containers.RepeatedScalarFieldContainer[str]
    error: str
    def __init__(self, id: _Optional[str] = ..., path: _Optional[str] = ..., phase: _Optional[_Union[Checkpoint.Phase, str]] = ..., ended: _Optional[_Iterable[str]] = ..., error: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run", "round", "size", "view", "workers", "checkpoint")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    size: int
    view: View
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    checkpoint: Checkpoint
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., size: _Optional[int] = ..., view: _Optional[_Union[View, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "name", "address", "rank", "state", "heard_seconds_ago")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARD_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    name: str
    address: str
    rank: int
    state: str
    heard_seconds_ago: float
    def __init__(self, worker_id: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., rank: _Optional[int] = ..., state: _Optional[str] = ..., heard_seconds_ago: _Optional[float] = ...) -> None: ...
