from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from covey.base.errors import ConfigError
from covey.runtime.tasks import CoreDriver


class Counter:
    """A core whose effects are words; it ticks every `every` seconds."""

    def __init__(self, every: float = math.inf) -> None:
        self.every = every
        self.waiting: list[str] = []
        self.due = time.monotonic() + every

    def effects(self) -> list[str]:
        effects, self.waiting = self.waiting, []
        return effects

    def next_deadline(self) -> float:
        return self.due

    def tick(self, now: float) -> None:
        self.due = now + self.every
        self.waiting.append("tick")


class Scene:
    """A core, its driver, and what the driver did."""

    def __init__(self, every: float = math.inf, **options: Any) -> None:
        self.core = Counter(every)
        self.done: list[str] = []
        self.ticked = asyncio.Event()
        self.driver = CoreDriver(self.core, self, **options)

    def say(self, *words: str) -> None:
        self.core.waiting += words
        self.driver.settle()

    def perform(self, effect: str) -> None:
        self.done.append(effect)
        if effect == "tick":
            self.ticked.set()
        if effect == "call":
            self.say("later")
        elif effect == "fail":
            raise ConfigError("no disk")

    def settled(self) -> None:
        self.done.append("settled")

    def failed(self, error: ConfigError) -> None:
        self.done.append(str(error))


def test_effects_are_performed_in_order_and_those_of_an_effect_after_it() -> None:
    scene = Scene()
    scene.say("first", "call", "second")
    assert scene.done == ["first", "call", "second", "later", "settled"]


def test_an_effect_that_cannot_be_performed_drops_those_after_it() -> None:
    scene = Scene()
    scene.say("first", "fail", "second")
    assert scene.done == ["first", "fail", "no disk"]
    scene.say("third")
    assert scene.done[3:] == ["third", "settled"]


def test_a_closed_driver_performs_nothing() -> None:
    scene = Scene()
    scene.driver.close()
    scene.say("first")
    assert scene.done == []


def test_the_core_is_ticked_at_its_deadlines_from_the_first_effects_until_it_is_closed() -> None:
    async def act() -> None:
        scene = Scene(every=0.002)
        await asyncio.sleep(0.01)
        assert scene.done == [], "nothing before the first input"
        scene.say()
        for _ in range(3):
            scene.ticked.clear()
            await scene.ticked.wait()
        scene.driver.close()
        before = list(scene.done)
        await asyncio.sleep(0.02)
        assert scene.done == before

    asyncio.run(act())


def test_a_driver_that_is_run_ticks_until_it_is_cancelled_and_still_performs_effects_then() -> None:
    async def act() -> None:
        scene = Scene(every=0.002, is_ticking=False)
        scene.say("early")
        scene.driver.settle_soon()
        await asyncio.sleep(0.01)
        assert scene.done == ["early", "settled"], "no tick before it is run"
        task = asyncio.get_running_loop().create_task(scene.driver.run())
        await scene.ticked.wait()
        task.cancel()
        await asyncio.wait([task])
        scene.done.clear()
        await asyncio.sleep(0.02)
        scene.say("late")
        assert scene.done == ["late", "settled"]

    asyncio.run(act())


def test_settling_soon_waits_for_the_present_callback_and_settles_once() -> None:
    async def act() -> None:
        scene = Scene()
        for word in ("one", "two"):
            scene.core.waiting.append(word)
            scene.driver.settle_soon()
        assert scene.done == []
        await asyncio.sleep(0)
        assert scene.done == ["one", "two", "settled"]
        scene.driver.close()

    asyncio.run(act())
