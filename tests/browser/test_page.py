# ruff: noqa: E501, SIM117 - lines of JavaScript; a run, its page and its viewer
"""The 22 checks of the page in a real browser. `make page-checks` prints a line for each.

Those about what a run does have a real run; those about how it looks have scripted overviews.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.browser.viewer import GUARD, RealPage, RealRun, living, scripted, text_of, until_text
from tests.support import scenes
from tests.support.player import JOIN_CODE
from tests.support.waiting import wait_until

from covey.watch.output import OutputLine
from covey.watch.overview import MachineSeen, Overview, RankSeen, RunSeen, Sentence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page
    from tests.browser.viewer import Chromium

pytestmark = [pytest.mark.thorough, pytest.mark.alone]

SLOW_MACHINE = float(os.environ.get("TEST_SLACK", "1"))
"""What the promised seconds are multiplied with, on a machine that does other things beside."""


def within(seconds: float) -> float:
    return seconds * SLOW_MACHINE


def test_01_the_first_picture_comes_within_two_seconds_and_the_console_stays_empty(
    chromium: Chromium, tmp_path: Path
) -> None:
    with RealRun(tmp_path, "first") as run, RealPage(tmp_path, run.name) as served, chromium.viewer() as viewer:
        begin = time.monotonic()
        page = viewer.page(served.link)
        until_text(page, ".rank-table tbody th", "3", within(2))
        assert time.monotonic() - begin < within(2)
        until_text(page, "#live-text", "live", within(5))
        assert viewer.complaints == []
        assert page.title().startswith("first")


def test_02_nothing_comes_from_another_host(chromium: Chromium) -> None:
    with scripted() as (player, served), chromium.viewer() as viewer, living(player):
        page = viewer.page(served.new_link())
        page.click("#logs-open summary")
        page.click("#show-code")
        page.wait_for_selector("#code-dialog[open]")
        assert {re.match(r"\w+://[^/]*", each)[0] for each in viewer.requests} == {f"http://127.0.0.1:{served.port}"}  # type: ignore[index]
        assert viewer.complaints == []


def test_03_no_address_has_a_ticket_or_a_token(chromium: Chromium) -> None:
    with scripted() as (_, served), chromium.viewer() as viewer:
        page = viewer.page(served.new_link())
        token = page.evaluate("sessionStorage.getItem('covey-token')")
        assert page.url == f"http://127.0.0.1:{served.port}/"
        assert page.evaluate("document.referrer") == ""
        assert page.evaluate("document.cookie") == ""
        page.reload()
        page.wait_for_selector("#main:not([hidden])")
        page.go_back()
        addresses = [*viewer.requests, page.url]
        assert len(token) > 30
        assert not [each for each in addresses if token in each or ("ticket" in each and "#" not in each)]
        assert served.tickets.enter(served.tickets.new_ticket()) == token


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll(
      '.cell, .machine, .machine .name, .dot-rank, .links li, .speed text, .figures div, h2, #top > *, .rank-table th[scope=row]')]
    .filter((each) => each.getClientRects().length && !each.closest('dialog') && getComputedStyle(each).visibility !== 'hidden')
    .map((each) => [each, each.getBoundingClientRect()]).filter(([, box]) => box.width > 1 && box.height > 1);
  const found = [];
  for (const [one, a] of boxes) for (const [other, b] of boxes) {
    if (one === other || one.contains(other) || other.contains(one)) continue;
    if (a.left + 1 < b.right && b.left + 1 < a.right && a.top + 1 < b.bottom && b.top + 1 < a.bottom)
      found.push(`${one.className?.baseVal ?? one.className} ${one.textContent.slice(0, 20)} / ${other.textContent.slice(0, 20)}`);
  }
  return found;
}"""


CUT = """() => [...document.querySelectorAll('svg text')].filter((each) => each.getClientRects().length).filter((each) => {
  const box = each.getBoundingClientRect(), frame = each.ownerSVGElement.getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1;
}).map((each) => each.textContent)"""


