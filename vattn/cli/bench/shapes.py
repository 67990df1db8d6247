"""Attention layers of real models, and the steps that an engine runs them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vattn.errors import UnknownOptionError


@dataclass(frozen=True)
class LayerShape:
    """One attention layer.

    Attributes:
        name: on the command line and in tables.
        heads, kv_heads, head_size: of the layer, or of its part on one of the GPUs that share it.
        window: sliding window, `None` for none.
        soft_cap: of the scores, `None` for none.
        sinks: whether it has attention sinks.
    """

    name: str
    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        text = f"{self.heads} heads of {self.head_size}, {self.kv_heads} KV heads"
        text += f", window {self.window}" if self.window is not None else ""
        text += f", soft cap {self.soft_cap}" if self.soft_cap is not None else ""
        return text + (", sinks" if self.sinks else "")


@dataclass(frozen=True)
class Work:
    """One step.

    Attributes:
        name: on the command line and in tables.
        requests: (new tokens, keys) of each request, the new ones among the keys.
    """

    name: str
    requests: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Query rows of the step."""
        return sum(query for query, _ in self.requests)

    @property
    def equal(self) -> bool:
        """Whether all requests have the same lengths."""
        return len(set(self.requests)) == 1


_LAYERS = (
    LayerShape("llama3-8b", 32, 8, 128),
    LayerShape("gemma3-12b-window-cap", 16, 8, 256, window=1024, soft_cap=50.0),
    LayerShape("gpt-oss-20b-window", 64, 8, 64, window=128, sinks=True),
    LayerShape("llama3-70b-tp8", 8, 1, 128),
    LayerShape("qwen3-30b-a3b", 32, 4, 128),
    LayerShape("gpt-oss-20b", 64, 8, 64, sinks=True),
    LayerShape("gemma3-12b", 16, 8, 256),
    LayerShape("llama3-70b", 64, 8, 128),
    LayerShape("gemma3-12b-window", 16, 8, 256, window=1024),
    LayerShape("llama3-8b-tp8", 4, 1, 128),
    LayerShape("mistral-7b-window", 32, 8, 128, window=1024),
    LayerShape("llama3.2-1b", 32, 8, 64),
    LayerShape("llama3-405b", 128, 8, 128),
    LayerShape("qwen2.5-32b", 40, 8, 128),
    LayerShape("qwen2.5-7b", 28, 4, 128),
    LayerShape("llama2-7b", 32, 32, 128),
)

LAYERS: dict[str, LayerShape] = {layer.name: layer for layer in _LAYERS}
"""By name, in the order in which they run."""

_MIXED = tuple((n, n) for n in (8192, 1, 77, 3000, 513, 5000, 1024, 250, 2048, 4100, 33, 700, 6001, 128, 1500, 900))

_WORKS = (
    Work("decode 1x1k", ((1, 1024),)),
    Work("decode 1x8k", ((1, 8192),)),
    Work("decode 1x128k", ((1, 131072),)),
    Work("decode 8x1k", ((1, 1024),) * 8),
    Work("decode 8x8k", ((1, 8192),) * 8),
    Work("decode 32x1k", ((1, 1024),) * 32),
    Work("decode 32x8k", ((1, 8192),) * 32),
    Work("decode 64x4k", ((1, 4096),) * 64),
    Work("decode 128x2k", ((1, 2048),) * 128),
    Work("decode 256x1k", ((1, 1024),) * 256),
    Work("decode 256x8k", ((1, 8192),) * 256),
    Work("decode skewed", ((1, 131072), *((1, 512 + 56 * i) for i in range(63)))),
    Work("speculative 64x4k, 2", ((2, 4096),) * 64),
    Work("speculative 64x4k, 4", ((4, 4096),) * 64),
    Work("speculative 64x4k, 8", ((8, 4096),) * 64),
    Work("prefill 1x8k", ((8192, 8192),)),
    Work("prefill 1x32k", ((32768, 32768),)),
    Work("prefill 16x1k", ((1024, 1024),) * 16),
    Work("prefill mixed 1 to 8k", _MIXED),
    Work("chunk 4x512 of 8k", ((512, 8192),) * 4),
    Work("mixed 8x512 + 128 decodes of 4k", ((512, 512),) * 8 + ((1, 4096),) * 128),
    # Its parts, and what a window of 1024 over 32k is compared with.
    Work("prefill 8x512", ((512, 512),) * 8),
    Work("decode 128x4k", ((1, 4096),) * 128),
    Work("prefill 32x1k", ((1024, 1024),) * 32),
    Work("decode 64x1k", ((1, 1024),) * 64),
    Work("decode 64x32k", ((1, 32768),) * 64),
)

