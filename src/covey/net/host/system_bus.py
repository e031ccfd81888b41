"""A client of the system bus (D-Bus): calls, and the signals that it has asked for. Linux only.

covey needs few calls, so this is the part of the protocol that these use: a unix socket, the login as the user of this
process, messages whose bodies are plain values, and descriptors in answers. The bus belongs to the system; what it
sends is bounded and checked all the same.

Invariant: after a `BusError` that is no `BusRefusalError` the connection is closed, and every later call raises one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from covey.net.host.descriptors import explain, track

if TYPE_CHECKING:
    from collections.abc import Iterator

ADDRESS_VARIABLE: Final = "DBUS_SYSTEM_BUS_ADDRESS"
USUAL_ADDRESS: Final = "unix:path=/run/dbus/system_bus_socket"
BUS: Final = "org.freedesktop.DBus"
BUS_PATH: Final = "/org/freedesktop/DBus"
PROPERTIES: Final = "org.freedesktop.DBus.Properties"
CALL_SECONDS: Final = 2.0
"""How long the bus, and a service behind it, may take to answer."""
BUS_MESSAGE_LIMIT: Final = 1 << 16
"""Bytes of a message; those that covey asks for have some hundred."""
BUS_READ_BYTES: Final = 4096
DESCRIPTORS_LIMIT: Final = 8
LINE_LIMIT: Final = 512

_METHOD_CALL, _RETURN, _ERROR, _SIGNAL = 1, 2, 3, 4
_PATH, _INTERFACE, _MEMBER, _ERROR_NAME, _REPLY_TO, _DESTINATION, _SENDER, _SIGNATURE_FIELD, _DESCRIPTORS = range(1, 10)
_FIXED_TYPES: Final = {
    "y": "B",
    "b": "I",
    "n": "h",
    "q": "H",
    "i": "i",
    "u": "I",
    "x": "q",
    "t": "Q",
    "d": "d",
    "h": "I",
}
_OWN_ORDER: Final = "l" if sys.byteorder == "little" else "B"


class BusError(Exception):
    """There is no system bus, or it has ended the connection, or it does not answer."""


class BusRefusalError(BusError):
    """The bus or a service has answered with an error; the connection goes on."""


class BusSignal(NamedTuple):
    """A signal that a service has sent."""

    interface: str
    member: str
    body: tuple[Any, ...]


class _Message(NamedTuple):
    kind: int
    fields: dict[int, Any]
    body: tuple[Any, ...]


class SystemBus:
    """A connection with the system bus, for one thread."""

    def __init__(self) -> None:
        """Connect; BusError if there is no bus."""
        self._socket: socket.socket | None = None
        self._data = bytearray()
        self._descriptors: list[int] = []
        """Those that came with the bytes in `_data`."""
        self._signals: list[BusSignal] = []
        self._serial = 0
        until = time.monotonic() + CALL_SECONDS
        self._socket = _connected(os.environ.get(ADDRESS_VARIABLE) or USUAL_ADDRESS)
        with self._closing_on_failure():
            self._log_in(until)
        self.call(BUS, BUS_PATH, BUS, "Hello")

    def fileno(self) -> int:
        """Return the descriptor that is readable when something has come; BusError if the connection has ended."""
        return self._open().fileno()

    def call(self, destination: str, path: str, interface: str, member: str, *words: str) -> tuple[Any, ...]:
        """Call a method with texts, and return its result; descriptors in it belong to the caller.

        Raises:
            BusRefusalError: the answer is an error.
            BusError: the connection has ended, or there is no answer in time.
        """
        until = time.monotonic() + CALL_SECONDS
        with self._closing_on_failure():
            self._serial += 1
            fields = {_PATH: path, _INTERFACE: interface, _MEMBER: member, _DESTINATION: destination}
            self._send(_encode(_METHOD_CALL, self._serial, fields, words), until)
            while True:
                for message in self._messages():
                    if message.kind in (_RETURN, _ERROR) and message.fields.get(_REPLY_TO) == self._serial:
                        if message.kind == _ERROR:
                            name, said = message.fields.get(_ERROR_NAME, ""), " ".join(map(str, message.body))
                            raise BusRefusalError(f"{member}: {said or name}")
                        return message.body
                    self._note(message)
                self._receive(until)

    def property(self, destination: str, path: str, interface: str, name: str) -> Any:
        """Return a property of an object; raises as `call`."""
        (value,) = self.call(destination, path, PROPERTIES, "Get", interface, name) or (None,)
        return value

    def subscribe(self, sender: str, interface: str, member: str) -> None:
        """Ask for a signal of a service; raises as `call`."""
        rule = f"type='signal',sender='{sender}',interface='{interface}',member='{member}'"
        self.call(BUS, BUS_PATH, BUS, "AddMatch", rule)

    def signals(self) -> list[BusSignal]:
        """Return the signals that have come, without waiting; BusError if the connection has ended."""
        with self._closing_on_failure():
            while self._receive(0.0):
                pass
            for message in self._messages():
                self._note(message)
        found, self._signals = self._signals, []
        return found

    def close(self) -> None:
        """End the connection. Closing twice is fine."""
        found, self._socket = self._socket, None
        if found is not None:
            found.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    # Bytes

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BusRefusalError:
            raise
        except (OSError, BusError, ValueError, struct.error, IndexError) as error:
            self.close()
            if isinstance(error, BusError):
                raise
            raise BusError(explain(error) if isinstance(error, OSError) else f"it sent no D-Bus ({error})") from error
        except BaseException:  # a signal in the middle of a message
            self.close()
            raise

    def _open(self) -> socket.socket:
        if self._socket is None:
            raise BusError("the connection with the system bus has ended")
        return self._socket

    def _log_in(self, until: float) -> None:
        user = str(os.getuid()).encode().hex().encode()
        self._send(b"\0AUTH EXTERNAL " + user + b"\r\n", until)
        if not (line := self._line(until)).startswith(b"OK "):
            raise BusError(f"it refuses this user: {line.decode(errors='replace')}")
        self._send(b"NEGOTIATE_UNIX_FD\r\n", until)
        self._line(until)  # without descriptors the system goes to sleep without waiting
        self._send(b"BEGIN\r\n", until)

    def _line(self, until: float) -> bytes:
        while (end := self._data.find(b"\r\n")) < 0:
            if len(self._data) > LINE_LIMIT:
                raise BusError("it sent no D-Bus (a line without end)")
            self._receive(until)
        line = bytes(self._data[:end])
        del self._data[: end + 2]
        return line

    def _send(self, data: bytes, until: float) -> None:
        open_socket = self._open()
        open_socket.settimeout(max(until - time.monotonic(), 0.001))
        open_socket.sendall(data)

    def _receive(self, until: float) -> bool:
        """Read once; with a time, wait until then, and raise if nothing comes. Without one tell whether there was."""
        open_socket = self._open()
        open_socket.settimeout(max(until - time.monotonic(), 0.001) if until else 0.0)
        try:
            data, descriptors, _, _ = socket.recv_fds(open_socket, BUS_READ_BYTES, DESCRIPTORS_LIMIT)
        except BlockingIOError:
            return False
        except TimeoutError:
            raise BusError(f"the system bus gave no answer for {CALL_SECONDS:g} s") from None
        self._descriptors += descriptors
        if not data:
            raise BusError("the system bus has ended the connection")
        self._data += data
        return True

    # Messages

    def _messages(self) -> Iterator[_Message]:
        """Take the messages that are here completely, one by one."""
        while len(self._data) >= 16:
            order = {ord("l"): "<", ord("B"): ">"}.get(self._data[0])
            if order is None:
                raise BusError("it sent no D-Bus (a message of neither byte order)")
            length, _, header = struct.unpack_from(f"{order}III", self._data, 4)
            start = 16 + header + -header % 8
            if start + length > BUS_MESSAGE_LIMIT:
                raise BusError(f"it sent a message of {start + length} bytes")
            if len(self._data) < start + length:
                return
            kind, data = self._data[1], bytes(self._data[: start + length])
            del self._data[: start + length]
            fields = _Reader(data, order, 16, []).fields(16 + header)
            count = fields.get(_DESCRIPTORS, 0)
            came, self._descriptors = self._descriptors[:count], self._descriptors[count:]
            reader = _Reader(data, order, start, came)
            try:  # descriptors belong to answers
                body = reader.values(str(fields.get(_SIGNATURE_FIELD, "")) if kind == _RETURN or not came else "")
            finally:
                reader.close_unread()
            yield _Message(kind, fields, body)

    def _note(self, message: _Message) -> None:
        """Keep a signal; drop signals that no caller waits for any more."""
        if message.kind == _SIGNAL:
            fields = message.fields
            self._signals.append(BusSignal(str(fields.get(_INTERFACE)), str(fields.get(_MEMBER)), message.body))


class _Reader:
    """Reads values at a position of a message."""

    def __init__(self, data: bytes, order: str, at: int, descriptors: list[int]) -> None:
        self._data, self._order, self._at, self._descriptors = data, order, at, descriptors
        self._read = set[int]()

    def values(self, signature: str) -> tuple[Any, ...]:
        """Return values of plain types; of others, none is read."""
        is_plain = all(each in _FIXED_TYPES or each in "sogv" for each in signature)
        return tuple(self._value(each) for each in signature) if is_plain else ()

    def fields(self, end: int) -> dict[int, Any]:
        """Return the fields of a header that ends there."""
        found = dict[int, Any]()
        while self._at < end:
            self._align(8)
            code = self._value("y")
            found[code] = self._value("v")
        return found

    def close_unread(self) -> None:
        """Close the descriptors that no value refers to."""
        for index, descriptor in enumerate(self._descriptors):
            if index not in self._read:
                os.close(descriptor)

    def _value(self, kind: str) -> Any:
        if kind in _FIXED_TYPES:
            layout = f"{self._order}{_FIXED_TYPES[kind]}"
            size = struct.calcsize(layout)
            self._align(size)
            (value,) = struct.unpack_from(layout, self._data, self._at)
            self._at += size
            if kind == "h":
                self._read.add(value)
                return self._descriptors[value]
            return bool(value) if kind == "b" else value
        if kind in "so":
            return self._text(self._value("u"))
        if kind == "g":
            return self._text(self._value("y"))
        if kind != "v":
            raise BusError(f"it sent a value of the type {kind!r}, which nothing asked for")
        signature = self._value("g")
        if len(signature) != 1 or signature == "v":
            raise BusError(f"it sent a value of the type {signature!r}, which nothing asked for")
        return self._value(signature)

    def _text(self, length: int) -> str:
        start, self._at = self._at, self._at + length + 1
        if self._at > len(self._data):
            raise BusError("it sent a text that is longer than its message")
        return self._data[start : start + length].decode(errors="replace")

    def _align(self, size: int) -> None:
        self._at += -self._at % size


def _encode(kind: int, serial: int, fields: dict[int, str], words: tuple[str, ...]) -> bytes:
    """Return a message whose body is texts."""
    order = "<" if _OWN_ORDER == "l" else ">"
    body = bytearray()
    for word in words:
        _put_text(body, order, word)
    header = bytearray()
    for code, value in (*fields.items(), *([(_SIGNATURE_FIELD, "s" * len(words))] if words else [])):
        header += bytes(-len(header) % 8)
        signature = {_PATH: b"o", _SIGNATURE_FIELD: b"g"}.get(code, b"s")
        header += bytes((code, 1)) + signature + b"\0"
        if code == _SIGNATURE_FIELD:
            header += bytes((len(value),)) + value.encode() + b"\0"
        else:
            _put_text(header, order, value)
    start = _OWN_ORDER.encode() + bytes((kind, 0, 1)) + struct.pack(f"{order}III", len(body), serial, len(header))
    return start + bytes(header) + bytes(-len(header) % 8) + bytes(body)


def _put_text(data: bytearray, order: str, text: str) -> None:
    data += bytes(-len(data) % 4)
    encoded = text.encode()
    data += struct.pack(f"{order}I", len(encoded)) + encoded + b"\0"


def _connected(addresses: str) -> socket.socket:
    """Return a socket that is connected with the first address that works; BusError if none does."""
    reason = f"no unix socket in {addresses!r}"
    for address in addresses.split(";"):
        transport, _, rest = address.partition(":")
        keys = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair)
        path = unquote(keys.get("path", "")) or (f"\0{unquote(keys['abstract'])}" if "abstract" in keys else "")
        if transport != "unix" or not path:
            continue
        made = track(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            made.settimeout(CALL_SECONDS)
            made.connect(path)
        except OSError as error:
            made.close()
            reason = f"{path}: {explain(error)}"
        else:
            return made
    raise BusError(reason)
