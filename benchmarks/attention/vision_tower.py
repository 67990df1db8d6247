"""Time a vision tower's attention on one GPU: bf16, FP8, FlashAttention where it is found, and torch's own.

    python -m benchmarks.attention.vision_tower --json out.json

Everything is captured in CUDA graphs and checked first. "attention" starts at the fused projection of query, key and
value, so that FP8 pays for its scales and its quantisation; "tower" is whole layers, projections and MLP included.
Errors are relative L2 against fp32 on the same bf16 inputs, over every row of one head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import vattn
from benchmarks.harness import add_row, machine, parser_of, time_in_turn

DEVICE = "cuda"


@dataclass(frozen=True)
class Shape:
    """Images as one tower sees them: tokens of each, heads, width of a head, width of the MLP."""

    lens: tuple[int, ...]
    heads: int
    size: int
    mlp: int

    @property
    def hidden(self) -> int:
        """Columns of a row."""
        return self.heads * self.size

    @property
    def flops(self) -> int:
        """Operations of the two products of attention."""
        return sum(4 * n * n for n in self.lens) * self.hidden


SHAPES: dict[str, Shape] = {
    "SigLIP so400m, 16 images of 729": Shape((729,) * 16, 16, 72, 4304),
    "Qwen2-VL, 12 images of 64 to 4096": Shape(
        (4096, 256, 1024, 2304, 64, 1296, 576, 3136, 400, 144, 784, 1600), 16, 80, 5120
    ),
    "d64, 32 images of 1024": Shape((1024,) * 32, 16, 64, 4096),
    "d128, 4 images of 4096": Shape((4096,) * 4, 16, 128, 8192),
}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class VattnAttention(nn.Module):
    """Our layer over packed images."""

    def __init__(self, shape: Shape, quant: vattn.EncoderFP8Config | None, backend: str | None = None) -> None:
        super().__init__()
        self.layer = vattn.MMEncoderAttention(
            shape.heads, shape.size, quant_config=quant, prefix="a", attn_backend=backend
        )
        starts = torch.tensor([0, *shape.lens]).cumsum(0).int()
        self.register_buffer("starts", starts)
        self.register_buffer("longest", torch.tensor(max(shape.lens)))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; all are `[1, tokens, hidden]`."""
        return self.layer(query, key, value, self.starts, self.longest)


class TorchAttention(nn.Module):
    """torch's own operator: one batched call for equal images, otherwise one call an image."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; all are `[1, tokens, hidden]`."""
        heads, lens = (self.shape.heads, self.shape.size), self.shape.lens
        rows = [t.squeeze(0).unflatten(1, heads) for t in (query, key, value)]
        if len(set(lens)) == 1:
            batched = (t.unflatten(0, (len(lens), lens[0])).transpose(1, 2) for t in rows)
            return scaled_dot_product_attention(*batched).transpose(1, 2).reshape(query.shape)
        parts = zip(*(t.split(lens) for t in rows), strict=True)
        out = [scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in part))[0] for part in parts]
        return torch.cat([o.transpose(0, 1) for o in out]).view(query.shape)


