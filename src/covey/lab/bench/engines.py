"""One interface to the libraries under test: bind an operation to buffers, get a call that runs it once."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from covey.base.version import __version__

if TYPE_CHECKING:
    from covey.runtime.group.group import Group

Array = NDArray[Any]
Step = Callable[[], Any]


class CollectiveEngine(Protocol):
    """A library that has joined its ranks together."""

    rank: int
    size: int
    versions: dict[str, str]

    def bind(self, operation: str, x: Array, out: Array) -> tuple[Step, Array | None]:
        """Return a call that runs `operation` once, and the array that then holds the result.

        `x` is the input (and the result of operations in place), `out` a separate result of its own length.
        None as the array means that the call returns the result.
        """

    def barrier(self) -> None: ...

    def lanes(self) -> str:
        """Return the kinds of lane in use; empty if the library does not report them."""

    def close(self) -> None: ...


def open_engine(name: str, *, rank: int, size: int, folder: str) -> CollectiveEngine:
    """Join the other ranks. `rank` and `size` are used if no launcher sets them; `folder` is private."""
    match name:
        case "covey":
            import covey

            return CoveyEngine(covey.join())
        case "covey-torch":
            return TorchEngine("covey", rank, size, folder)
        case "gloo":
            return TorchEngine("gloo", rank, size, folder)
        case "mpi":
            return MpiEngine()
    raise ValueError(f"no engine {name!r}")


class CoveyEngine:
    """covey through its public calls, in a group that was joined before."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.versions = {"covey": __version__}

    def bind(self, operation: str, x: Array, out: Array) -> tuple[Step, Array | None]:
        group, peer = self.group, partner(self.rank, self.size)
        match operation:
            case "all_reduce":
                return lambda: group.all_reduce(x), x
            case "reduce":
                return lambda: group.reduce(x), x
            case "broadcast":
                return lambda: group.broadcast(x), x
            case "all_gather":
                rows = out.reshape(self.size, -1)
                return lambda: group.all_gather(x, out=rows), out
            case "reduce_scatter":
                return lambda: group.reduce_scatter(x, out=out), out
            case "all_to_all":
                given, taken = x.reshape(self.size, -1), out.reshape(self.size, -1)
                return lambda: group.all_to_all(given, out=taken), out
            case "send_recv":
                return there_and_back(
                    self.rank, peer, lambda: group.send(x, peer), lambda: group.recv(peer, out=out)
                ), out
            case "barrier":
                return group.barrier, out
        raise ValueError(operation)

    def barrier(self) -> None:
        self.group.barrier()

    def lanes(self) -> str:
        return "+".join(sorted(set(self.group.lanes().values())))

    def close(self) -> None:
        self.group.close()


class TorchEngine:
    """torch.distributed with one of its backends, on CPU tensors that share the arrays' memory."""

    def __init__(self, backend: str, rank: int, size: int, folder: str) -> None:
        import torch
        import torch.distributed as dist

        import covey.torch  # imported here: not every contender needs it

        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
        self.torch, self.dist, self.rank, self.size = torch, dist, rank, size
        self.versions = {"torch": str(torch.__version__)}
        if backend == "covey":
            self.versions["covey"] = covey.__version__

    def bind(self, operation: str, x: Array, out: Array) -> tuple[Step, Array | None]:
        dist, peer = self.dist, partner(self.rank, self.size)
        source, target = self._tensor(x), self._tensor(out)
        # torch is renaming these two; the old names warn on every call, which would be timed too.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        match operation:
            case "all_reduce":
                return lambda: dist.all_reduce(source), x
            case "reduce":
                return lambda: dist.reduce(source, 0), x
            case "broadcast":
                return lambda: dist.broadcast(source, 0), x
            case "all_gather":
                return lambda: all_gather(target, source), out
            case "reduce_scatter":
                return lambda: reduce_scatter(target, source), out
            case "all_to_all":
                return lambda: dist.all_to_all_single(target, source), out
            case "send_recv":
                return there_and_back(
                    self.rank, peer, lambda: dist.send(source, peer), lambda: dist.recv(target, peer)
                ), out
            case "barrier":
                return dist.barrier, out
        raise ValueError(operation)

    def barrier(self) -> None:
        self.dist.barrier()

    def lanes(self) -> str:
        group = getattr(self.dist.group.WORLD, "covey_group", None)
        return "+".join(sorted(set(group.lanes().values()))) if group is not None else ""

    def close(self) -> None:
        self.dist.destroy_process_group()

    def _tensor(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16":  # unknown to torch.from_numpy
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)


class MpiEngine:
    """mpi4py's calls on buffers; mpirun chose the transport."""

    def __init__(self) -> None:
        import mpi4py

        # Full thread support takes locks in every call; without it Open MPI runs at its best.
        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.versions = {
            "mpi4py": version("mpi4py"),
            "mpi": str(MPI.Get_library_version()).split(",")[0].strip(),
        }

    def bind(self, operation: str, x: Array, out: Array) -> tuple[Step, Array | None]:
        world, in_place, peer = self.world, self.mpi.IN_PLACE, partner(self.rank, self.size)
        match operation:
            case "all_reduce":
                return lambda: world.Allreduce(in_place, x), x
            case "reduce":
                given, taken = (in_place, x) if self.rank == 0 else (x, None)
                return lambda: world.Reduce(given, taken, root=0), x
            case "broadcast":
                return lambda: world.Bcast(x, root=0), x
            case "all_gather":
                return lambda: world.Allgather(x, out), out
            case "reduce_scatter":
                return lambda: world.Reduce_scatter_block(x, out), out
            case "all_to_all":
                return lambda: world.Alltoall(x, out), out
            case "send_recv":
                return there_and_back(self.rank, peer, lambda: world.Send(x, peer), lambda: world.Recv(out, peer)), out
            case "barrier":
                return world.Barrier, out
        raise ValueError(operation)

    def barrier(self) -> None:
        self.world.Barrier()

    def lanes(self) -> str:
        return ""

    def close(self) -> None:
        self.mpi.Finalize()


def partner(rank: int, size: int) -> int:
    """Return the partner for point-to-point: 0 with 1, 2 with 3; the last of an odd number has none."""
    return rank ^ 1 if rank ^ 1 < size else rank


def there_and_back(rank: int, peer: int, send: Step, recv: Step) -> Step:
    """Return this rank's half of a ping-pong; a rank without a partner does nothing."""
    if peer == rank:
        return lambda: None
    first, second = (send, recv) if rank < peer else (recv, send)

    def step() -> None:
        first()
        second()

    return step
