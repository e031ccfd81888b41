"""What a program asks `covey.join` for, and what that means in the environment of its process.

`find_placed_rank` takes the rank of this process from `rank=`, `size=`, `address=` and `peers=`.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Mapping, Sequence  # noqa: TC003 - fields of classes
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar

from covey.base.config import GroupConfig, from_argument, group_config, parse_seed
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS, suggestion
from covey.net.discovery.host_rendezvous import rendezvous_folder
from covey.runtime.environment import (
    ClusterOptions,
    LaunchedRank,
    WantedRun,
    find_launched_rank,
    find_run,
    is_loopback,
    launcher_wait,
    restarts,
)

if TYPE_CHECKING:
    from covey.base.config import Seed
    from covey.base.settings import Lanes, OnLoss, PlanChoice, Quorum, Setting, Striping, TopologyChoice
    from covey.compress.policy import CompressValue
    from covey.runtime.calls.functions import FunctionRegistry

    _Joining = TypeVar("_Joining", bound=Callable[..., Any])

PLACING_NAMES = ("rank", "address", "peers")
"""The arguments that place a process; `size` goes with them."""
_CLUSTER_ARGUMENTS = ("run", "min_size", "max_size", "tie_breaker", "new")
OTHER_ARGUMENTS: Final = {
    "new": "Give up an earlier run of this name that this machine knows of and that is not known to be over. Without "
    "it, this process waits for that run.",
    "rank": "The rank of this process among `size` ranks, which meet at `address`.",
    "address": "Where rank 0 listens, `host:port`. With a loopback address, all ranks are on this host, and no port is "
    "opened. Otherwise all machines need the secret of the cluster, or `insecure`.",
    "peers": "Where every rank listens, in the order of ranks, instead of `size` and `address`. `rank` may be left out "
    "if exactly one of the addresses is of this machine.",
    "settings": 'Values of other settings by name, as in `settings={"segment_bytes": "1MiB"}`. The documentation has '
    "a table of all settings; `covey config` prints those that are in effect.",
}
"""Arguments of `covey.join` that are not settings, and what they mean."""
_RUN_ARGUMENTS = ("run", "size", "min_size", "max_size", "timeout", "tie_breaker", "new")


def find_placed_rank(asked: Mapping[str, Any]) -> LaunchedRank | None:
    """Return the rank that arguments of `join` describe; None if they describe none.

    Raises:
        ConfigError: they contradict themselves, or say too little.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if not given.keys() & {*PLACING_NAMES}:
        return None
    if wrong := given.keys() & {*_CLUSTER_ARGUMENTS}:
        raise ConfigError(
            f"{min(wrong)}= is for runs of a cluster, whose nodes agree on their ranks; leave it out, or leave out "
            f"{min(given.keys() & {*PLACING_NAMES})}="
        )
    if "peers" in given:
        if "address" in given:
            raise ConfigError("peers= says where every rank listens, address= where rank 0 does; give one of them")
        return _among_peers(given["peers"], given.get("rank"), given.get("size"))
    if missing := {"rank", "size", "address"} - given.keys():
        raise ConfigError(
            f"{min(missing)}= is missing: rank=, size= and address= (where rank 0 listens, host:port) belong together"
        )
    rank, size = _whole("rank", given["rank"]), _whole("size", given["size"])
    address = _parse("address", given["address"])
    return _placed(f"address-{address.host}-{address.port}", rank, size, address, ())


def _among_peers(listed: Sequence[str], rank: Any, size: Any) -> LaunchedRank:
    if isinstance(listed, str):
        raise ConfigError("peers= is a list of addresses: peers=['10.0.0.1:29400', '10.0.0.2:29400']")
    peers = tuple(_parse("peers", each) for each in listed)
    if not peers or len(set(peers)) < len(peers):
        raise ConfigError("peers= needs the address of every rank, host:port, each once")
    if size is not None and _whole("size", size) != len(peers):
        raise ConfigError(f"size={size} and the {len(peers)} addresses of peers= contradict each other")
    own = _own_position(peers) if rank is None else _whole("rank", rank)
    return _placed(f"peers-{peers[0].host}-{peers[0].port}", own, len(peers), peers[0], peers)


