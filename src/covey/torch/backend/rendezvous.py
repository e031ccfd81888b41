"""How the ranks of a process group meet: `init_method="covey://RUN"`, without an address or given ranks, and its store.

The store of torch.distributed is over covey's control links; all members of the run hold copies of it.
"""

from __future__ import annotations

import collections
import contextlib
import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from covey.base.config import split_list
from covey.base.errors import ConfigError, DeadlineError
from covey.proto.store_copy import STORES_LIMIT
from covey.runtime.group.internals import open_group_store
from covey.runtime.joining.bootstrap import join_with, joined
from covey.runtime.joining.request import JoinRequest, own_arguments
from covey.runtime.joining.torch_env import given, gloo_variables, is_given, own_variables
from covey.runtime.state.store import describe, encoded
from covey.torch import entry
from covey.torch.backend.work import torchs_errors
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from covey.runtime.group.group import Group
    from covey.runtime.state.store import StoreClient

_alive: Final[collections.deque[CoveyStore]] = collections.deque(maxlen=STORES_LIMIT)
"""Keeps the Python objects of stores alive: torch's C++ code holds only its own part of a store."""


class StoreTimeoutError(DeadlineError, dist.DistStoreError):  # type: ignore[misc]  # torch is not followed
    """A key was not set in time. A DeadlineError that is also what torch's own stores raise."""


def open_store(group: Group, timeout: timedelta, *, owns_run: bool = False) -> CoveyStore:
    """Return a new store that all ranks of the group share; every rank calls this.

    With `owns_run`, this process leaves the run when the process group that uses the store is destroyed.
    """
    store = CoveyStore(group, open_group_store(group, timeout.total_seconds()), owns_run=owns_run)
    store.set_timeout(timeout)
    _alive.append(store)
    return store


