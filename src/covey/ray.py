"""covey on Ray: ranks as Ray actors, and a backend for Ray Train.

covey.ray.launch(fn, num_workers=4)                              # fn(group) on four actors
TorchTrainer(step, torch_config=covey.ray.CoveyConfig(), ...)    # Ray Train, over covey's lanes
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from covey.base.errors import ConfigError, DeadlineError
from covey.engines.seats import (
    ENGINE_START_SECONDS,
    RUN_SECRET_BYTES,
    Site,
    collect,
    free_pair,
    need_workers,
    seat_workers,
    sit,
)

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError("covey.ray needs Ray: pip install 'covey[ray]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.engines.seats import Seat
    from covey.runtime.keeper.reports import CallReport

    CoveyConfig: type

__all__ = ["CoveyConfig", "launch"]


def launch(
    fn: Callable[..., Any],
    *args: Any,
    num_workers: int,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    timeout: float | None = None,
    start_timeout: float = ENGINE_START_SECONDS,
    **join: Any,
) -> list[Any]:
    """Call `fn(group, *args)` in `num_workers` Ray actors and return the results, by rank.

    Ray is initialised if it is not. `resources` is what each actor needs (default: one CPU), and `strategy` how Ray's
    placement group spreads them ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"). Actors of one machine get
    consecutive ranks. A secret that is made for this launch protects what they send each other. `join` has arguments of
    `covey.join`, such as `on_loss="continue"`: then the others finish without a rank whose actor dies, and its result
    is None. In `fn`, `torch.distributed.init_process_group("covey")` works, too.

    Raises:
        ConfigError: an argument is wrong.
        DeadlineError: Ray did not start the actors within `start_timeout` seconds, or not all ranks returned within
            `timeout` seconds.
        RankFailedError: an actor died, or raised an exception that cannot be pickled. Any other exception of `fn` is
            raised here as it is, with the rank and its traceback as a note.
    """
    size = need_workers(num_workers)
    bundle = {"CPU": 1.0} if resources is None else dict(resources)
    if not ray.is_initialized():
        ray.init()
    group = placement_group([bundle] * size, strategy=strategy)
    actors: list[Any] = []
    try:
        if not group.wait(start_timeout):
            raise DeadlineError(
                f"Ray has not found {size} x {bundle} within the start timeout of {start_timeout:g} s; free now: "
                f"{ray.available_resources()}"
            )
        actors = [_actor(group, position, bundle) for position in range(size)]
        try:
            sites = ray.get([actor.site.remote() for actor in actors], timeout=start_timeout)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"Ray has not started {size} actors within the start timeout of {start_timeout:g} s"
            ) from None
        seats = seat_workers("ray", sites)
        pending = {actor.sit.remote(seat, fn, args, join): seat.rank for actor, seat in zip(actors, seats, strict=True)}

        def wait(seconds: float | None) -> Iterator[tuple[int, CallReport | str]]:
            ready, _ = ray.wait(list(pending), timeout=seconds)
            for reference in ready:
                try:
                    ended: CallReport | str = ray.get(reference)
                except ray.exceptions.RayError as error:
                    ended = f"its actor died: {error}"
                yield pending.pop(reference), ended

        survives = join.get("on_loss") == "continue"
        return collect(size, wait, ray.cloudpickle.loads, timeout=timeout, tolerate_losses=survives)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


class _RankActor:
    """An actor that is a rank."""

    def site(self) -> Site:
        """Return where this actor runs."""
        return Site(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_pair())

    def sit(self, seat: Seat, fn: Callable[..., Any], args: Sequence[Any], join: Mapping[str, Any]) -> CallReport:
        """Join as a rank, call a function, and report what came of it."""
        return sit(seat, fn, args, join, ray.cloudpickle.dumps)


def _actor(group: Any, position: int, resources: Mapping[str, float]) -> Any:
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return (
        ray.remote(_RankActor)
        .options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources=others,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=position),
        )
        .remote()
    )


def __getattr__(name: str) -> Any:
    if name == "CoveyConfig":  # Ray Train and torch take seconds to load
        globals()[name] = _make_config()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_config() -> type:
    from dataclasses import dataclass

    from ray.train.torch.config import TorchConfig, _TorchBackend

    class _CoveyBackend(_TorchBackend):  # type: ignore[misc]  # Ray is not followed by mypy
        """Gives the workers a secret, then makes the process group as for any backend of torch."""

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            worker_group.execute(_take_secret, secrets.token_hex(RUN_SECRET_BYTES))
            super().on_start(worker_group, backend_config)

    @dataclass
    class CoveyConfig(TorchConfig):  # type: ignore[misc]
        """Makes Ray Train's process group with covey: `TorchTrainer(step, torch_config=covey.ray.CoveyConfig())`.

        A secret that is made for the group protects what the workers send each other.
        """

        backend: str | None = "covey"

        @property
        def backend_cls(self) -> type:
            return _CoveyBackend

    CoveyConfig.__module__, CoveyConfig.__qualname__ = __name__, "CoveyConfig"
    return CoveyConfig


def _take_secret(secret: str) -> None:
    import os

    os.environ["COVEY_SECRET"] = secret
