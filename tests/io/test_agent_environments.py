"""The environment of a requirements file: made once, used again, and an error if it cannot be made."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support.waiting import DEADLINE

import covey
from covey.agent import environments
from covey.agent.environments import NEEDS_INDEX, Environments
from covey.agent.launching import make_own_wheel
from covey.agent.requests import Interpreter
from covey.base.errors import ConfigError


def make_wheel(folder: Path, name: str = "stand-in", version: str = "1.0", needs: str = "") -> Path:
    """Write a package that pip installs without a network."""
    module = name.replace("-", "_")
    wheel, info = folder / f"{module}-{version}-py3-none-any.whl", f"{module}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", about + (f"Requires-Dist: {needs}\n" if needs else ""))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def of(requirements: str, release: str = "") -> Interpreter:
    return Interpreter("", requirements, release)


def test_what_an_index_has_to_give_is_known_before_it_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(
        "# covey itself is here\n--no-index\ncovey\nnumpy>=1  # here\nnumpy>=99\nno-such-package\n\n"
        "other; python_version < '3'\nfrom-elsewhere @ https://example.org/x.whl\n./a/path\n"
    )

    def missing(*wheels: Path) -> list[str]:
        command = [sys.executable, "-c", environments.PRINT_MISSING, str(file), *map(str, wheels)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE).stdout.splitlines()

    known = ["numpy>=99", "no-such-package", "from-elsewhere@ https://example.org/x.whl"]
    assert [each.replace(" @", "@") for each in missing()] == known
    file.write_text("covey==99.1\n")
    assert missing() == ["covey==99.1"]
    wheel = make_wheel(tmp_path, "covey", "99.1", needs="numpy>=98")
    assert missing(wheel) == ["numpy>=98"], "a wheel that was sent is here, and what it needs is not"


def test_the_wheel_of_the_covey_that_runs_here_has_all_of_it(tmp_path: Path) -> None:
    wheel = make_own_wheel()
    assert make_own_wheel().digest == wheel.digest
    (tmp_path / wheel.name).write_bytes(wheel.data)
    with zipfile.ZipFile(tmp_path / wheel.name) as archive:
        names = archive.namelist()
        package = Path(covey.__file__).parent
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert archive.read(f"covey/{path.relative_to(package).as_posix()}") == path.read_bytes()
        assert not [name for name in names if "__pycache__" in name]
        (record,) = (archive.read(name).decode() for name in names if name.endswith("/RECORD"))
        assert [line.partition(",")[0] for line in record.splitlines()] == names
        (about,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
        assert re.search(r"^Requires-Dist: numpy", about, re.MULTILINE)


def test_an_environment_that_cannot_be_made_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Environments(tmp_path / "environments")
    with pytest.raises(ConfigError, match="start again"):
        made.python(of("covey"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"cannot make an environment \(exit code 1\)"):
        list(made.make(of("covey"), ()))
    assert list((tmp_path / "environments").iterdir()) == []
    with pytest.raises(ConfigError, match="start again"):
        made.python(of("covey"))


@pytest.mark.thorough
def test_an_environment_is_made_once_and_sees_the_covey_that_is_here_or_gets_the_one_that_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    made, wanted = Environments(tmp_path / "environments"), of(f"covey\nnumpy\n{make_wheel(tmp_path)}\n")
    with pytest.raises(ConfigError, match="start again"):
        made.python(wanted)
    printed = b"".join(made.make(wanted, ()))
    assert b"Successfully installed stand-in-1.0" in printed
    assert NEEDS_INDEX not in printed

    def told(interpreter: Interpreter, words: str) -> str:
        command = [made.python(interpreter), "-c", f"import sys, covey, numpy; print({words})"]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout.strip()

    python = made.python(wanted)
    assert told(wanted, "sys.prefix") == str(tmp_path / "environments" / python.split("/")[-3])
    assert told(wanted, "covey.__file__") == covey.__file__
    assert list(made.make(wanted, ())) == []

    sent = make_own_wheel()
    (tmp_path / sent.name).write_bytes(sent.data)
    other = of(wanted.requirements, sent.digest)
    assert NEEDS_INDEX not in b"".join(made.make(other, (), tmp_path / sent.name))
    assert told(other, "covey.__file__").startswith(str(tmp_path)), "its own, whatever is here"

    pieces: list[bytes] = []
    with pytest.raises(
        ConfigError, match=r"cannot install \(exit code 1\): Could not find a version .* no-such-package"
    ):
        pieces.extend(made.make(of("covey\nno-such-package\n"), ()))
    assert NEEDS_INDEX + b"no-such-package\n" in pieces, "before pip has looked for it"

    monkeypatch.setattr(environments, "ENVIRONMENTS_LIMIT", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="cannot make an environment"):
        list(made.make(of("another"), in_use=[wanted]))
    assert made.python(wanted) == python, "one that is in use stays"
    assert len(list((tmp_path / "environments").iterdir())) == 1, "nothing is left of one that could not be made"
