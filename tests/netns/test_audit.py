"""The audit logs of two machines after a run, however it was started."""

from __future__ import annotations

import json

import pytest
from tests.support.nodes import Cluster, node_id

from covey.net.audit import audit_reader
from covey.testing.netns import Lan

WORK = """
import json, sys
import covey

with covey.join(%s) as group:
    print(json.dumps(group.all_reduce(10 ** group.rank)), flush=True)
"""


@pytest.mark.parametrize("is_launched", [False, True], ids=["agreed", "launched"])
def test_each_machine_notes_the_run_its_members_and_where_it_met_them(
    is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lan(hosts=2) as lan:
        cluster = Cluster(name="lab")
        master = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": lan.hosts[0].ip4}
        code = WORK % ("" if is_launched else "sys.argv[2], size=2")
        nodes = [
            cluster.start(host, code=code, env={"RANK": str(rank), **master} if is_launched else {})
            for rank, host in enumerate(lan.hosts)
        ]
        ends = [node.end() for node in nodes]
        assert [(code, json.loads(out)) for code, out, _ in ends] == [(0, 11), (0, 11)], ends
        ids = [node_id(host).hex() for host in lan.hosts]
        for place, host in enumerate(lan.hosts):
            monkeypatch.setenv("COVEY_HOME", str(host.home))
            found = list(audit_reader.entries())
            assert audit_reader.verify().problems == ()
            assert {entry.cluster for entry in found} == {"lab"}
            (began,) = (entry for entry in found if entry.event == "began")
            assert began.node == ids[place]
            assert began.reason.partition(":")[0] in ("rank 0 of 2", "rank 1 of 2")
            assert sorted(entry.node for entry in found if entry.event == "joined") == sorted(ids)
            assert [entry.node for entry in found if entry.event == "ended"] == [ids[place]]
            met = [entry for entry in found if entry.event == "met"]  # ranks of a launcher know where the others are
            assert [entry.node for entry in met] == ([] if is_launched else [ids[1 - place]])
            other = lan.hosts[1 - place]
            assert all(entry.address in (other.ip4, other.ip6) or entry.address.startswith("fe80") for entry in met)
            assert not [entry for entry in found if entry.event in ("lost", "refused", "rejected")]
