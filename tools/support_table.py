"""docs/support.md: what every backend accepts and where that was seen to run, from capabilities and recorded runs.

Run `python -m tools.support_table > docs/support.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vattn.backends import selector
from vattn.backends.base import Backend, Capabilities, Package
from vattn.backends.mla.base import MLA_FEATURES
from vattn.backends.mla.registry import mla_backends
from vattn.backends.recorded_runs import runs_of
from vattn.config.attention import AttentionConfig, AttentionType
from vattn.config.device import DeviceInfo
from vattn.config.features import FEATURES
from vattn.config.mla import WEIGHT_FORMATS
from vattn.quantization.formats import KV_FORMATS, OUTPUT_FORMATS, QUERY_FORMATS, QUERY_LOADS
from vattn.quantization.mla_formats import MLA_FORMATS

INTRODUCTION = """\
# What each backend accepts

Generated from the backends' capabilities and from recorded runs by `python -m tools.support_table`; a test compares.
A request outside it is refused with the reason; `vattn.explain(...)` answers for one.

`yes`: accepted, and right in a recorded run on a GPU, or on a CPU with every change. `interpreter`: right in
Triton's interpreter with every change, no recorded run on a GPU. `untested`: accepted, but it never ran.
"""

LAYERS: dict[str, dict[str, Any]] = {
    "Attention, StaticSinkAttention": {},
    "CrossAttention": {"attn_type": "encoder_decoder", "causality": "bidirectional"},
    "EncoderOnlyAttention": {"attn_type": "encoder_only", "causality": "bidirectional", "block_size": 0},
    "MMEncoderAttention": {"attn_type": "encoder", "causality": "bidirectional", "block_size": 0},
    "DifferentialAttention": {"head_pairs": "even", "head_size_v": 256},
}
"""Layers, and what a plain bf16 one with heads of 128 asks for beyond a plain paged decoder."""

DEVICES = (
    DeviceInfo("cpu"),
    DeviceInfo("cuda", (8, 0), "sm_80"),
    DeviceInfo("cuda", (9, 0), "sm_90"),
    DeviceInfo("cuda", (10, 0), "sm_100"),
)


class Table:
    """A Markdown table with a column per backend."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = backends
        self.can: list[Any] = [backend.capabilities for backend in backends]
        self.lines = [
            "| | " + " | ".join(backend.name for backend in backends) + " |",
            "|---" * (len(backends) + 1) + "|",
        ]

    def row(self, title: str, cells: Iterable[str]) -> None:
        """Add a row."""
        self.lines.append(f"| {title} | " + " | ".join(cells) + " |")

    def flags(self, title: str, field: str, names: Iterable[str], part: str = "") -> None:
        """Add a row for each name that a field of the capabilities may list; `part`: field of the config, if any."""
        for name in names:
            cells = []
            for backend, can in zip(self.backends, self.can, strict=True):
                listed = name in getattr(can, field)
                cells.append(_cell(backend.name, can, f"{part}={name}" if part else name) if listed else "no")
            self.row(f"{title} `{name}`", cells)

    def common(self) -> None:
        """Add what all backends have: where they ran, devices, package, graphs."""
        self.row("ran on a GPU", ("; ".join(map(str, runs_of(b.name))) or "untested" for b in self.backends))
        self.row("devices", (", ".join(c.devices) for c in self.can))
        self.row("package", ("torch alone" if c.package is None else _requirement(c.package) for c in self.can))
        self.row("lowest compute capability", (_sm(c.minimum_capability) for c in self.can))
        self.row("CUDA graphs", (c.cuda_graphs for c in self.can))
        self.row("garbage in unused memory is harmless", ("yes" if c.garbage_safe else "no" for c in self.can))
        self.row("dtypes", (", ".join(c.dtypes) for c in self.can))


