"""The identity of a node: its own key, a readable name, and a number for each of its lives.

An identity is a slot in a folder: `0.key` has the key, `0.count` how often it was used, and `0.lock` is locked while a
process uses it. A second process takes the next slot. A copied folder cannot be noticed here: the two nodes notice it
when they are linked, by the random half of `life`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.base.errors import ConfigError
from covey.net.host.descriptors import explain
from covey.net.host.folders import existing, home, key_words, private_folder, read_private, write_private
from covey.net.host.locks import LockHolder, only_one, try_lock
from covey.wire.signed import machine_words

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

MAX_SLOTS: Final = 4096
PREFIX_LETTERS: Final = 4


class NodeIdentity(LockHolder):
    """A node's key, its name, and the number of its life. Use it in `with`, or call `release`."""

    def __init__(
        self, private: Ed25519PrivateKey, incarnation: int, lock: int = -1, machine: Ed25519PrivateKey | None = None
    ) -> None:
        """`machine` is the first key of this machine, which signs this node's key."""
        self.private = private
        self.id = private.public_key().public_bytes_raw()
        """The public key, by which peers know this node."""
        self.name = node_name(socket.gethostname(), self.id)
        """The host name and four letters of the id."""
        self.incarnation = incarnation
        """The number of this life, from 1; a later life replaces an earlier one."""
        self.life = struct.pack(">Q8s", incarnation, secrets.token_bytes(8))
        """The incarnation and 8 random bytes, which differ even for a copied identity."""
        self.machine = self.endorsement = b""
        """The first key of this machine and its signature, as on a card; empty if this is the first."""
        if machine is not None and (first := machine.public_key().public_bytes_raw()) != self.id:
            self.machine, self.endorsement = first, machine.sign(machine_words(self.id))
        super().__init__(lock)

    @classmethod
    def acquire(cls, folder: Path | None = None, preferred: bytes = b"") -> NodeIdentity:
        """Take an identity in `folder` (default: the user's) that no process uses, or make a new one.

        It is the one with the id `preferred`, if that is free, else the first.

        Raises:
            ConfigError: one of its files is damaged, open to other users, or cannot be written.
        """
        folder = private_folder(home() / "identities" if folder is None else folder)
        for slot in (*_slots_of(folder, preferred), *range(MAX_SLOTS)):
            lock = _lock_slot(folder / f"{slot}.lock")
            if lock is None:
                continue
            try:
                private = _slot_key(folder, slot)
                machine = _slot_key(folder, 0) if slot else None
                return cls(private, _count_up(folder / f"{slot}.count"), lock, machine)
            except BaseException:
                os.close(lock)
                raise
        raise ConfigError(f"all {MAX_SLOTS} identities in {folder} are in use; end some nodes of yours")

    @classmethod
    def ephemeral(cls) -> NodeIdentity:
        """Return an identity that is not stored and ends with this process."""
        return cls(Ed25519PrivateKey.generate(), 1)

    @classmethod
    def passing(cls) -> NodeIdentity:
        """Return an identity that ends with this process, signed by the first key of this machine if there is one."""
        machine = None
        with contextlib.suppress(ConfigError, FileNotFoundError):  # a machine without such files can still visit
            machine = _read_key(existing("identities") / "0.key")
        return cls(Ed25519PrivateKey.generate(), 1, machine=machine)

    @property
    def short_id(self) -> str:
        """The beginning of the id, for messages."""
        return short_id(self.id)

    def release(self) -> None:
        """Release the identity for another process. Releasing twice is fine."""
        self.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"NodeIdentity({self.name!r}, incarnation={self.incarnation})"


def id_text(node_id: bytes) -> str:
    """Return a node's id as text to type: 52 letters and digits; usually the first few are enough."""
    return base64.b32encode(node_id).decode().rstrip("=").lower()


def short_id(node_id: bytes) -> str:
    """Return the first eight letters of a node's id."""
    return id_text(node_id)[:8]


def node_name(host_name: str, node_id: bytes) -> str:
    """Return the name of a node: its host's name and four letters of its id.

    The host name may come from a peer: the result contains only letters, digits and dashes.
    """
    host = re.sub(r"[^A-Za-z0-9-]+", "-", host_name.partition(".")[0])[:40].strip("-")
    return f"{host or 'node'}-{id_text(node_id)[:4]}"


def machine_name(claimed: str, machine: bytes) -> str:
    """Return a name for a machine from what one of its nodes calls itself, which ends in letters of the node's id."""
    return node_name(claimed.rpartition("-")[0] or claimed, machine)


def meant_ids(text: str, nodes: Mapping[bytes, str]) -> list[bytes]:
    """Return which of `nodes` a text can mean: a whole id, a name, a name without the letters of the id, or the
    beginning of an id.
    """
    text = text.strip().lower()
    if (whole := _whole_id(text)) is not None:
        return [whole] if whole in nodes else []
    host = re.sub(r"[^a-z0-9-]+", "-", text.partition(".")[0])
    exact = [each for each, name in nodes.items() if name and text == name.lower()]
    hosts = [each for each, name in nodes.items() if name and host == name.lower().rpartition("-")[0]]
    begun = [each for each in nodes if each.hex().startswith(text) or id_text(each).startswith(text)]
    return exact or hosts or (begun if len(text) >= PREFIX_LETTERS else [])


def is_whole_id(text: str) -> bool:
    """Tell whether a text is a whole id: no node of another key can be meant by it."""
    return _whole_id(text.strip().lower()) is not None


