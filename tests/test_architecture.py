"""The diagram of layers, held by reading every import in the source."""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import tools.house

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

SRC = Path(__file__).parents[1] / "src" / "covey"

BELOW = {
    "base": {"_native"},
    "wire": {"base"},
    "plan": {"base"},
    "compress": {"base"},
    "proto": {"wire", "base"},
    "_native": set(),
    "arrays": {"base"},
    "net": {"wire", "base"},
    "runtime": {"net", "proto", "plan", "compress", "wire", "arrays", "base"},
    "coordinator": {"runtime", "net", "wire", "base"},
    "gateway": {"coordinator", "runtime", "net", "wire", "base"},
    "agent": {"covey", "runtime", "net", "wire", "base"},
    "watch": {"agent", "runtime", "net", "proto", "wire", "base"},
    "ui": {"watch", "runtime", "net", "wire", "base"},
    "cli": {
        "covey",
        "ui",
        "watch",
        "agent",
        "torch",
        "coordinator",
        "gateway",
        "runtime",
        "net",
        "proto",
        "plan",
        "compress",
        "wire",
        "base",
    },
    "torch": {"runtime", "net", "proto", "plan", "compress", "wire", "arrays", "base"},
    "testing": {"covey", "runtime", "net", "proto", "wire", "arrays", "base"},
    "lab": {
        *("covey", "cli", "watch", "testing", "agent", "torch", "coordinator"),
        *("runtime", "net", "proto", "plan", "compress", "wire", "base"),
    },
    "jax": {"runtime", "plan", "base"},
    "metrics": {"runtime", "wire"},
    "engines": {"covey", "runtime", "net", "base"},
    "ray": {"engines", "runtime", "base"},
    "dask": {"engines", "runtime", "base"},
    "integrations": {"torch", "runtime", "proto", "base"},
    "__init__": {"agent", "coordinator", "runtime", "net", "proto", "plan", "compress", "wire", "arrays", "base"},
    "__main__": {"cli"},
}
"""What each layer may import besides itself; "covey" is the package's public face."""

ROOMS: dict[str, dict[str, set[str]]] = {
    "runtime": {
        "metrics": set(),
        "links": set(),
        "shards": set(),
        "state": {"links"},
        "peers": {"state", "links", "metrics"},
        "views": {"peers", "state", "links", "metrics"},
        "lanes": {"views", "peers", "links"},
        "messages": {"lanes"},
        "calls": {"messages", "lanes", "views", "peers"},
        "collectives": {"messages", "lanes", "views", "peers", "links", "metrics"},
        "compressed": {"collectives"},
        "group": {
            *("calls", "compressed", "collectives", "messages", "lanes", "views", "peers", "state"),
            *("links", "metrics", "shards"),
        },
        "joining": {
            *("group", "calls", "collectives", "messages", "lanes", "views", "peers", "state", "links"),
            "metrics",
        },
        "relaying": {"links"},
        "pairing": {"peers", "links"},
        "keeper": {
            *("joining", "group", "calls", "collectives", "messages", "lanes", "views", "peers", "state"),
            *("links", "metrics", "relaying"),
        },
    },
    "net": {
        "host": set(),
        "audit": {"host"},
        "keys": {"host"},
        "lanes": {"host"},
        "discovery": {"host"},
        "router": {"host"},
        "quic": {"host", "keys"},
    },
    "torch": {"backend": set(), "training": {"backend"}},
    "lab": {"fuzz": set(), "chaos": set(), "bench": {"chaos"}, "demo": set()},
}
"""The rooms of a layer, and which others each may import, for types too. All may import the layer's own modules."""
FACES = {"covey.torch", "covey.torch.entry", "covey.lab.hostile"}
"""What lies in a layer itself and imports its rooms."""

