"""What people hold: exactly these names, each documented, each module importable by itself."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import DEADLINE

import covey
import covey.testing

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

PUBLIC = {
    *("join", "join_async", "wait_all", "wait_any", "MessageInfo", "CancelledError"),
    *("generations", "launch", "run_on", "Group", "Work", "Event", "ANY"),
    *("CoveyError", "Remedy", "AuthError", "BusyError", "ClosedError", "ConfigError", "ConnectError", "DeadlineError"),
    *("GroupChangedError", "MismatchError", "PeerLostError", "QuorumLostError", "RankFailedError"),
    *("RemoteProtocolError", "SplitRunError", "load_state", "CheckpointError", "Shard"),
    *("Codec", "FP16", "BF16", "FP8", "Int8", "Int4", "OneBit", "TopK", "RandomK", "Threshold", "PowerSGD"),
    *("ErrorFeedback", "register_codec"),
    *("ArrayAdapter", "StagedArray", "register_adapter"),
    *("Election", "Mesh", "Member", "MemberHealth", "PeerLink", "LanePath", "Checkpoint"),
    *("PlanAlternative", "PlanReport", "Topology", "TopologyHost", "TopologyLink", "TopologyNode"),
    *("WorkerNode", "WorkerNodeConfig"),
    *("Strategy", "GroupStrategy", "HierarchicalStrategy", "accumulate", "clip_norm", "data"),
    *("serve_http", "HttpServer", "on_shutdown", "shutdown"),
    *("OnLoss", "Op", "Priority"),
    *("Node", "Handle", "CallWork", "CallStream", "CallCancelledError", "CallRefusedError", "RemoteCallError"),
}
GROUP = {
    *("rank", "size", "live", "generation", "name", "local_rank", "lanes", "on_loss", "contributors", "sequence"),
    *("compression", "feedback", "members", "to_parent", "to_local", "parent", "settings", "to_run", "split_by_host"),
    *("change_pending", "shrink", "agree", "revoke", "on_change", "events", "leave", "restore", "who_is_late"),
    *("explain", "cancellable"),
    *("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "sync_gradients"),
    *("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"),
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *("send", "recv", "send_object", "recv_object", "sendrecv", "probe", "iprobe", "split", "close"),
    *("split_async", "restore_async", "close_async"),
    *("node", "call", "metrics"),
    *("checkpoint", "checkpoint_pending", "request_checkpoint", "end_checkpoint"),
    "report",
}
NODE = {
    *("register", "unregister", "rpc", "export", "caller"),
    *("call", "call_async", "stream", "broadcast_call", "proxy"),
    *(
        "id",
        "name",
        "leader",
        "election",
        "members",
        "hosts",
        "links",
        "topology",
        "health",
        "on_event",
        "events",
        "store",
    ),
    *("add_check", "remove_check"),
}
MODULES = sorted(
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in (SRC / "covey").rglob("*.py")
    if path.name not in ("__main__.py", "guided.py")  # programs; the latter runs under atheris
)


def public_members(thing: Any) -> dict[str, Any]:
    """Return what a class of ours offers, with all that it inherits from others of ours."""
    ours = [each for each in reversed(inspect.getmro(thing)) if each.__module__.startswith("covey.")]
    return {name: value for each in ours for name, value in vars(each).items() if not name.startswith("_")}


def test_the_package_offers_exactly_these_names() -> None:
    assert set(covey.__all__) == PUBLIC
    assert list(covey.__all__) == sorted(covey.__all__), "kept sorted, so that two changes do not collide"
    for name in covey.__all__:
        assert getattr(covey, name) is not None


def test_a_star_import_brings_the_names_and_nothing_else() -> None:
    names: dict[str, Any] = {}
    exec("from covey import *", names)
    assert set(names) - {"__builtins__"} == PUBLIC


def test_a_group_offers_exactly_these_operations() -> None:
    assert set(public_members(covey.Group)) == GROUP


def test_a_node_offers_exactly_these_operations() -> None:
    assert set(public_members(covey.Node)) == NODE


@pytest.mark.parametrize("name", sorted(PUBLIC - {"ANY", "OnLoss", "Op", "Priority"}))
def test_everything_public_says_what_it_does_and_so_do_its_methods(name: str) -> None:
    thing = getattr(covey, name)
    assert inspect.getdoc(thing), name
    assert thing.__doc__, f"{name} has only the docstring of its base"
    if inspect.isclass(thing):
        for member, value in public_members(thing).items():
            target = value.fget if isinstance(value, property) else value
            if inspect.isroutine(target):
                assert target.__doc__, f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", sorted(name for name in PUBLIC if name.endswith("Error")))
def test_every_error_is_a_covey_error_with_a_remedy(name: str) -> None:
    error = getattr(covey, name)
    assert issubclass(error, covey.CoveyError)
    assert isinstance(error.remedy, covey.Remedy)


def test_what_others_expect_to_catch_they_catch() -> None:
    assert issubclass(covey.ConfigError, ValueError)
    assert issubclass(covey.DeadlineError, TimeoutError)
    assert issubclass(covey.ConnectError, ConnectionError)


def test_arguments_that_qualify_a_call_are_named() -> None:
    """Flags and time limits read as statements at the call, on every operation that has them."""
    for name in sorted(GROUP):
        member = inspect.getattr_static(covey.Group, name)
        if inspect.isfunction(member):
            for parameter in inspect.signature(member).parameters.values():
                if parameter.name in ("timeout", "async_op", "algorithm", "allow_pickle", "weight", "counts"):
                    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"Group.{name}({parameter.name})"


def documents() -> dict[str, str]:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path.exists()}


def test_the_documents_name_only_what_exists() -> None:
    modules = {"_native"} | {name.split(".")[1] for name in MODULES if "." in name}
    for document, text in documents().items():
        for name in re.findall(r"\bcovey\.(?!toml\b|service\b)([A-Za-z_]+)\b(?!/)", text):
            assert name in PUBLIC | modules, f"{document} names covey.{name}"
        for name in re.findall(r"\bgroup\.([a-z_]+)\b", text):
            assert name in GROUP, f"{document} names group.{name}"


def test_the_documents_name_every_operation_of_a_group() -> None:
    text = "\n".join(documents().values())
    operations = [name for name in sorted(GROUP) if inspect.isfunction(inspect.getattr_static(covey.Group, name))]
    missing = [name for name in operations if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_the_test_kit_is_public() -> None:
    assert "run_threads" in covey.testing.__all__
    assert covey.testing.run_threads.__doc__


ON_OTHERS = ("covey.ray", "covey.dask", "covey.integrations", "covey.jax")
"""Modules that load libraries which take seconds to import, and warn by themselves."""


@pytest.mark.thorough
def test_every_module_can_be_imported_without_a_warning() -> None:
    """In any order: `test_every_module_can_be_imported_first` shows that the order makes no difference."""
    code = """
import importlib, json, sys
failures = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failures[name] = repr(error)
print(json.dumps(failures))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=json.dumps([name for name in MODULES if not name.startswith(ON_OTHERS)]),
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {}


def test_importing_covey_starts_nothing_and_reads_no_setting() -> None:
    code = """
import sys, threading
import covey
absent = ("asyncio", "typer", "rich", "torch", "ssl", "cryptography", "zeroconf", "ifaddr", "prometheus_client")
print(threading.active_count(), *(name in sys.modules for name in absent))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC), "COVEY_LANES": "bogus", "COVEY_NONSENSE": "1", "RANK": "x"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", *["False"] * 9]