def _own_position(peers: Sequence[Seed]) -> int:
    """Return the position of the only address that belongs to this machine."""
    own = [position for position, peer in enumerate(peers) if _is_of_this_machine(peer.host)]
    if len(own) != 1:
        found = "none of them is" if not own else f"{len(own)} of them are"
        raise ConfigError(f"peers= has {len(peers)} addresses, and {found} of this machine; give rank=, too")
    return own[0]


def _is_of_this_machine(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:  # a name that only other machines know
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _placed(name: str, rank: int, size: int, first: Seed, peers: tuple[Seed, ...]) -> LaunchedRank:
    if all(is_loopback(peer.host) for peer in (first, *peers)):
        folder = str(rendezvous_folder(name)) if size > 1 else ""
        return LaunchedRank(rank=rank, size=size, local_rank=rank, local_size=size, folder=folder, name=name)
    listens_at = tuple((peer.host, peer.port) for peer in peers or (first,))
    return LaunchedRank(rank=rank, size=size, local_rank=None, listens_at=listens_at, name=name)


def _parse(what: str, text: Any) -> Seed:
    forms = f"{what}: {text!r} is not an address; write host:port or [IPv6]:port, like 192.168.1.5:29400"
    if not isinstance(text, str) or not text.rpartition(":")[2].isdigit() or (text.count(":") > 1 and "]" not in text):
        raise ConfigError(forms)
    try:
        return parse_seed(text)
    except ConfigError:
        raise ConfigError(forms) from None


def _whole(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < (what == "size"):
        raise ConfigError(f"{what}={value!r} must be a whole number from {int(what == 'size')} up")
    return value


class JoinArguments(TypedDict, total=False):
    """The keyword arguments of `covey.join`, for type checkers and editors; None is the same as not given.

    The names are those of the table of settings and of `OTHER_ARGUMENTS`, which decide what `join` accepts; a test
    compares them with these.
    """

    cluster: str | None
    min_size: int | None
    max_size: int | None
    size: int | None
    timeout: float | None
    secret: bytes | str | None
    seeds: Sequence[str] | None
    interfaces: str | None
    lanes: Lanes | None
    streams: int | str | None
    stripe: Striping | None
    topology: TopologyChoice | None
    limit: int | str | None
    op_timeout: float | None
    insecure: bool | None
    on_loss: OnLoss | None
    patience: float | None
    quorum: Quorum | None
    compress: CompressValue
    plan: PlanChoice | None
    tie_breaker: str | None
    new: bool | None
    rank: int | None
    address: str | None
    peers: Sequence[str] | None
    settings: Mapping[str, Any] | None


def own_arguments() -> dict[str, Setting]:
    """Return the settings that have an argument of `covey.join` of their own, by that argument."""
    return {row.argument: row for row in SETTINGS.values() if row.argument not in ("", "settings")}


def takes_join_arguments(**defaults: Any) -> Callable[[_Joining], _Joining]:
    """Decorate a function that takes `JoinArguments`: its signature and documentation name each of them.

    `defaults` are those that the function has instead of None. Explanations of the arguments that the docstring does
    not mention are put before its line `arguments:`.
    """

    def decorate(function: _Joining) -> _Joining:
        own = own_arguments()
        shown = inspect.signature(function)
        kept = [each for each in shown.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        names = [name for name in (*own, *OTHER_ARGUMENTS) if name not in shown.parameters]
        made = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name),
                annotation=getattr(JoinArguments.__annotations__.get(name), "__forward_arg__", Any),
            )
            for name in names
        ]
        function.__signature__ = shown.replace(parameters=[*kept, *made])  # type: ignore[attr-defined]
        doc = function.__doc__ or ""
        untold = [name for name in names if f"\n        {name}: " not in doc]
        lines = "".join(f"        {name}: {_explained(own.get(name), name)}\n" for name in untold)
        begin, line, end = doc.partition("        arguments: ")
        function.__doc__ = begin + lines + line + end
        return function

    return decorate