def test_04_no_label_overlaps_another_and_nothing_scrolls_sideways(chromium: Chromium) -> None:
    for ranks, hosts in ((64, 16), (8, 4), (6, 3), (4, 2), (256, 32)):
        overview = scenes.one_late(scenes.training(ranks, hosts), 1)
        with scripted(scenes.with_run(overview, reports={"loss": -0.000562})) as (_, served):
            for width in (1280, 768, 390):
                with chromium.viewer(width) as viewer:
                    page = viewer.page(served.new_link())
                    assert page.evaluate(OVERLAPS) == [], (ranks, width)
                    assert page.evaluate(CUT) == [], (ranks, width)
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, (ranks, width)
                    shown = page.locator(".cell").count() or page.locator(".rank-table tbody tr").count()
                    assert shown == ranks


CONTRAST = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const ground = (each) => { const layers = []; for (let e = each; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]); };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const each = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !each.getClientRects().length || each.closest('.sr, .skip, noscript, option')) continue;
    const style = getComputedStyle(each);
    const ink = parse(each instanceof SVGElement ? style.fill : style.color);
    const back = ground(each instanceof SVGElement ? each.closest('svg').parentElement : each);
    const [a, b] = [light(over(ink, back)), light(back)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), is_large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const contrast = (a + .05) / (b + .05);
    if (contrast < (is_large ? 3 : 4.5)) bad.push(`${walker.currentNode.data.trim().slice(0, 30)}: ${contrast.toFixed(2)} in ${each.className?.baseVal ?? each.className}`);
  }
  return [...new Set(bad)];
}"""


def test_05_every_text_has_contrast_in_light_and_dark(chromium: Chromium) -> None:
    overview = scenes.one_late(scenes.training(20, 5), 5)
    overview = scenes.with_rank(scenes.with_rank(overview, 7, state="lost", reason="no answer"), 8, state="silent")
    silent = replace(overview.machines[4], state="silent", problem="it does not answer since 20 s")
    overview = replace(overview, applicants=(scenes.applicant(),), machines=(*overview.machines[:4], silent))
    with scripted(overview) as (player, served):
        player.lines_of[scenes.RUN] = [OutputLine(scenes.START, "attic", 0, at % 2 == 0, "a line") for at in range(4)]
        for scheme in ("light", "dark"):
            with chromium.viewer(color_scheme=scheme) as viewer:
                page = viewer.page(served.new_link())
                page.click("#logs-open summary")
                page.wait_for_selector(".line")
                page.click(".sentence .why")
                assert page.evaluate(CONTRAST) == [], scheme
                page.click("#as-table")
                assert page.evaluate(CONTRAST) == [], scheme
                page.click("#stop")
                assert page.evaluate(CONTRAST) == [], scheme
                page.click("#stop-cancel")
                page.click("#theme")
                assert page.evaluate(CONTRAST) == [], f"{scheme}, switched"


def test_06_states_differ_without_colours(chromium: Chromium) -> None:
    overview = scenes.training(20, 4)
    for number, state in enumerate(("active", "waiting", "late", "lost")):
        overview = scenes.with_rank(overview, number, state=state)
    with scripted(overview) as (_, served), chromium.viewer() as viewer:
        page = viewer.page(served.new_link())
        looks = page.evaluate(
            "[...document.querySelectorAll('.cell')].slice(0, 4).map((each) => ["
            "getComputedStyle(each).borderStyle, each.querySelector('.word').textContent, each.querySelector('.sign').textContent])"
        )
        for part in range(3):
            assert len({look[part] for look in looks}) == 4, looks
        page.click("#as-table")
        words = [page.locator("tbody tr .word").nth(at).inner_text() for at in range(4)]
        assert words == ["active", "waits", "late", "lost"]


def test_07_a_killed_rank_is_named_within_three_seconds_and_the_other_rows_stay(
    chromium: Chromium, tmp_path: Path
) -> None:
    with RealRun(tmp_path, "killed", "--on-loss", "continue") as run, RealPage(tmp_path, run.name) as served:
        with chromium.viewer() as viewer:
            page = viewer.page(served.link)
            until_text(page, "#figures", "4", GUARD)
            until_text(page, "#sentences", "4 ranks", GUARD)
            places = rows(page)
            os.kill(run.pids[2], signal.SIGKILL)
            until_text(page, "#sentences .text", "Rank 2", within(3))
            until_text(page, ".happenings .kind", "lost", within(3))
            after = rows(page)
            assert [place for place in after if place[0] != "2"] == [place for place in places if place[0] != "2"]
            assert viewer.complaints == []


def rows(page: Page) -> list[tuple[str, int]]:
    """Return the ranks of the table and where each is."""
    found = page.evaluate(
        "[...document.querySelectorAll('.rank-table tbody tr')].map((row, at) => [row.children[0].textContent, at])"
    )
    return [(rank, place) for rank, place in found]


def test_08_a_rank_that_is_late_or_stopped_is_waited_for_within_three_seconds(
    chromium: Chromium, tmp_path: Path
) -> None:
    with RealRun(tmp_path, "late", "--on-loss", "continue") as run, RealPage(tmp_path, run.name) as served:
        with chromium.viewer() as viewer:
            page = viewer.page(served.link)
            until_text(page, "#sentences", "4 ranks", GUARD)
            waits = "tbody td[data-label='Waits for']"
            run.hold.touch()
            until_text(page, waits, "rank 2", within(3))
            until_text(page, "#sentences .text", "Rank 2", within(3))
            run.hold.unlink()
            page.wait_for_function(
                "(waits) => ![...document.querySelectorAll(waits)].some((each) => each.textContent.includes('2'))",
                arg=waits, timeout=within(3) * 1000,
            )  # fmt: skip
            until_text(page, "#sentences", "4 ranks", within(3))
            os.kill(run.pids[1], signal.SIGSTOP)
            until_text(page, "#sentences .text", "stopped", within(3))
            until_text(page, "#sentences .text", "Rank 1", within(3))


def test_09_a_slow_rank_shows_as_sync_of_the_others(chromium: Chromium, tmp_path: Path) -> None:
    with RealRun(tmp_path, "slow", SLOW="2") as run, RealPage(tmp_path, run.name) as served:
        with chromium.viewer() as viewer:
            page = viewer.page(served.link)
            share = (
                "(rank) => { const row = document.querySelectorAll('.rank-table tbody tr')[rank]; if (!row) return null;"
                " const [compute, sync] = row.querySelector('.bar').children;"
                " return parseFloat(sync.style.width) / (parseFloat(compute.style.width) + parseFloat(sync.style.width)); }"
            )
            page.wait_for_function(f"() => [0, 1, 3].every((rank) => ({share})(rank) > 0.3) && ({share})(2) < 0.25")


def test_10_the_page_says_when_its_server_is_gone_stopped_or_another_one(chromium: Chromium, tmp_path: Path) -> None:
    with RealRun(tmp_path, "gone") as run, chromium.viewer() as viewer:
        with RealPage(tmp_path, run.name) as served:
            page = viewer.page(served.link)
            until_text(page, "#live-text", "live", GUARD)
            served.process.send_signal(signal.SIGSTOP)
            until_text(page, "#offline", "covey ui does not answer", within(5))
            served.process.send_signal(signal.SIGCONT)
            page.wait_for_selector("#offline", state="hidden", timeout=within(2.5) * 1000)
            served.process.kill()
            until_text(page, "#offline", "covey ui does not answer", within(2))
            assert "type covey ui" in text_of(page, "#offline")
            served.process.wait(GUARD)
        with RealPage(tmp_path, run.name, "--port", str(served.port)) as again:
            until_text(page, "#outside-title", "This link is not valid any more", within(4))
            assert "covey ui --link" in text_of(page, "#outside-command")
            assert not page.is_visible("#offline")
            other = viewer.page(again.link)
            until_text(other, "#live-text", "live", GUARD)


def test_11_machines_are_approved_denied_or_put_off(chromium: Chromium) -> None:
    asks = replace(scenes.training(4, 2), applicants=(scenes.applicant(0), scenes.applicant(1)))
    with scripted(asks) as (player, served), chromium.viewer() as viewer:
        page = viewer.page(served.new_link())
        assert page.locator(".applicants li").count() == 2
        assert scenes.applicant(0).id in text_of(page, ".applicants li")
        page.click(".applicants li:first-child button:has-text('Approve')")
        wait_until(lambda: player.done == [("approve", scenes.applicant(0).id)])
        joined = MachineSeen("ff" * 32, "shed", state="ready")
        player.show(replace(asks, applicants=(scenes.applicant(1),), machines=(*asks.machines, joined)))
        page.wait_for_function("() => document.querySelectorAll('.applicants li').length === 1")
        until_text(page, ".machine .name", "shed", GUARD)
        page.wait_for_timeout(1100)  # one action a second
        page.click(".applicants button:has-text('Deny')")
        wait_until(lambda: player.done[1:] == [("deny", scenes.applicant(1).id)])
        player.show(replace(asks, applicants=(scenes.applicant(2),)))
        page.click(".applicants li button:has-text('Later')")
        page.wait_for_selector("#applicants", state="hidden")
        player.show(
            replace(asks, applicants=(scenes.applicant(2), scenes.applicant(3)), can_approve=False, approver="north")
        )
        until_text(page, ".applicants", "Machines are approved on north", GUARD)
        assert not page.is_visible("button:has-text('Approve')")
        assert page.locator(".applicants li").count() == 1, "what was put off stays away"


def test_12_stop_needs_the_dialog_and_ends_the_run_which_the_history_lists(chromium: Chromium, tmp_path: Path) -> None:
    with RealRun(tmp_path, "ending") as run, RealPage(tmp_path, run.name) as served, chromium.viewer() as viewer:
        page = viewer.page(served.link)
        page.click("#stop")
        assert "ending" in text_of(page, "#stop-title")
        assert page.evaluate("document.activeElement.id") == "stop-cancel"
        page.keyboard.press("Escape")
        page.wait_for_selector("#stop-dialog", state="hidden")
        until_text(page, "#live-text", "live", GUARD)
        assert run.process.poll() is None
        page.click("#stop")
        page.click("#stop-confirm")
        run.process.wait(GUARD)
        until_text(page, "#run-state", "ended", GUARD)
        page.click("#past summary")
        until_text(page, ".past .name", "ending", GUARD)
        assert "stopped by" in text_of(page, ".past .outcome")
        page.click(".past li summary")
        until_text(page, ".past .facts", "4 ranks on", GUARD)
        assert "covey logs " in text_of(page, ".past .facts .command")
        audit = (tmp_path / "home" / "audit" / "log.jsonl").read_text()
        assert "from the page" in audit


class Evil(http.server.BaseHTTPRequestHandler):
    """A web page of somebody else, at another port."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>evil</title><body>evil</body>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def evil() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_13_no_attack_of_another_page_gets_through(chromium: Chromium, evil: int) -> None:
    with scripted() as (player, served), chromium.viewer() as viewer:
        good = viewer.page(served.new_link())
        token = good.evaluate("sessionStorage.getItem('covey-token')")
        address = f"http://127.0.0.1:{served.port}"
        page = viewer.context.new_page()
        for host in (f"127.0.0.1:{evil}", f"evil.example:{evil}"):
            page.goto(f"http://{host}/")
            attack = """async ([address, token]) => {
              const results = [];
              const attempt = async (path, options) => {
                try { const answer = await fetch(address + path, options); results.push(answer.type === 'opaque' ? 'opaque' : answer.status); }
                catch { results.push('blocked'); } };
              const json = { 'Content-Type': 'application/json', Authorization: `Bearer ${token}` };
              await attempt('/api/stop', { method: 'POST', headers: json, body: '{"run":"r1"}' });
              await attempt('/api/stop', { method: 'POST', mode: 'no-cors', body: '{"run":"r1"}' });
              for (const method of ['DELETE', 'PUT']) await attempt('/api/stop', { method, headers: json, body: '{"run":"r1"}' });
              await attempt('/api/stop?run=r1', { mode: 'no-cors' });
              await attempt('/api/overviews', { headers: { Authorization: `Bearer ${token}` } });
              await attempt('/main.js', { mode: 'no-cors' });
              const frame = document.createElement('iframe');
              frame.src = address + '/'; frame.name = 'framed';
              document.body.append(frame);
              const form = document.createElement('form');
              form.method = 'POST'; form.enctype = 'text/plain'; form.action = address + '/api/stop'; form.target = 'framed';
              form.append(Object.assign(document.createElement('input'), { name: '{"run":"r1","x":"', value: '"}' }));
              document.body.append(form); form.submit();
              await new Promise((resolve) => setTimeout(resolve, 700));
              return results; }"""
            results = page.evaluate(attack, [address, token])
            assert [each for each in results if each not in ("blocked", "opaque")] == [], (host, results)
            assert [frame.url for frame in page.frames[1:] if frame.url.startswith("http://127.0.0.1")] == [] or all(
                frame.evaluate("document.body?.innerText ?? ''").find("live") < 0 for frame in page.frames[1:]
            )
            assert page.evaluate("sessionStorage.getItem('covey-token')") is None
        rebound = viewer.context.new_page()
        answer = rebound.goto(f"http://evil.example:{served.port}/")
        assert answer is not None
        assert answer.status == 421
        assert "open the link that" in rebound.content()
        assert rebound.evaluate(
            "async (token) => (await fetch('/api/history', { headers: { Authorization: `Bearer ${token}` } })).status", token
        ) == 421  # fmt: skip
        used = served.new_link()
        viewer.page(used)
        with chromium.viewer() as other:
            late = other.context.new_page()
            late.goto(used)
            until_text(late, "#outside-title", "This link is not valid any more", GUARD)
        assert player.done == []