PURE = {"base", "wire", "plan", "compress", "proto"}
"""Layers without I/O, threads or clocks: time is an argument, randomness a random.Random."""
IMPURE = {
    *("asyncio", "atexit", "concurrent", "ctypes", "fcntl", "http", "importlib", "io", "logging", "mmap"),
    *("multiprocessing", "os", "pathlib", "platform", "queue", "sched", "secrets", "select", "selectors", "shutil"),
    *("signal", "socket", "socketserver", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib"),
}
IMPURE_BUILTINS = {"breakpoint", "input", "open", "print"}

THIRD_PARTY = {
    "base": {"numpy", "ml_dtypes"},
    "wire": {"numpy", "msgspec", "cryptography"},
    "plan": set(),
    "compress": {"numpy", "ml_dtypes"},
    "proto": {"numpy", "ml_dtypes"},
    "arrays": {"numpy", "torch", "jax", "cupy", "cupyx", "mlx"},
    "net": {"numpy", "msgspec", "cryptography", "zeroconf", "ifaddr", "qh3"},
    "runtime": {"numpy", "rich", "prometheus_client", "opentelemetry", "qh3", "h11", "cloudpickle", "IPython"},
    "jax": {"jax", "numpy"},
    "metrics": {"prometheus_client"},
    "coordinator": {"msgspec", "cryptography", "grpc", "grpc_health", "grpc_reflection", "google"},
    "gateway": {"numpy", "grpc", "google"},
    "agent": {"numpy", "msgspec"},
    "watch": {"msgspec"},
    "ui": {"h11", "msgspec"},
    "cli": {"numpy", "msgspec", "rich", "typer", "cryptography"},
    "torch": {"numpy", "torch"},
    "ray": {"ray"},
    "dask": {"distributed", "cloudpickle"},
    "integrations": {"torch", "lightning", "transformers", "accelerate"},
    "testing": {"numpy"},
    "lab": {"numpy", "msgspec", "rich", "typer", "cryptography", "atheris"},
}
OPPONENTS = {"torch", "mpi4py", "grpc", "torchft", "hivemind"}
"""Only the benchmark measures itself against these, and only when asked to. `torch` stands on torch, too."""

FILES = sorted(SRC.rglob("*.py"))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    gc.disable()  # it would look through all trees again and again, which takes longer than to parse them
    try:
        return {path: ast.parse(path.read_text(), path) for path in FILES}
    finally:
        gc.enable()


def tree_of(path: Path) -> ast.Module:
    return trees()[path]


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements right below a node, and what holds statements; expressions import nothing."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, name, ())


def layer_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path) -> tuple[tuple[str, ast.stmt], ...]:
    return tuple(imports_in(path, tree_of(path)))


