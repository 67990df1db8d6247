"""A whole decode layer of latent attention beside transformers' eager attention, compiled, both as CUDA graphs.

`python -m benchmarks.mla.layer --json FILE`: hidden states in, FP8 codes out, batch 32 of 4096 tokens, of DeepSeek-V3's
attention: projections, norms, rotation, cache write, absorption, attention, up-projection and output quantisation, but
no output projection. The peer is transformers' own module with `attn_implementation="eager"`, compiled with a
quantisation behind it, over a contiguous cache and without a mask, as equal lengths need none.

A row a cell is printed and written: microseconds, the ratio (above 1: vattn is faster), the
relative difference of both results, and every kernel that a call launches, with its time. `--device cpu` runs tiny
sizes, compiled by nobody: that it runs, no more.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import vattn
from benchmarks.harness import run_cells, time_in_turn
from benchmarks.kernels import profile_kernels
from vattn.config.rope import RopeConfig
from vattn.layers.mla.rotary import LatentRotary
from vattn.quantization.codecs import quant_fp8_static

BAR = 2.0
OUTPUT_SCALE = 0.002
_LISTED = 24
"""Longest lists of kernels that a row holds."""


@dataclass(frozen=True)
class Cell:
    """One row: query heads, requests, their length, format of the cache, columns."""

    heads: int = 16
    batch: int = 32
    length: int = 4096
    cache: str = "auto"
    hidden: int = 7168
    query_rank: int = 1536
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    block: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"decode layer: {self.batch} x {self.length}, {self.heads} heads, cache {self.cache}"


CELLS = (Cell(), Cell(heads=128), Cell(cache="fp8"))
TINY = {"heads": 2, "batch": 3, "length": 37, "hidden": 48, "query_rank": 24, "latent": 32, "rope": 16, "nope": 16,
        "value": 16, "block": 16, "dtype": torch.float32}  # fmt: skip


class Shelf:
    """A contiguous cache of one layer, whose newest row is written again by every call."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self.newest = torch.tensor([first.shape[2] - 1], device=first.device)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest row and return all of them, as caches of transformers do."""
        self.first.index_copy_(2, self.newest, key)
        self.second.index_copy_(2, self.newest, value)
        return self.first, self.second


class Codes(nn.Module):
    """What stands for the output projection: its input, quantised."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([OUTPUT_SCALE], device=device))

    def forward(self, rows: Tensor) -> Tensor:
        """Return e4m3 codes of rows."""
        return quant_fp8_static(rows.flatten(0, -2), self.scale)


class DecodeLayer(nn.Module):
    """The same layer on vattn: the two projections of hidden states are one."""

    def __init__(self, peer: Any, cell: Cell) -> None:
        super().__init__()
        self.cell, self.query_norm, self.query_up = cell, peer.q_a_layernorm, peer.q_b_proj
        down = torch.cat((peer.q_a_proj.weight, peer.kv_a_proj_with_mqa.weight))
        self.register_buffer("down", down.detach().clone())
        self.register_buffer("latent_norm", peer.kv_a_layernorm.weight.detach().clone())
        rope = RopeConfig(cell.rope, "neox", "rms", peer.kv_a_layernorm.variance_epsilon)
        self.rope, quantised = rope.encode(), cell.cache != "auto"
        self.attention = vattn.MLAAttention(
            cell.heads, float(peer.scaling), cell.nope, cell.rope, cell.value, cell.query_rank, cell.latent,
            peer.kv_b_proj, vattn.CacheConfig(cell.block, cell.cache),
            vattn.QuantConfig(k_scale=0.02 if quantised else None, output_format="fp8_static",
                              output_scale=OUTPUT_SCALE),
        )  # fmt: skip

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return e4m3 codes `[T, N * V]` of hidden states `[T, hidden]`; `cos` and `sin` `[T, R]`."""
        cell = self.cell
        narrow, latent, key = nn.functional.linear(hidden, self.down).split(
            (cell.query_rank, cell.latent, cell.rope), -1
        )
        query = self.query_up(self.query_norm(narrow)).unflatten(-1, (cell.heads, -1))
        rotated = query[..., cell.nope :]
        low, high = rotated.chunk(2, -1)
        rotated = rotated * cos.unsqueeze(1) + torch.cat((-high, low), -1) * sin.unsqueeze(1)
        query = torch.cat((query[..., : cell.nope], rotated), -1)
        rotary = LatentRotary(cos, sin, None, self.latent_norm, self.rope)
        out = self.attention(query, latent, key, rotary=rotary)
        assert isinstance(out, Tensor)
        return out


