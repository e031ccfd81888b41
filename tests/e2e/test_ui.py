"""`covey ui` as a user starts it: the link, a real run behind it, another link, the browser, and its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.browser.viewer import RealPage, RealRun
from tests.support.waiting import DEADLINE, wait_until

from covey.base.errors import ConfigError
from covey.net.host.run_notes import REPORT_PREFIX
from covey.ui.links import LinkFile, new_link, opened

if TYPE_CHECKING:
    from pathlib import Path


def post(port: int, path: str, body: object, key: str = "") -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    headers = {
        "Content-Type": "application/json",
        "Origin": f"http://127.0.0.1:{port}",
        "Authorization": f"Bearer {key}",
    }
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)
    finally:
        connection.close()


def get(port: int, path: str, token: str) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def own_name() -> str:
    return os.uname().nodename.partition(".")[0]


def test_a_run_is_seen_and_stopped_through_the_page(tmp_path: Path) -> None:
    with RealRun(tmp_path, "seen") as run, RealPage(tmp_path, run.name) as page:
        env = {**os.environ, "COVEY_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "covey", "ui", "--link", "--port", str(page.port)]
        printed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
        assert f"http://127.0.0.1:{page.port}/#ticket=" in printed
        assert printed.partition("#ticket=")[2].strip() != page.link.partition("#ticket=")[2]
        token = post(page.port, "/api/enter", {"ticket": printed.partition("#ticket=")[2].strip()})["token"]
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=DEADLINE)
        connection.request("GET", "/api/overviews", headers={"Authorization": f"Bearer {token}"})
        stream = connection.getresponse()
        seen: dict[str, Any] = {}
        while not seen.get("runs") or not seen["runs"][0]["reports"].get("loss"):
            seen = json.loads(stream.readline())
        connection.close()
        found = seen["runs"][0]
        assert (found["name"], [rank["rank"] for rank in found["ranks"]]) == ("seen", [0, 1, 2, 3])
        assert {rank["pid"] for rank in found["ranks"]} == set(run.pids.values())
        folder = tmp_path / "home" / "ui"
        assert stat.S_IMODE((folder / f"{page.port}.json").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        wait_until(lambda: any(path.suffix != ".new" for path in (tmp_path / "home").rglob(f"{REPORT_PREFIX}*")))
        post(page.port, "/api/stop", {"run": found["id"]}, token)
        run.process.wait(DEADLINE)
        assert "from the page" in (tmp_path / "home" / "audit" / "log.jsonl").read_text()
        (past,) = get(page.port, "/api/past", token)
        assert (past["run"], past["ranks"], past["machines"], past["state"]) == ("seen", 4, [own_name()], "ended")
        assert past["report"]["step"] > 0
        assert past["logs"] == f"covey logs {past['id']}"
        page.process.send_signal(signal.SIGTERM)
        assert page.process.wait(DEADLINE) == 0
        assert not list(folder.iterdir())


def test_a_link_comes_only_from_a_page_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="no `covey ui` of yours runs on this machine"):
        new_link()
    with LinkFile(1, "key") as file:
        with pytest.raises(ConfigError, match="does not answer"):
            new_link()
        left = (file.folder / "1.json").read_bytes()
    (file.folder / "1.json").write_bytes(left)  # its server was killed
    (file.folder / "1.json").chmod(0o600)
    with pytest.raises(ConfigError, match="no `covey ui` of yours runs at port 1"):
        new_link(1)
    assert not list(file.folder.glob("*.json"))


def test_the_browser_gets_the_link_by_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform == "linux":
        with opened("http://127.0.0.1:1/#ticket=abc", tmp_path) as is_open:
            assert not is_open, "without a screen it would take the terminal"
    script, told = tmp_path / "browser", tmp_path / "told"
    script.write_text(f"#!/bin/sh\nprintf '%s' \"$1\" > {told}.part && mv {told}.part {told}\n")
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(script))
    with opened("http://127.0.0.1:1/#ticket=abc", tmp_path) as is_open:
        assert is_open
        wait_until(told.exists)
        path = told.read_text().removeprefix("file://")
        assert "ticket" not in path
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with open(path) as file:
            assert "url=http://127.0.0.1:1/#ticket=abc" in file.read()
    assert not os.path.exists(path)
