"""What a benchmark measures: operations, sizes, contenders, and how long each. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final

from covey.base import arithmetic, settings
from covey.base.errors import ConfigError
from covey.base.lane_kinds import LANE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

MEASURED_LANES: Final = settings.LANES[1:]
"""Without `auto`."""
OPPONENTS: Final = ("gloo", "mpi", "mpi-tcp")

COMPARED_LANES: Final = {
    "gloo": MEASURED_LANES,
    "mpi": tuple(name for name in MEASURED_LANES if not LANE_KINDS[name].is_of_network),
    "mpi-tcp": tuple(name for name in MEASURED_LANES if LANE_KINDS[name].is_of_network),
}
"""The covey lanes that each opponent is compared with: those of the same kind; for gloo, which has only TCP, all."""

MEASURED_DTYPES: Final = {
    dtype.name: dtype
    for dtype in arithmetic.DTYPES
    if dtype.name in ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
"""The element types that gloo adds too."""

NOT_IN_MPI: Final = ("float16", "bfloat16")

MAX_RANKS: Final = 32
"""The check values of up to 32 ranks sum to less than 256, which bfloat16 still holds exactly."""

ROUND_ITERATIONS: Final = 1000
"""Most iterations in one round, which bounds the raw numbers to keep."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective and how its bandwidth is counted (the conventions of nccl-tests)."""

    name: str
    bus_factor: Callable[[int], float]
    """Share of the algorithm bandwidth that crosses each rank's link, for a number of ranks."""
    in_parts: bool = False
    """The buffer is one equal part a rank, so its length is a multiple of the ranks."""
    one_way: bool = False
    """A rank may finish before the others begin, so an untimed barrier keeps iterations apart."""


