"""The rooms that are measured: their files, and their tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tools.mutation.operators import Mutant, mutants_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Room:
    """Files that are changed, and folders or files of tests that shall notice."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self) -> list[str]:
        """Return its files, from the root of the repository."""
        return sorted(str(path.relative_to(ROOT)) for source in self.sources for path in ROOT.glob(source))


ROOMS = {
    "scheduler": Room(
        ("vattn/generation/scheduler.py", "vattn/generation/cache_blocks.py", "vattn/generation/request.py"),
        ("tests/generation",),
    ),
    "block_pool": Room(("vattn/cache/block_pool.py", "vattn/cache/hybrid_block_table.py"), ("tests/cache",)),
    "metadata": Room(("vattn/metadata/*.py",), ("tests/metadata",)),
    "reference": Room(("vattn/ops/reference/*.py",), ("tests/ops",)),
    "passes": Room(("vattn/passes/**/*.py",), ("tests/passes",)),
    "selector": Room(
        ("vattn/backends/selector.py", "vattn/backends/base.py", "vattn/backends/choice_table.py"), ("tests/backends",)
    ),
}


def draw(room: str, seed: str, count: int) -> list[Mutant]:
    """Return `count` mutants of a room: the operators take turns, and the seed chooses among the changes of each."""
    by_operator: dict[str, list[Mutant]] = {}
    for path in ROOMS[room].files():
        for mutant in mutants_of(path, (ROOT / path).read_bytes()):
            by_operator.setdefault(mutant.operator, []).append(mutant)
    rng = random.Random(f"{seed} {room}")
    for name in sorted(by_operator):
        rng.shuffle(by_operator[name])
    drawn: list[Mutant] = []
    while len(drawn) < count and any(by_operator.values()):
        drawn += [by_operator[name].pop() for name in sorted(by_operator) if by_operator[name]]
    return drawn[:count]
