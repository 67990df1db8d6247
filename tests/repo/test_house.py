"""The rooms of vattn/ and the floors they stand on: a room imports rooms of lower floors alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = (
    "errors version", "quantization", "config", "cache distributed", "ops", "kernels kv_transfer", "backends",
    "metadata passes", "layers", "compilation calibration", "integrations generation", "__init__", "cli", "__main__",
)  # fmt: skip
"""From the ground up. Rooms of one floor do not import each other."""

LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms.split()}


def imports(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line and dotted name, split, of everything that a file imports from vattn, lazily or for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{name.name}".split(".")) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, name.name.split(".")) for name in node.names)


def test_nothing_imports_upwards() -> None:
    upwards = []
    for path in (ROOT / "vattn").rglob("*.py"):
        room = path.relative_to(ROOT / "vattn").parts[0].removesuffix(".py")
        for line, name in imports(path):
            if name[0] != "vattn":
                continue
            target = name[1] if len(name) > 1 and name[1] in LEVEL else "__init__"
            if target != room and LEVEL[target] >= LEVEL[room]:
                upwards.append(f"{path.relative_to(ROOT)}:{line} imports {'.'.join(name)}")
            elif room == "kernels" and "triton" in path.parts and "hopper" in name:
                upwards.append(f"{path.relative_to(ROOT)}:{line} imports Hopper kernels into those of any GPU")
    assert not upwards, "\n".join(upwards)


def test_the_top_has_room_for_24() -> None:
    rooms = {path.relative_to(ROOT / "vattn").parts[0].removesuffix(".py") for path in (ROOT / "vattn").rglob("*.py")}
    assert rooms == set(LEVEL)
    assert len(rooms) <= 24
