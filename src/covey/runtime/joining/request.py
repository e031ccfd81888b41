"""What a program asks `covey.join` for, and what that means in the environment of its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003 - dataclass fields
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from covey.base.config import GroupConfig, group_config
from covey.base.settings import from_argument
from covey.runtime.environment import (
    ClusterOptions,
    LaunchedRank,
    WantedRun,
    find_launched_rank,
    find_run,
    launcher_wait,
    restarts,
)
from covey.runtime.placement import find_placed_rank

if TYPE_CHECKING:
    from covey.compress.policy import CompressValue
    from covey.runtime.calls.functions import FunctionRegistry


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JoinRequest:
    """The arguments of `covey.join`, which documents them. None: not given, so the environment or a default decides."""

    run: str | None = None
    cluster: str | None = None
    min_size: int | None = None
    max_size: int | None = None
    size: int | None = None
    timeout: float | None = None
    secret: bytes | str | None = field(default=None, repr=False)
    seeds: Sequence[str] | None = None
    interfaces: str | None = None
    lanes: str | None = None
    streams: int | str | None = None
    stripe: str | None = None
    topology: str | None = None
    limit: int | str | None = None
    op_timeout: float | None = None
    insecure: bool | None = None
    on_loss: str | None = None
    patience: float | None = None
    quorum: str | None = None
    compress: CompressValue = None
    plan: str | None = None
    tie_breaker: str | None = None
    new: bool | None = None
    rank: int | None = None
    address: str | None = None
    peers: Sequence[str] | None = None
    settings: Mapping[str, Any] | None = None
    is_elastic: bool = False
    """The process goes through generations: it waits for a seat in a running one as long as the run lasts."""
    is_newcomer: bool = False
    """The process was in the run before, or knows that it goes on."""
    functions: FunctionRegistry | None = None
    """Functions that this process registered when it was in the run before."""
    fewest: int = 0
    """Under a launcher: with how many processes a run that has lost all its members may begin again; 0 for all."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> JoinRequest:
        """Return a request with these arguments of `covey.join`; TypeError for one that it does not have."""
        if unknown := arguments.keys() - {each.name for each in fields(cls)} | arguments.keys() & _OURS:
            raise TypeError(f"join has no argument {min(unknown)!r}")
        return cls(**arguments)

    def resolve(self, env: Mapping[str, str]) -> JoinTarget:
        """Return what to join, from this request and the environment.

        Raises:
            ConfigError: they contradict themselves or each other.
        """
        config = group_config(
            env,
            timeout=self.op_timeout,
            lanes=self.lanes,
            insecure=self.insecure,
            interfaces=self.interfaces,
            streams=self.streams,
            stripe=self.stripe,
            topology=self.topology,
            limit=self.limit,
            on_loss=self.on_loss,
            patience=self.patience,
            quorum=self.quorum,
            compress=None if self.compress is None else _policy_text(self.compress),
            plan=self.plan,
            **from_argument(self.settings or {}),
        )
        if config.compress:
            _policy_text(config.compress)  # raises for a codec that does not exist
        asked = {name: getattr(self, name) for name in _OF_RUN}
        launched = find_placed_rank({**asked, "rank": self.rank, "address": self.address, "peers": self.peers})
        wanted = find_run(env, asked) if launched is None else None
        if launched is None and wanted is None:
            launched = find_launched_rank(env)
        if launched is not None and self.is_newcomer:
            launched = replace(launched, is_restarted=True)
        if launched is not None:
            launched = replace(launched, fewest=self.fewest)
        return JoinTarget(
            config=config,
            run=wanted,
            launched=launched,
            options=ClusterOptions(self.cluster, self.secret, tuple(self.seeds) if self.seeds is not None else None),
            wait=wanted.timeout if wanted is not None else launcher_wait(env, self.timeout),
            is_elastic=self.is_elastic,
            is_returning=self.is_newcomer or restarts(env) > 0,
            functions=self.functions,
        )


_OF_RUN = ("run", "size", "min_size", "max_size", "timeout", "tie_breaker", "new")
_OURS = {"is_elastic", "is_newcomer", "functions", "fewest"}
"""Fields that are no arguments of `covey.join`."""


def _policy_text(compress: CompressValue) -> str:
    from covey.compress.policy import make_policy  # slow to load, and most programs do not need it

    return str(make_policy(compress))


@dataclass(frozen=True, kw_only=True)
class JoinTarget:
    """What a process joins: a run of a cluster, or the rank that a launcher gave it; and how.

    Two equal targets are served by one group.
    """

    config: GroupConfig
    run: WantedRun | None = None
    """The run of a cluster; None under a launcher."""
    launched: LaunchedRank | None = None
    """The rank that a launcher gave this process; None in a run of a cluster."""
    options: ClusterOptions = field(default_factory=ClusterOptions)
    wait: float = field(compare=False)
    """Seconds to wait for the others."""
    is_elastic: bool = field(default=False, compare=False)
    """Whether the process waits for a seat in a running generation as long as the run lasts."""
    is_returning: bool = field(default=False, compare=False)
    """Whether the process was in the run before, or waited for it."""
    functions: FunctionRegistry | None = field(default=None, compare=False)
    """Functions that other nodes may call from the first moment on."""