WORKS: dict[str, Work] = {work.name: work for work in _WORKS}

_SHORT = ("decode 64x4k", "speculative 64x4k, 4", "prefill 1x8k")


def default_cells() -> list[tuple[LayerShape, Work]]:
    """Return every work on Llama 3 8B, and one decode, one speculative step and one prefill on the other layers."""
    first = [(_LAYERS[0], work) for work in _WORKS]
    return first + [(layer, WORKS[name]) for layer in _LAYERS[1:] for name in _SHORT]


def every_cell() -> list[tuple[LayerShape, Work]]:
    """Return every work on every layer."""
    return [(layer, work) for layer in _LAYERS for work in _WORKS]


def choose_cells(layers: Sequence[str], works: Sequence[str]) -> list[tuple[LayerShape, Work]]:
    """Return the cells that names pick: all of a model or a kind of work by its beginning; none given: the default.

    Raises:
        UnknownOptionError: a name that begins nothing.
    """
    if not layers and not works:
        return default_cells()
    picked_layers = _picked("--models", layers, list(LAYERS)) if layers else [_LAYERS[0].name]
    picked_works = _picked("--work", works, list(WORKS)) if works else list(WORKS)
    return [(LAYERS[layer], WORKS[work]) for layer in picked_layers for work in picked_works]


def _picked(option: str, given: Sequence[str], names: list[str]) -> list[str]:
    for name in given:
        if not any(known.startswith(name) for known in names):
            raise UnknownOptionError(f"{option} {name!r}", "; ".join(names), "give the beginning of one of them")
    # An exact name picks only itself, not the names that it begins.
    return [known for known in names if known in given or any(known.startswith(n) for n in given if n not in names)]


def choose_rows(
    cells: Sequence[tuple[LayerShape, Work]], caches: Sequence[str], only: Sequence[str]
) -> list[tuple[LayerShape, Work, str]]:
    """Return the rows of a table, a cell and a cache each, in the order in which they run.

    Args:
        cells, caches: those to choose among.
        only: `MODEL/WORK/CACHE`, each part the beginning of a name or empty for all; earlier ones run first. None
            given: every row, in the order of the cells.

    Raises:
        UnknownOptionError: a name that picks nothing.
    """
    rows = {(layer.name, work.name, cache): (layer, work, cache) for layer, work in cells for cache in caches}
    picked = dict.fromkeys(() if only else rows)
    for name in only:
        parts = [part.strip() for part in name.split("/")]
        names = [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]
        chosen = [_picked("--only", [part], known) for part, known in zip([*parts, "", ""], names, strict=False)]
        found = [row for row in rows if all(part in among for part, among in zip(row, chosen, strict=True))]
        if not found or len(parts) > 3:
            raise UnknownOptionError(
                f"--only {name!r}", "MODEL/WORK/CACHE of a row that is run", "see bench attention --list for names"
            )
        picked.update(dict.fromkeys(found))
    return [rows[row] for row in picked]


def tiny(layer: LayerShape, work: Work) -> tuple[LayerShape, Work]:
    """Return a cell of the same kind that a CPU runs in a moment."""
    requests = tuple((min(query, 5), min(keys, 40)) for query, keys in work.requests[-3:])
    small = replace(
        layer, heads=4, kv_heads=2, head_size=32, window=None if layer.window is None else min(layer.window, 16)
    )
    return small, replace(work, name=f"{work.name} (tiny)", requests=requests)
