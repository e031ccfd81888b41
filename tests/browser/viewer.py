"""What the checks of the page see: a browser with fresh profiles, pages of scripted overviews, and real runs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from tests.support import scenes
from tests.support.jobs import SOURCE
from tests.support.player import Player
from tests.support.waiting import DEADLINE, wait_until
from tools.browser import ARGUMENTS

from covey.ui.server import PageServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Dialog, Page

    from covey.testing.netns import Host
    from covey.watch.overview import Overview

GUARD = 60.0
"""Seconds after which a check gives up waiting for the browser."""
NO_NAMES = "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Every name but that of the attacker cannot be resolved: what works so works without a network."""

PROGRAM = """
import math, os, sys, time
import numpy as np
import covey

with covey.join() as group:
    pace = float(os.environ.get("PACE", "0.05"))
    print("ready", os.getpid(), flush=True)
    step = 0
    while True:
        time.sleep(pace + (0.05 if group.rank == int(os.environ.get("SLOW", "-1")) else 0))
        while group.rank == 2 and os.path.exists(sys.argv[1]):
            time.sleep(0.02)
        group.all_reduce(np.full(50_000, group.rank + step, np.float32))
        step += 1
        loss = 2 + 2 * math.exp(-step / 150) + 0.03 * math.sin(step)
        group.report(step=step, loss=loss, samples=32)
        if step % 10 == 0 and group.rank == 0:
            print(f"step {step} loss {loss:.3f}", flush=True)
"""


class Chromium:
    """A browser; `viewer` gives a fresh profile."""

    def __init__(self, path: str) -> None:
        from playwright.sync_api import sync_playwright

        self._ending = contextlib.ExitStack()
        playwright = self._ending.enter_context(sync_playwright())
        self._browser = playwright.chromium.launch(
            executable_path=path, args=[*ARGUMENTS, NO_NAMES, "--enable-precise-memory-info"]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._ending.close()

    @contextlib.contextmanager
    def viewer(self, width: int = 1280, height: int = 900, **options: Any) -> Iterator[Viewer]:
        """Give a person with a fresh browser."""
        context = self._browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(GUARD * 1000)
        viewer = Viewer(context)
        try:
            yield viewer
        finally:
            context.close()


def chromium_on(host: Host, path: str, folder: Path) -> str:
    """Return what starts a Chromium on a host of a test network: a script in a folder."""
    script = folder / "chromium"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(host.command([path]))} "$@"\n')
    script.chmod(0o755)
    return str(script)


class Viewer:
    """One profile of the browser, and all that went on in it."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.complaints: list[str] = []
        """Messages of the console, errors, dialogs."""
        self.requests: list[str] = []

    def _dismiss(self, dialog: Dialog) -> None:
        self.complaints.append("a dialog")
        dialog.dismiss()

    def page(self, address: str = "") -> Page:
        """Return a new tab; with an address, it shows the overview there."""
        page = self.context.new_page()
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.requests.append(request.url))
        if address:
            page.goto(address)
            page.wait_for_selector("#main:not([hidden])")
        return page


def text_of(page: Page, selector: str) -> str:
    return page.inner_text(selector)


def until_text(page: Page, selector: str, wanted: str, within: float) -> float:
    """Return how long it took until an element has a text; fail if that took longer than `within`."""
    begin = time.monotonic()
    page.wait_for_function(
        "([selector, wanted]) => [...document.querySelectorAll(selector)].some((each) => !each.closest('[hidden]')"
        " && each.textContent.includes(wanted))",
        arg=[selector, wanted],
        timeout=within * 1000,
    )
    return time.monotonic() - begin


@contextlib.contextmanager
def scripted(overview: Overview | None = None, *, seconds_of_history: int = 600) -> Iterator[tuple[Player, PageServer]]:
    """Give a page of scripted overviews."""
    player = Player()
    player.show(overview or scenes.training(4, 2))
    player.remember(scenes.RUN, list(scenes.history(seconds_of_history)))
    with PageServer(player, player, player) as page:
        yield player, page


@contextlib.contextmanager
def living(player: Player, every: float = 0.2) -> Iterator[None]:
    """Let a player show the same overview again and again, as a collector does, until the end of `with`."""
    is_over = threading.Event()

    def show() -> None:
        while not is_over.wait(every):
            newest = player.newest()
            player.show(replace(newest, taken=newest.taken + every))

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Command:
    """A covey command in a process of its own, with its output."""

    def __init__(self, home: Path, *arguments: str, **env: str) -> None:
        own = {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
        own |= {"COVEY_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "covey", *arguments],
            env={**os.environ, **own, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def said(self, words: str, count: int = 1) -> list[str]:
        """Return the lines with these words as soon as there are so many."""

        def found() -> list[str]:
            return [line for line in self.lines if words in line]

        wait_until(lambda: len(found()) >= count or not self._reader.is_alive(), lambda: "".join(self.lines))
        if len(found()) < count:
            self.end()
            raise AssertionError("".join(self.lines))
        return found()

    def end(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(18)  # SIGCONT: a stopped one does not end
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class RealRun(Command):
    """`covey run -n 4` of a program that reports, whose pids are known by rank."""

    def __init__(self, folder: Path, name: str, *options: str, **env: str) -> None:
        (folder / "home").mkdir(mode=0o700, exist_ok=True)
        script = folder / f"{name}.py"
        script.write_text(PROGRAM)
        self.hold = folder / "hold"
        """While this file exists, rank 2 does not come to the next operation."""
        super().__init__(folder / "home", "run", "-n", "4", *options, str(script), str(self.hold), **env)
        self.name = name
        self.pids = {int(line[1]): int(line.split()[-1]) for line in self.said("ready", 4)}


class RealPage(Command):
    """`covey ui` on one run."""

    def __init__(self, folder: Path, run: str, *options: str) -> None:
        (folder / "home").mkdir(mode=0o700, exist_ok=True)
        super().__init__(folder / "home", "ui", run, "--json", *options)
        self.link: str = json.loads(self.said("link")[0])["link"]
        self.port = int(self.link.split(":")[2].partition("/")[0])