MEASURED_OPERATIONS: Final = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", lambda n: 2 * (n - 1) / n),
        Operation("reduce", lambda n: 1.0, one_way=True),
        Operation("broadcast", lambda n: 1.0, one_way=True),
        Operation("all_gather", lambda n: (n - 1) / n, in_parts=True),
        Operation("reduce_scatter", lambda n: (n - 1) / n, in_parts=True),
        Operation("all_to_all", lambda n: (n - 1) / n, in_parts=True),
        Operation("send_recv", lambda n: 1.0),
        Operation("barrier", lambda n: 0.0),
    )
}


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation under test, with one transport."""

    name: str
    engine: str
    """`covey`, `covey-torch`, `gloo` or `mpi`: which library the ranks load."""
    lane: str = ""
    """The lane forced on covey, or `tcp` to keep Open MPI off shared memory."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the sweep: an operation, its size in bytes, and the number of ranks."""

    operation: Operation
    size_bytes: int
    """As asked for; `bytes` is what is moved after rounding to whole elements and equal parts."""
    ranks: int
    dtype: str

    @property
    def elements(self) -> int:
        """Elements of the operation's larger buffer on one rank."""
        if self.operation.name == "barrier":
            return 0
        wanted = max(1, self.size_bytes // MEASURED_DTYPES[self.dtype].itemsize)
        return max(1, round(wanted / self.ranks)) * self.ranks if self.operation.in_parts else wanted

    @property
    def bytes(self) -> int:
        return self.elements * MEASURED_DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        size = f" {format_bytes(self.size_bytes)}" if self.elements else ""
        return f"{self.operation.name}{size}, {self.ranks} ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseGrid:
    """Operations over sizes, and how often each is measured; checked when built."""

    operations: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    dtype: str = "float32"
    repetitions: int = 7
    """Rounds of each contender in each case."""
    round_seconds: float = 0.1
    """What one round of one contender should take; its iterations follow from the warm-up."""

    def __post_init__(self) -> None:
        _choose("operation", self.operations, MEASURED_OPERATIONS)
        _choose("dtype", (self.dtype,), MEASURED_DTYPES)
        if not self.operations:
            raise ConfigError(f"nothing to measure: name an operation, such as {', '.join(MEASURED_OPERATIONS)}")
        if self.repetitions < 1:
            raise ConfigError(f"at least one repetition is needed, not {self.repetitions}")

    def cases(self, ranks: int) -> Iterator[Case]:
        """Yield the cases for one number of ranks, operation by operation, sizes rising."""
        for name, size in product(self.operations, sorted(self.sizes)):
            if name != "barrier":
                yield Case(MEASURED_OPERATIONS[name], size, ranks, self.dtype)
            elif size == min(self.sizes):
                yield Case(MEASURED_OPERATIONS[name], 0, ranks, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep(CaseGrid):
    """Everything one `covey bench` measures on one machine; checked when built."""

    ranks: tuple[int, ...] = (2,)
    lanes: tuple[str, ...] = ("shm", "tcp")
    opponents: tuple[str, ...] = ()
    busy: bool = False
    """Every rank of every contender also runs one pure-Python thread during its rounds."""
    through_torch: bool = False
    """covey is called as a backend of torch.distributed."""

    def __post_init__(self) -> None:
        CaseGrid.__post_init__(self)
        _choose("lane", self.lanes, MEASURED_LANES)
        _choose("opponent", self.opponents, OPPONENTS)
        if not self.lanes and not self.opponents:
            raise ConfigError("nothing to measure: name a lane or an opponent")
        for ranks in self.ranks:
            if not 2 <= ranks <= MAX_RANKS:
                raise ConfigError(f"a benchmark needs 2 to {MAX_RANKS} ranks, not {ranks}")
        if self.dtype in NOT_IN_MPI and {"mpi", "mpi-tcp"} & set(self.opponents):
            raise ConfigError(f"Open MPI cannot add {self.dtype}; use --dtype float32, or leave mpi out of --against")

    def contenders(self) -> list[Contender]:
        """Return the contenders, covey first."""
        engine = "covey-torch" if self.through_torch else "covey"
        lanes = [Contender(f"covey {lane}", engine, lane) for lane in self.lanes]
        others = {
            "gloo": Contender("gloo", "gloo"),
            "mpi": Contender("mpi", "mpi"),
            "mpi-tcp": Contender("mpi-tcp", "mpi", "tcp"),
        }
        return lanes + [others[name] for name in self.opponents]


def iterations_for(seconds_each: float, round_seconds: float) -> int:
    """Return how many iterations fill a round, given what one took in the warm-up."""
    if seconds_each <= 0:
        return ROUND_ITERATIONS
    return max(1, min(ROUND_ITERATIONS, round(round_seconds / seconds_each)))


def parse_names(text: str) -> tuple[str, ...]:
    """Split `a,b,c`, dropping blanks and repeats."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_operations(text: str) -> tuple[str, ...]:
    """Split a list of operations; `all` stands for every one."""
    return tuple(MEASURED_OPERATIONS) if text.strip() == "all" else parse_names(text)


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Split `2,4` into integers, naming `option` in the error."""
    names = parse_names(text)
    if not names or not all(name.isdecimal() for name in names):
        raise ConfigError(f"{option} takes whole numbers such as 2,4, not {text!r}")
    return tuple(dict.fromkeys(int(name) for name in names))


def parse_size(text: str) -> int:
    """Return the bytes of --size, which takes one size; ConfigError for several."""
    sizes = parse_sizes(text)
    if len(sizes) != 1:
        raise ConfigError(f"--size takes one size, not {text!r}")
    return sizes[0]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Split `4,64K,1M` into bytes; K, M and G are powers of 1024, with or without `iB`."""
    sizes = []
    for name in parse_names(text):
        match = re.fullmatch(r"(\d+) ?(?:([KMG])(?:iB)?|B)?", name, re.IGNORECASE)
        if not match or int(match[1]) == 0:
            raise ConfigError(f"--sizes takes bytes such as 4,64K,1M, not {name!r}")
        sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[(match[2] or "").upper()])
    if not sizes:
        raise ConfigError("--sizes names no size; write for example --sizes 4,64K,1M")
    return tuple(dict.fromkeys(sizes))


def format_bytes(count: int) -> str:
    """Write a byte count with the largest binary unit that leaves it readable."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _choose(what: str, chosen: Sequence[str], known: Collection[str]) -> None:
    for name in chosen:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
