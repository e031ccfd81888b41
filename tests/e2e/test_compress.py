"""Compression that a launcher, a variable or `join` switches on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.ranks import Ranks, covey, np, run_ranks
from tests.support.survivors import CoveyRun


def compressed(options: dict[str, Any]) -> dict[str, Any]:
    """Reduce arrays and named gradients, and tell what was compressed how."""
    with covey.join(**options) as group:
        x = np.random.default_rng(group.rank).standard_normal(1 << 15).astype(np.float32)
        exact = group.all_reduce(x.copy(), "mean")
        found = [group.compression.codec]
        group.sync_gradients({"small": x[:1000].copy()})
        found.append(group.compression.codec)
        grads = {"embed.w": x.copy(), "head.w": x.copy()}
        group.sync_gradients(grads)
        found.append(group.compression.codec)
        error = float(np.abs(grads["head.w"] - exact).max())
        return {"found": found, "error": error, "names": sorted(group.feedback.names())}


def test_covey_run_compresses_gradients_and_nothing_else() -> None:
    with CoveyRun("-n", "2", "--compress", "embed.*=int4, *=int8", function=compressed, args=[{}]) as run:
        assert run.await_end() == 0, run.story("failed")
        for line in run.said("returned"):
            assert line["result"]["found"] == ["", "", "int8"]
            assert 0 < line["result"]["error"] < 0.05
            assert line["result"]["names"] == ["embed.w", "head.w"]


def test_a_variable_does_the_same_and_an_argument_of_join_takes_precedence() -> None:
    for options, codec in (({}, "int4"), ({"compress": {"*": "bf16"}}, "bf16"), ({"compress": "none"}, "")):
        with Ranks(2, compressed, options, lanes="tcp", env={"COVEY_COMPRESS": "int4"}) as ranks:
            for report in ranks.results():
                assert report["found"] == ["", "", codec]
                assert (report["error"] > 0) == bool(codec)
            ranks.await_exit()
    assert run_ranks(2, compressed, {}, lanes="tcp")[0]["error"] == 0


def test_a_codec_in_the_variable_that_does_not_exist_is_named_when_a_rank_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before: a program may register codecs of its own."""
    monkeypatch.setenv("COVEY_COMPRESS", "int9")
    with pytest.raises(covey.ConfigError, match=r"there is no codec 'int9' \(did you mean int8\?\)"):
        covey.join()
