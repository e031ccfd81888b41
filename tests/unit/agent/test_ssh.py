"""What `--hosts` means, and what is on the command line of ssh."""

from __future__ import annotations

import pytest
from tests.support.in_turn import in_turn

from covey.agent.ssh import SshHost, SshShare, parse_hosts, ssh_command
from covey.base.errors import ConfigError


def test_hosts_have_numbers_of_processes() -> None:
    assert parse_hosts("north, south:2,me@west") == [SshHost("north", 1), SshHost("south", 2), SshHost("me@west", 1)]
    assert parse_hosts("north,south:2", 4) == [SshHost("north", 4), SshHost("south", 2)]


@in_turn(text=["", ",", "north:0", "north:x", "north:9999", ":2", "-oProxyCommand=x", "a b", "north,north:2", "a\nb"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text)


def test_the_secret_and_the_program_are_not_on_the_command_line() -> None:
    secret = bytes(range(32))
    share = SshShare(SshHost("north", 1), ["ssh"], "/opt/my env/python", ["run", "train.py", "--password=x"], secret)
    line = " ".join(share._argv)
    assert line.endswith("north '/opt/my env/python' -m covey.agent.remote")
    assert "BatchMode=yes" in line
    assert secret.hex() not in line
    assert "train" not in line


def test_another_program_can_connect() -> None:
    assert ssh_command({}) == ["ssh"]
    assert ssh_command({"COVEY_SSH": "ssh -p 2222"}) == ["ssh", "-p", "2222"]
    with pytest.raises(ConfigError, match="COVEY_SSH"):
        ssh_command({"COVEY_SSH": "ssh 'x"})
