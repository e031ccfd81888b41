"""The table of all settings: name, kind, default, what each does, and where it may be set.

A setting is one row. From the rows are made: the fields of `GroupConfig`, the variables and the keys of covey.toml
(`base.config`), the keyword arguments of `covey.join` with their signature and documentation (`joining.request`), the
options of `covey run` and `covey up` with their help (`cli.options`), and docs/reference/settings.md.

A value comes from the first of these that has one: an option of a command or an argument of `covey.join`, the variable
`COVEY_NAME`, covey.toml in the working folder, covey.toml in the user's configuration folder, the default.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from covey.base.errors import ConfigError
from covey.base.lane_kinds import LANE_KINDS, LaneName, LaneReach, named_kinds
from covey.base.numbers import MAX_MEMBERS
from covey.base.setting_kinds import (
    AnyText,
    ByteCount,
    FilePath,
    Flag,
    Kind,
    Listing,
    Number,
    OneOf,
    Rate,
    Seconds,
    Whole,
    show_bytes,
    show_rate,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Lanes: TypeAlias = Literal["auto"] | LaneName
OnLoss: TypeAlias = Literal["raise", "continue"]
"""What a group does when a rank is lost."""
Quorum: TypeAlias = Literal["majority", "any"]
PlanChoice: TypeAlias = Literal["auto", "plain"]
Striping: TypeAlias = Literal["auto", "off"]
TopologyChoice: TypeAlias = Literal["auto", "full", "kregular", "hypercube"]

LANES: Final = ("auto", *named_kinds())
_IN_CLEAR: Final = tuple(name for name in LANES if name in LANE_KINDS and not LANE_KINDS[name].is_sealed)
_OPTIONAL: Final = tuple(name for name in LANES if name in LANE_KINDS and LANE_KINDS[name].extra)
_OF_THREADS: Final = tuple(kind.name for kind in LANE_KINDS.values() if kind.reach is LaneReach.THREADS)
KERNEL_COPY: Final = ("never", "auto", "always")
POOL_PROFILES: Final = ("training", "inference", "small")
ON_LOSS: Final[tuple[OnLoss, ...]] = get_args(OnLoss)
QUORUMS: Final[tuple[Quorum, ...]] = get_args(Quorum)
PLANS: Final[tuple[PlanChoice, ...]] = get_args(PlanChoice)
STRIPE: Final[tuple[Striping, ...]] = get_args(Striping)
TOPOLOGY: Final[tuple[TopologyChoice, ...]] = get_args(TopologyChoice)
STREAMS_LIMIT: Final = 64
NODE_PORTS: Final = range(47700, 47732)
"""The ports of cluster nodes: a node listens on the first free one, so that a seed's port is easy to guess."""
RELAY_PORT: Final = 47690
"""The port of a relay, unless its address says another."""
SETTINGS_FILE: Final = "covey.toml"
ANY_FILE: Final = "any"
"""A setting that both files may have."""
USER_FILE: Final = "user"
"""A setting that only the file in the user's configuration folder may have: see `Setting.files`."""
NO_FILE: Final = ""

RUN: Final = "run"
UP: Final = "up"

_LARGEST: Final = 1 << 30
_Value = TypeVar("_Value")


def _listed(names: Sequence[str]) -> str:
    *most, last = (f"`{name}`" for name in names)
    return f"{', '.join(most)} and {last}" if most else last


