from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.proto.health import (
    ASK_VOUCHED,
    FRESH,
    GRAIN,
    STOPPED_SILENCE,
    VOUCHED,
    Cause,
    Dead,
    Health,
    PeerOpinion,
    ProcessState,
    SendPing,
    Silences,
    Suspect,
    Trust,
    Unheard,
)

A, B, C = (letter.encode() * 32 for letter in "abc")
LAN = 0.001
SILENCES = Silences()
INTERVAL, HOST_SILENCE, PROCESS_SILENCE = SILENCES
SUSPECT_LEAST, SUSPECT_MOST = SILENCES.suspect_least, SILENCES.suspect_most


class Watch:
    """A health core on host "north" that watches peers by hand; it is ticked punctually."""

    def __init__(self, **hosts: str) -> None:
        self.now = 100.0
        self.health = Health("north", self.now)
        self.log: list[tuple[float, Any]] = []
        for name, host in hosts.items():
            peer = name.encode() * 32
            self.health.watch(peer, host, self.now)
            self.health.link_up(peer, self.now)
            self.health.round_trip(peer, LAN)

    def run(self, seconds: float, *heard: bytes, every: float = 0.3, vouches: ProcessState | None = None) -> list[Any]:
        """Let time pass in which these peers talk, or are vouched for; return the accusations and their ends."""
        end, start, word_at = self.now + seconds, len(self.log), self.now + every
        while min(word_at, self.health.next_deadline()) <= end:
            if word_at <= self.health.next_deadline():
                self.now, word_at = word_at, word_at + every
                for peer in heard:
                    if vouches is None:
                        self.health.heard(peer, self.now)
                    else:
                        self.health.vouched(peer, vouches, self.now)
            else:
                self.now = self.health.next_deadline()
                self.health.tick(self.now)
            self.drain()
        self.now = end
        return [effect for _, effect in self.log[start:] if not isinstance(effect, SendPing | Unheard)]

    def sleep(self, seconds: float) -> None:
        """Let this node do nothing for a while, and wake up."""
        self.now = self.health.next_deadline() + seconds
        self.health.tick(self.now)
        self.drain()

    def drain(self) -> None:
        self.log += [(self.now, effect) for effect in self.health.effects()]

    def told(self, call: str, *args: Any) -> list[Any]:
        getattr(self.health, call)(*args, self.now)
        before = len(self.log)
        self.drain()
        return [effect for _, effect in self.log[before:]]

    def moment(self, kind: type[Any], peer: bytes) -> float:
        """Return when the last such effect was about this peer."""
        return [at for at, effect in self.log if isinstance(effect, kind) and effect.peer == peer][-1]


def kinds(effects: list[Any]) -> list[tuple[type, Cause | None]]:
    return [(type(effect), getattr(effect, "cause", None)) for effect in effects]


SILENT_DEATH = [(Suspect, Cause.SILENT), (Dead, Cause.SILENT)]


def test_only_the_quiet_are_pinged() -> None:
    watch = Watch(a="south", b="west")
    watch.run(10.0, A, every=INTERVAL / 2)
    pings = [effect.peer for _, effect in watch.log if isinstance(effect, SendPing)]
    assert A not in pings
    assert 30 <= len(pings) <= 40


def test_a_process_without_a_second_voice_is_suspect_soon_and_dead_after_fifteen_seconds() -> None:
    watch = Watch(a="south", b="west")
    start = watch.now
    assert kinds(watch.run(30.0, B)) == SILENT_DEATH
    assert SUSPECT_LEAST < watch.moment(Suspect, A) - start < SUSPECT_LEAST + 0.1
    assert PROCESS_SILENCE <= watch.moment(Dead, A) - start <= PROCESS_SILENCE + GRAIN
    assert watch.health.standing(A) is PeerOpinion.DEAD
    assert watch.health.standing(B) is PeerOpinion.TRUSTED


