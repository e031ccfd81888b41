"""The process of a program that `covey worker` starts: `covey.join` makes it a worker of a coordinator's run.

The rank is asked for when the program joins, so that its own arguments of `join` hold, and again when it joins after
its group is over: that is the next round.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from covey.coordinator.worker import WorkerNode, WorkerNodeConfig
from covey.runtime.joining.bootstrap import take_ranks_from

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.runtime.environment import ClusterOptions
    from covey.runtime.group.group import Group
    from covey.runtime.joining.request import JoinTarget


class JoiningWorker(WorkerNode):
    """A worker whose group has the settings with which a program called `join`."""

    def __init__(self, config: WorkerNodeConfig, target: JoinTarget) -> None:
        super().__init__(config)
        self._target = target

    def _group_options(self) -> tuple[ClusterOptions, GroupConfig]:
        return self._target.options, self._target.config


class WorkerRanks:
    """Gives this process a rank in each round of its run; a `RankSource`."""

    def __init__(self, config: WorkerNodeConfig) -> None:
        self._config = config
        self._node: WorkerNode | None = None

    def join(self, target: JoinTarget) -> Group:
        self.close()
        options = target.options
        config = replace(self._config, timeout=target.wait)
        if options.name is None:
            options = replace(options, name=config.cluster)
        else:
            config = replace(config, cluster=options.name)
        if options.secret is not None:
            config = replace(config, secret=options.secret)
        self._node = JoiningWorker(config, replace(target, options=options)).start()
        return self._node.group

    def close(self) -> None:
        """Leave the round, and unregister."""
        if self._node is not None:
            self._node.close()


def main(config: str, kind: str, program: str, *arguments: str) -> None:
    """Run a Python script, or a module if `kind` is "module", as a worker; `config` is its WorkerNodeConfig as JSON."""
    ranks = WorkerRanks(WorkerNodeConfig(**msgspec.json.decode(config)))
    take_ranks_from(ranks)
    sys.argv = [program, *arguments]
    try:
        if kind == "module":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program))  # where Python would look, instead of here
            runpy.run_path(program, run_name="__main__")
    finally:
        ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