def test_14_names_and_lines_with_markup_are_shown_as_text(chromium: Chromium) -> None:
    markup = "<img src=x onerror=alert(1)>"
    overview = scenes.training(4, 2)
    named = tuple(replace(each, name=f"{markup}{at}", problem=markup) for at, each in enumerate(overview.machines))
    overview = replace(overview, cluster=markup, machines=named, applicants=(replace(scenes.applicant(), name=markup),))
    overview = scenes.with_run(
        scenes.with_rank(overview, 1, reason=markup, operation=markup),
        name=markup, sentence=Sentence(markup, "error", (markup,), (f"covey logs '{markup}'",)), reports={markup: 1.0},
    )  # fmt: skip
    with scripted(overview) as (player, served), chromium.viewer() as viewer:
        player.lines_of[scenes.RUN] = [
            OutputLine(scenes.START, markup, 0, False, f"<script>alert(1)</script>{markup}\\x1b[31m")
        ]
        page = viewer.page(served.new_link())
        page.click("#logs-open summary")
        until_text(page, ".line .said", "<script>alert(1)</script>", GUARD)
        page.click(".why")
        assert markup in text_of(page, "#sentences")
        assert markup in text_of(page, ".machines")
        assert page.locator("img").count() == 1, "only the icon"
        assert viewer.complaints == []
        assert not [each for each in viewer.requests if each.endswith("/x")]