@pytest.mark.parametrize("voice", ["kernel", "keeper"])
def test_a_machine_that_could_be_heard_is_dead_in_under_five_seconds_with_everybody_on_it(voice: str) -> None:
    watch = Watch(a="south", b="south", c="west")
    if voice == "kernel":
        watch.told("acknowledged", A)
    else:
        watch.told("vouched", A, ProcessState.BUSY)
    start = watch.now
    effects = watch.run(5.0, C)
    assert {effect.peer for effect in effects if isinstance(effect, Dead)} == {A, B}
    assert {effect.cause for effect in effects if isinstance(effect, Dead)} == {Cause.HOST_SILENT}
    assert start + HOST_SILENCE <= watch.moment(Dead, B) <= start + HOST_SILENCE + GRAIN
    assert watch.moment(Suspect, B) < start + SUSPECT_MOST
    assert effects[-1].reason == "nothing heard from its host south for 4.5 s"


def test_a_host_lives_while_one_of_its_members_is_heard() -> None:
    watch = Watch(a="south", b="south")
    watch.told("acknowledged", A)
    assert kinds(watch.run(14.0, B)) == [(Suspect, Cause.SILENT)]
    assert kinds(watch.run(2.0, B)) == [(Dead, Cause.SILENT)]


def test_acknowledgements_of_its_kernel_save_a_busy_process_for_the_time_that_a_process_has() -> None:
    watch = Watch(a="south")
    for _ in range(16):
        watch.told("acknowledged", A)
        watch.run(0.5)
    assert watch.health.standing(A) is PeerOpinion.SUSPECT
    assert kinds(watch.told("heard", A)) == [(Trust, None)]


def test_an_old_acknowledgement_does_not_undo_a_later_word() -> None:
    watch = Watch(a="south")
    watch.health.acknowledged(A, watch.now - 60.0)
    assert watch.run(1.0) == []
    assert kinds(watch.run(3.6)) == [(Suspect, Cause.SILENT), (Dead, Cause.HOST_SILENT)]


def test_the_machine_of_this_node_is_never_silent() -> None:
    watch = Watch(a="north")
    watch.told("vouched", A, ProcessState.BUSY)
    watch.told("acknowledged", A)
    assert kinds(watch.run(14.0)) == [(Suspect, Cause.SILENT)]


@pytest.mark.parametrize("host", ["north", "south"])
def test_a_keeper_vouches_for_a_process_that_says_nothing_for_a_minute(host: str) -> None:
    watch = Watch(a=host)
    assert watch.run(60.0, A, every=INTERVAL, vouches=ProcessState.BUSY) == []


def test_a_process_that_is_busy_for_ever_hangs_and_is_dead_at_last() -> None:
    watch = Watch(a="south")
    start = watch.now
    effects = watch.run(VOUCHED + 20.0, A, every=INTERVAL, vouches=ProcessState.BUSY)
    assert kinds(effects) == SILENT_DEATH
    assert 0 <= watch.moment(Dead, A) - start - VOUCHED - PROCESS_SILENCE <= GRAIN
    assert effects[-1].reason == "silent for 315.0 s; it is alive, so it hangs"


def test_a_process_whose_keeper_is_gone_is_judged_by_itself_again() -> None:
    watch = Watch(a="south", b="south")
    watch.run(30.0, A, B, vouches=ProcessState.BUSY)
    last = watch.now
    assert kinds(watch.run(20.0, B)) == SILENT_DEATH
    assert watch.moment(Dead, A) - last == pytest.approx(PROCESS_SILENCE, abs=0.4)


def test_one_that_exited_is_dead_at_once_and_no_word_that_was_on_the_way_revives_it() -> None:
    watch = Watch(a="south")
    assert kinds(watch.told("vouched", A, ProcessState.EXITED)) == [(Dead, Cause.EXITED)]
    calls: list[tuple[Any, ...]] = [
        ("heard", A),
        ("link_lost", A),
        ("link_up", A),
        ("vouched", A, ProcessState.BUSY),
        ("vouched", A, ProcessState.EXITED),
    ]
    for call in calls:
        assert watch.told(*call) == []
    assert watch.run(30.0, A) == []
    assert not any(isinstance(effect, SendPing) for _, effect in watch.log)