class Option(NamedTuple):
    """The option of commands that sets a setting; its help is the first sentence of the setting's meaning."""

    flag: str = ""
    """Empty: two dashes and the name of the setting."""
    metavar: str = ""
    """Empty: that of the kind."""
    default: str = ""
    """What the help shows as the default; empty: the default of the setting."""
    of_cluster: bool = False
    """Whether it asks for a run of the cluster: `covey run -n` without such an option starts ranks on this machine."""
    of_machine: bool = False
    """Whether it is about this machine only, so that it is not for runs that are started on several."""
    commands: tuple[str, ...] = (RUN,)


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    """In covey.toml and `covey config`."""
    kind: Kind[Any]
    default: Any
    """None: there is none."""
    meaning: str
    section: str
    """The heading under which the documentation has it."""
    argument: str = ""
    """The argument of `covey.join`, if it has one of its own; "settings" if it is a key of `settings=`."""
    files: str = NO_FILE
    """Which covey.toml may have it. The file of a working folder may come from a stranger, with the program in that
    folder, so it must not turn encryption off, or send proofs of the secret to machines of its choice."""
    is_shared: bool = False
    """Whether all ranks of a run need the same value; the ranks compare it before they form a group."""
    of_group: bool = False
    """Whether it is a field of GroupConfig."""
    option: Option | None = None

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"COVEY_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The option of commands; "" if there is none."""
        if self.option is None:
            return ""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """The default as a person would write it; "" if there is none."""
        return self.show(self.default)

    def show(self, value: Any) -> str:
        """Return a value as a person would write it."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return str(int(value))
        if isinstance(self.kind, ByteCount) and isinstance(value, int):
            return show_bytes(value)
        if isinstance(self.kind, Rate) and isinstance(value, int):
            return show_rate(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def _own(section: str, kind: Kind[_Value], default: _Value, meaning: str, *, argument: str = "", **rest: Any) -> _Value:
    """Return a field of GroupConfig: a setting with an argument of `join`, by default of the same name."""
    given = {"files": ANY_FILE, "argument": argument} | rest
    row = {"section": section, "kind": kind, "default": default, "meaning": meaning, "of_group": True, **given}
    return field(default=default, metadata=row)


def _tuned(section: str, kind: Kind[_Value], default: _Value, meaning: str, **rest: Any) -> _Value:
    """Return a field of GroupConfig: a setting that is a key of `settings=` of `join`."""
    return _own(section, kind, default, meaning, argument="settings", **rest)


def _other(section: str, name: str, kind: Kind[Any], default: Any, meaning: str, **rest: Any) -> Setting:
    """Return a setting that is not about a group."""
    return Setting(section=section, name=name, kind=kind, default=default, meaning=meaning, **rest)


_JOINING, _NETWORK, _OPERATIONS = "Joining", "Network", "Operations"
_LOSSES, _HEALTH, _SIZES, _MACHINE = "Losses", "Health", "Sizes", "This machine"
_SECTIONS: Final = (_JOINING, _NETWORK, _OPERATIONS, _LOSSES, _HEALTH, _SIZES, _MACHINE)
"""The order of the documentation."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How the ranks of a run reach each other, how long they wait, and how they work."""

    # fmt: off
    interfaces: str = _own(
        _NETWORK, Listing("patterns, separated by commas"), "",
        "Network interfaces to use: `eth*,!docker*` or `10.0.0.0/8`; empty: all that are up.",
        option=Option(of_cluster=True, commands=(RUN, UP)),
    )
    metered: str = _tuned(
        _NETWORK, Listing("patterns, separated by commas"), "wwan*,ppp*,rmnet*",
        "Network interfaces on which bytes cost money, as in `interfaces`; empty: none. If a rank uses one, nothing is "
        "sent only to measure the links of its group.",
    )
    map_port: bool = _tuned(
        _NETWORK, Flag(), False,
        "Ask the router (PCP, NAT-PMP, UPnP) to pass connections from outside on to this node: this opens a port to "
        "the internet.",
        files=USER_FILE, option=Option(of_cluster=True, of_machine=True, commands=(RUN, UP)),
    )
    lanes: str = _own(
        _NETWORK, OneOf(LANES, hidden=_OF_THREADS), "auto",
        f"The kind of lane between all ranks; `auto` is the fastest safe one for each pair. {_listed(_IN_CLEAR)} are "
        f"for one host. {_listed(_OPTIONAL)} needs the extra of this name, and continues when the address of a machine "
        "changes.",
        is_shared=True, option=Option(),
    )
    streams: str = _own(
        _NETWORK, Number(1, STREAMS_LIMIT, "auto"), "auto",
        "Connections per secure lane; `auto` uses more for longer round trips, and two if each rank has two cores. "
        "Between distant machines it tries more, and keeps them if they are clearly faster (Linux only). "
        "With the executor in Python, it is one.",
    )
    stripe: str = _own(
        _NETWORK, OneOf(STRIPE), "auto",
        "Whether a secure lane uses several networks at once, such as two cables, or Wi-Fi and a cable: `auto` does if "
        "that is measured to be faster. It needs Linux and the compiled executor.",
        option=Option(),
    )
    topology: str = _own(
        _NETWORK, OneOf(TOPOLOGY), "auto",
        "Which control links stay open in a run of a cluster with `on_loss=\"continue\"`: `full` keeps all; `kregular` "
        "and `hypercube` keep those of each node with a few others and with the leader, and open others when there is "
        "something to say; `auto` is `kregular` for more than 32 nodes.",
    )
    limit: int = _own(
        _NETWORK, Rate(100_000, 10**12), 0,
        "How much the processes of a run on this machine send over TCP together, and how much they receive: `20M` is "
        "20 million bits a second, `2.5MB` as much in bytes. Calls come before tensors. Linux only.",
        option=Option(default="no limit"),
    )
    insecure: bool = _own(
        _NETWORK, Flag(), False,
        "Allow unencrypted connections between the machines of a launcher's run.",
        files=USER_FILE, option=Option(of_machine=True),
    )
    tls_ca: str = _tuned(
        _NETWORK, FilePath(), "",
        "PEM file with the authority of your organisation: nodes of the cluster need a certificate from it, too.",
        files=USER_FILE, option=Option(of_cluster=True),
    )
    tls_cert: str = _tuned(
        _NETWORK, FilePath(), "", "PEM file with the certificate of this machine.",
        files=USER_FILE, option=Option(of_cluster=True),
    )
    tls_key: str = _tuned(
        _NETWORK, FilePath(), "", "PEM file with the key of that certificate.",
        files=USER_FILE, option=Option(of_cluster=True),
    )
    timeout: float = _own(
        _OPERATIONS, Seconds(), 1800.0,
        "How long an operation may take before it raises DeadlineError. A lost process is noticed long before.",
        argument="op_timeout",
    )
    warn_after: float = _tuned(
        _OPERATIONS, Seconds(), 30.0,
        "How long an operation waits before a log line says for which ranks, and how often the line is repeated.",
    )
    compress: str = _own(
        _OPERATIONS, AnyText("a codec or a policy"), "",
        "How gradients are compressed: `int8`, or `embed.*=topk(0.01), *=int8`; empty: not at all. Applies to "
        "`sync_gradients` and to what trains with torch; sums of other arrays are exact. Ranks that differ raise "
        "MismatchError in the first operation.",
        option=Option(metavar="CODEC"),
    )
    check_every: int = _tuned(
        _OPERATIONS, Whole(0, _LARGEST), 0,
        "Every how many steps `covey.torch` compares the parameters of all ranks, and raises MismatchError with the "
        "ranks that differ; 0: never, or with `COVEY_DEBUG=1` in every step.",
    )
    plan: str = _own(
        _OPERATIONS, OneOf(PLANS, hidden=("always",)), "auto",
        "How large arrays are added between three or more ranks on several machines: `auto` measures the links, and "
        "uses the plan that fits them; `plain` treats all links alike.",
        is_shared=True,
    )
    call_handlers: int = _tuned(
        _OPERATIONS, Whole(1, 4096), 64,
        "How many functions run at a time for calls of other nodes; further calls wait, and nodes are served in turn.",
    )
    call_bytes: int = _tuned(
        _OPERATIONS, ByteCount(1, 1 << 40), 1 << 30,
        "How many bytes the arguments or the result of a call may have, and all large arguments that a node holds.",
    )
    pool_bytes: int = _tuned(
        _OPERATIONS, ByteCount(1, 1 << 50), 4 << 30,
        "While payloads in the memory of a process have so many bytes, large arguments of further calls to it wait at "
        "their callers. Payloads that the program has asked for count, and never wait.",
    )
    pool_profile: str = _tuned(
        _OPERATIONS, OneOf(POOL_PROFILES), "training",
        "How much memory for payloads a process keeps for later ones: up to 256 MiB (`training`), 64 MiB "
        "(`inference`) or 8 MiB (`small`), in blocks of up to 64, 8 or 1 MiB.",
    )
    bucket_bytes: int = _tuned(
        _OPERATIONS, ByteCount(1, _LARGEST), 25 << 20,
        "How much `sync_gradients` sends in one operation, unless the call says it. Ranks that differ raise "
        "MismatchError in the first call.",
    )
    on_loss: OnLoss = _own(  # noqa: RUF009 - words are immutable
        _LOSSES, OneOf(ON_LOSS), "raise",
        "When a member is lost: `raise` an error, or `continue` among the remaining ranks.",
        is_shared=True, option=Option(default="what the script says"),
    )
    patience: float = _own(
        _LOSSES, Seconds(), 30.0,
        "How long members wait for a quorum, or for a silent member, before they give up with QuorumLostError.",
        option=Option(),
    )
    quorum: str = _own(
        _LOSSES, OneOf(QUORUMS), "majority",
        "Which members may continue: a `majority` of the last view, or `any`: if the network splits, both sides "
        "continue.",
        option=Option(),
    )
    heartbeat: float = _tuned(
        _HEALTH, Seconds(0.1), 0.5,
        "After how much silence a peer is pinged. After three times that, a peer is suspected; on a link with a long "
        "or changing round trip, after up to two thirds of `host_silence`.",
    )
    host_silence: float = _tuned(
        _HEALTH, Seconds(1.0), 4.5,
        "After how much silence a machine is lost. At least 4.5 times `heartbeat`.",
    )
    process_silence: float = _tuned(
        _HEALTH, Seconds(1.0), 15.0,
        "After how much silence a process is lost whose machine is heard: longer than the program's longest call "
        "that keeps other threads from running. At least `host_silence`.",
    )
    exchange_bytes: int = _tuned(
        _SIZES, ByteCount(0, _LARGEST), 256 << 10,
        "Up to this size, two ranks add by swapping whole arrays; above it, halves.", is_shared=True,
    )
    doubling_bytes: int = _tuned(
        _SIZES, ByteCount(0, _LARGEST), 256 << 10,
        "Up to this size, more than two ranks add in the fewest rounds; above it, with the fewest bytes.",
        is_shared=True,
    )
    tree_bytes: int = _tuned(
        _SIZES, ByteCount(0, _LARGEST), 128 << 10,
        "Up to this size, `broadcast` and `reduce` use a binomial tree; above it, a pipeline.", is_shared=True,
    )
    segment_bytes: int = _tuned(
        _SIZES, ByteCount(4096, _LARGEST), 4 << 20,
        "The size of one transfer of a pipeline: larger ones need fewer calls, smaller ones fill the pipeline sooner.",
        is_shared=True,
    )
    cached_segment_bytes: int = _tuned(
        _SIZES, ByteCount(4096, _LARGEST), 256 << 10,
        "The same through shared memory, among more than two ranks: what a rank has added should be in its cache when "
        "it is sent on.",
        is_shared=True,
    )
    ring_bytes: int = _tuned(
        _SIZES, ByteCount(16 << 10, 64 << 20, 4096), 512 << 10,
        "The memory of one direction of a lane in shared memory. After the first 64 MiB of a process, lanes get at "
        "most 128 KiB.",
        is_shared=True,
    )
    kernel_copy: str = _tuned(
        _SIZES, OneOf(KERNEL_COPY), "auto",
        "Whether the kernel copies large transfers between ranks of one host, once, instead of a ring twice; on Linux, "
        "where it is allowed. `auto` measures which is faster.",
    )
    eager_bytes: int = _tuned(
        _SIZES, ByteCount(0, 1 << 20), 64 << 10,
        "Messages up to this size are sent at once; larger ones wait for the matching `recv`.", is_shared=True,
    )
    credit_bytes: int = _tuned(
        _SIZES, ByteCount(64 << 10, _LARGEST), 4 << 20,
        "How many bytes of messages a rank keeps from another rank that no `recv` has taken; then `send` waits.",
        is_shared=True,
    )
    store_bytes: int = _tuned(
        _SIZES, ByteCount(1 << 20, 1 << 40), 64 << 20,
        "How much the store of a run may hold, and each store of torch: keys and values of all entries. Every member "
        "has a copy.",
        is_shared=True,
    )
    store_file: str = _tuned(
        _MACHINE, FilePath(), "",
        "A file for the entries of the store of a run: the member that orders its changes writes it, half a second "
        "after a change and when it leaves, and reads it when a run begins. One run at a time may use a file.",
        files=USER_FILE,
    )
    # fmt: on

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, SETTINGS[each.name].kind.read(each.name, getattr(self, each.name)))
        if self.host_silence < 4.5 * self.heartbeat:
            raise ConfigError(
                f"host_silence={self.host_silence:g} must be at least 4.5 times heartbeat={self.heartbeat:g}: a peer "
                "is pinged and suspected before its machine is lost"
            )
        if self.process_silence < self.host_silence:
            raise ConfigError(
                f"process_silence={self.process_silence:g} must be at least host_silence={self.host_silence:g}"
            )

    def agreed(self) -> str:
        """Return the settings that all ranks must share and that are not at their defaults, as one text.

        `lanes` and `on_loss` are not in it: ranks tell each other these in fields of their own.
        """
        shared = [each for each in SETTINGS.values() if each.is_shared and each.name not in ("lanes", "on_loss")]
        values = {each.name: getattr(self, each.name) for each in shared}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value != SETTINGS[name].default)


