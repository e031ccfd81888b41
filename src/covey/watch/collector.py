"""The collector: looks at machines and runs once a second, on a thread of its own, and keeps the newest overview.

Its methods may be called on any thread; each returns at once or within the time that it was given.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from covey.base.config import group_config
from covey.base.errors import ConfigError, CoveyError
from covey.base.text import printable
from covey.net.host.readings import MachineReader
from covey.net.host.runs import find_local_run
from covey.net.host.settings_files import effective_environment
from covey.net.keys.identity import own_machine
from covey.runtime.environment import ClusterOptions
from covey.watch.books import RunBooks
from covey.watch.cluster_source import PROGRAMS_EVERY, ClusterSource
from covey.watch.local_source import LOCAL_ID, LocalSource
from covey.watch.overview import Overview

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.watch.asking import RoundSource
    from covey.watch.far_output import FarOutput
    from covey.watch.overview import Moment

logger = logging.getLogger("covey")

COLLECT_EVERY: Final = 1.0
COLLECTOR_CLOSE_SECONDS: Final = 15.0
"""How long the last round may take when the collector is closed."""


@contextlib.contextmanager
def open_collector(run: str = "", cluster: str | None = None) -> Iterator[Collector]:
    """Look at what this machine can see, until the end of `with`: its cluster and its own runs, or one `run` of them.

    If a cluster is named, only at that.

    Raises:
        ConfigError: the cluster that was named is not known, or no port is free.
    """
    env = effective_environment()
    here = find_local_run(run) if run and cluster is None else None
    try:
        found = None if here is not None else ClusterOptions(cluster).find(env)
    except ConfigError:
        if cluster is not None:
            raise
        found = None
    if found is None:
        made = Collector.of_this_machine(run)
    else:
        made = Collector.of_cluster(found, group_config(env), run, has_local=cluster is None)
    with made as collector:
        yield collector


class Collector:
    """Overviews of machines and runs, a new one each second."""

    def __init__(self, sources: Sequence[RoundSource], books: RunBooks, ending: contextlib.ExitStack) -> None:
        """Begin to look at `sources`; `ending` is closed after the last look."""
        self.sources = tuple(sources)
        self._books, self._ending = books, ending
        self._changed = threading.Condition()
        self._newest = Overview(0, time.time())
        self._is_closing = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="covey-watch", daemon=True)]
        if any(isinstance(source, ClusterSource) for source in sources):
            self._threads.append(threading.Thread(target=self._ask_agents, name="covey-watch-agents", daemon=True))
        for thread in self._threads:
            thread.start()

    @classmethod
    def of_cluster(cls, cluster: Cluster, config: GroupConfig, run: str = "", *, has_local: bool = True) -> Collector:
        """Look at a cluster and, with `has_local`, at the runs of this machine; or at one `run` of them.

        Raises:
            ConfigError: no port is free, or no interface matches.
        """
        from covey.agent.callers import calling

        with contextlib.ExitStack() as ending:
            terminal = ending.enter_context(calling(cluster, config))
            id = own_machine().hex()
            reader = MachineReader()
            local = LocalSource(reader.read, machine=id, name=_host(), only=run)
            books = RunBooks(cluster.name, own_id=id)
            sources: list[RoundSource] = [ClusterSource(terminal, only=run)]
            return cls([*sources, local] if has_local else sources, books, ending.pop_all())

    @classmethod
    def of_this_machine(cls, run: str = "") -> Collector:
        """Look at the runs of `covey run -n` on this machine, or at one of them."""
        local = LocalSource(MachineReader().read, machine=LOCAL_ID, name=_host(), only=run)
        return cls([local], RunBooks("", own_id=LOCAL_ID), contextlib.ExitStack())

    def newest(self) -> Overview:
        """Return the newest overview; its serial is 0 before the first look has ended."""
        return self._newest

    def next_after(self, serial: int, within: float) -> Overview | None:
        """Return the first overview after the one with this serial; None if none came within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest.serial > serial or self._is_closing.is_set(), within)
            return self._newest if self._newest.serial > serial else None

    def history(self, run_id: str, since: float = 0.0) -> tuple[Moment, ...]:
        """Return the moments of a run after a time, oldest first; none of a run that is not known."""
        return self._books.history(run_id, since)

    def follow(self, output: FarOutput) -> None:
        """Ask other machines for the output of a run, as long as it is wanted."""
        for source in self.sources:
            if isinstance(source, ClusterSource):
                source.follow(output)

    @property
    def books(self) -> RunBooks:
        """What is known of the runs."""
        return self._books

    def close(self) -> None:
        """Look no more, and end all links. Closing twice is fine."""
        self._is_closing.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(COLLECTOR_CLOSE_SECONDS)
        for source in self.sources:
            source.close()
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        at = time.monotonic()
        while not self._is_closing.is_set():
            try:
                self._look()
            except (CoveyError, OSError, TimeoutError) as error:  # the next round may succeed
                logger.warning("the runs could not be looked at: %s", printable(str(error)))
            at = max(at + COLLECT_EVERY, time.monotonic())
            self._is_closing.wait(at - time.monotonic())

    def _look(self) -> None:
        wanted = self._books.wanted()
        rounds = [source.look(wanted) for source in self.sources]
        overview = self._books.overview(rounds)
        with self._changed:
            self._newest = overview
            self._changed.notify_all()

    def _ask_agents(self) -> None:
        asked = -PROGRAMS_EVERY
        while not self._is_closing.wait(COLLECT_EVERY):
            is_due = time.monotonic() - asked >= PROGRAMS_EVERY
            asked = time.monotonic() if is_due else asked
            for source in self.sources:
                if isinstance(source, ClusterSource):
                    with contextlib.suppress(CoveyError, OSError, TimeoutError):
                        if is_due:
                            source.ask_programs()
                        source.read_programs()


def _host() -> str:
    return printable(socket.gethostname().partition(".")[0], 100)