def test_one_that_is_stopped_is_suspect_at_once_dead_within_a_second_and_well_when_it_goes_on() -> None:
    watch = Watch(a="south")
    stopped = watch.now
    assert kinds(watch.told("vouched", A, ProcessState.STOPPED)) == [(Suspect, Cause.STOPPED)]
    assert watch.told("heard", A) == []  # was on the way
    assert kinds(watch.run(1.0, A, every=0.1, vouches=ProcessState.STOPPED)) == [(Dead, Cause.STOPPED)]
    assert STOPPED_SILENCE <= watch.moment(Dead, A) - stopped <= STOPPED_SILENCE + GRAIN
    assert watch.run(20.0, A) == []
    assert kinds(watch.told("vouched", A, ProcessState.BUSY)) == [(Trust, None)]


def test_a_debugger_that_attaches_for_a_moment_kills_nobody() -> None:
    watch = Watch(a="south")
    watch.told("vouched", A, ProcessState.STOPPED)
    watch.run(0.3)
    assert kinds(watch.told("vouched", A, ProcessState.BUSY)) == [(Trust, None)]
    assert watch.run(5.0, A) == []


def test_a_link_that_ends_makes_suspect_at_once_and_shortens_no_life() -> None:
    watch = Watch(a="south")
    start = watch.now
    assert watch.told("link_lost", A) == [Suspect(A, Cause.LINK_LOST, "its link ended")]
    assert watch.told("link_lost", A) == []
    assert watch.told("heard", A) == []  # read from the link that ended
    assert kinds(watch.run(20.0)) == [(Dead, Cause.SILENT)]
    assert PROCESS_SILENCE <= watch.moment(Dead, A) - start <= PROCESS_SILENCE + GRAIN
    assert not any(isinstance(effect, SendPing) for _, effect in watch.log)
    assert kinds(watch.told("link_up", A)) == [(Trust, None)]


def test_the_silence_of_a_peer_whose_link_rests_means_nothing_until_it_wakes() -> None:
    watch = Watch(a="south")
    watch.health.link_rests(A)
    assert watch.run(600.0) == []
    assert not any(isinstance(effect, SendPing) and at > 0 for at, effect in watch.log[1:])
    assert watch.health.explain(A, watch.now) == "trusted: its link is idle, and other members listen to it"
    woken_at = watch.now
    assert watch.told("link_up", A) == []
    assert kinds(watch.run(20.0)) == SILENT_DEATH
    assert watch.moment(Dead, A) - woken_at >= PROCESS_SILENCE


def test_a_link_that_rests_and_cannot_be_woken_has_ended() -> None:
    watch = Watch(a="south")
    watch.health.link_rests(A)
    watch.run(600.0)
    ended_at = watch.now
    assert watch.told("link_lost", A) == [Suspect(A, Cause.LINK_LOST, "its link ended")]
    assert kinds(watch.run(20.0)) == [(Dead, Cause.SILENT)]
    assert watch.moment(Dead, A) - ended_at >= PROCESS_SILENCE


def test_one_whose_link_rests_is_dead_if_its_keeper_says_so() -> None:
    watch = Watch(a="south")
    watch.health.link_rests(A)
    assert watch.told("vouched", A, ProcessState.STOPPED) == []
    assert kinds(watch.told("vouched", A, ProcessState.EXITED)) == [(Dead, Cause.EXITED)]


def test_a_keeper_keeps_one_without_a_link_alive_but_not_trusted() -> None:
    watch = Watch(a="south")
    watch.told("link_lost", A)
    assert watch.run(60.0, A, every=INTERVAL, vouches=ProcessState.BUSY) == []
    assert watch.health.standing(A) is PeerOpinion.SUSPECT
    assert kinds(watch.told("link_up", A)) == [(Trust, None)]


def test_a_suspect_is_accused_again_only_for_something_graver() -> None:
    watch = Watch(a="south")
    assert kinds(watch.run(2.0)) == [(Suspect, Cause.SILENT)]
    assert kinds(watch.told("link_lost", A)) == [(Suspect, Cause.LINK_LOST)]
    assert kinds(watch.told("vouched", A, ProcessState.STOPPED)) == [(Suspect, Cause.STOPPED)]
    assert watch.told("vouched", A, ProcessState.STOPPED) == []


def test_a_word_revives_the_dead() -> None:
    watch = Watch(a="south")
    watch.run(20.0)
    assert kinds(watch.told("heard", A)) == [(Trust, None)]
    assert watch.run(10.0, A) == []


