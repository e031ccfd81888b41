"""Facts about this machine that need no network: versions, files and their permissions, settings and their sources."""

from __future__ import annotations

import difflib
import itertools
import os
import platform
import pwd
import socket
import ssl
import stat
import tempfile
import time
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base import config as settings
from covey.base.config import GroupConfig
from covey.base.errors import ConfigError
from covey.base.version import __version__
from covey.cli.doctor.facts import Folder, Machine, PrivatePath, Setting
from covey.net.keys import clusters
from covey.net.keys.identity import node_name
from covey.net.native import describe_executor
from covey.runtime.environment import CLUSTER_JOIN_SECONDS, DEFAULT_MIN_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_PATHS: Final = 1000
WRITTEN_BYTES: Final = 1 << 16
"""How much is written into a folder to test whether it is writable."""
SECRETS: Final = ("COVEY_SECRET", "COVEY_SECRET_FD", "COVEY_TOKEN_FD")
DEFAULTS: Final = {
    "COVEY_RUN_MIN_SIZE": f"{DEFAULT_MIN_SIZE}",
    "COVEY_JOIN_TIMEOUT": f"{CLUSTER_JOIN_SECONDS:g}",
    "COVEY_PORT": f"first free of {settings.PORTS[0]}-{settings.PORTS[-1]}",
    "COVEY_DEBUG": "0",
    "COVEY_NATIVE": "1",
}
"""Defaults of variables that are not fields of `GroupConfig`. Variables not listed have no default."""
GROUP_VARIABLES: Final = tuple(f"COVEY_{field.name.upper()}" for field in fields(GroupConfig))
KNOWN_VARIABLES: Final = (
    *GROUP_VARIABLES,
    *settings.CLUSTER_VARIABLES,
    *settings.RUN_VARIABLES,
    *settings.LAUNCHER_VARIABLES,
    *settings.OTHER_VARIABLES,
)


def known_part(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without unknown COVEY_ variables, which would be errors."""
    return {key: value for key, value in env.items() if not key.startswith("COVEY_") or key in KNOWN_VARIABLES}


def examine_machine(env: Mapping[str, str], arguments: Mapping[str, str | None], config: GroupConfig) -> Machine:
    """Return the facts about this machine.

    `env` is the environment of the process; `arguments` has command-line values, by the variables that they override.
    """
    home = home_path(env)
    names, default = _clusters()
    return Machine(
        host_name=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=_versions(),
        home=str(home),
        paths=tuple(_private_paths(home, env.get("COVEY_SECRET_FILE", ""))),
        identities=tuple(_identities(home)),
        clusters=names,
        default_cluster=default,
        settings=tuple(_settings(env, arguments, config, home, default)),
        unknown_variables={
            key: next(iter(difflib.get_close_matches(key, KNOWN_VARIABLES, n=1)), "")
            for key in sorted(env)
            if key.startswith("COVEY_") and key not in KNOWN_VARIABLES
        },
        folders=tuple(_folders(env, home)),
        clock=time.time(),
    )


def home_path(env: Mapping[str, str]) -> Path:
    """Return the path of the configuration folder, which need not exist."""
    if env.get("COVEY_HOME"):
        return Path(env["COVEY_HOME"]).absolute()
    above = env.get("XDG_CONFIG_HOME", "")
    return Path(above if os.path.isabs(above) else os.path.expanduser("~/.config")) / "covey"


def _versions() -> dict[str, str]:
    found = {"covey": __version__, "executor": describe_executor(), "Python": platform.python_version()}
    found["OpenSSL"] = ssl.OPENSSL_VERSION.removeprefix("OpenSSL ").split()[0]
    for package in ("cryptography", "zeroconf", "msgspec", "numpy"):
        found[package] = metadata.version(package)
    return found


def _clusters() -> tuple[tuple[str, ...], str]:
    try:
        return tuple(cluster.name for cluster in clusters.list_clusters()), clusters.default_name() or ""
    except ConfigError:  # their permissions, or looking up the cluster, will show the reason
        return (), ""


def _private_paths(home: Path, secret_file: str) -> Iterator[PrivatePath]:
    """Yield the configuration folder, everything in it that can be listed, and the file with the secret."""
    inside = (Path(folder, name) for folder, _, files in sorted(os.walk(home)) for name in ("", *sorted(files)))
    for path in itertools.chain([Path(secret_file)] if secret_file else [], itertools.islice(inside, MOST_PATHS)):
        try:
            status = path.stat()
        except OSError:  # removed meanwhile, or a broken link
            continue
        is_folder, mode = stat.S_ISDIR(status.st_mode), stat.S_IMODE(status.st_mode)
        yield PrivatePath(
            path=str(path),
            mode=f"{mode:04o}",
            owner=_user(status.st_uid),
            is_folder=is_folder,
            is_ours=status.st_uid == os.geteuid(),
            is_loose=bool(mode & (0o077 if is_folder else 0o177)),
        )


def _folders(env: Mapping[str, str], home: Path) -> Iterator[Folder]:
    """Yield the folders in which covey writes, each with the result of writing an unnamed file there."""
    yield _folder("configuration", home, "COVEY_HOME")
    temporary = {"TMPDIR": env.get("TMPDIR", "") or "/tmp", "XDG_RUNTIME_DIR": env.get("XDG_RUNTIME_DIR", "")}
    for variable, path in temporary.items():
        if path:
            yield _folder("temporary", Path(path), variable)


def _folder(role: str, path: Path, variable: str) -> Folder:
    problem, free = "", -1
    there = path
    if role == "configuration":  # created on first use
        there = next((each for each in (path, *path.parents) if each.exists()), path)
    try:
        status = os.statvfs(there)
        free = status.f_bavail * status.f_frsize
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
    return Folder(role=role, path=str(path), variable=variable, problem=problem, free_bytes=free)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _identities(home: Path) -> Iterator[str]:
    """Yield the names of this user's identities. Only the public half of each file is read."""
    for path in sorted((home / "identities").glob("*.key"), key=lambda path: (len(path.name), path.name)):
        try:
            yield node_name(socket.gethostname(), bytes.fromhex(path.read_text().split()[1]))
        except (OSError, ValueError, IndexError):
            yield f"{path.name} (cannot be read)"


def _settings(
    env: Mapping[str, str], arguments: Mapping[str, str | None], config: GroupConfig, home: Path, default: str
) -> Iterator[Setting]:
    values = {f"COVEY_{field.name.upper()}": getattr(config, field.name) for field in fields(GroupConfig)}
    computed = {key: f"{value:g}" if isinstance(value, float) else f"{value}" for key, value in values.items()}
    for variable in KNOWN_VARIABLES:
        is_launchers = variable in settings.LAUNCHER_VARIABLES
        if is_launchers and variable not in env:  # set by launchers, not by users
            continue
        name = variable.removeprefix("COVEY_").lower()
        if arguments.get(variable) is not None:
            value, source = str(arguments[variable]), "argument"
        elif variable in env:
            value, source = env[variable], "environment"
        elif variable == "COVEY_CLUSTER" and default:
            value, source = default, "file"
        elif variable == "COVEY_SECRET" and default and "COVEY_SECRET_FILE" not in env:
            value, source = "set", "file"
        else:
            value, source = computed.get(variable, DEFAULTS.get(variable, "")), "default"
            value = str(home) if variable == "COVEY_HOME" else value
        if variable in SECRETS and source != "default":
            value = "(hidden)"
        yield Setting(name=name, value=value, source=source, variable=variable)
