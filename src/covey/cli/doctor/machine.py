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
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.config import KNOWN_VARIABLES, EffectiveSetting, effective_settings
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.base.version import __version__
from covey.cli.doctor.facts import Folder, Machine, PrivatePath
from covey.net.host.machine import describe_executor
from covey.net.host.settings_files import settings_of_files
from covey.net.keys import clusters
from covey.net.keys.identity import node_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_PATHS: Final = 1000
WRITTEN_BYTES: Final = 1 << 16
"""How much is written into a folder to test whether it is writable."""
_TEMPORARY_VARIABLES: Final = ("TMPDIR", "XDG_RUNTIME_DIR")
SECRETS: Final = ("COVEY_SECRET_FD", "COVEY_TOKEN_FD")


def known_part(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without unknown COVEY_ variables, which would be errors."""
    return {key: value for key, value in env.items() if not key.startswith("COVEY_") or key in KNOWN_VARIABLES}


def examine_machine(env: Mapping[str, str], arguments: Mapping[str, str | None]) -> Machine:
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
        paths=tuple(_private_paths(home, env)),
        identities=tuple(_identities(home)),
        clusters=names,
        default_cluster=default,
        settings=tuple(_settings(env, arguments, home, default)),
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


def _private_paths(home: Path, env: Mapping[str, str]) -> Iterator[PrivatePath]:
    """Yield the configuration folder, the folders and files in it that can be listed, and the file with the secret."""
    secret_file = env.get("COVEY_SECRET_FILE", "")
    inside = itertools.islice(_below(home, env), MOST_PATHS)
    for path in itertools.chain([Path(secret_file)] if secret_file else [], inside):
        try:
            status = path.stat()
        except OSError:  # removed meanwhile, or a broken link
            continue
        is_folder, mode = stat.S_ISDIR(status.st_mode), stat.S_IMODE(status.st_mode)
        if not is_folder and not stat.S_ISREG(status.st_mode):
            continue  # a socket or pipe keeps nothing
        yield PrivatePath(
            path=str(path),
            mode=f"{mode:04o}",
            owner=_user(status.st_uid),
            is_folder=is_folder,
            is_ours=status.st_uid == os.geteuid(),
            is_loose=bool(mode & (0o077 if is_folder else 0o177)),
        )


def _below(home: Path, env: Mapping[str, str]) -> Iterator[Path]:
    """Yield a folder and what is in it, in order, but for folders of temporary files: those of any program."""
    temporary = {os.path.realpath(folder) for name in _TEMPORARY_VARIABLES if (folder := env.get(name))}
    for folder, inner, files in os.walk(home):
        inner[:] = sorted(name for name in inner if os.path.realpath(os.path.join(folder, name)) not in temporary)
        yield from (Path(folder, name) for name in ("", *sorted(files)))


def _folders(env: Mapping[str, str], home: Path) -> Iterator[Folder]:
    """Yield the folders in which covey writes, each with the result of writing an unnamed file there."""
    yield _folder("configuration", home, "COVEY_HOME")
    temporary, runtime = env.get("TMPDIR", "") or "/tmp", env.get("XDG_RUNTIME_DIR", "")
    if temporary == runtime:
        yield _folder("temporary", Path(temporary), " and ".join(_TEMPORARY_VARIABLES))
        return
    yield _folder("temporary", Path(temporary), "TMPDIR")
    if runtime:
        yield _folder("temporary", Path(runtime), "XDG_RUNTIME_DIR")


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
    env: Mapping[str, str], arguments: Mapping[str, str | None], home: Path, default: str
) -> Iterator[EffectiveSetting]:
    given = {variable: value for variable, value in arguments.items() if value is not None}
    for each in effective_settings({"argument": given, "environment": env} | settings_of_files()):
        if each.source == "default" and each.name == "home":
            yield replace(each, value=str(home))
        elif each.source == "default" and each.name == "cluster" and default:
            yield replace(each, value=default, source="file")
        elif each.source == "default" and each.name == "secret" and default and "COVEY_SECRET_FILE" not in env:
            yield replace(each, value="(hidden)", source="file")
        else:
            yield each
    told = {each.variable for each in SETTINGS.values()}
    for variable in KNOWN_VARIABLES:
        if variable in env and variable not in told:  # set by launchers, not by users
            value = "(hidden)" if variable in SECRETS else env[variable]
            name = variable.removeprefix("COVEY_").lower()
            yield EffectiveSetting(name=name, value=value, source="environment", variable=variable)
