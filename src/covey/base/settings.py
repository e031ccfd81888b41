"""The table of all settings: name, kind, default, what each does, and where it may be set.

A value comes from the first of these that has one: an argument of `covey.join`, the variable `COVEY_NAME`, covey.toml
in the working folder, covey.toml in the user's configuration folder, the default. Nothing here reads the environment
or a file: callers pass what they found there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.limits import MAX_MEMBERS
from covey.base.setting_kinds import (
    AnyText,
    ByteCount,
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
    from collections.abc import Mapping

LANES: Final = ("auto", "shm", "unix", "tcp", "secure", "quic")
KERNEL_COPY: Final = ("never", "auto", "always")
ON_LOSS: Final = ("raise", "continue")
QUORUMS: Final = ("majority", "any")
PLANS: Final = ("auto", "plain")
STRIPE: Final = ("auto", "off")
TOPOLOGY: Final = ("auto", "full", "kregular", "hypercube")
STREAMS_LIMIT: Final = 64
PORTS: Final = range(47700, 47732)
"""The ports of cluster nodes: a node listens on the first free one, so that a seed's port is easy to guess."""
RELAY_PORT: Final = 47690
"""The port of a relay, unless its address says another."""
FILE: Final = "covey.toml"
ANY_FILE: Final = "any"
"""A setting that both files may have."""
USER_FILE: Final = "user"
"""A setting that only the file in the user's configuration folder may have: see `Setting.files`."""
NO_FILE: Final = ""

_LARGEST: Final = 1 << 30


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    """In covey.toml and `covey config`."""
    kind: Kind
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

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"COVEY_{self.name.upper()}"

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


def _of_group(section: str, name: str, kind: Kind, default: Any, meaning: str, **rest: Any) -> Setting:
    given = {"files": ANY_FILE, "argument": name} | rest
    return Setting(section=section, name=name, kind=kind, default=default, meaning=meaning, of_group=True, **given)


def _tuned(section: str, name: str, kind: Kind, default: Any, meaning: str, **rest: Any) -> Setting:
    return _of_group(section, name, kind, default, meaning, argument="settings", **rest)


def _variable(section: str, name: str, kind: Kind, default: Any, meaning: str, **rest: Any) -> Setting:
    return Setting(section=section, name=name, kind=kind, default=default, meaning=meaning, **rest)


_JOINING, _NETWORK, _OPERATIONS = "Joining", "Network", "Operations"
_LOSSES, _HEALTH, _SIZES, _MACHINE = "Losses", "Health", "Sizes", "This machine"