def support_table() -> str:
    """Return Markdown that shows what every backend accepts, generated from its capabilities."""
    backends = [selector.get_backend(name) for name in selector.backend_names()]
    lines = INTRODUCTION.splitlines() + ["", *_attention(backends)]
    lines += ["", "## Layers", "", "Devices on which a backend runs a plain bf16 layer with heads of 128.", ""]
    lines += _layers(backends)
    lines += ["", "## Latent attention (`MLAAttention`)", "", *_latent(list(mla_backends().values()))]
    lines += [
        "",
        "## Order",
        "",
        "Backends in the order they are tried, by architecture; the first that accepts is used.",
        "",
    ]
    lines += [f"- {key}: {', '.join(f'`{name}`' for name in names)}" for key, names in selector.PRIORITY.items()]
    for backend in backends:
        lines += _limits(backend)
    return "\n".join(lines) + "\n"


def _attention(backends: Sequence[Backend]) -> list[str]:
    table = Table(backends)
    table.common()
    table.row("head sizes", (str(c.head_sizes) for c in table.can))
    table.row("block sizes", (str(c.block_sizes) for c in table.can))
    table.flags("attention type", "attn_types", tuple(kind.value for kind in AttentionType), "attn_type")
    table.flags("feature", "features", FEATURES)
    table.flags("KV cache", "kv_cache_dtypes", KV_FORMATS, "kv_cache_dtype")
    table.flags("query", "query_formats", QUERY_FORMATS, "query_format")
    table.flags("query rounded by the kernel", "query_loads", QUERY_LOADS[1:], "query_load")
    table.flags("output", "output_formats", OUTPUT_FORMATS, "output_format")
    return table.lines


def _layers(backends: Sequence[Backend]) -> list[str]:
    table = Table(backends)
    plain = AttentionConfig(32, 8, 128, 128, 128**-0.5, "bfloat16", "bfloat16")
    for layer, changes in LAYERS.items():
        config = plain.replace(**changes)
        accepting = [
            [str(device.name) for device in DEVICES if not Backend.limits(backend, config, device)]
            for backend in backends
        ]
        table.row(layer, (", ".join(devices) or "no" for devices in accepting))
    return table.lines


def _latent(backends: Sequence[Any]) -> list[str]:
    table = Table(backends)
    table.common()
    table.row("kv_lora_rank", (str(c.latent_sizes) for c in table.can))
    table.row("qk_rope_head_dim", (str(c.rope_sizes) for c in table.can))
    table.row("query heads", (str(c.num_heads) for c in table.can))
    table.row("block sizes", (str(c.block_sizes) for c in table.can))
    table.flags("feature", "features", MLA_FEATURES)
    table.flags("KV cache", "kv_cache_dtypes", MLA_FORMATS, "kv_cache_dtype")
    table.flags("query", "query_formats", QUERY_FORMATS, "query_format")
    table.flags("weights", "weight_formats", WEIGHT_FORMATS, "weight_format")
    table.flags("output", "output_formats", OUTPUT_FORMATS, "output_format")
    return table.lines


def _cell(backend: str, can: Capabilities, part: str) -> str:
    """Return what the support table says of a part of requests that a backend accepts."""
    if "cpu" in can.devices or any(part in run.cells for run in runs_of(backend)):
        return "yes"
    return "interpreter" if "interpreter" in can.devices else "untested"


def _limits(backend: Backend) -> list[str]:
    can = backend.capabilities
    limits = [f"- {', '.join(f'`{n}`' for n in sorted(rule.names))} together: {rule.why}" for rule in can.exclusions]
    limits += [f"- format `{name}`: head sizes {sizes}" for name, sizes in can.format_head_sizes.items()]
    limits += [f"- format `{name}` needs {_sm(need)} or newer" for name, need in can.format_capability.items()]
    limits += [] if can.negative_scales else ["- scales of 0 and below are refused"]
    return ["", f"## Limits of {backend.name}", "", *limits] if limits else []


def _sm(capability: tuple[int, int]) -> str:
    return "any" if capability == (0, 0) else f"sm_{capability[0]}{capability[1]}"


def _requirement(package: Package) -> str:
    return f"{package.distribution} >= {'.'.join(map(str, package.minimum))}"


if __name__ == "__main__":
    print(support_table(), end="")