def test_15_eight_tabs_share_one_stream(chromium: Chromium) -> None:
    with scripted() as (_, served), chromium.viewer() as viewer:  # of a server that tells nothing new
        until_text(viewer.page(served.new_link()), "#live-text", "old", GUARD)
        until_text(viewer.page(served.new_link()), "#figures", "12", GUARD)
    with scripted() as (player, served), chromium.viewer() as viewer, living(player):
        tabs = [viewer.page(served.new_link())]
        tabs += [viewer.page(f"http://127.0.0.1:{served.port}/") for _ in range(7)]
        assert sum(each.endswith("/api/overviews") for each in viewer.requests) == 1
        player.show(scenes.with_run(player.newest(), step=77_001))
        for tab in tabs:
            until_text(tab, "#figures", "77\u202f001", GUARD)
        tabs.pop(0).close()
        player.show(scenes.with_run(player.newest(), step=77_002))
        for tab in tabs:
            until_text(tab, "#figures", "77\u202f002", GUARD)


def test_16_a_viewer_that_stops_reading_costs_the_server_nothing(chromium: Chromium) -> None:
    large = scenes.training(256, 32)
    with scripted(large) as (player, served), chromium.viewer() as viewer:
        page = viewer.page(served.new_link())
        token = page.evaluate("sessionStorage.getItem('covey-token')")
        head = f"GET /api/overviews HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nAuthorization: Bearer {token}\r\n\r\n"
        deaf = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(5)]
        try:
            for each in deaf:
                each.sendall(head.encode())
            for _ in range(20):
                player.show(large)
            before = resident()
            for step in range(400):
                player.show(scenes.with_run(large, step=step))
                time.sleep(0.01)
            until_text(page, "#figures", "399", GUARD)
            assert resident() - before < 5 << 20
        finally:
            for each in deaf:
                each.close()


