"""Where the secret of a cluster comes from: the program, the environment, or the files of this machine.

An explicit secret takes precedence over COVEY_SECRET_FILE, that over COVEY_SECRET, and that over the files.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.net.host.folders import read_private
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.wire.secret import (
    KEY_BYTES,
    ClusterSecret,
    check_cluster_name,
    decode_join_code,
    from_passphrase,
    looks_like_join_code,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping


def find(name: str | None, env: MutableMapping[str, str], secret: bytes | str | None = None) -> Cluster:
    """Return the cluster to join: from an explicit secret, from the environment, or from the files of this machine.

    A secret is 32 bytes, 64 hexadecimal digits, a join code or a passphrase. COVEY_SECRET is removed from `env`, so
    that child processes do not inherit it, and is remembered.

    Raises:
        ConfigError: a secret cannot be used, or there is none and this machine is in no such cluster.
    """
    take_secret(env)
    if name is not None:
        check_cluster_name(name)
    if secret is not None:
        return _given("secret=", name, secret)
    if "COVEY_SECRET_FILE" in env:
        return _given("COVEY_SECRET_FILE", name, _read_secret_file(env["COVEY_SECRET_FILE"]))
    if _environment_secret is not None:
        return _given("COVEY_SECRET", name, _environment_secret)
    return clusters.find_saved(name)


def take_secret(env: MutableMapping[str, str]) -> None:
    """Remove COVEY_SECRET from `env`, so that child processes do not inherit it, and remember it."""
    global _environment_secret
    _environment_secret = env.pop("COVEY_SECRET", _environment_secret)


@contextlib.contextmanager
def forgetting_secrets() -> Iterator[None]:
    """Forget the secrets that `take_secret` has remembered within it; the one of before counts again."""
    global _environment_secret
    before = _environment_secret
    try:
        yield
    finally:
        _environment_secret = before


_environment_secret: str | None = None


def parse_secret(secret: bytes | str, name: str | None = None) -> Cluster:
    """Return the cluster of a secret in any form; `name` is used for forms that contain no name."""
    if isinstance(secret, bytes):
        return Cluster(ClusterSecret(name or "default", secret))
    text = secret.strip()
    if not text:
        raise ConfigError("the secret is empty; give a join code, 64 hexadecimal digits or a passphrase")
    if looks_like_join_code(text):
        code = decode_join_code(text)
        if name not in (None, code.secret.name):
            raise ConfigError(f"this join code is for the cluster {code.secret.name!r}, not for {name!r}")
        return Cluster(code.secret, code.seeds, owner=code.owner, relays=code.relays)
    if re.fullmatch(r"[0-9a-fA-F]{32,}", text):  # a key with a digit missing must not be taken for a passphrase
        if len(text) != 2 * KEY_BYTES:
            raise ConfigError(f"a key in hexadecimal has {2 * KEY_BYTES} digits, not {len(text)}")
        return Cluster(ClusterSecret(name or "default", bytes.fromhex(text)))
    return Cluster(from_passphrase(name or "default", text, random=secrets.token_bytes))


def _given(source: str, name: str | None, secret: bytes | str) -> Cluster:
    try:
        cluster = parse_secret(secret, name)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    try:
        is_saved = clusters.cluster_path(cluster.name).exists()
    except ConfigError:  # there is no folder for files, and a secret from the program needs none
        is_saved = False
    if not is_saved:
        return cluster
    saved = clusters.load(cluster.name)
    cluster = replace(cluster, denied=saved.denied)  # nodes stay denied whatever the source of the secret
    if saved.secret == cluster.secret and cluster.owner in (b"", saved.owner):
        return replace(
            saved,
            seeds=tuple(dict.fromkeys((*cluster.seeds, *saved.seeds))),
            relays=tuple(dict.fromkeys((*cluster.relays, *saved.relays))),
        )
    return cluster


def _read_secret_file(path: str) -> str:
    try:
        return read_private(Path(path), may_be_mounted=True).decode()
    except FileNotFoundError:
        raise ConfigError(f"COVEY_SECRET_FILE: there is no file {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"COVEY_SECRET_FILE: {path} is not text; write a join code, 64 hexadecimal digits or a passphrase into it"
        ) from None
