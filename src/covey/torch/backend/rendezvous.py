"""The rendezvous `init_method="covey://RUN"`: ranks of a process group meet without an address or given ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from torch.distributed.constants import default_pg_timeout

from covey.base.config import split_list
from covey.base.errors import ConfigError
from covey.runtime.joining.bootstrap import join_with, joined
from covey.runtime.joining.request import JoinRequest, own_arguments
from covey.runtime.joining.torch_env import given, gloo_variables, is_given, own_variables
from covey.torch import entry
from covey.torch.backend.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from covey.runtime.group.group import Group
    from covey.torch.backend.store import CoveyStore

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
