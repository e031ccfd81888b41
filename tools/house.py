"""Print the figures that show where the source drifts: slivers, knots, what takes `NodeParts`, names that occur twice.

    python -m tools.house [--json] [--all] [--walks]

The figures are read from the syntax trees; nothing is imported, except with `--walks`, which performs a call and an
all_reduce between two ranks and counts the functions that run. `tests/test_architecture.py` holds what is a rule.
"""

from __future__ import annotations

import argparse
import ast
import gc
import itertools
import json
import statistics
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from covey.cli.layout import Column, room, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

SRC: Final = Path(__file__).parents[1] / "src" / "covey"
GENERATED: Final = ("coordinator_pb2.py", "coordinator_pb2_grpc.py", "gateway_pb2.py", "gateway_pb2_grpc.py")
SLIVER_LINES: Final = 120
"""Modules with fewer lines are counted; those that only describe a package are not."""
MOST_PARAMETERS: Final = 12
MOST_METHODS: Final = 25
MOST_IN_KNOT: Final = 3
"""Modules that may import each other, for types, inside a room."""
LOCATORS: Final = {
    "NodeParts": "covey.runtime.joining.node",
    "Engine": "covey.runtime.collectives.engine",
}
"""Classes that hold everything, and where they are defined: a class that is handed one depends on all of it."""
WITH_ROOMS: Final = frozenset(["runtime", "net", "torch", "lab"])
"""Layers whose folders are rooms; a layer without rooms is one."""
CALLS: Final = 200
"""Calls of which the shortest is counted: the first ones open lanes, and threads that poll come in between."""
SHOWN: Final = 12
"""Most names in a line of the report, without --all."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Its full name: `covey.plan.ring`."""
    file: str
    lines: int
    tree: ast.Module
    imports: Mapping[str, str]
    """By the name that it has here: the full name of what is imported, for types too."""
    import_lines: int
    functions: Sequence[Function]
    classes: Sequence[ast.ClassDef]

    @property
    def is_face(self) -> bool:
        """Whether it only describes a package."""
        return self.file.endswith("__init__.py") or self.file.endswith("__main__.py")

    @property
    def room(self) -> str:
        """The room that it is in: `runtime/links`, `plan`, or `covey` for what lies in the package itself."""
        layer, *rest = Path(self.file).parts
        if not rest:
            return "covey"
        return f"{layer}/{rest[0]}" if layer in WITH_ROOMS and len(rest) > 1 else layer


def read(root: Path = SRC) -> list[Module]:
    """Return all modules below `root`, which is the folder of the package `covey`."""
    gc.disable()  # it would look through all trees again and again, which takes longer than to parse them
    try:
        return [_module(root, path) for path in sorted(root.rglob("*.py")) if path.name not in GENERATED]
    finally:
        gc.enable()


def _module(root: Path, path: Path) -> Module:
    text, relative = path.read_text(), path.relative_to(root)
    tree = ast.parse(text, path)
    name = ".".join(["covey", *relative.with_suffix("").parts]).removesuffix(".__init__")
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports: dict[str, str] = {}
    import_lines = 0
    statements = list(_statements(tree))
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            import_lines += (node.end_lineno or node.lineno) - node.lineno + 1
            imports |= _imported(node, package)
    functions = [node for node in statements if isinstance(node, Function)]
    classes = [node for node in statements if isinstance(node, ast.ClassDef)]
    return Module(name, relative.as_posix(), text.count("\n"), tree, imports, import_lines, functions, classes)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, in any depth. Expressions, which are most of a tree, are left out."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, name, ())
            if isinstance(inner, list):  # the body of a lambda is an expression
                waiting += inner
                yield from inner


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, str]:
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name: alias.name for alias in node.names}
    parts = package.split(".")
    home = parts[: len(parts) + 1 - node.level] if node.level else []
    base = ".".join([*home, *([node.module] if node.module else [])])
    return {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}


# What is counted


def slivers(modules: Sequence[Module]) -> list[str]:
    """Return the modules that are shorter than a whole idea usually is."""
    return [each.file for each in modules if not each.is_face and each.lines < SLIVER_LINES]


def median_function(modules: Sequence[Module]) -> float:
    """Return the median number of lines of a function."""
    return statistics.median((each.end_lineno or 0) - each.lineno + 1 for m in modules for each in m.functions)


