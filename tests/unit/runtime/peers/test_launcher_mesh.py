"""The token under which ranks of a launcher call rank 0 at a relay."""

from __future__ import annotations

from covey.net.keys.clusters import Cluster
from covey.runtime.peers.launcher_mesh import first_token
from covey.wire.secret import ClusterSecret


def test_rank_0_of_a_run_has_a_token_that_only_holders_of_the_secret_derive() -> None:
    secret = ClusterSecret("lab", bytes(range(32)))
    token = first_token(Cluster(secret), "mpirun-j")
    assert token == secret.derive("relayed-launch/mpirun-j")[:16]
    assert token == first_token(Cluster(ClusterSecret("lab", bytes(range(32)))), "mpirun-j")
    others = [
        first_token(Cluster(secret), "mpirun-k"),
        first_token(Cluster(ClusterSecret("lab", bytes(32))), "mpirun-j"),
    ]
    assert token not in others
    assert len({token, *others}) == 3