@in_turn(seconds=[1.0, 4.0, 30.0, 86_400.0])
@in_turn(silence=[0.0, 0.4, 1.4])
def test_a_node_that_did_not_listen_accuses_nobody_and_asks_everybody(seconds: float, silence: float) -> None:
    watch = Watch(a="south", b="west")
    watch.told("acknowledged", A)
    watch.run(silence)
    watch.sleep(seconds)
    pinged = {effect.peer for at, effect in watch.log if at == watch.now}
    assert pinged == {A, B}
    assert watch.run(0.05, A, B, every=0.02) == []  # they answer
    assert watch.run(60.0, A, B) == []


def test_silence_after_a_suspension_counts_from_the_waking() -> None:
    watch = Watch(a="south")
    watch.told("acknowledged", A)
    watch.run(1.0)
    watch.sleep(30.0)
    woken = watch.now
    assert kinds(watch.run(10.0)) == [(Suspect, Cause.SILENT), (Dead, Cause.HOST_SILENT)]
    assert woken + HOST_SILENCE <= watch.moment(Dead, A) <= woken + HOST_SILENCE + GRAIN


def test_a_node_that_hardly_ever_listens_still_finds_the_dead() -> None:
    watch = Watch(a="south")
    watch.told("acknowledged", A)
    start = watch.now
    while watch.health.standing(A) is not PeerOpinion.DEAD:
        watch.sleep(0.6)
        watch.run(0.3)
        assert watch.now < start + 60.0
    assert watch.now - start > HOST_SILENCE


def test_ticks_that_come_early_do_nothing() -> None:
    watch = Watch(a="south")
    for _ in range(100):
        watch.health.tick(watch.now)
    assert watch.health.effects() == []
    assert watch.health.next_deadline() > watch.now


def test_nobody_to_watch_is_nothing_to_wait_for() -> None:
    watch = Watch()
    assert watch.health.next_deadline() == math.inf
    watch.now += 1000.0
    watch.told("watch", A, "south")
    assert watch.run(1.0) == []
    watch.health.forget(A)
    watch.health.forget(A)
    calls: list[tuple[Any, ...]] = [("heard", A), ("link_up", A), ("link_lost", A), ("acknowledged", A)]
    for call in [*calls, ("vouched", A, ProcessState.EXITED)]:
        assert watch.told(*call) == []
    watch.health.round_trip(A, 1.0)
    assert watch.health.next_deadline() == math.inf


def test_a_new_life_starts_trusted() -> None:
    watch = Watch(a="south")
    watch.told("vouched", A, ProcessState.EXITED)
    watch.told("watch", A, "south")
    assert watch.health.standing(A) is PeerOpinion.TRUSTED
    watch.told("link_up", A)
    assert watch.run(10.0, A) == []


def test_one_that_never_gets_a_link_is_missed_too() -> None:
    watch = Watch()
    watch.told("watch", A, "south")
    assert kinds(watch.run(20.0)) == SILENT_DEATH


@given(st.floats(0, 100), st.floats(0, 100))
def test_patience_grows_with_the_round_trip_and_its_jitter_within_bounds(round_trip: float, jitter: float) -> None:
    patience = SILENCES.suspect_after(round_trip, jitter)
    assert SUSPECT_LEAST <= patience <= SUSPECT_MOST < HOST_SILENCE
    assert (
        patience
        <= SILENCES.suspect_after(round_trip + 0.1, jitter)
        <= SILENCES.suspect_after(round_trip + 0.1, jitter + 0.1)
    )


def test_a_slow_link_gets_more_patience_and_one_that_improves_loses_it_again() -> None:
    watch = Watch(a="south")

    def patience() -> float:
        start = watch.now
        watch.told("heard", A)
        watch.run(5.0)
        return watch.moment(Suspect, A) - start

    for seconds in (0.05, 0.6) * 20:
        watch.health.round_trip(A, seconds)
    slow = patience()
    for _ in range(40):
        watch.health.round_trip(A, LAN)
    watch.told("heard", A)
    for _ in range(40):
        watch.health.round_trip(A, LAN)
    assert slow == pytest.approx(SUSPECT_MOST, abs=0.1)
    assert patience() == pytest.approx(SUSPECT_LEAST, abs=0.1)


