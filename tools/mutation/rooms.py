"""The rooms that are measured: their files, and their tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tools.mutation.operators import Mutant, mutants_of

ROOT = Path(__file__).parents[2]


def _found(patterns: Sequence[str]) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


class Room:
    """Files that are changed, and folders or files of tests that shall notice, as patterns.

    Attributes:
        files, tests: their paths from the root of the repository.
    """

    def __init__(self, files: Sequence[str], tests: Sequence[str]) -> None:
        self.files, self.tests = _found(files), _found(tests)


ROOMS = {
    "scheduler": Room(
        tuple(f"vattn/generation/{name}.py" for name in ("scheduler", "batch", "cache_blocks", "request")),
        ("tests/generation/test_scheduler.py", "tests/generation/test_generator.py", "tests/generation/test_choices.py")
        + tuple(
            f"tests/generation/test_generator_{name}.py"
            for name in ("faults", "hybrid", "misuse", "runs", "speculation", "states")
        )
        + tuple(
            f"tests/generation/test_{name}.py" for name in ("draft_models", "draft_trees", "eagle", "prefix_identity")
        ),
    ),
    "block_pool": Room(("vattn/cache/block_pool.py", "vattn/cache/hybrid_block_table.py"), ("tests/cache",)),
    "metadata": Room(
        ("vattn/metadata/*.py",),
        ("tests/metadata", "tests/layers/test_kv_sharing.py", "tests/backends/test_xformers.py")
        + ("tests/cache/test_hybrid_cache.py", "tests/layers/test_cross_attention.py"),
    ),
    "reference": Room(
        ("vattn/ops/reference/*.py",),
        (
            "tests/ops/test_reference*.py",
            "tests/ops/test_mla_*.py",
            "tests/ops/test_rope_*.py",
            "tests/ops/test_lora_op.py",
        ),
    ),
    "passes": Room(("vattn/passes/**/*.py",), ("tests/passes",)),
    "selector": Room(
        ("vattn/backends/selector.py", "vattn/backends/base.py", "vattn/backends/choice_table.py"),
        ("tests/backends/test_selector.py", "tests/backends/test_choice_table.py", "tests/backends/test_recorded_*.py"),
    ),
}


def draw(room: str, seed: str, count: int) -> list[Mutant]:
    """Return `count` mutants of a room: the operators take turns, and the seed chooses among the changes of each."""
    by_operator: dict[str, list[Mutant]] = {}
    for path in ROOMS[room].files:
        for mutant in mutants_of(path, (ROOT / path).read_bytes()):
            by_operator.setdefault(mutant.operator, []).append(mutant)
    rng = random.Random(f"{seed} {room}")
    for name in sorted(by_operator):
        rng.shuffle(by_operator[name])
    drawn: list[Mutant] = []
    while len(drawn) < count and any(by_operator.values()):
        drawn += [by_operator[name].pop() for name in sorted(by_operator) if by_operator[name]]
    return drawn[:count]
