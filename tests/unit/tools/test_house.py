"""The figures of the source, on a small package whose figures are known, and on covey's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tools import house

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = {
    "__init__.py": '"""The face."""\n',
    "base/numbers.py": "from typing import Final, TypeVar\n\nT = TypeVar('T')\nLOOK: Final = 1.0\nFEW, MANY = 1, 2\n",
    "runtime/__init__.py": '"""A layer."""\n',
    "runtime/joining/node.py": """
from typing import TYPE_CHECKING, TypeVar
if TYPE_CHECKING:
    from covey.runtime.joining.peers import Peers
T = TypeVar("T")
LOOK = 2.0
class NodeParts:
    peers: "Peers"
    def one(self, a, b, c, d, e, f, *, g, h, i, j, k, l, m): pass
""",
    "runtime/joining/peers.py": """
from covey.runtime.joining import lanes
class Peers:
    def __init__(self, node: "NodeParts | None") -> None: ...
class Ended: pass
from covey.runtime.joining.node import NodeParts
""",
    "runtime/joining/lanes.py": """
from .store import Store
class Lanes:
    def late(self, node):
        self.node: NodeParts = node
from covey.runtime.joining.node import NodeParts
""",
    "runtime/joining/store.py": """
from covey.runtime.joining.peers import Peers
class Store:
    def __init__(self, node: "NodeParts") -> None: ...  # another NodeParts
class Ended: pass
class NodeParts: pass
""",
    "runtime/group/group.py": "class Base:\n"
    + "".join(f"    def method_{i}(self): pass\n" for i in range(20))
    + "class Group(Base):\n"
    + "".join(f"    def other_{i}(self): pass\n" for i in range(10)),
}


@pytest.fixture
def modules(tmp_path: Path) -> list[house.Module]:
    for name, text in PACKAGE.items():
        path = tmp_path / "covey" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.read(tmp_path / "covey")


def test_each_figure_of_a_small_package_is_right(modules: list[house.Module]) -> None:
    found = house.figures(modules)
    members = [f"runtime/joining/{name}.py" for name in ("lanes", "node", "peers", "store")]
    assert found["modules"] == 8
    assert found["slivers"] == ["base/numbers.py", "runtime/group/group.py", *members]
    assert found["median_function_lines"] == 1
    assert found["import_share"] == round(8 / sum(text.count("\n") for text in PACKAGE.values()), 4)
    assert found["knots"] == {"runtime/joining": [members]}
    assert found["takers"]["NodeParts"] == ["runtime/joining/lanes.py:Lanes", "runtime/joining/peers.py:Peers"]
    assert found["takers"]["Engine"] == []
    assert found["classes_twice"] == {"Ended": members[2:], "NodeParts": [members[1], members[3]]}
    assert found["constants_twice"] == {"LOOK": ["base/numbers.py", "runtime/joining/node.py"]}
    assert found["long_calls"] == {"runtime/joining/node.py:9 one": 13}
    assert found["large_classes"] == {"runtime/group/group.py:Group": 30}
    assert found["rooms"]["runtime/joining"]["modules"] == 4
    assert list(found["rooms"]) == ["base", "covey", "runtime", "runtime/group", "runtime/joining"]


def test_the_report_fits_its_width_and_names_what_it_counts(modules: list[house.Module]) -> None:
    text = house.report(house.figures(modules), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "type knot in runtime/joining" in text
    assert "Group (30)" in text


def test_components_are_found_in_a_graph_with_two_cycles_and_a_bridge() -> None:
    edges = {"a": "b", "b": "ca", "c": "d", "d": "c", "e": ""}
    assert sorted(map(sorted, house.components(edges))) == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.thorough
def test_it_works_on_covey_itself(capsys: pytest.CaptureFixture[str]) -> None:
    house.main(["--json", "--walks"])
    found = json.loads(capsys.readouterr().out)
    assert sum(room["lines"] for room in found["rooms"].values()) == found["lines"] > 50_000
    assert found["walks"]["node.call, both ends"]["frames"] > 20
    assert found["walks"]["all_reduce of 16 MiB, both ranks"]["frames"] > 5