def _explained(setting: Setting | None, name: str) -> str:
    if setting is None:
        return OTHER_ARGUMENTS[name]
    default = f"; default: {setting.shown_default}" if setting.shown_default else ""
    return f"{setting.meaning.removesuffix('.')} ({setting.variable}{default})."


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JoinRequest:
    """The arguments of `covey.join` that were given. Where there is none, the environment or a default decides."""

    asked: Mapping[str, Any] = field(default_factory=dict)
    """By name; never None."""
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
        known = {*own_arguments(), *OTHER_ARGUMENTS}
        if unknown := arguments.keys() - known:
            raise TypeError(f"join has no argument {min(unknown)!r}{suggestion(min(unknown), known)}")
        return cls(asked={name: value for name, value in arguments.items() if value is not None})

    def resolve(self, env: Mapping[str, str]) -> JoinTarget:
        """Return what to join, from this request and the environment.

        Raises:
            ConfigError: they contradict themselves or each other.
        """
        explicit = {row.name: self.asked[name] for name, row in own_arguments().items() if name in self.asked}
        if "compress" in explicit:
            explicit["compress"] = _policy_text(explicit["compress"])
        of_group = {name: value for name, value in explicit.items() if SETTINGS[name].of_group}
        config = group_config(env, **of_group, **from_argument(self.asked.get("settings", {})))
        if config.compress:
            _policy_text(config.compress)  # raises for a codec that does not exist
        asked = {name: value for name, value in self.asked.items() if name in _RUN_ARGUMENTS}
        launched = find_placed_rank({name: self.asked.get(name) for name in (*_RUN_ARGUMENTS, *PLACING_NAMES)})
        wanted = find_run(env, asked) if launched is None else None
        worker = env.get("COVEY_WORKER", "") if launched is None and wanted is None else ""
        if launched is None and wanted is None and not worker:
            launched = find_launched_rank(env)
        if launched is not None and self.is_newcomer:
            launched = replace(launched, is_restarted=True)
        if launched is not None:
            launched = replace(launched, fewest=self.fewest)
        cluster, secret, seeds = (self.asked.get(name) for name in ("cluster", "secret", "seeds"))
        return JoinTarget(
            config=config,
            run=wanted,
            launched=launched,
            worker=worker,
            options=ClusterOptions(cluster, secret, None if seeds is None else tuple(seeds)),
            wait=wanted.timeout if wanted is not None else launcher_wait(env, self.asked.get("timeout")),
            is_elastic=self.is_elastic,
            is_returning=self.is_newcomer or restarts(env) > 0,
            functions=self.functions,
        )


def _policy_text(compress: CompressValue) -> str:
    from covey.compress.policy import make_policy  # slow to load, and most programs do not need it

    return str(make_policy(compress))


@dataclass(frozen=True, kw_only=True)
class JoinTarget:
    """What a process joins: a run of a cluster, the rank that a launcher gave it, or that of a worker; and how.

    Two equal targets are served by one group.
    """

    config: GroupConfig
    run: WantedRun | None = None
    """The run of a cluster; None under a launcher."""
    launched: LaunchedRank | None = None
    """The rank that a launcher gave this process; None in a run of a cluster."""
    worker: str = ""
    """The id of the worker that this process is, if `covey worker` started it: a coordinator gives it its rank."""
    options: ClusterOptions = field(default_factory=ClusterOptions)
    wait: float = field(compare=False)
    """Seconds to wait for the others."""
    is_elastic: bool = field(default=False, compare=False)
    """Whether the process waits for a seat in a running generation as long as the run lasts."""
    is_returning: bool = field(default=False, compare=False)
    """Whether the process was in the run before, or waited for it."""
    functions: FunctionRegistry | None = field(default=None, compare=False)
    """Functions that other nodes may call from the first moment on."""