def test_after_a_suspicion_in_vain_the_next_takes_longer() -> None:
    watch = Watch(a="south")
    watch.run(1.6)
    assert watch.health.standing(A) is PeerOpinion.SUSPECT
    watch.told("heard", A)
    assert watch.run(2.9) == []
    assert kinds(watch.run(0.2)) == [(Suspect, Cause.SILENT)]


def test_it_explains_itself() -> None:
    watch = Watch(a="south", b="west")
    watch.run(0.4, B)
    assert watch.health.explain(A, watch.now) == ("trusted: last heard 0.4 s ago; round trip 1 ms, give or take 0.5 ms")
    watch.told("vouched", A, ProcessState.BUSY)
    watch.now += 0.1
    assert watch.health.explain(A, watch.now).startswith("trusted: last heard 0.5 s ago, vouched for 0.1 s ago;")
    watch.run(3.7, B)
    assert watch.health.explain(A, watch.now) == (
        "suspect: silent for 4.2 s; last heard 4.2 s ago, its host 3.8 s ago; "
        "round trip 1 ms, give or take 0.5 ms; dead in 0.7 s if nothing more is heard"
    )
    watch.run(2.0)
    assert watch.health.explain(A, watch.now).startswith("dead: nothing heard from its host south for 5.8 s; ")
    assert watch.health.explain(A, watch.now).endswith("this machine may be cut off")
    watch.told("vouched", A, ProcessState.EXITED)
    watch.told("heard", B)
    assert watch.health.explain(A, watch.now) == "dead: its process has exited"
    watch.told("link_lost", B)
    assert "suspect: its link ended; " in watch.health.explain(B, watch.now)
    watch.told("vouched", B, ProcessState.STOPPED)
    assert "its process is stopped (SIGSTOP, a debugger)" in watch.health.explain(B, watch.now)


def test_a_link_that_carries_nothing_is_noticed_although_the_keeper_vouches_for_the_process() -> None:
    watch = Watch(a="south")
    watch.run(2.0, A)
    watch.log.clear()
    assert watch.run(10.0, A, vouches=ProcessState.BUSY) == [], "the process is not even suspect"
    (unheard,) = [(at, effect) for at, effect in watch.log if isinstance(effect, Unheard)]
    assert unheard[1] == Unheard(A), "once"
    assert unheard[0] - 102.0 <= SUSPECT_MOST
    assert watch.health.is_unheard(A)
    watch.health.heard(A, watch.now)
    assert not watch.health.is_unheard(A)
    watch.log.clear()
    watch.run(10.0, A, vouches=ProcessState.BUSY)
    assert [effect for _, effect in watch.log if isinstance(effect, Unheard)] == [Unheard(A)], "and again"


# Many members of one machine


def pings(watch: Watch, since: float) -> int:
    return sum(isinstance(effect, SendPing) for at, effect in watch.log if at >= since)


def test_a_peer_of_this_machine_is_asked_rarely_while_its_keeper_vouches_for_it() -> None:
    watch = Watch(a="north")
    began = watch.now
    assert watch.run(60.0, A, every=INTERVAL, vouches=ProcessState.BUSY) == []
    assert 60 / ASK_VOUCHED - 1 <= pings(watch, began) <= 60 / ASK_VOUCHED + 1


def test_a_peer_of_another_machine_is_asked_as_ever_though_its_keeper_vouches_for_it() -> None:
    watch = Watch(a="south")
    began = watch.now
    watch.run(10.0, A, every=INTERVAL, vouches=ProcessState.BUSY)
    assert pings(watch, began) >= 10 / INTERVAL - 1


def test_a_peer_of_this_machine_is_asked_once_its_keeper_is_silent() -> None:
    watch = Watch(a="north")
    watch.run(5.0, A, every=INTERVAL, vouches=ProcessState.BUSY)
    silent_since = watch.now
    watch.run(FRESH + INTERVAL)
    assert pings(watch, silent_since) >= 1


def test_members_of_one_loaded_machine_do_not_all_ask_each_other_when_they_are_late() -> None:
    watch = Watch(a="north", b="south")
    watch.run(2.0, A, every=INTERVAL, vouches=ProcessState.BUSY)
    before = watch.now
    watch.sleep(1.0)
    assert [effect for at, effect in watch.log if at > before] == [SendPing(B)]
