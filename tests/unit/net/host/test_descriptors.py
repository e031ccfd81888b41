"""Descriptors that are running out: what is still done, what is not begun, and what is said about it."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ConnectError, DeadlineError
from covey.net.host.descriptors import explain, explained, is_exhausted


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_an_operation_that_finds_no_descriptor_says_what_to_do(number: int) -> None:
    with pytest.raises(ConnectError, match="this cannot continue: ") as caught, explained("this cannot continue"):
        raise OSError(number, "no")
    assert ("ulimit -n" in str(caught.value)) == (number == errno.EMFILE)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ECONNREFUSED, "no"), ConnectError("lost"), DeadlineError("late"), ValueError("odd"), OSError("odd")],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explained("this cannot continue"):
        raise error
    assert caught.value is error
    assert not is_exhausted(error)


def test_no_more_threads_is_the_same_case() -> None:
    with pytest.raises(ConnectError, match="can't start new thread"), explained("this"):
        raise RuntimeError("can't start new thread")
    assert explain(OSError(errno.ECONNREFUSED, "x")) == "Connection refused"


SPARE = """
import errno, os, resource, sys
from pathlib import Path
from covey.base.errors import ConfigError
from covey.net.host import descriptors
from covey.net.host import folders
from covey.wire.membership import Record

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
path = Path(sys.argv[1]) / "promise"
if sys.argv[2] == "spare":
    descriptors.keep_a_spare()
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    assert error.errno == errno.EMFILE
try:
    for number in range(3):
        folders.write_private(path, b"promise %d" % number)
except ConfigError as error:
    print(error)
    sys.exit(3)
for number in held:
    os.close(number)
assert path.read_bytes() == b"promise 2", path.read_bytes()
assert [each.name for each in path.parent.iterdir()] == ["promise"]
probe = os.open("/dev/null", os.O_RDONLY)
assert not descriptors.is_scarce(probe)
before = descriptors.left()
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(63 - probe)]
assert descriptors.is_scarce(held[-1])
assert 0 < before <= len(held), before
assert descriptors.left() == 0
"""


@pytest.mark.parametrize(("spare", "code"), [("spare", 0), ("none", 3)])
def test_what_a_node_promises_is_written_down_even_if_all_descriptors_are_used_up(
    tmp_path: object, spare: str, code: int
) -> None:
    words = [sys.executable, "-c", SPARE, str(tmp_path), spare]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == code, ended.stderr
    if code:
        assert "ulimit -n" in ended.stdout