def resolve_id(text: str, nodes: Mapping[bytes, str]) -> bytes:
    """Return the id for `text`: a whole id, or the beginning of the id or the name of one of `nodes`.

    Ids are hexadecimal or base32, in any case.

    Raises:
        ConfigError: it matches none of them, or several.
    """
    text = text.strip().lower()
    if (whole := _whole_id(text)) is not None:
        return whole
    named = [node_id for node_id, name in nodes.items() if text == name.lower()]
    begun = [node_id for node_id in nodes if node_id.hex().startswith(text) or id_text(node_id).startswith(text)]
    found = named or (begun if len(text) >= PREFIX_LETTERS else [])
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{nodes[node_id]} ({id_text(node_id)[:12]})" for node_id in sorted(found or nodes)[:10])
    if found:
        raise ConfigError(f"{text!r} means several nodes: {listed}; write more letters of the id")
    raise ConfigError(
        f"{text!r} is no node known here; write its whole id (64 hexadecimal digits), or at least {PREFIX_LETTERS} "
        f"letters of one of these: {listed or 'none was met yet'}"
    )


def ensure_identity() -> None:
    """Make the user's first identity if there is none yet."""
    folder = private_folder(home() / "identities")
    if not any(folder.glob("*.key")):
        NodeIdentity.acquire(folder).release()


def _whole_id(text: str) -> bytes | None:
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return bytes.fromhex(text)
    if re.fullmatch(r"[a-z2-7]{52}", text):
        node_id = base64.b32decode(text.upper() + "====")
        return node_id if id_text(node_id) == text else None
    return None


def _lock_slot(path: Path) -> int | None:
    """Return a locked descriptor, or None if a process has this slot."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use the identity {path}: {explain(error)}; set COVEY_HOME elsewhere") from error
    taken = False
    try:
        taken = try_lock(lock, path)
    finally:
        if not taken:
            os.close(lock)
    return lock if taken else None


def own_ids() -> set[bytes]:
    """Return the ids of all stored identities of this machine."""
    found = set()
    for path in existing("identities").glob("*.key"):
        with contextlib.suppress(FileNotFoundError):
            found.add(_read_key(path).public_key().public_bytes_raw())
    return found


def own_machine() -> bytes:
    """Return the first key of this machine, by which lists name it; made if there is none."""
    return _slot_key(private_folder(home() / "identities"), 0).public_key().public_bytes_raw()


def sign_as_machine(words: bytes) -> tuple[bytes, bytes]:
    """Return the first key of this machine, made if there is none, and its signature over `words`."""
    private = _slot_key(private_folder(home() / "identities"), 0)
    return private.public_key().public_bytes_raw(), private.sign(words)


def stored_machine() -> bytes:
    """Return the first key of this machine; empty if there is none yet."""
    with contextlib.suppress(FileNotFoundError):
        return _read_key(existing("identities") / "0.key").public_key().public_bytes_raw()
    return b""


def machine_secret(purpose: str) -> bytes:
    """Return 32 bytes for one purpose that only this user on this machine can compute; the same ones each time."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    first = _slot_key(private_folder(home() / "identities"), 0).private_bytes_raw()
    info = f"covey/1/machine/{purpose}".encode()
    return HKDF(algorithm=SHA256(), length=32, salt=b"covey/1", info=info).derive(first)


def _slots_of(folder: Path, node_id: bytes) -> list[int]:
    """Return the slot of the stored identity with this id, if there is one."""
    found = []
    for path in folder.glob("*.key") if node_id else ():
        with contextlib.suppress(ConfigError, FileNotFoundError, ValueError):
            if _read_key(path).public_key().public_bytes_raw() == node_id:
                found.append(int(path.stem))
    return found


def _slot_key(folder: Path, slot: int) -> Ed25519PrivateKey:
    """Return the slot's key, made on first use. The file also names the id, so that a damaged key is noticed."""
    path, counter = folder / f"{slot}.key", folder / f"{slot}.count"
    with contextlib.suppress(FileNotFoundError):
        return _read_key(path)
    with only_one(folder / ".lock"):  # the first key is also made by processes that use another slot
        with contextlib.suppress(FileNotFoundError):
            return _read_key(path)
        private = Ed25519PrivateKey.generate()
        if not counter.exists():  # written before the key, so that a key without its count means damage, not a crash
            write_private(counter, b"0\n")
        write_private(
            path, f"{private.private_bytes_raw().hex()} {private.public_key().public_bytes_raw().hex()}\n".encode()
        )
        return private


def _read_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in a file; FileNotFoundError if there is none."""
    words = key_words(path)
    with contextlib.suppress(ValueError):
        secret, public = (bytes.fromhex(word.decode("ascii")) for word in words)
        private = Ed25519PrivateKey.from_private_bytes(secret)
        if private.public_key().public_bytes_raw() == public:
            return private
    raise ConfigError(f"the node key {path} is damaged; remove it, and this node gets a new identity")


def _count_up(path: Path) -> int:
    """Return the next number in the file, which is on disk before it is used: no two lives have the same number."""
    try:
        text = read_private(path).decode("ascii", "replace").strip()
    except FileNotFoundError:
        text = "missing"
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        key = path.with_suffix(".key")
        raise ConfigError(f"the counter {path} is damaged; remove it and {key.name}, and this node gets a new identity")
    count = int(text) + 1
    write_private(path, f"{count}\n".encode())
    return count