_OTHERS: Final = (
    _other(
        _JOINING, "run", AnyText(), None,
        "The run's name; nodes of a cluster that give the same name are in it together.",
        argument="run", option=Option(metavar="RUN", default="the script's, without .py", of_cluster=True),
    ),
    _other(
        _JOINING, "cluster", AnyText(), None, "The cluster, if this machine is in several.",
        argument="cluster", option=Option(metavar="NAME", of_cluster=True, commands=(RUN, UP)),
    ),
    _other(
        _JOINING, "secret", AnyText("a join code, 64 hexadecimal digits or a passphrase"), None,
        "The secret of the cluster, if this machine is not enrolled. `COVEY_SECRET_FILE` is better.",
        argument="secret",
    ),
    _other(
        _JOINING, "secret_file", FilePath(), None,
        "A file with the secret: it belongs to you, has mode 0600 and is not a link.",
    ),
    _other(
        _JOINING, "run_size", Whole(1, MAX_MEMBERS), None, "The exact number of nodes of the run.",
        argument="size", option=Option("--size", of_cluster=True),
    ),
    _other(
        _JOINING, "run_min_size", Whole(1, MAX_MEMBERS), 2,
        "The fewest nodes with which the run begins; under `covey run`, on at least 2 machines.",
        argument="min_size", option=Option("--min", of_cluster=True),
    ),
    _other(
        _JOINING, "run_max_size", Whole(1, MAX_MEMBERS), None, "The most nodes in the run.",
        argument="max_size", option=Option("--max", of_cluster=True),
    ),
    _other(
        _JOINING, "join_timeout", Seconds(), 60.0,
        "How long to wait for the other nodes. Under a launcher, the default is 300.",
        argument="timeout", files=ANY_FILE, option=Option("--wait", of_cluster=True),
    ),
    _other(
        _JOINING, "tie_breaker", AnyText("`here`, or the name of a node or host"), None,
        "The node that breaks ties when half of the members are left. By default, it is rank 0.",
        argument="tie_breaker", files=ANY_FILE,
        option=Option(metavar="here|NAME", default="rank 0", of_cluster=True),
    ),
    _other(
        _NETWORK, "seeds", Listing("addresses `host:port`, separated by commas"), None,
        "Addresses `host:port` of nodes, for networks without multicast.",
        argument="seeds", files=USER_FILE, option=Option(of_cluster=True, commands=(RUN, UP)),
    ),
    _other(
        _NETWORK, "relays", Listing("addresses `host:port`, separated by commas"), None,
        "Relays (`covey relay`), through which nodes meet that cannot connect with each other.",
        files=USER_FILE, option=Option("--relay", of_cluster=True, commands=(RUN, UP)),
    ),
    _other(
        _NETWORK, "port", Number(1, 65535), str(NODE_PORTS[0]),
        f"The first of {len(NODE_PORTS)} ports to try for listening.",
        files=ANY_FILE,
    ),
    _other(
        _MACHINE, "home", FilePath(), None,
        "The configuration folder; default: `covey` in `$XDG_CONFIG_HOME`, or `~/.config/covey`.",
    ),
    _other(
        _MACHINE, "events", FilePath(), None, "A file to which losses and recoveries are appended, as JSON."
    ),
    _other(
        _MACHINE, "keep_output", Flag(), True,
        "Whether `covey run` keeps the output of each rank in the configuration folder, for `covey logs`.",
        files=ANY_FILE,
    ),
    _other(
        _MACHINE, "keep_output_bytes", ByteCount(64 << 10, 1 << 30), 4 << 20,
        "How much is kept of the output of each rank, the latest.", files=ANY_FILE,
    ),
    _other(
        _MACHINE, "keep_output_total", ByteCount(1 << 20, 1 << 40), 512 << 20,
        "How much is kept of the output of all runs on this machine; the oldest is removed first.", files=ANY_FILE,
    ),
    _other(
        _MACHINE, "share_output", Flag(), False,
        "Let every machine of the cluster read what the processes here print, in `covey logs` and on the page. Output "
        "may hold secrets. Needs `keep_output`.",
        files=USER_FILE, option=Option(of_cluster=True),
    ),
    _other(
        _MACHINE, "data_folder", FilePath(), None,
        "The folder for data sets that other machines push to this one; the default is `data` in the configuration "
        "folder.",
        files=USER_FILE,
    ),
    _other(
        _MACHINE, "data_total", ByteCount(1 << 20, 1 << 50), 256 << 30,
        "How much data sets that other machines push to this one may take here, all together.", files=USER_FILE,
    ),
    _other(
        _MACHINE, "only_on_power", Flag(), False,
        "Take part in a run of the cluster only while this machine has power: on battery its processes leave in order, "
        "and they return with power.",
        files=ANY_FILE, option=Option(of_cluster=True, commands=(RUN, UP)),
    ),
    _other(
        _MACHINE, "while_idle", Flag(), False,
        "Take part in a run of the cluster only while this machine is idle: when a person uses it, its processes leave "
        "in order, and they return when it is idle again (systemd-logind or macOS says so).",
        files=ANY_FILE, option=Option(of_cluster=True, commands=(RUN, UP)),
    ),
    _other(
        _MACHINE, "reports", FilePath(), None,
        "A file to which what programs report (`group.report`) is appended, as JSON.",
    ),
    _other(
        _MACHINE, "tensorboard", FilePath(), None,
        "A folder in which every rank that reports writes an event file of TensorBoard.",
    ),
    _other(
        _MACHINE, "as", OneOf(("gloo",)), None,
        "The backend of torch whose place covey takes: programs that ask torch for it by name get covey. "
        "`covey.torch.replace` does the same from a program.",
        option=Option(metavar="gloo"),
    ),
    _other(
        _MACHINE, "estimate", Flag(), False,
        "1: a program that trains with torch ends after its first steps. Rank 0 then prints how fast each way to train "
        "would be. `covey estimate` sets it.",
        option=Option(),
    ),
    _other(
        _MACHINE, "native", Flag(), True,
        "0: move data with Python instead of the compiled executor; `covey --version` shows which one is used.",
    ),
    _other(
        _MACHINE, "warm_start", Flag(), None,
        "Whether `covey run -n` forks its ranks from one process; default: with more ranks than cores.",
    ),
    _other(_MACHINE, "ssh", AnyText("a command"), "ssh", "The program with which `covey run --hosts` connects."),
    _other(
        _MACHINE, "debug", Flag(), False,
        "1: show whole tracebacks of errors, and compare the parameters of all ranks in every step (`check_every`).",
    ),
)  # fmt: skip


