"""Signal handlers do not run while they are held, and run once afterwards."""

from __future__ import annotations

import signal
import threading

import pytest
from tests.support.waiting import DEADLINE

from covey.runtime.signals import HeldSignals


def test_ctrl_c_is_raised_after_the_section_and_wakes_it() -> None:
    woken, done = list[int](), list[str]()
    before = signal.getsignal(signal.SIGINT)

    def section() -> None:
        with HeldSignals(lambda: woken.append(1)) as held:
            assert not held.noted
            signal.raise_signal(signal.SIGINT)
            done.append("after the signal")
            assert held.noted

    with pytest.raises(KeyboardInterrupt):
        section()
    assert (woken, done) == ([1], ["after the signal"])
    assert signal.getsignal(signal.SIGINT) is before


def test_an_inner_section_leaves_the_signal_to_the_outer_one() -> None:
    done = list[str]()

    def section() -> None:
        with HeldSignals():
            with HeldSignals():
                signal.raise_signal(signal.SIGINT)
            done.append("after the inner one")

    with pytest.raises(KeyboardInterrupt):
        section()
    assert done == ["after the inner one"]


def test_a_signal_that_the_program_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HeldSignals() as held:
            signal.raise_signal(signal.SIGINT)
            assert not held.noted
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing() -> None:
    handlers = []

    def body() -> None:
        with HeldSignals():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(DEADLINE)
    assert handlers == [before]