def make_peer(cell: Cell, device: str) -> Any:
    """Return transformers' attention with random weights."""
    import transformers

    modelling = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = transformers.DeepseekV3Config(
        hidden_size=cell.hidden, num_attention_heads=cell.heads, num_key_value_heads=cell.heads,
        q_lora_rank=cell.query_rank, kv_lora_rank=cell.latent, qk_nope_head_dim=cell.nope, qk_rope_head_dim=cell.rope,
        v_head_dim=cell.value, rope_interleave=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(device):
        peer = modelling.DeepseekV3Attention(config, 0)
    peer.o_proj = Codes(device)
    return peer.to(cell.dtype).eval().requires_grad_(False)


def restore_scale(peer: Any) -> None:
    """Give the output scale its dtype back, which the module's conversion took."""
    peer.o_proj.scale = peer.o_proj.scale.float()


def fill(peer: Any, layer: DecodeLayer, cell: Cell, device: str) -> tuple[Shelf, list[list[int]]]:
    """Put the same past into both caches; return the peer's, and the block tables of ours."""
    rng = torch.Generator(device=device).manual_seed(1)

    def draw(columns: int) -> Tensor:
        shape = (cell.batch, 1, cell.length, columns)
        return (0.3 * torch.randn(shape, generator=rng, device=device)).to(cell.dtype)

    latent, key = draw(cell.latent), draw(cell.rope)
    width = -(-cell.length // cell.block)
    vattn.allocate_kv_cache(layer, num_blocks=cell.batch * width + 1, dtype=cell.dtype, device=device)
    own: Any = layer.attention
    slots = torch.arange(cell.length, device=device)
    for request in range(cell.batch):
        own_slots = slots + (1 + request * width) * cell.block
        torch.ops.vattn.mla_kv_cache_update(
            latent[request, 0], key[request, 0], own.kv_cache, own_slots, own.k_scale, own._op_config
        )
    tables = [[1 + request * width + i for i in range(width)] for request in range(cell.batch)]
    if hasattr(peer, "expand_kv"):
        return Shelf(latent, key), tables
    # An older transformers caches what it expands.
    wide = peer.kv_b_proj(latent).view(cell.batch, cell.length, cell.heads, -1).transpose(1, 2)
    nope, value = wide.split((cell.nope, cell.value), -1)
    return Shelf(torch.cat((nope, key.expand(-1, cell.heads, -1, -1)), -1), value.contiguous()), tables


def run_cell(cell: Cell, device: str) -> dict[str, Any]:
    """Time one cell and return its row."""
    compiled = device == "cuda"
    peer = make_peer(cell, device)
    restore_scale(peer)
    layer = DecodeLayer(peer, cell).to(device)
    shelf, tables = fill(peer, layer, cell, device)
    builder = vattn.AttentionMetadataBuilder(
        cell.batch, cell.batch, cell.length, cell.block, device, layers=layer.attention
    )
    step = builder.build([1] * cell.batch, [cell.length] * cell.batch, tables)
    hidden = torch.randn(cell.batch, 1, cell.hidden, device=device).to(cell.dtype)
    angle = (cell.length - 1) * torch.logspace(0, -4, cell.rope // 2, device=device)
    angle = torch.cat((angle, angle)).expand(cell.batch, 1, cell.rope)
    cos, sin = angle.cos().to(cell.dtype).contiguous(), angle.sin().to(cell.dtype).contiguous()
    own_call: Any = vattn.compile(layer, fullgraph=True) if compiled else layer
    peer_call: Any = torch.compile(peer, fullgraph=True) if compiled else peer

    def run_own() -> Tensor:
        with vattn.forward_context(step):
            return own_call(hidden[:, 0], cos[:, 0], sin[:, 0])

    def run_peer() -> Tensor:
        return peer_call(hidden, (cos, sin), None, shelf)[0]

    runs = {"vattn": run_own, "transformers": run_peer}
    with torch.no_grad():
        results = [run().float().view(cell.batch, -1) for run in runs.values()]
        row: dict[str, Any] = {}
        row["difference"] = round(float((results[0] - results[1]).norm() / results[1].norm()), 4)
        times, _ = time_in_turn({name: [run] for name, run in runs.items()}, device)
        row["us"] = {name: round(us, 1) for name, us in times.items()}
        row["ratio"] = round(row["us"]["transformers"] / row["us"]["vattn"], 2)
        row |= {"bar": BAR, "met": row["ratio"] >= BAR}
        for name, run in runs.items() if compiled else ():
            kernels = profile_kernels(run)
            row[f"kernels of {name}"] = len(kernels)
            row[f"{name} runs"] = [[kernel.name[:60], round(kernel.us, 1)] for kernel in kernels[:_LISTED]]
    return row


def main(arguments: list[str] | None = None) -> int:
    """Run the cells; return 1 if any failed."""

    def run(cell: Cell, device: str) -> dict[str, Any]:
        torch._dynamo.reset()
        return run_cell(Cell(**{**TINY, "cache": cell.cache}) if device == "cpu" else cell, device)

    return run_cells(__doc__, {cell.name: cell for cell in CELLS}, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