def imports_in(path: Path, tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the full name of every module a file imports, wherever in it that happens."""
    package = ["covey", *path.relative_to(SRC).parts[:-1]]
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        waiting.extend(statements_in(node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*home, *([node.module] if node.module else [])])
            # `from covey import base` names a layer as much as `from covey.base import errors` does.
            yield from ((f"{base}.{alias.name}" if base == "covey" else base, node) for alias in node.names)


def target_layer(name: str) -> str:
    """Return the layer that `covey.x.y` belongs to, or "covey" for what the package itself offers."""
    inner = name.split(".")[1:]
    return inner[0] if inner and inner[0] in BELOW else "covey"


def is_environ(node: ast.stmt) -> bool:
    """Tell whether an import is `from os import environ`."""
    return (
        isinstance(node, ast.ImportFrom) and node.module == "os" and [each.name for each in node.names] == ["environ"]
    )


def test_imports_point_down() -> None:
    assert [
        f"{path}:{node.lineno} imports {name}"
        for path in FILES
        for name, node in imports(path)
        if name.split(".")[0] == "covey" and target_layer(name) not in BELOW[layer_of(path)] | {layer_of(path)}
    ] == []


def test_only_the_command_line_knows_of_the_laboratory_and_only_by_name() -> None:
    assert [layer for layer, below in BELOW.items() if "lab" in below] == []
    named = [path for path in FILES if layer_of(path) != "lab" and re.search(r"[\"']covey\.lab", path.read_text())]
    assert named == [SRC / "cli" / "main.py"]


WIRING = {"Engine", "Group", "Survival", "TensorGroup", "NodeProxy", "GroupStrategy", "Mesh"}
"""Classes that make groups out of their parts; the last three are what programs make of a node or a group."""


WHOLES = {"Node", "NodeParts", "Engine", "Group"}


def test_no_class_is_handed_a_whole_node_engine_or_group() -> None:
    """In the rooms of groups, those that wire apart: a class takes what it uses."""
    rooms = [SRC / "runtime" / name for name in ("calls", "collectives", "compressed", "group", "messages")]
    wrong = []
    for path in (path for room in rooms for path in sorted(room.glob("*.py"))):
        for holder in (each for each in ast.walk(tree_of(path)) if isinstance(each, ast.ClassDef)):
            for each in holder.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__" and holder.name not in WIRING:
                    names = {name.id for name in ast.walk(each.args) if isinstance(name, ast.Name)} & WHOLES
                    wrong += [f"{path}:{each.lineno} takes {name}" for name in names]
    assert wrong == []


def test_pure_layers_touch_neither_the_world_nor_the_clock() -> None:
    wrong = []
    for path in FILES:
        if layer_of(path) not in PURE:
            continue
        for name, node in imports(path):
            if name == "io" and isinstance(node, ast.ImportFrom) and node.names[0].name == "BytesIO":
                continue  # memory, and nothing else
            if path == SRC / "base" / "native.py" and is_environ(node):
                continue  # whether the extension is used is one answer for all layers
            if name.split(".")[0] in IMPURE:
                wrong.append(f"{path}:{node.lineno} imports {name}")
        for call in ast.walk(tree_of(path)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in IMPURE_BUILTINS:
                wrong.append(f"{path}:{call.lineno} calls {call.func.id}")
    assert wrong == []


def test_each_layer_uses_only_the_libraries_it_is_known_for() -> None:
    wrong = []
    for path in FILES:
        known = THIRD_PARTY.get(layer_of(path), set())
        for name, node in imports(path):
            top = name.split(".")[0]
            if top == "covey" or top in sys.stdlib_module_names:
                continue
            if top in OPPONENTS - known:
                if not path.is_relative_to(SRC / "lab" / "bench"):
                    wrong.append(f"{path}:{node.lineno} imports {name}")
                if node.col_offset == 0 and path.name not in (
                    "train_worker.py",
                    "train_others.py",
                ):  # parts of a program
                    wrong.append(f"{path}:{node.lineno} imports {name} before a benchmark asks for it")
            elif top not in known:
                wrong.append(f"{path}:{node.lineno} imports {name}")
    assert wrong == []


def test_only_the_room_of_group_touches_its_private_parts() -> None:
    """Other rooms use `runtime.group.internals`; a subclass of Group may use its own."""
    private = {"_engine", "_is_fresh", "_state", "_local_rank", "_call", "_assembly"}
    wrong = []
    for path in FILES:
        if path.parent == SRC / "runtime" / "group" or not any(name in path.read_text() for name in private):
            continue
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in private
                and isinstance(node.value, ast.Name | ast.Attribute)
            ):
                holder = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if holder.strip("_") in ("group", "top"):
                    wrong.append(f"{path}:{node.lineno} uses {holder}.{node.attr}")
    assert wrong == []


def test_every_layer_and_room_is_in_the_diagram() -> None:
    assert {layer_of(path) for path in FILES} <= set(BELOW)
    for layer, rooms in ROOMS.items():
        assert {path.name for path in (SRC / layer).iterdir() if (path / "__init__.py").exists()} == set(rooms)


def room_of(module: str) -> tuple[str, str]:
    """Return the layer and the room that a module is in; the room is empty for what lies in the layer itself."""
    layer, room, *_ = [*module.split(".")[1:], "", ""]
    return layer, room if room in ROOMS.get(layer, {}) else ""


def test_rooms_import_only_rooms_below_them() -> None:
    wrong = []
    for path in FILES:
        if layer_of(path) not in ROOMS:
            continue
        module = module_of(path)
        layer, room = room_of(module)
        for name, node in imports(path):
            other_layer, other = room_of(name)
            if name.split(".")[0] != "covey" or other_layer != layer or other in ("", room) or module in FACES:
                continue
            if not room:
                wrong.append(f"{path}:{node.lineno} is in no room and imports {name}")
            elif other not in ROOMS[layer][room]:
                wrong.append(f"{path}:{node.lineno} imports {name}")
    assert wrong == []


def module_of(path: Path) -> str:
    return ".".join(["covey", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")


def imported_at_once(path: Path, tree: ast.Module, modules: Container[str]) -> Iterator[str]:
    """Yield each of `modules` that importing the module of a file imports, whichever branch that takes."""
    package = ["covey", *path.relative_to(SRC).parts[:-1]]
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*home, *([node.module] if node.module else [])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            # `from package import module` needs the package to have begun, a name of the package that it has ended.
            names = [name for name in inner if name in modules]
            names += [base] if len(names) < len(inner) else []
        else:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                waiting += node.orelse
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):  # which run later
                waiting += statements_in(node)
            continue
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                if ".".join(parts[:end]) in modules and (end == len(parts) or parts[:end] != package[:end]):
                    yield ".".join(parts[:end])


def cycle_among(imported: dict[str, set[str]]) -> list[str]:
    """Return modules each of which imports the next, and the last the first; empty if there is no such cycle."""
    done: set[str] = set()

    def visit(path: list[str]) -> list[str]:
        for name in sorted(imported[path[-1]] - done):
            if name in path:
                return path[path.index(name) :]
            if cycle := visit([*path, name]):
                return cycle
        done.add(path[-1])
        return []

    return next(filter(None, (visit([name]) for name in sorted(imported) if name not in done)), [])


def test_every_module_can_be_imported_first() -> None:
    """Without a cycle, what a module imports has been imported to its end, whatever was imported before."""
    modules = {module_of(path) for path in FILES}
    imported = {module_of(path): set(imported_at_once(path, tree_of(path), modules)) for path in FILES}
    assert sum(map(len, imported.values())) > 2 * len(modules), "the walk sees few imports"
    assert cycle_among(imported) == []


def test_a_cycle_of_imports_is_seen() -> None:
    source = """
from typing import TYPE_CHECKING
import covey.base.errors
from covey.plan import moves, Plan
from . import check
if TYPE_CHECKING:
    from covey.plan import typed
def later():
    from covey.plan import ring
class Now:
    try:
        from covey.wire import decoding
    finally:
        import os
"""
    within = {f"covey.plan.{name}" for name in ("moves", "check", "typed", "ring")}
    modules = {"covey", "covey.base", "covey.base.errors", "covey.plan", "covey.wire", "covey.wire.decoding"} | within
    assert set(imported_at_once(SRC / "plan" / "imagined.py", ast.parse(source), modules)) == {
        *("covey.base", "covey.base.errors", "covey.plan", "covey.plan.moves", "covey.plan.check"),
        *("covey.wire", "covey.wire.decoding"),
    }
    assert cycle_among({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert cycle_among({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c"]


def test_the_walk_sees_every_way_to_import() -> None:
    """An import that it cannot see would be free to point up."""
    source = """
import covey.cli.main, os.path as p
from covey import runtime, Group
from ..net import lane
from . import moves
def later():
    from covey.testing.threads import run_threads
"""
    names = {name for name, _ in imports_in(SRC / "plan" / "imagined.py", ast.parse(source))}
    assert names == {
        *("covey.cli.main", "os.path", "covey.runtime", "covey.Group", "covey.net", "covey.plan"),
        "covey.testing.threads",
    }
    assert [target_layer(name) for name in ("covey.runtime", "covey.Group", "covey")] == ["runtime", "covey", "covey"]


def test_a_constant_is_defined_once() -> None:
    """What has one meaning has one definition, which others import; a name says which of several meanings it has."""
    assert tools.house.constants_twice(house()) == {}


def test_no_function_takes_more_than_twelve_parameters() -> None:
    assert tools.house.long_calls(house()) == {}


def test_processes_are_started_and_supervised_in_one_place() -> None:
    """`runtime.processes.Children`; simulated networks, which are no part of a run, and mpirun's ranks apart.

    The template reaps its own forks, and what passes on the output of a program ends after it.
    """
    starting = re.compile(r"subprocess\.Popen\(|os\.waitpid\(|WNOHANG|register\(\w+\.stdout")
    others = {path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") if starting.search(path.read_text())}
    others = {path for path in others if not path.startswith("testing/")}
    assert others == {"runtime/processes.py", "runtime/keeper/template.py", "runtime/own_output.py"}


def test_what_is_tried_again_is_paced_in_one_way() -> None:
    """`base.pace.Growing` has the pauses that grow, and `runtime.backoff.Backoff` the tries: no loop has its own."""
    growing = re.compile(
        r"pause = min\((?!\[)|\bpause \* [\d.]+|[\d.]+ \* pause\b|PAUSE\w* \* 2|\* 2(?:\.0)? \*\* min\("
    )
    others = (path for path in SRC.rglob("*.py") if path.name != "backoff.py")
    assert not [str(path) for path in others if growing.search(path.read_text())]


def test_no_wait_loses_that_it_was_cancelled() -> None:
    """`asyncio.wait_for` of Python 3.11 drops a cancellation that comes with the end of what it waits for."""
    assert [str(path) for path in SRC.rglob("*.py") if "asyncio.wait_for(" in path.read_text()] == []


JOINTED = ("links", "state", "peers", "views", "lanes", "joining")
"""The rooms of `runtime` whose joints the tests below hold."""


@functools.cache
def house() -> list[tools.house.Module]:
    return tools.house.read()


def rooms_of_joints() -> Iterator[tuple[str, Path]]:
    for room in JOINTED:
        for path in sorted((SRC / "runtime" / room).rglob("*.py")):
            yield room, path


def test_no_class_is_handed_the_node_that_wires_the_parts() -> None:
    """`runtime.joining.node.NodeParts` is a record of the parts of a run: each takes the parts that it uses."""
    assert tools.house.takers(house(), "NodeParts") == []


def test_no_more_than_three_modules_of_a_room_need_each_other() -> None:
    knots = {room: found for room, found in tools.house.knots(house()).items() if room.startswith("runtime/")}
    assert knots == {}


def settable_callables(tree: ast.Module) -> list[str]:
    """Return what others may set to be called: public attributes whose type is a callable, and `other.on_x = ...`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            is_callable = any(
                isinstance(each, ast.Name) and each.id == "Callable" for each in ast.walk(node.annotation)
            )
            if is_callable and not node.target.attr.startswith("_"):
                found.append(f"{node.lineno}: {ast.unparse(node.target)}")
        elif isinstance(node, ast.Assign):
            targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
            for target in targets:
                is_other = isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
                if is_other and target.attr.startswith("on_"):
                    found.append(f"{node.lineno}: {ast.unparse(target)}")
    return sorted(found)


def test_what_is_called_back_is_an_argument_and_not_an_attribute_to_set() -> None:
    wrong = {str(path): found for _, path in rooms_of_joints() if (found := settable_callables(tree_of(path)))}
    assert wrong == {}


def test_an_attribute_to_set_is_seen() -> None:
    source = """
class A:
    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self.on_end: Callable[[], None] | None = None
        self.spawn = self._tasks.spawn
def wire(one, two):
    one.on_link, two.seat = two.accept, 1
"""
    assert settable_callables(ast.parse(source)) == ["5: self.on_end", "8: one.on_link"]


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that the classes of a module define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in getattr(target, "elts", [target]):
                    if isinstance(each, ast.Attribute):
                        yield each.attr
                    elif isinstance(each, ast.Name):
                        yield each.id


OF_NAMED_TUPLES = {"_asdict", "_replace"}
"""Public, though they begin with an underscore, so that they collide with no field."""


def test_no_room_touches_private_parts_of_another() -> None:
    own: dict[str, set[str]] = {room: set() for room in JOINTED}
    for room, path in rooms_of_joints():
        own[room] |= {name for name in private_names(tree_of(path)) if name.startswith("_")}
    wrong = []
    for room, path in rooms_of_joints():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not is_own and node.attr not in own[room] and node.attr not in OF_NAMED_TUPLES:
                    wrong.append(f"{path}:{node.lineno} uses {ast.unparse(node)}")
    assert wrong == []