class Block(nn.Module):
    """One layer of a tower."""

    def __init__(self, shape: Shape, attention: nn.Module) -> None:
        super().__init__()
        hidden = shape.hidden
        self.norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(hidden, shape.mlp), nn.GELU(approximate="tanh"), nn.Linear(shape.mlp, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `[1, tokens, hidden]`."""
        x = x + self.out(self.attention(*self.qkv(self.norm(x)).chunk(3, dim=-1)))
        return x + self.mlp(self.mlp_norm(x))


def variants(shape: Shape, folder: Path) -> dict[str, Callable[[], nn.Module]]:
    """Return what is timed, by name; FlashAttention only where a library is found."""
    scales = folder / "scales.json"
    scales.write_text(json.dumps({"a": dict.fromkeys("qkv", 5.0 / 448)}))  # 5 is the largest of 10 million normals
    found: dict[str, Callable[[], nn.Module]] = {
        "vattn bf16": lambda: VattnAttention(shape, None, "TRITON_ATTN"),
        "vattn FP8, dynamic": lambda: VattnAttention(shape, vattn.EncoderFP8Config(dynamic=True), "TRITON_ATTN"),
        "vattn FP8, static": lambda: VattnAttention(shape, vattn.EncoderFP8Config(scale_path=scales), "TRITON_ATTN"),
        "torch SDPA": lambda: TorchAttention(shape),
    }
    config = vattn.MMEncoderAttention(shape.heads, shape.size).resolve_config(torch.bfloat16, DEVICE)
    if not vattn.explain(config.replace(backend="auto"), DEVICE).refusals.get("FLASH_ATTN", ("absent",)):
        found["FLASH_ATTN"] = lambda: VattnAttention(shape, None, "FLASH_ATTN")
        static = vattn.EncoderFP8Config(scale_path=scales)
        layer = vattn.MMEncoderAttention(shape.heads, shape.size, prefix="a", quant_config=static)
        config = layer.resolve_config(torch.bfloat16, DEVICE)
        if not vattn.explain(config.replace(backend="FLASH_ATTN"), DEVICE).refusals["FLASH_ATTN"]:
            found["FLASH_ATTN FP8, static"] = lambda: VattnAttention(shape, static, "FLASH_ATTN")
    return found


def expected_rows(shape: Shape, qkv: Tensor, head: int) -> Tensor:
    """Return fp32 `[tokens, size]` of one head, image by image."""
    columns = qkv.squeeze(0).float().unflatten(1, (3, shape.heads, shape.size))[:, :, head]
    out = []
    for part in columns.split(list(shape.lens)):
        query, key, value = part.unbind(1)
        out.append((query @ key.T * shape.size**-0.5).softmax(-1) @ value)
    return torch.cat(out)


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error."""
    return float((got.float() - expected).norm() / expected.norm())


def time_all(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Return microseconds by name."""
    return time_in_turn({name: [call] for name, call in calls.items()}, warm_up=True)[0]


def run_attention(name: str, shape: Shape, folder: Path) -> dict[str, Any]:
    """Check and time attention alone."""
    qkv = torch.randn(1, sum(shape.lens), 3 * shape.hidden, device=DEVICE).bfloat16()
    head = shape.heads // 2
    expected, calls, rows = expected_rows(shape, qkv, head), {}, {}
    for variant, make in variants(shape, folder).items():
        module = make().to(DEVICE)
        target: Any = vattn.compile(module) if isinstance(module, VattnAttention) else module

        def call(target: Any = target) -> Tensor:
            return target(*qkv.chunk(3, dim=-1))

        got = call().squeeze(0).unflatten(1, (shape.heads, shape.size))[:, head]
        rows[variant] = {"error": relative(got, expected)}
        calls[variant] = call
    for variant, microseconds in time_all(calls).items():
        rows[variant] |= {"us": round(microseconds, 1), "tflops": round(shape.flops / microseconds / 1e6, 1)}
    return {"what": "attention", "shape": name, "variants": rows}


def run_tower(name: str, shape: Shape, folder: Path, num_layers: int) -> dict[str, Any]:
    """Check and time whole layers against the same layers with torch's attention."""
    torch.manual_seed(0)
    x = torch.randn(1, sum(shape.lens), shape.hidden, device=DEVICE).bfloat16()
    weights: dict[str, Tensor] | None = None
    calls, rows, results = {}, {}, {}
    for variant, make in variants(shape, folder).items():
        with torch.device(DEVICE):
            blocks = nn.ModuleList(Block(shape, make()) for _ in range(num_layers)).requires_grad_(False)
        weights = weights or blocks.state_dict()
        blocks.load_state_dict(weights, strict=False)
        blocks.to(DEVICE, torch.bfloat16)
        compiled = torch.compile(Block.forward, fullgraph=True)

        def call(blocks: Any = blocks, compiled: Any = compiled) -> Tensor:
            out = x
            for block in blocks:
                out = compiled(block, out)
            return out

        results[variant] = call()
        calls[variant] = call
    added = results["torch SDPA"].float() - x.float()
    for variant, microseconds in time_all(calls).items():
        error = relative(results[variant].float() - x.float(), added)
        rows[variant] = {"us": round(microseconds, 1), "difference to torch SDPA": error}
    return {"what": f"tower of {num_layers} layers", "shape": name, "variants": rows}


def describe(row: dict[str, Any]) -> str:
    """Return the lines of one table."""
    base = row["variants"]["torch SDPA"]["us"]
    lines = [f"{row['what']}: {row['shape']}"]
    for variant, entry in row["variants"].items():
        error = entry.get("error", entry.get("difference to torch SDPA"))
        rate = f"{entry['tflops']:7.1f} TFLOP/s" if "tflops" in entry else ""
        lines.append(f"  {variant:22s} {entry['us']:9.1f} us {rate} {base / entry['us']:6.2f}x SDPA, error {error:.2e}")
    return "\n".join(lines)


def main() -> None:
    """Run the shapes and print a table each."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where scales.json may be written")
    parser.add_argument("--only", default="", help="shapes whose name contains this text")
    parser.add_argument("--layers", type=int, default=4, help="layers of the tower; 0: attention alone")
    options = parser.parse_args()
    result = machine()
    with torch.no_grad():
        for name, shape in SHAPES.items():
            if options.only not in name:
                continue
            rows = [run_attention(name, shape, options.folder)]
            if options.layers and name.startswith("SigLIP"):
                rows.append(run_tower(name, shape, options.folder, options.layers))
            for row in rows:
                add_row(result, row, options.json, describe(row))
            torch._dynamo.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