def knots(modules: Sequence[Module]) -> dict[str, list[list[str]]]:
    """Return, by room, the sets of more than `MOST_IN_KNOT` modules of it that all import each other, for types too."""
    names = {module.name: module for module in modules}
    by_room: defaultdict[str, list[list[str]]] = defaultdict(list)
    edges: dict[str, set[str]] = {}
    for module in modules:
        found = {name if name in names else name.rpartition(".")[0] for name in module.imports.values()}
        edges[module.name] = {name for name in found if name in names and names[name].room == module.room}
    for component in components(edges):
        if len(component) > MOST_IN_KNOT:
            by_room[names[component[0]].room].append(sorted(names[name].file for name in component))
    return dict(by_room)


def components(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in edges[node]:
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in edges:
        if node not in number:
            visit(node)
    return found


def takers(modules: Sequence[Module], locator: str) -> list[str]:
    """Return the classes that are handed a locator, or have an attribute of its type."""
    found = []
    for module in modules:
        full = f"{LOCATORS[locator]}.{locator}"
        local = {name for name, target in module.imports.items() if target == full}
        for each in module.classes:
            if any(_names(annotation) & local for annotation in _annotations(each)):
                found.append(f"{module.file}:{each.name}")
    return found


def _annotations(node: ast.ClassDef) -> Iterator[ast.expr]:
    """Yield the annotations of a class's fields, of its constructor's arguments, and of what its methods assign."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            yield each.annotation
        elif isinstance(each, Function):
            if each.name == "__init__":
                yield from (argument.annotation for argument in _parameters(each) if argument.annotation is not None)
            for inner in _statements(each):
                if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Attribute):
                    yield inner.annotation


def _names(annotation: ast.expr) -> set[str]:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def _parameters(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def classes_twice(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Return the class names that occur in more than one module."""
    return _several((each.name, module.file) for module in modules for each in module.classes)


def constants_twice(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Return the names of constants that more than one module defines."""
    return _several((name, module.file) for module in modules for name in _constants(module))


def _constants(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Name) and name.id.isupper():
                    yield name.id


def _is_type_variable(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("ParamSpec", "TypeVar")
    )


def _several(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that occur in more than one file, most frequent first."""
    files: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in found:
        files[name].add(file)
    several = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    return dict(sorted(several.items(), key=lambda item: (-len(item[1]), item[0])))


def long_calls(modules: Sequence[Module]) -> dict[str, int]:
    """Return the functions with more than `MOST_PARAMETERS` parameters, and how many each has."""
    found = {}
    for module in modules:
        for each in module.functions:
            count = sum(argument.arg not in ("self", "cls") for argument in _parameters(each))
            if count > MOST_PARAMETERS:
                found[f"{module.file}:{each.lineno} {each.name}"] = count
    return _descending(found)


def large_classes(modules: Sequence[Module]) -> dict[str, int]:
    """Return the classes with more than `MOST_METHODS` methods, those of covey's base classes included."""
    classes = {f"{module.name}.{each.name}": (module, each) for module in modules for each in module.classes}

    def methods(full: str) -> set[str]:
        module, node = classes[full]
        found = {each.name for each in node.body if isinstance(each, Function)}
        for base in node.bases:
            if isinstance(base, ast.Name):
                target = module.imports.get(base.id, f"{module.name}.{base.id}")
                found |= methods(target) if target in classes and target != full else set()
        return found

    counts = {f"{module.file}:{node.name}": len(methods(full)) for full, (module, node) in classes.items()}
    return _descending({name: count for name, count in counts.items() if count > MOST_METHODS})


def _descending(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def rooms(modules: Sequence[Module]) -> dict[str, dict[str, int]]:
    """Return the number of modules and lines of every room."""
    found: dict[str, dict[str, int]] = {}
    for module in modules:
        room_of = found.setdefault(module.room, {"modules": 0, "lines": 0})
        room_of["modules"] += 1
        room_of["lines"] += module.lines
    return dict(sorted(found.items()))


# Walks


class Walk:
    """Counts the functions of covey that run, on this thread and on those that are started in its block."""

    def __init__(self) -> None:
        self._entered: list[tuple[str, str]] = []
        self._is_counting = False

    def __enter__(self) -> Walk:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._is_counting:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("covey."):
                self._entered.append((module, frame.f_code.co_qualname))

    def measure(self, work: Callable[[], object]) -> dict[str, int]:
        """Return what ran while `work` did: frames, functions, modules, and changes of module."""
        self._entered = []
        self._is_counting = True
        try:
            work()
        finally:
            self._is_counting = False
        entered = list(self._entered)
        changes = sum(one[0] != other[0] for one, other in itertools.pairwise(entered))
        modules = {module for module, _ in entered}
        return {
            "frames": len(entered),
            "functions": len(set(entered)),
            "modules": len(modules),
            "changes of module": changes,
        }


def walks() -> dict[str, dict[str, int]]:
    """Return the least of several measurements of a call, and of an all_reduce, between two ranks that are threads."""
    import numpy as np

    from covey.testing import run_threads

    found: dict[str, dict[str, int]] = {}

    def body(group: Any) -> None:
        node, values = group.node, np.ones(1 << 22, np.float32)
        node.register("add", lambda a, b: a + b)
        group.barrier()
        if group.rank == 0:
            tried = [walk.measure(lambda: node.call(1, "add", 1, 2)) for _ in range(CALLS)]
            found["node.call, both ends"] = min(tried, key=lambda figures: figures["frames"])
        group.barrier()
        for _ in range(5):
            group.barrier()
            if group.rank == 0:
                figures = walk.measure(lambda: group.all_reduce(values))
                before = found.setdefault("all_reduce of 16 MiB, both ranks", figures)
                before |= figures if figures["frames"] < before["frames"] else {}
            else:
                group.all_reduce(values)
            group.barrier()

    with Walk() as walk:
        found["join of two ranks of a launcher"] = walk.measure(lambda: run_threads(2, lambda _group: None))
        run_threads(2, body)
    return found


# The report


def figures(modules: Sequence[Module]) -> dict[str, Any]:
    """Return everything as plain values."""
    lines = sum(module.lines for module in modules)
    return {
        "lines": lines,
        "modules": len(modules),
        "slivers": slivers(modules),
        "median_function_lines": median_function(modules),
        "import_share": round(sum(module.import_lines for module in modules) / lines, 4),
        "knots": knots(modules),
        "takers": {locator: takers(modules, locator) for locator in LOCATORS},
        "classes_twice": classes_twice(modules),
        "constants_twice": constants_twice(modules),
        "long_calls": long_calls(modules),
        "large_classes": large_classes(modules),
        "rooms": rooms(modules),
    }


def report(found: Mapping[str, Any], *, shows_all: bool = False, width: int | None = None) -> str:
    """Return the figures as text: a line each, then the rooms."""
    most = sys.maxsize if shows_all else SHOWN
    rows = [
        ("lines of Python", str(found["lines"]), f"in {found['modules']} modules"),
        (
            f"modules of fewer than {SLIVER_LINES} lines",
            str(len(found["slivers"])),
            _some(found["slivers"], most) if shows_all else "",
        ),
        ("median lines of a function", f"{found['median_function_lines']:g}", ""),
        ("share of import lines", f"{found['import_share']:.1%}", ""),
    ]
    for where, several in sorted(found["knots"].items()):
        rows += [(f"type knot in {where}", str(len(knot)), _some(knot, most)) for knot in several]
    for locator, classes in found["takers"].items():
        rows.append((f"classes that hold `{locator}`", str(len(classes)), _some(classes, most)))
    for name, what in (("classes_twice", "class names"), ("constants_twice", "constants")):
        several = [f"{each} ({len(files)})" for each, files in found[name].items()]
        rows.append((f"{what} in several modules", str(len(several)), _some(several, most)))
    for name, what in (
        ("long_calls", f"functions of more than {MOST_PARAMETERS} parameters"),
        ("large_classes", f"classes of more than {MOST_METHODS} methods"),
    ):
        several = [f"{each} ({count})" for each, count in found[name].items()]
        rows.append((what, str(len(several)), _some(several, most)))
    for name, counts in found.get("walks", {}).items():
        rest = ", ".join(f"{count} {what}" for what, count in counts.items() if what != "frames")
        rows.append((f"frames of {name}", str(counts["frames"]), rest))
    columns = [list(cells) for cells in zip(*rows, strict=True)]
    first = table(
        [Column("figure", columns[0]), Column("", columns[1], is_right=True), Column("which", columns[2], wraps=True)],
        width,
    )
    sizes = found["rooms"]
    second = table(
        [
            Column("room", list(sizes)),
            Column("modules", [str(each["modules"]) for each in sizes.values()], is_right=True),
            Column("lines", [str(each["lines"]) for each in sizes.values()], is_right=True),
        ],
        width,
    )
    return f"{first}\n\n{second}"


def _some(names: Sequence[str], most: int) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--all", action="store_true", help="print all names, not only the first ones")
    parser.add_argument("--walks", action="store_true", help="count what runs in a join, a call and an all_reduce, too")
    options = parser.parse_args(words)
    found = figures(read())
    if options.walks:
        found["walks"] = walks()
    print(json.dumps(found) if options.json else report(found, shows_all=options.all, width=room()))


if __name__ == "__main__":
    main()
