"""A secret that was changed while a node runs: both are good for a while, then only the new one."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.support.attackers import (
    BROKEN,
    Insider,
    Victim,
    call_on_loop,
    dial_door,
    dial_tls,
    dialling_context,
    hear,
    new_cluster,
    read,
    run_nodes,
    until,
    victim,
)
from typer.testing import CliRunner

from covey.base.numbers import Seat
from covey.cli.enroll import app as enroll_command
from covey.net.discovery.host_registry import is_nodes_socket
from covey.net.keys import clusters, owner
from covey.net.keys.clusters import MAX_GRACE
from covey.runtime.joining.node import node_of
from covey.runtime.links.handshake import LinkCredentials
from covey.wire import door, messages
from covey.wire.secret import ClusterSecret, encode_join_code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.net.keys.clusters import Cluster
    from covey.runtime.group.group import Group


@pytest.fixture
def prey(home: Path) -> Iterator[Victim]:
    """A node of a cluster in a file, whose secret can be changed."""
    cluster = new_cluster(owner=owner.make("prey"))
    clusters.save(cluster)
    with victim(cluster) as node:
        yield node


def changed(prey: Victim, grace: int = 600) -> Cluster:
    """Change the secret in the file, and wait until the running node goes by it."""
    secret = ClusterSecret("prey", secrets.token_bytes(32))
    after = clusters.update("prey", lambda now: clusters.with_secret(now, secret, now.serial + 1, grace))
    until(lambda: prey.node.cluster.secret == secret)
    return after


def with_secret(prey: Victim, cluster: Cluster) -> Victim:
    """Return the same node, as one sees it that holds another secret."""
    return Victim(cluster, prey.endpoint, prey.node, prey.address)


def probes(prey: Victim, cluster: Cluster) -> bool:
    """Tell whether the node answers a probe of a holder of this secret."""
    with dial_door(prey.address, cluster.secret.derive("door"), door.Purpose.PROBE) as sock:
        with contextlib.suppress(*BROKEN):
            sock.sendall(b"12345678")
            return read(sock, 8) == b"12345678"
        return False


def test_links_stay_and_both_secrets_are_good_until_the_grace_is_over(prey: Victim) -> None:
    with Insider(prey) as member:
        member.ping()
        after = changed(prey)
        member.ping()
        for cluster in (prey.cluster, after):
            with Insider(with_secret(prey, cluster)) as other:
                assert isinstance(other.greeting, messages.Welcome)
                other.ping()
        clusters.update("prey", lambda now: replace(now, previous_until=time.time() - 1))
        until(lambda: prey.endpoint.credentials.good() == (prey.endpoint.credentials,))
        with pytest.raises(BROKEN):
            Insider(prey)
        assert not probes(prey, prey.cluster)
        assert probes(prey, after)
        with Insider(with_secret(prey, after)) as other:
            assert isinstance(other.greeting, messages.Welcome)
        member.ping()


def test_without_a_grace_the_old_secret_is_refused_at_once(prey: Victim) -> None:
    after = changed(prey, grace=0)
    until(lambda: prey.endpoint.credentials.good() == (prey.endpoint.credentials,))
    with pytest.raises(BROKEN):
        Insider(prey)
    with Insider(with_secret(prey, after)) as other:
        assert isinstance(other.greeting, messages.Welcome)


def test_the_grace_ends_by_itself(prey: Victim) -> None:
    changed(prey, grace=2)
    until(lambda: prey.endpoint.credentials.good() == (prey.endpoint.credentials,))
    with pytest.raises(BROKEN):
        Insider(prey)


def test_a_door_key_of_one_secret_does_not_go_with_the_certificate_of_the_other(prey: Victim) -> None:
    one, other = prey.cluster.secret, changed(prey).secret
    for door_of, authority_of in ((one, other), (other, one)):
        with contextlib.ExitStack() as stack:
            context = dialling_context(authority_of.derive("node-ca"))
            with contextlib.suppress(*BROKEN):
                link = stack.enter_context(dial_tls(prey.address, door_of.derive("door"), context))
                link.sendall(b"\0\0\0\0")
                hear(link)
                pytest.fail("it was heard")


def test_two_nodes_find_each_other_when_one_knows_only_the_new_secret(prey: Victim) -> None:
    after = changed(prey)
    newcomer = replace(after, previous=None, previous_until=0.0)
    with victim(newcomer) as other:
        until(lambda: other.node.card.id in prey.node.met and prey.node.card.id in other.node.met)


def test_lanes_to_a_node_that_has_not_heard_of_a_new_secret_are_opened_with_the_one_before() -> None:
    """One end of each pair dials the lanes: first that one has heard, then the other."""

    def heard_of_another(credentials: LinkCredentials) -> None:
        before = LinkCredentials(credentials.door_key, tls=credentials.tls)
        credentials.become(LinkCredentials(secrets.token_bytes(32), tls=credentials.tls, earlier=before,
                         until=time.monotonic() + 600))  # fmt: skip

    for dialler_has_heard in (True, False):

        def main(group: Group, dialler_has_heard: bool = dialler_has_heard) -> int:
            group.all_reduce(1)
            node = node_of(group)
            assert node is not None
            if node.peers[Seat(1 - group.rank)].is_dialled is dialler_has_heard:
                call_on_loop(heard_of_another, node.credentials)
            group.barrier()
            part = group.split(0)
            assert part is not None
            with part:
                return int(part.all_reduce(1 + group.rank))

        assert run_nodes(new_cluster(), main) == [3, 3]


def test_enrolling_by_hand_gives_a_running_node_the_new_secret(prey: Victim) -> None:
    secret = ClusterSecret("prey", secrets.token_bytes(32))
    code = encode_join_code(secret, (), prey.cluster.owner)
    enrolled = CliRunner().invoke(enroll_command, ["-"], input=code)
    assert "has the new secret" in enrolled.output
    until(lambda: prey.node.cluster.secret == secret)
    for cluster in (prey.cluster, replace(prey.cluster, secret=secret)):
        with Insider(with_secret(prey, cluster)) as member:
            assert isinstance(member.greeting, messages.Welcome)


def test_a_clock_that_is_set_back_does_not_make_an_old_secret_good_for_years() -> None:
    old = ClusterSecret("prey", secrets.token_bytes(32))
    cluster = replace(new_cluster(), previous=old, previous_until=time.time() + MAX_GRACE + 3600)
    assert cluster.earlier(time.time()) is None
    assert cluster.earlier(time.time() + 7200) == old
    assert cluster.earlier(time.time() + MAX_GRACE + 7200) is None


def test_a_process_is_not_led_back_to_an_older_secret_by_its_file(home: Path) -> None:
    """A machine whose file missed a change, and a process there that was given the new secret another way."""
    public = owner.make("prey")
    old, new = new_cluster(owner=public), new_cluster(owner=public)
    clusters.save(old)
    with victim(new) as prey:
        clusters.update("prey", lambda now: replace(now, denied=frozenset({b"d" * 32})))
        until(lambda: prey.node.cluster.denied == {b"d" * 32})
        assert call_on_loop(lambda: prey.node.cluster.secret) == new.secret


def test_sockets_are_dialled_only_where_nodes_of_this_user_listen() -> None:
    own = "/run/user/0/covey-0/nodes-abc-123"
    assert is_nodes_socket("/run/user/0/covey-0/nodes-abc-123/s1", own)
    assert is_nodes_socket("/run/user/0/covey-0/nodes-def-456/s1", own)
    for path in (
        "/run/user/0/covey-0/jobs-abc-123/s1",
        "/run/user/0/other/nodes-abc-123/s1",
        "/run/user/0/covey-0/nodes-abc-123/../../bus/s1",
        "/run/user/0/covey-0/nodes-abc-123/sub/s1",
        "nodes-abc/s1",
        "",
    ):
        assert not is_nodes_socket(path, own)
    assert not is_nodes_socket("nodes-a/s1", "")