class CoveyStore(dist.Store):  # type: ignore[misc]  # torch is not followed by the type checker
    """A key-value store of a run. Any thread may use it; Ctrl-C ends a waiting call.

    C++ calls some methods by other names than Python does: see the pairs at the end.
    """

    def __init__(self, group: Group, client: StoreClient, *, owns_run: bool) -> None:
        super().__init__()
        self._client = client
        self.group, self.owns_run = group, owns_run
        self._worlds = 0

    def new_nonce(self) -> str:
        """Return a name that is equal on all ranks, and new for each process group of all ranks that uses the store."""
        self._worlds += 1
        return f"{self._client.store_id:016x}.{self._worlds}"

    def set(self, key: str, value: str | bytes) -> None:
        """Set an entry."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several entries at once."""
        self._ask(wire.Put(tuple((key, encoded(value)) for key, value in zip(keys, values, strict=True))))

    def get(self, key: str) -> bytes:
        """Wait for an entry, and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several entries, and return their values."""
        with self._naming(wire.Get(tuple(keys)), self.timeout):
            return self._client.read(tuple(keys), self.timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for several entries."""
        self._ask(wire.Await(tuple(keys)), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these entries exist."""
        return bool(self._ask(wire.HasKeys(tuple(keys))).number)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; return the sum."""
        return self._ask(wire.Add(key, amount)).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set an entry if it has the expected value, or does not exist and "" is expected; return its value.

        As in torch's own stores, the answer is what was expected if there is no entry.
        """
        answer = self._ask(wire.Swap(key, encoded(expected), encoded(desired)))
        return answer.values[0] if answer.values else encoded(expected)

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        self._ask(wire.Append(key, encoded(value)))

    def delete_key(self, key: str) -> bool:
        """Remove an entry; return whether it existed."""
        return bool(self._ask(wire.Delete(key)).number)

    def num_keys(self) -> int:
        """Return how many entries there are."""
        return self._ask(wire.Count()).number

    def list_keys(self) -> list[str]:
        """Return the keys of all entries."""
        with self._naming(wire.Names(), self.timeout):
            return self._client.names(self.timeout.total_seconds())

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Add a value to the end of a queue."""
        self._ask(wire.Push(key, encoded(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue; wait for one if `block`."""
        values = self._ask(wire.Pop(key, block)).values
        if not values:
            raise dist.QueueEmptyError(f"the queue {key!r} is empty")
        return values[0]

    def queue_len(self, key: str) -> int:
        """Return how many values are in a queue."""
        return self._ask(wire.Length(key)).number

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set exist."""
        return True

    def clone(self) -> CoveyStore:
        """Return itself: any thread may use it."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815

    def _ask(self, question: wire.Question, timeout: timedelta | None = None) -> wire.Done:
        within = self.timeout if timeout is None else timeout
        with self._naming(question, within):
            return self._client.ask(question, within.total_seconds())

    @staticmethod
    @contextlib.contextmanager
    def _naming(question: wire.Question, timeout: timedelta) -> Iterator[None]:
        """Let an error about time say what was asked for, and every error be torch's own, too."""
        try:
            with torchs_errors():
                yield
        except DeadlineError:
            raise StoreTimeoutError(
                f"{describe(question)}: not set within {timeout.total_seconds():g} s; "
                "has every rank called this, or did one fail before?"
            ) from None


_PARAMETERS: Final = ("cluster", "size", "min_size", "max_size", "timeout", "seeds", "interfaces", "on_loss")
"""The parameters of an address: arguments of `covey.join`."""


def meet(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[CoveyStore, int, int]]:
    """Yield a store that all ranks share, the rank of this process, and the number of ranks.

    `covey://RUN?size=4` joins a run of the cluster. `covey://`, or `env://` under covey's launcher, uses the group that
    this process has joined, or joins the run of its launcher; without a launcher the process is the only rank.
    """
    asked, rank, size = parse(url)
    if asked.get("timeout") is None and timeout != default_pg_timeout:
        asked["timeout"] = timeout.total_seconds()
    before = joined()
    group = before if before is not None and not asked.keys() - {"timeout"} else join_with(JoinRequest.of(asked))
    # The run of a launcher is not left, so that the ranks can meet in it again.
    owns_run = group is not before and ("run" in asked or group.size == 1)
    try:
        if rank not in (None, group.rank) or size not in (None, group.size):
            raise ConfigError(
                f"covey gave this process rank {group.rank} of {group.size}, and init_process_group was told "
                f"rank={rank}, world_size={size}; leave them out"
            )
        store = open_store(group, timeout, owns_run=owns_run)
    except BaseException:
        if owns_run:
            group.close()
        raise
    _export(group)
    yield store, group.rank, group.size
    raise ConfigError("a process group cannot meet a second time; destroy it, and call init_process_group again")


def parse(url: str) -> tuple[dict[str, Any], int | None, int | None]:
    """Return the arguments of `join` in an address, and the rank and size that torch was given.

    Raises:
        ConfigError: the address has an unknown parameter, or parameters that contradict each other.
    """
    parts = urlsplit(url)
    asked: dict[str, Any] = {}
    told: dict[str, int] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name in ("rank", "world_size"):
            told |= {name: number} if (number := _number(url, name, text)) != -1 else {}
        elif name not in _PARAMETERS:
            raise ConfigError(f"{url}: there is no parameter {name!r}; there are {', '.join(_PARAMETERS)}")
        elif name in asked:
            raise ConfigError(f"{url}: {name} is given twice")
        else:
            value = own_arguments()[name].kind.read(f"{url}: {name}", text)
            asked[name] = split_list(value) if name == "seeds" else value
    rank, size = told.get("rank"), told.get("world_size")
    run = unquote(parts.netloc + parts.path).strip("/") if parts.scheme == entry.NAME else ""
    if not run:
        return asked, rank, size
    if rank is not None:
        raise ConfigError(f"{url}: the nodes of a run agree on their ranks; leave rank= out")
    if size is not None and not asked.keys() & {"size", "min_size", "max_size"}:
        asked["size"] = size
    if size is not None and asked.get("size", size) != size:
        raise ConfigError(f"{url}: world_size={size} and size={asked['size']} contradict each other; leave one out")
    return {"run": run} | asked, None, size


def _number(url: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{url}: {name}={text!r} is not a number") from None


def _export(group: Group) -> None:
    """Set the variables that torchrun sets for a rank, except the address to meet at.

    Without covey's launcher only the LOCAL_ ones: RANK and WORLD_SIZE would be taken for another launcher's.
    """
    variables = own_variables(group)
    if not entry.is_launched():
        variables = {name: value for name, value in variables.items() if name.startswith("LOCAL_")}
    elif "RANK" not in os.environ or is_given(os.environ):
        place = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
        variables = given(variables | place)
    os.environ |= variables | gloo_variables(group)