def resident() -> int:
    """Return the memory of this process, which serves."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_17_ten_thousand_lines_a_second_leave_the_page_responsive(chromium: Chromium) -> None:
    with scripted() as (player, served), chromium.viewer() as viewer, living(player):
        lines = player.lines_of.setdefault(scenes.RUN, [])
        page = viewer.page(served.new_link())
        page.click("#logs-open summary")
        is_over = threading.Event()

        def print_much() -> None:
            while not is_over.wait(0.01):
                lines.extend(
                    OutputLine(scenes.START, "attic", 0, False, f"line {len(lines) + at}") for at in range(100)
                )

        thread = threading.Thread(target=print_much)
        thread.start()
        try:
            until_text(page, "#log-note", "left out", GUARD)
            slowest = page.evaluate("""async () => {
              let slowest = 0;
              for (let turn = 0; turn < 20; turn++) {
                const begin = performance.now();
                document.getElementById('slowest').click();
                await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
                slowest = Math.max(slowest, performance.now() - begin);
                await new Promise((resolve) => setTimeout(resolve, 150));
              }
              return slowest; }""")
            assert slowest < within(200), slowest
            assert page.locator(".line").count() <= 400
        finally:
            is_over.set()
            thread.join()


def test_18_filters_work_together_and_survive_a_reload(chromium: Chromium) -> None:
    with scripted() as (player, served), chromium.viewer() as viewer, living(player):
        player.lines_of[scenes.RUN] = [
            OutputLine(scenes.START, machine, rank, is_error, f"{word} of {machine} {rank} {is_error}")
            for machine in ("attic", "barn") for rank in range(4) for is_error in (False, True) for word in ("Loss", "other")
        ]  # fmt: skip
        page = viewer.page(served.new_link())
        page.click("#logs-open summary")
        page.select_option("#log-machine", "barn")
        page.select_option("#log-rank", "2")
        page.fill("#log-filter", "loss")
        page.check("#log-errors")
        for turn in range(2):
            page.wait_for_function("() => document.querySelectorAll('.line').length === 1")
            assert page.inner_text(".line .said") == "! Loss of barn 2 True"
            if not turn:
                page.reload()
                page.wait_for_selector("#main:not([hidden])")


def test_19_an_hour_of_history_fits_into_memory(chromium: Chromium) -> None:
    overview = scenes.training(64, 16)
    with scripted(overview, seconds_of_history=3600) as (player, served), chromium.viewer() as viewer:
        page = viewer.page(served.new_link())
        for second in range(300):
            player.show(replace(overview, taken=overview.taken + second))
            page.wait_for_timeout(5)
        page.select_option("#span", "3600")
        until_text(page, "#steps-reading", "compute", GUARD)
        assert page.evaluate("performance.memory.usedJSHeapSize") < 100e6
        assert page.locator("#steps-plot path").count() >= 2


def test_20_missing_figures_nan_and_no_ranks_break_nothing(chromium: Chromium) -> None:
    bare = RunSeen(scenes.RUN, "bare", "running", ranks=(RankSeen(0, "gone", 1), RankSeen(1, "gone", 2, age=60.0)))
    machine = MachineSeen("a", "old", version="0.1")
    nan = scenes.with_run(scenes.training(4, 2), reports={"loss": float("nan"), "other": float("inf")})
    empty = Overview(1, scenes.START, sentence=Sentence("This machine is in no cluster.", "note", (), ("covey init",)))
    with scripted(empty, seconds_of_history=0) as (player, served), chromium.viewer() as viewer:
        page = viewer.page(served.new_link())
        until_text(page, "#sentences", "in no cluster", GUARD)
        assert "covey init" in text_of(page, "#sentences")
        player.show(Overview(1, scenes.START, machines=(machine,), runs=(bare,)))
        until_text(page, "#figures", "not known", GUARD)
        assert "0" not in text_of(page, ".rank-table tbody tr td[data-label='Sent']")
        until_text(page, "#loss-hint", "group.report(step=step, loss=loss)", GUARD)
        player.show(replace(nan, taken=scenes.START + 1))
        until_text(page, "#figures", "NaN", GUARD)
        player.show(
            Overview(
                1,
                scenes.START,
                runs=(RunSeen(scenes.RUN, "none", "waiting", sentence=Sentence("waits for 2 more", "note")),),
            )
        )
        until_text(page, "#no-ranks", "No rank has joined yet", GUARD)
        player.show(Overview(1, scenes.START))
        page.wait_for_selector("#ranks", state="hidden")
        assert viewer.complaints == []


def test_21_the_keyboard_reaches_every_action_and_readers_hear_at_most_every_ten_seconds(chromium: Chromium) -> None:
    overview = replace(scenes.one_late(scenes.training(4, 2), 1), applicants=(scenes.applicant(),))
    with scripted(overview) as (player, served), chromium.viewer() as viewer:
        page = viewer.page()
        page.clock.install()
        page.goto(served.new_link())
        page.wait_for_selector("#main:not([hidden])")
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("(document.activeElement.id || document.activeElement.textContent || '').trim()"))
        assert {
            "checkpoint",
            "stop",
            "theme",
            "why?",
            "Approve",
            "Deny",
            "Later",
            "show-code",
            "slowest",
            "span",
        } <= reached
        page.evaluate("""() => { window.heard = []; new MutationObserver(() => window.heard.push([performance.now(),
            document.querySelector('[role=status]').textContent])).observe(document.querySelector('[role=status]'), { childList: true, characterData: true, subtree: true }); }""")
        for turn in range(30):
            text = Sentence(f"rank 1 is {turn} operations behind", "warning")
            player.show(replace(scenes.with_run(overview, sentence=text), taken=overview.taken + turn))
            until_text(page, "#sentences .text", f"is {turn} operations", GUARD)
            page.clock.run_for(1000)
        times = [at for at, _ in page.evaluate("window.heard")]
        assert 1 <= len(times) <= 4
        assert all(later - earlier >= 10_000 for earlier, later in itertools.pairwise(times))


def test_22_the_join_code_is_in_no_overview_and_gone_after_a_minute(chromium: Chromium) -> None:
    with scripted() as (player, served), chromium.viewer() as viewer:
        page = viewer.page()
        page.clock.install()
        page.goto(served.new_link())
        page.wait_for_selector("#main:not([hidden])")
        assert JOIN_CODE not in page.content()
        page.click("#show-code")
        page.wait_for_selector("#code-dialog[open]")
        assert page.inner_text("#code-text") == JOIN_CODE
        assert page.locator("#code-qr svg path").count() == 1
        page.clock.run_for(58_000)
        assert page.inner_text("#code-text") == JOIN_CODE
        page.clock.run_for(4_000)
        page.wait_for_selector("#code-dialog", state="hidden")
        assert JOIN_CODE not in page.content()
        assert page.locator("#code-qr svg").count() == 0
        stream = page.evaluate("""async () => {
          const answer = await fetch('/api/overviews', { headers: { Authorization: `Bearer ${sessionStorage.getItem('covey-token')}` } });
          const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
          let text = '';
          while (!text.includes('\\n')) text += (await reader.read()).value;
          return text; }""")
        assert json.loads(stream.splitlines()[0])["cluster"] == "home"
        assert JOIN_CODE not in stream
        assert player.done == [("code",)]


def test_the_checks_fail_clearly_without_a_browser(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "TEST_CHROMIUM": ""}
    command = [sys.executable, "-m", "tools.browser"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GUARD)
    assert ran.returncode == 1
    assert "install chromium" in ran.stderr
