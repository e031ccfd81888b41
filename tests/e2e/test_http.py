"""Readiness of real ranks, as an orchestrator sees it."""

from __future__ import annotations

from typing import Any

from tests.support.ranks import Ranks, covey, np, threading


def serve() -> list[Any]:
    import json
    import os
    import urllib.error
    import urllib.request

    server = covey.serve_http()

    def ask(path: str) -> list[Any]:
        try:
            with urllib.request.urlopen(server.url + path, timeout=500) as answer:
                return [answer.status, json.loads(answer.read())["checks"]]
        except urllib.error.HTTPError as error:
            return [error.code, json.loads(error.read())["checks"]]

    seen = [ask("/readyz"), ask("/healthz")]
    hang = threading.Event()
    with covey.join() as group:
        seen.append(ask("/readyz"))
        group.node.add_check("disk", lambda: "only 3 GB left")
        group.node.add_check("model", lambda: 1 / 0)
        group.node.add_check("queue", hang.wait)
        seen.append(ask("/readyz"))
        hang.set()
        group.node.add_check("disk", lambda: None)
        group.node.remove_check("model")
        seen.append(ask("/readyz"))
        if group.rank == 1:
            group.recv_object(0)
            os._exit(1)
        try:
            group.send_object(None, 1)  # not before: this rank asks no more
            group.all_reduce(np.ones(3))
        except covey.PeerLostError:
            seen.append(ask("/readyz"))
        return seen


def test_a_rank_is_ready_while_it_is_in_a_run_and_its_checks_pass() -> None:
    with Ranks(2, serve, lanes="unix") as ranks:
        (seen,) = ranks.results([0])
    ok = {"ok": True, "reason": ""}
    before, alive, joined, failing, again, lost = seen
    assert before == [503, {"joined": {"ok": False, "reason": "this process is in no run"}}]
    assert alive == [200, {"control-loop": ok}]
    assert joined == [200, {"joined": ok}]
    assert failing == [
        503,
        {
            "joined": ok,
            "disk": {"ok": False, "reason": "only 3 GB left"},
            "model": {"ok": False, "reason": "ZeroDivisionError: division by zero"},
            "queue": {"ok": False, "reason": "it has not returned within 2 s"},
        },
    ]
    assert again == [200, {"joined": ok, "disk": ok, "queue": ok}]
    assert lost[0] == 503
    assert "rank 1" in lost[1]["joined"]["reason"]