_ROWS: Final = (
    _variable(_JOINING, "run", AnyText(), None, "The run of the cluster to join.", argument="run"),
    _variable(
        _JOINING, "cluster", AnyText(), None, "Which cluster; default: the one this machine is in.", argument="cluster"
    ),
    _variable(
        _JOINING, "secret", AnyText("a join code, 64 hexadecimal digits or a passphrase"), None,
        "The secret of the cluster, if this machine is not enrolled. `COVEY_SECRET_FILE` is better.",
        argument="secret",
    ),
    _variable(
        _JOINING, "secret_file", AnyText("a path"), None,
        "A file with the secret: it belongs to you, has mode 0600 and is not a link.",
    ),
    _variable(
        _JOINING, "run_size", Number(1, MAX_MEMBERS), None, "The exact number of nodes of the run.", argument="size"
    ),
    _variable(
        _JOINING, "run_min_size", Number(1, MAX_MEMBERS), "2",
        "The fewest nodes with which the run begins; under `covey run`, on at least 2 machines.", argument="min_size",
    ),
    _variable(
        _JOINING, "run_max_size", Number(1, MAX_MEMBERS), None, "The most nodes in the run.", argument="max_size"
    ),
    _variable(
        _JOINING, "join_timeout", Seconds(), 60.0,
        "How long `join` waits for the other nodes; the default is 300 under a launcher.",
        argument="timeout", files=ANY_FILE,
    ),
    _variable(
        _JOINING, "tie_breaker", AnyText("`here`, or the name of a node or host"), None,
        "Which node breaks ties when half of the members are left; default: rank 0.",
        argument="tie_breaker", files=ANY_FILE,
    ),
    _variable(
        _NETWORK, "seeds", Listing("addresses `host:port`, separated by commas"), None,
        "Nodes to ask for others, for networks without multicast.", argument="seeds", files=USER_FILE,
    ),
    _variable(
        _NETWORK, "relays", Listing("addresses `host:port`, separated by commas"), None,
        "Relays (`covey relay`), through which nodes meet that cannot connect with each other.", files=USER_FILE,
    ),
    _of_group(
        _NETWORK, "interfaces", Listing("patterns, separated by commas"), "",
        "Network interfaces to use: `eth*,!docker*,10.0.0.0/8`; empty: all that are up.",
    ),
    _tuned(
        _NETWORK, "metered", Listing("patterns, separated by commas"), "wwan*,ppp*,rmnet*",
        "Network interfaces on which bytes cost money, as in `interfaces`; empty: none. If a rank uses one, nothing is "
        "sent only to measure the links of its group.",
    ),
    _variable(
        _NETWORK, "port", Number(1, 65535), str(PORTS[0]), f"The first of {len(PORTS)} ports to try for listening.",
        files=ANY_FILE,
    ),
    _tuned(
        _NETWORK, "map_port", Flag(), False,
        "Ask the router (PCP, NAT-PMP, UPnP) to pass connections from outside on to this node: this opens a port to "
        "the internet.",
        files=USER_FILE,
    ),
    _of_group(
        _NETWORK, "lanes", OneOf(LANES, hidden=("memory",)), "auto",
        "`auto` uses the fastest safe lane for each pair of ranks; the others force one kind. `shm`, `unix` and `tcp` "
        "are for one host. `quic` needs the extra of this name, and goes on when the address of a machine changes.",
        is_shared=True,
    ),
    _of_group(
        _NETWORK, "streams", Number(1, STREAMS_LIMIT, "auto"), "auto",
        "Connections per secure lane; `auto` uses more for longer round trips, and two if each rank has two cores. "
        "Between distant machines it tries more, and keeps them if they are clearly faster (Linux only).",
    ),
    _of_group(
        _NETWORK, "stripe", OneOf(STRIPE), "auto",
        "Whether a secure lane uses several networks at once, such as two cables, or Wi-Fi and a cable: `auto` does if "
        "that is measured to be faster. Linux only.",
    ),
    _of_group(
        _NETWORK, "topology", OneOf(TOPOLOGY), "auto",
        "Which control links stay open in a run of a cluster with `on_loss=\"continue\"`: `full` keeps all; `kregular` "
        "and `hypercube` keep those of each node with a few others and with the leader, and open others when there is "
        "something to say; `auto` is `kregular` for more than 32 nodes.",
    ),
    _of_group(
        _NETWORK, "limit", Rate(100_000, 10**12), 0,
        "How much the processes of a run on this machine send over TCP together, and how much they receive: `20M` is "
        "20 million bits a second, `2.5MB` as much in bytes. Calls come before tensors. Linux only.",
    ),
    _of_group(
        _NETWORK, "insecure", Flag(), False,
        "Allow unencrypted connections between the machines of a launcher's run.", files=USER_FILE,
    ),
    _tuned(
        _NETWORK, "tls_ca", AnyText("a path"), "",
        "PEM file with the authority of your organisation: nodes of the cluster need a certificate from it, too.",
        files=USER_FILE,
    ),
    _tuned(
        _NETWORK, "tls_cert", AnyText("a path"), "", "PEM file with the certificate of this machine.", files=USER_FILE
    ),
    _tuned(_NETWORK, "tls_key", AnyText("a path"), "", "PEM file with the key of that certificate.", files=USER_FILE),
    _of_group(
        _OPERATIONS, "timeout", Seconds(), 1800.0,
        "How long an operation may take before it raises DeadlineError. A lost process is noticed long before.",
        argument="op_timeout",
    ),
    _tuned(
        _OPERATIONS, "warn_after", Seconds(), 30.0,
        "How long an operation waits before a log line says for which ranks, and how often the line is repeated.",
    ),
    _of_group(
        _OPERATIONS, "compress", AnyText("a codec or a policy"), "",
        "How gradients are compressed: `int8`, or `embed.*=topk(0.01), *=int8`; empty: not at all. Applies to "
        "`sync_gradients` and to what trains with torch; sums of other arrays are exact. Ranks that differ raise "
        "MismatchError in the first operation.",
    ),
    _tuned(
        _OPERATIONS, "check_every", Whole(0, _LARGEST), 0,
        "Every how many steps `covey.torch` compares the parameters of all ranks, and raises MismatchError with the "
        "ranks that differ; 0: never, or with `COVEY_DEBUG=1` in every step.",
    ),
    _of_group(
        _OPERATIONS, "plan", OneOf(PLANS, hidden=("always",)), "auto",
        "How large arrays are added between three or more ranks on several machines: `auto` measures the links, and "
        "uses the plan that fits them; `plain` treats all links alike.",
        is_shared=True,
    ),
    _tuned(
        _OPERATIONS, "call_handlers", Whole(1, 4096), 64,
        "How many functions run at a time for calls of other nodes; further calls wait, and nodes are served in turn.",
    ),
    _tuned(
        _OPERATIONS, "call_bytes", ByteCount(1, 1 << 40), 1 << 30,
        "How many bytes the arguments or the result of a call may have, and all large arguments that a node holds.",
    ),
    _tuned(
        _OPERATIONS, "bucket_bytes", ByteCount(1, _LARGEST), 25 << 20,
        "How much `sync_gradients` sends in one operation, unless the call says it. Ranks that differ raise "
        "MismatchError in the first call.",
    ),
    _of_group(
        _LOSSES, "on_loss", OneOf(ON_LOSS), "raise",
        "When a member is lost: `raise` an error, or `continue` among the remaining ranks.", is_shared=True,
    ),
    _of_group(
        _LOSSES, "patience", Seconds(), 30.0,
        "How long members wait for a quorum, or for a silent member, before they give up with QuorumLostError.",
    ),
    _of_group(
        _LOSSES, "quorum", OneOf(QUORUMS), "majority",
        "Which members may continue: a `majority` of the last view, or `any`: if the network splits, both sides "
        "continue.",
    ),
    _tuned(
        _HEALTH, "heartbeat", Seconds(0.1), 0.5,
        "After how much silence a peer is pinged. After three times that, a peer is suspected; on a link with a long "
        "or changing round trip, after up to two thirds of `host_silence`.",
    ),
    _tuned(
        _HEALTH, "host_silence", Seconds(1.0), 4.5,
        "After how much silence a machine is lost. At least 4.5 times `heartbeat`.",
    ),
    _tuned(
        _HEALTH, "process_silence", Seconds(1.0), 15.0,
        "After how much silence a process is lost whose machine is heard: longer than the program's longest call "
        "that keeps other threads from running. At least `host_silence`.",
    ),
    _tuned(
        _SIZES, "exchange_bytes", ByteCount(0, _LARGEST), 256 << 10,
        "Up to this size, two ranks add by swapping whole arrays; above it, halves.", is_shared=True,
    ),
    _tuned(
        _SIZES, "doubling_bytes", ByteCount(0, _LARGEST), 256 << 10,
        "Up to this size, more than two ranks add in the fewest rounds; above it, with the fewest bytes.",
        is_shared=True,
    ),
    _tuned(
        _SIZES, "tree_bytes", ByteCount(0, _LARGEST), 128 << 10,
        "Up to this size, `broadcast` and `reduce` use a binomial tree; above it, a pipeline.", is_shared=True,
    ),
    _tuned(
        _SIZES, "segment_bytes", ByteCount(4096, _LARGEST), 4 << 20,
        "The size of one transfer of a pipeline: larger ones need fewer calls, smaller ones fill the pipeline sooner.",
        is_shared=True,
    ),
    _tuned(
        _SIZES, "cached_segment_bytes", ByteCount(4096, _LARGEST), 256 << 10,
        "The same through shared memory, among more than two ranks: what a rank has added should be in its cache when "
        "it is sent on.",
        is_shared=True,
    ),
    _tuned(
        _SIZES, "ring_bytes", ByteCount(16 << 10, 64 << 20, 4096), 512 << 10,
        "The memory of one direction of a lane in shared memory. After the first 64 MiB of a process, lanes get at "
        "most 128 KiB.",
        is_shared=True,
    ),
    _tuned(
        _SIZES, "kernel_copy", OneOf(KERNEL_COPY), "auto",
        "Whether the kernel copies large transfers between ranks of one host, once, instead of a ring twice; on Linux, "
        "where it is allowed. `auto` measures which is faster.",
    ),
    _tuned(
        _SIZES, "eager_bytes", ByteCount(0, 1 << 20), 64 << 10,
        "Messages up to this size are sent at once; larger ones wait for the matching `recv`.", is_shared=True,
    ),
    _tuned(
        _SIZES, "credit_bytes", ByteCount(64 << 10, _LARGEST), 4 << 20,
        "How many bytes of messages a rank keeps from another rank that no `recv` has taken; then `send` waits.",
        is_shared=True,
    ),
    _variable(
        _MACHINE, "home", AnyText("a path"), None,
        "The configuration folder; default: `covey` in `$XDG_CONFIG_HOME`, or `~/.config/covey`.",
    ),
    _variable(
        _MACHINE, "events", AnyText("a path"), None, "A file to which losses and recoveries are appended, as JSON."
    ),
    _variable(
        _MACHINE, "native", Flag(), True,
        "0: move data with Python instead of the compiled executor; `covey --version` shows which one is used.",
    ),
    _variable(
        _MACHINE, "warm_start", Flag(), None,
        "Whether `covey run -n` forks its ranks from one process; default: with more ranks than cores.",
    ),
    _variable(_MACHINE, "ssh", AnyText("a command"), "ssh", "The program with which `covey run --hosts` connects."),
    _variable(
        _MACHINE, "debug", Flag(), False,
        "1: show whole tracebacks of errors, and compare the parameters of all ranks in every step (`check_every`).",
    ),
)  # fmt: skip

