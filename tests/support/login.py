"""A system bus with logind behind it, as far as covey asks. jeepney, another implementation, writes the bytes."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from jeepney import HeaderFields, Message
from jeepney.low_level import Parser
from jeepney.wrappers import DBusAddress, new_error, new_method_return, new_signal
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

MANAGER = DBusAddress("/org/freedesktop/login1", interface="org.freedesktop.login1.Manager")


class FakeLogin:
    """One bus at a path. Any thread may call any method."""

    def __init__(self, path: Path, *, has_login: bool = True) -> None:
        """Listen; without `has_login` there is a bus, and no logind."""
        self.address = f"unix:path={path}"
        self.is_idle, self._has_login = True, has_login
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._clients: list[socket.socket] = []
        self._holds: list[int] = []
        """The read ends of pipes: each is at its end when the client has let the machine sleep."""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def sleep(self) -> None:
        """Announce a sleep."""
        self._announce(True)

    def wake(self) -> None:
        """Announce the end of one."""
        self._announce(False)

    def await_hold(self, count: int = 1) -> None:
        """Wait until so many clients ask the machine to wait for them."""
        wait_until(lambda: sum(not _is_closed(end) for end in self._ends()) >= count)

    def await_permission(self) -> None:
        """Wait until no client wants the machine to wait any more."""
        wait_until(lambda: all(_is_closed(end) for end in self._ends()))

    def hang_up(self) -> None:
        """End every connection, as a bus does that is started again."""
        with self._lock:
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        self.hang_up()
        for end in self._ends():
            os.close(end)
        self._holds.clear()

    def _ends(self) -> list[int]:
        with self._lock:
            return list(self._holds)

    def _announce(self, is_asleep: bool) -> None:
        signal = new_signal(MANAGER, "PrepareForSleep", "b", (is_asleep,))
        with self._lock:
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.sendall(signal.serialise(serial=99))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._log_in(client)
                with self._lock:
                    self._clients.append(client)
                parser = Parser()
                while data := client.recv(4096):
                    parser.add_data(data)
                    while (message := parser.get_next_message()) is not None:
                        self._answer(client, message)
        finally:
            with self._lock:
                if client in self._clients:
                    self._clients.remove(client)
            client.close()

    def _log_in(self, client: socket.socket) -> None:
        lines = client.makefile("rb", buffering=0)
        assert lines.read(1) == b"\0"
        assert lines.readline() == b"AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n"
        client.sendall(b"OK 1234deadbeef\r\n")
        assert lines.readline() == b"NEGOTIATE_UNIX_FD\r\n"
        client.sendall(b"AGREE_UNIX_FD\r\n")
        assert lines.readline() == b"BEGIN\r\n"

    def _answer(self, client: socket.socket, message: Message) -> None:
        fields = message.header.fields
        member = fields[HeaderFields.member]
        self.calls.append((member, message.body))
        descriptors = array.array("i")
        if member == "Hello":
            answer = new_method_return(message, "s", (":1.7",))
        elif member == "AddMatch":
            answer = new_method_return(message)
        elif not self._has_login:
            answer = new_error(
                message, "org.freedesktop.DBus.Error.ServiceUnknown", "s", ("org.freedesktop.login1 is not there",)
            )
        elif member == "Get":
            answer = new_method_return(message, "v", (("b", self.is_idle),))
        else:
            assert member == "Inhibit"
            ours, theirs = os.pipe()
            with self._lock:
                self._holds.append(ours)
            answer = new_method_return(message, "h", (theirs,))
            data = answer.serialise(serial=98, fds=descriptors)
            socket.send_fds(client, [data], list(descriptors))
            os.close(theirs)
            return
        client.sendall(answer.serialise(serial=98))


def _is_closed(end: int) -> bool:
    """Tell whether nothing holds the other end of a pipe."""
    os.set_blocking(end, False)
    try:
        return os.read(end, 1) == b""
    except BlockingIOError:
        return False