def _table() -> dict[str, Setting]:
    rows = [*_OTHERS]
    for each in fields(GroupConfig):
        row = Setting(name=each.name, **each.metadata)
        rows.append(row if row.argument else row._replace(argument=each.name))
    return {row.name: row for row in sorted(rows, key=lambda row: _SECTIONS.index(row.section))}


SETTINGS: Final[Mapping[str, Setting]] = _table()


def differences_of(here: str, there: str) -> list[tuple[str, str, str]]:
    """Return the settings in which two ranks differ, each with its value here and there.

    `here` and `there` are what `GroupConfig.agreed` returned on the two ranks.
    """
    mine, theirs = (dict(item.partition("=")[::2] for item in text.split(", ") if item) for text in (here, there))
    defaults = {setting.name: str(setting.default) for setting in SETTINGS.values()}
    pairs = [(name, defaults | mine, defaults | theirs) for name in sorted({*mine, *theirs})]
    return [(name, ours.get(name, "unknown"), other.get(name, "unknown")) for name, ours, other in pairs
            if ours.get(name) != other.get(name)]  # fmt: skip


def suggestion(name: str, known: Any) -> str:
    """Return "; did you mean NAME?" with the known name that is most like `name`, or ""."""
    import difflib  # rarely needed, and slow to load

    near = difflib.get_close_matches(str(name), sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
