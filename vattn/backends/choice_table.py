"""Which backend `auto` tries first, by measurement: one small table per GPU architecture, or one from `vattn tune`.

A table orders backends for a kind of layer, never for a step: batch sizes and lengths do not matter, so a layer keeps
the backend that it was bound with. Tables cover causal attention over a paged cache, with or without a window. Other
requests, and kinds that are not in a table, follow `selector.PRIORITY`. A table never makes a backend accept a
request.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.features import requested_features
from vattn.errors import ConfigError

FORMAT = 1
"""Version of the file; rises when a key changes its meaning."""

FOLDER = Path(__file__).with_name("choices")
"""Shipped tables, `sm_90.json` and so on."""

VARIABLE = "VATTN_CHOICE_TABLE"
"""Environment variable with the path of a table of `python -m vattn tune`, used instead of the shipped one."""

MEASURED_FEATURES = frozenset({"sliding_window"})
"""Features of requests that tables cover, beyond plain attention."""

LEAST_GAIN = 1.05
"""How much faster, over all steps of a kind, a backend must be to be tried before the first one by priority."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer in a table.

    Attributes:
        head_size: of keys and values.
        group_size: query heads per KV head.
        kv_cache_dtype: name of the KV format.
        window: whether the layer has a sliding window.
    """

    head_size: int
    group_size: int
    kv_cache_dtype: str
    window: bool

    @staticmethod
    def of(config: AttentionConfig) -> Kind:
        """Return the kind of a layer."""
        return Kind(config.head_size, config.group_size, config.kv_cache_dtype, config.sliding_window is not None)


@dataclass(frozen=True)
class Measured:
    """Times of one kind of layer.

    Attributes:
        kind: of the layer.
        us: step -> backend -> microseconds, only of results that were right.
    """

    kind: Kind
    us: Mapping[str, Mapping[str, float]]

    def speed(self, backend: str, other: str) -> float | None:
        """Return how much faster `backend` is than `other`: the geometric mean over their common steps."""
        ratios = [times[other] / times[backend] for times in self.us.values() if {backend, other} <= set(times)]
        return statistics.geometric_mean(ratios) if ratios else None


@dataclass(frozen=True)
class ChoiceTable:
    """One table.

    Attributes:
        gpu, capability: where it was measured.
        date: day of the run, ISO.
        versions: of the packages that ran.
        cells: what was measured.
    """

    gpu: str
    capability: tuple[int, int]
    date: str
    versions: Mapping[str, str] = field(default_factory=dict)
    cells: tuple[Measured, ...] = ()

    def cell(self, kind: Kind) -> Measured | None:
        """Return the cell of a kind, or of the nearest group size; `None` if head size, format or window differ."""
        alike = [cell for cell in self.cells if replace(cell.kind, group_size=kind.group_size) == kind]
        return min(alike, key=lambda cell: abs(math.log(cell.kind.group_size / kind.group_size)), default=None)

    def dump(self) -> str:
        """Return the text of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


@lru_cache(maxsize=16)
def read_table(path: Path) -> ChoiceTable:
    """Read and check a table.

    Raises:
        ConfigError: the file is missing, incomplete or in another format.
    """
    try:
        return _table_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"choice table {path}: {type(error).__name__}: {error}",
            f"a whole file of format {FORMAT}, as `python -m vattn tune --out` writes it",
            "run `python -m vattn tune --out FILE` again on this GPU",
        ) from error


def _table_of(data: Any) -> ChoiceTable:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}")
    cells = []
    for cell in data["cells"]:
        kind, us = Kind(**cell["kind"]), cell["us"]
        if not all(time > 0 for times in us.values() for time in times.values()):
            raise ValueError("a time that is not positive")
        if [type(value) for value in astuple(kind)] != [int, int, str, bool]:
            raise TypeError(f"a kind of {astuple(kind)}")
        cells.append(Measured(kind, us))
    major, minor = map(int, data["capability"])
    return ChoiceTable(data["gpu"], (major, minor), data["date"], data["versions"], tuple(cells))


def table_for(device: DeviceInfo) -> ChoiceTable | None:
    """Return the table for a GPU: the one that the environment names, else the shipped one; `None` without.

    Raises:
        ConfigError: the named table is missing or incomplete, or was measured on another GPU.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        path = FOLDER / f"sm_{device.capability[0]}{device.capability[1]}.json"
        return read_table(path) if device.type == "cuda" and path.is_file() else None
    # No table is for a CPU, but a wrong path is an error wherever the variable is set.
    table = read_table(Path(named))
    if device.type != "cuda":
        return None
    if table.capability != device.capability or device.name not in ("GPU", table.gpu):
        raise ConfigError(
            f"choice table {named} of {table.gpu} (sm_{table.capability[0]}{table.capability[1]}) on {device}",
            "a table of this GPU",
            f"run `python -m vattn tune --out FILE` here, or unset {VARIABLE}",
        )
    return table


def order(names: Sequence[str], config: AttentionConfig, device: DeviceInfo) -> tuple[tuple[str, ...], str | None]:
    """Return backend names with the measured fastest first, and why; `None` if no measurement applies.

    Args:
        names: in the order of their priority.
    """
    if config.attn_type != "decoder" or not requested_features(config) <= MEASURED_FEATURES:
        return tuple(names), None
    table = table_for(device)
    cell = None if table is None else table.cell(Kind.of(config))
    if table is None or cell is None:
        return tuple(names), None
    measured = {name for times in cell.us.values() for name in times}
    first = next((name for name in names if name in measured), None)
    if first is None:
        return tuple(names), None
    gains = {name: speed for name in measured if name in names and (speed := cell.speed(name, first)) is not None}
    best = max(gains, key=lambda name: gains[name])
    speeds = ", ".join(f"{name} {gains[name]:.2f}" for name in sorted(gains, key=lambda name: -gains[name]))
    where = f"speeds over {first} on {table.gpu}, {table.date}, {cell.kind}: {speeds}"
    if best == first or gains[best] < LEAST_GAIN:
        return tuple(names), f"measured: {first} stays first ({where}; {LEAST_GAIN} would change it)"
    moved = (best, *(name for name in names if name != best))
    return moved, f"measured: {best} is tried first ({where})"