SETTINGS: Final[Mapping[str, Setting]] = {setting.name: setting for setting in _ROWS}
HIDDEN: Final = ("secret",)
"""Settings whose values are not shown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EffectiveSetting:
    """One setting of this process: its value, and its source."""

    name: str
    value: str
    """Never a secret."""
    source: str
    """`argument`, `environment`, `default`, or the path of a covey.toml or of a file with keys."""
    variable: str


def effective_settings(layers: Mapping[str, Mapping[str, str]]) -> list[EffectiveSetting]:
    """Return all settings; `layers` has variables and their texts by source, those that take precedence first.

    Raises:
        ConfigError: a value is malformed.
    """
    return [_effective(setting, layers) for setting in _ROWS]


def _effective(setting: Setting, layers: Mapping[str, Mapping[str, str]]) -> EffectiveSetting:
    source = next((source for source, values in layers.items() if setting.variable in values), "default")
    if source == "default":
        value = setting.shown_default
    elif setting.name in HIDDEN:
        value = "(hidden)"
    else:
        value = setting.show(setting.kind.read(setting.variable, layers[source][setting.variable]))
    return EffectiveSetting(name=setting.name, value=value, source=source, variable=setting.variable)


def from_file(content: Mapping[str, Any], path: str, *, is_users: bool) -> dict[str, str]:
    """Return the settings of a covey.toml, as texts by variable; `is_users` if it is in the configuration folder.

    Raises:
        ConfigError: a name is unknown or must not be set there, or a value is malformed.
    """
    found = {}
    for name, value in content.items():
        setting = SETTINGS.get(name)
        if setting is None:
            raise ConfigError(f"{path}: covey has no setting {name!r}{suggestion(name, SETTINGS)}")
        if not setting.files:
            raise ConfigError(f"{path}: {name} cannot be set in a file; set {setting.variable}")
        if setting.files == USER_FILE and not is_users:
            raise ConfigError(
                f"{path}: {name} cannot be set by the folder of a program, because it affects security; set it in "
                f"{FILE} of your configuration folder, or set {setting.variable}"
            )
        found[setting.variable] = setting.show(setting.kind.read(f"{path}: {name}", value))
    return found


def from_argument(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of `join(settings=...)`, by name.

    Raises:
        ConfigError: a name is unknown or has an argument of its own, or a value is malformed.
    """
    found = {}
    known = {name for name, setting in SETTINGS.items() if setting.argument == "settings"}
    for name, value in settings.items():
        setting = SETTINGS.get(name)
        if setting is None:
            raise ConfigError(f"settings={{{name!r}: ...}}: covey has no such setting{suggestion(name, known)}")
        if name not in known:
            instead = f"{setting.argument}= of join" if setting.argument else setting.variable
            raise ConfigError(f"settings={{{name!r}: ...}}: use {instead}")
        found[name] = setting.kind.read(name, value)
    return found


def differences_of(here: str, there: str) -> list[tuple[str, str, str]]:
    """Return the settings in which two ranks differ, each with its value here and there.

    `here` and `there` are what `GroupConfig.agreed` returned on the two ranks.
    """
    mine, theirs = (dict(item.partition("=")[::2] for item in text.split(", ") if item) for text in (here, there))
    defaults = {setting.name: str(setting.default) for setting in _ROWS}
    pairs = [(name, defaults | mine, defaults | theirs) for name in sorted({*mine, *theirs})]
    return [(name, ours.get(name, "unknown"), other.get(name, "unknown")) for name, ours, other in pairs
            if ours.get(name) != other.get(name)]  # fmt: skip


def suggestion(name: str, known: Any) -> str:
    """Return "; did you mean NAME?" with the known name that is most like `name`, or ""."""
    import difflib  # rarely needed, and slow to load

    near = difflib.get_close_matches(str(name), sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
