"""Ways to write RoPE, the norm ahead of it and the query's quantisation, each with what should become of it.

A form maps the raw query `[T, H, D]` and key `[T, K, D]`, a table of angles `[P, D / 2]` and positions `[T]` to query
and key. `LayerWithRope` puts it between a projection and an attention layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import vattn

HEADS, KV_HEADS, WIDTH, POSITIONS = 4, 2, 32, 64
Heads = tuple[Tensor, Tensor]
Write = Callable[["LayerWithRope", Tensor, Tensor, Tensor], Heads]


def gathered(layer: LayerWithRope, positions: Tensor) -> Heads:
    """Return cos and sin `[T, 1, D / 2]`."""
    angles = layer.angles[positions][:, None]
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_tables(change: Callable[[Tensor], Tensor] = lambda table: table) -> Callable[[Turn], Write]:
    """Make a form of a function that rotates a query or key by cosines and sines `[T, 1, D / 2]`, changed first."""

    def form(turn: Turn) -> Write:
        def write(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
            cos, sin = map(change, gathered(layer, positions))
            return turn(query, cos, sin), turn(key, cos, sin)

        return write

    return form


def halves_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@by_tables()
def chunked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As vattn's own demo writes it: fp32, chunk and cat."""
    return halves_turned(x.float(), cos, sin).to(x.dtype)


@by_tables(lambda table: table.bfloat16())
def scaled_cosines(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Cosines are scaled in the model dtype, sines are not."""
    return halves_turned(x, cos * 1.25, sin).to(x.dtype)


@by_tables(lambda table: table.double() * 1.5)
def tables_in_fp64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves_turned(x, cos, sin).to(x.dtype)


def hf(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """As transformers writes it: doubled tables in the model dtype, rotate_half."""
    angles = layer.angles[positions]
    doubled = torch.cat((angles, angles), dim=-1)
    cos, sin = doubled.cos().to(query.dtype)[:, None], doubled.sin().to(query.dtype)[:, None]
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def hf_batched(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """The same on `[1, heads, T, D]`, by transformers' own function."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = layer.angles[positions][None]
    doubled = torch.cat((angles, angles), dim=-1)
    cos, sin = doubled.cos().to(query.dtype), doubled.sin().to(query.dtype)
    query, key = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    return query[0].transpose(0, 1), key[0].transpose(0, 1)


@by_tables()
def half_tables_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    out[..., :half] = first * cos - second * sin
    out[..., half:] = first * sin + second * cos
    return out


@by_tables(lambda table: table.repeat_interleave(2, dim=-1))
def gptj(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs, tables repeated for both members."""
    x = x.float()
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * cos + turned * sin).bfloat16()


@by_tables()
def interleaved_stack(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def complex_numbers(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """As Llama's first code wrote it."""
    angles = layer.angles[positions]
    factors = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)

    return turn(query), turn(key)


@by_tables(lambda table: table[..., : WIDTH // 4])
def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first half of the columns turn, as in GPT-NeoX."""
    x, rest = x.float().split(WIDTH // 2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).bfloat16()


@by_tables(lambda table: table[..., :6])
def partial_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x[..., :12].float().unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., 12:]), dim=-1)


def stacked_heads(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """Query and key turned together and taken apart afterwards."""
    cos, sin = gathered(layer, positions)
    both = layer.projected[:, : (HEADS + KV_HEADS) * WIDTH].unflatten(1, (-1, WIDTH))
    first, second = both.float().chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()
    return both[:, :HEADS], both[:, HEADS:]


def table_of_both(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """As vLLM keeps them: cosines and sines in the rows of one table."""
    cos, sin = layer.cos_sin.index_select(0, positions).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return tuple(halves_turned(x, cos, sin).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


def embedded(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """Tables of full width, looked up as embeddings."""
    doubled = layer.angles.repeat(1, 2)
    cos = nn.functional.embedding(positions, doubled.cos())[:, None]
    sin = nn.functional.embedding(positions, doubled.sin())[:, None]
    return tuple((x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


def looked_up(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """Whole tables and positions, which the op can take as they are."""
    cos, sin = layer.cos[positions][:, None], layer.sin[positions][:, None]
    return tuple(halves_turned(x.float(), cos, sin).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


@by_tables(lambda table: torch.cat((table, table), dim=-1))
def rolled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate_half by rolling, its signs in the table."""
    sign = torch.cat((-torch.ones(WIDTH // 2), torch.ones(WIDTH // 2)))
    return (x.float() * cos + x.float().roll(WIDTH // 2, dims=-1) * sign * sin).to(x.dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def qwen_norm(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return hf(layer, rms(query, layer.q_weight, 1e-6), rms(key, layer.k_weight, 1e-6), positions)


def module_norm(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """`nn.functional.rms_norm` with another epsilon."""
    query = nn.functional.rms_norm(query, (WIDTH,), layer.q_weight, 3e-5)
    key = nn.functional.rms_norm(key, (WIDTH,), layer.k_weight, 3e-5)
    return chunked(layer, query, key, positions)


def gemma_norm(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """Times one plus the weight, in fp32."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + weight.float())).to(x.dtype)

    return chunked(layer, norm(query, layer.q_weight), norm(key, layer.k_weight), positions)


def bare_norm(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """Without a weight, the mean square as a sum."""

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / ((wide * wide).sum(-1, keepdim=True) / WIDTH + 1e-5).sqrt()).to(x.dtype)

    return chunked(layer, norm(query), norm(key), positions)


def biased(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """The projection has biases, which belong to what comes before."""
    query = query + layer.bias[: HEADS * WIDTH].view(HEADS, WIDTH)
    key = key + layer.bias[HEADS * WIDTH : (HEADS + KV_HEADS) * WIDTH].view(KV_HEADS, WIDTH)
    return chunked(layer, query, key, positions)


@by_tables()
def swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves in the wrong places."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((second * cos + first * sin, first * cos - second * sin), dim=-1).to(x.dtype)


@by_tables()
def by_matrices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of columns times matrices of cosines and sines."""
    turns = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    pairs = torch.stack(x.float().chunk(2, dim=-1), -1).unsqueeze(-1)
    return torch.cat((turns @ pairs).squeeze(-1).unbind(-1), -1).to(x.dtype)


def first_positions(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    turned, near = chunked(layer, query, key, positions), (positions < 10)[:, None, None]
    return torch.where(near, turned[0], query), torch.where(near, turned[1], key)


def two_tables(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return chunked(layer, query, key, positions)[0], chunked(layer, query, key, positions + 1)[1]


def two_sines(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """The query is rotated one way, the key the other way, by the same cosines."""
    cos, sin = gathered(layer, positions)
    query, key = (halves_turned(x.float(), cos, by).to(x.dtype) for x, by in ((query, sin), (key, sin + 0.5)))
    return query, key


def query_alone(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return chunked(layer, query, key, positions)[0], key


def key_alone(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return query, chunked(layer, query, key, positions)[1]


def two_styles(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return chunked(layer, query, key, positions)[0], interleaved_stack(layer, query, key, positions)[1]


def norm_after(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    query, key = chunked(layer, query, key, positions)
    return rms(query, layer.q_weight, 1e-6), rms(key, layer.k_weight, 1e-6)


def norm_of_all_heads(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean((-2, -1), keepdim=True) + 1e-6)).to(x.dtype)

    return chunked(layer, norm(query), norm(key), positions)


def other_epsilons(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return hf(layer, rms(query, layer.q_weight, 1e-6), rms(key, layer.k_weight, 1e-5), positions)


def key_escapes(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    query, key = chunked(layer, query, key, positions)
    layer.escaped = key.float().sum()
    return query, key


def query_escapes(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    query, key = chunked(layer, query, key, positions)
    layer.escaped = query.amax()
    return query, key


def scaled_query(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    query, key = chunked(layer, query, key, positions)
    return query * 0.5, key


def clipped_key(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    query, key = chunked(layer, query, key, positions)
    return query, key.clamp(-300.0, 300.0)


def rounded_before(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    """The key is quantised ahead of the rotation, with which rounding does not commute."""
    key = (key.float() / 0.03).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.03
    return chunked(layer, query, key.bfloat16(), positions)


def no_rope(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return query, key


def low_rank_key(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return query, key + (layer.projected @ layer.low_rank).unflatten(1, (-1, WIDTH))


def gated_key(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    return query, key * layer.projected[:, :1].sigmoid().unsqueeze(1) + layer.low_rank[positions][:, None, :WIDTH]


def norm_of_the_width(layer: LayerWithRope, query: Tensor, key: Tensor, positions: Tensor) -> Heads:
    key = rms(key.flatten(1), layer.bias[: KV_HEADS * WIDTH], 1e-6)
    return query, key.unflatten(1, (-1, WIDTH))


@dataclass(frozen=True)
class RopeForm:
    """One way to write it.

    Attributes:
        write: the code.
        says: what the report must say: the op's description where it fuses, the reason where it does not.
        fuses: whether it should, on a CPU; `None`: there is no RoPE to report.
        exact: whether the graph before, run op by op, gives the same bits. It does where it computes in fp32; what
            multiplies in bf16, or rounds a query to bf16 ahead of FP8, rounds more often then than generated code does.
        options: of the layer.
    """

    write: Write
    says: str
    fuses: bool | None = True
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)


FORMS: dict[str, RopeForm] = {
    "chunk and cat, fp32": RopeForm(chunked, "RoPE (neox, 32 of 32 columns) and the cache write"),
    "transformers' way, bf16": RopeForm(hf, "RoPE (neox, 32 of 32 columns)", exact=False),
    "transformers' own function": RopeForm(hf_batched, "RoPE (neox, 32 of 32 columns)", exact=False),
    "halves written in place": RopeForm(half_tables_fp32, "RoPE (neox, 32 of 32 columns)"),
    "interleaved, repeated tables": RopeForm(gptj, "RoPE (interleaved, 32 of 32 columns)"),
    "interleaved, stacked": RopeForm(interleaved_stack, "RoPE (interleaved, 32 of 32 columns)"),
    "complex numbers": RopeForm(complex_numbers, "RoPE (interleaved, 32 of 32 columns)"),
    "partial": RopeForm(partial, "RoPE (neox, 16 of 32 columns)"),
    "partial, interleaved": RopeForm(partial_interleaved, "RoPE (interleaved, 12 of 32 columns)"),
    "query and key together": RopeForm(stacked_heads, "RoPE (neox, 32 of 32 columns)"),
    "one table for both": RopeForm(table_of_both, "RoPE (neox, 32 of 32 columns)"),
    "tables looked up": RopeForm(looked_up, "RoPE (neox, 32 of 32 columns)"),
    "tables as embeddings": RopeForm(embedded, "RoPE (neox, 32 of 32 columns)"),
    "a biased projection": RopeForm(biased, "RoPE (neox, 32 of 32 columns)"),
    "RMSNorm ahead, as in Qwen": RopeForm(qwen_norm, "normalised values are concatenated", False, exact=False),
    "RMSNorm by torch": RopeForm(module_norm, "RMSNorm, RoPE (neox", exact=False),
    "RMSNorm times one plus the weight": RopeForm(gemma_norm, "RMSNorm, RoPE (neox", exact=False),
    "RMSNorm without a weight": RopeForm(bare_norm, "RMSNorm, RoPE (neox", exact=False),
    "FP8 cache": RopeForm(chunked, "and the cache write", options={"cache": "fp8"}),
    "FP8 query": RopeForm(
        chunked, "the query's quantisation and the cache write", exact=False, options={"q_scale": 0.03}
    ),
    "FP8 query, a scale for each KV head": RopeForm(
        interleaved_stack,
        "the query's quantisation and the cache write",
        exact=False,
        options={"q_scale": [0.03, 0.02]},
    ),
    "FP8 query and cache behind a norm": RopeForm(
        gemma_norm, "RMSNorm, RoPE", exact=False, options={"q_scale": 0.03, "cache": "fp8"}
    ),
    "RMSNorm as in Qwen, FP8 query and cache": RopeForm(
        qwen_norm, "normalised values are concatenated", False, exact=False, options={"q_scale": 0.03, "cache": "fp8"}
    ),
    "rolled, signs in a constant": RopeForm(rolled, "RoPE (neox, 32 of 32 columns)"),
    "halves swapped": RopeForm(swapped, "not as a rotation that the op has", False),
    "products with matrices": RopeForm(by_matrices, "the key: made of cosines or sines, but not as a rotation", False),
    "up to a position": RopeForm(first_positions, "the key: made of cosines or sines, but not as a rotation", False),
    "different tables": RopeForm(two_tables, "different tables", False),
    "different sines": RopeForm(two_sines, "different tables", False),
    "cosines scaled in bf16": RopeForm(scaled_cosines, "the tables are bfloat16 and float32", False),
    "tables in fp64": RopeForm(tables_in_fp64, "the tables are float64", False),
    "the query alone": RopeForm(query_alone, "", None),
    "the key alone": RopeForm(key_alone, "the query: no rotation makes it", False),
    "different styles": RopeForm(two_styles, "differ in style", False),
    "norm after the rotation": RopeForm(norm_after, "not as a rotation that the op has", False),
    "norm of all heads, which stays ahead": RopeForm(norm_of_all_heads, "RoPE (neox, 32 of 32 columns)", exact=False),
    "different epsilons": RopeForm(other_epsilons, "differ in norm_eps", False),
    "the key is read again": RopeForm(key_escapes, "also read by", False),
    "the query is read again": RopeForm(query_escapes, "also read by", False),
    "a scaled query": RopeForm(scaled_query, "not as a rotation that the op has", False),
    "a clipped key": RopeForm(clipped_key, "not as a rotation that the op has", False),
    "rounded to FP8 before, which stays ahead": RopeForm(rounded_before, "RoPE (neox, 32 of 32 columns)"),
    "no RoPE": RopeForm(no_rope, "", None),
    "a low-rank part, no RoPE": RopeForm(low_rank_key, "", None),
    "a gate and learned positions, no RoPE": RopeForm(gated_key, "", None),
    "a norm of all heads with a weight, no RoPE": RopeForm(norm_of_the_width, "", None),
}


class LayerWithRope(nn.Module):
    """A projection, a form and attention."""

    def __init__(self, form: RopeForm, device: str = "cpu", backend: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, options = form, form.options
        columns = (HEADS + 2 * KV_HEADS) * WIDTH
        self.qkv = nn.Linear(64, columns, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        quant: dict[str, Any] = {}
        if "q_scale" in options:
            quant = {"query_format": "fp8_e4m3", "q_scale": options["q_scale"]}
        if "cache" in options:
            quant |= {"k_scale": 0.013, "v_scale": 0.011}
        self.attn = vattn.Attention(
            HEADS,
            WIDTH,
            WIDTH**-0.5,
            KV_HEADS,
            prefix="layers.0.attn",
            cache_config=vattn.CacheConfig(cache_dtype=options.get("cache", "auto")),
            quant_config=vattn.QuantConfig(**quant),
            attn_backend=None if backend == "auto" else backend,
        )
        self.register_buffer("angles", torch.rand(POSITIONS, WIDTH // 2) * 7)
        self.register_buffer("cos_sin", torch.cat((self.angles.cos(), self.angles.sin()), dim=-1))
        self.register_buffer("cos", self.angles.cos())
        self.register_buffer("sin", self.angles.sin())
        for name in ("q_weight", "k_weight"):
            self.register_buffer(name, (torch.rand(WIDTH) + 0.5).bfloat16())
        self.register_buffer("bias", torch.randn(columns).bfloat16())
        self.register_buffer("low_rank", torch.randn(columns, KV_HEADS * WIDTH).bfloat16() / 100)
        self.projected, self.escaped = torch.empty(0), torch.zeros(())
        self.to(device)
        vattn.allocate_kv_cache(self, num_blocks=16, dtype=torch.bfloat16)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from `x [T, 64]`; also returns what a form has kept."""
        self.projected, self.escaped = self.qkv(x), torch.zeros((), device=x.device)
        sizes = (HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH)
        query, key, value = self.projected.split(sizes, dim=-1)
        query, key = self.form.write(self, query.unflatten(1, (-1, WIDTH)), key.unflatten(1, (-1, WIDTH)), positions)
        attended, escaped = self.attn(query, key, value), self.escaped
        self.projected = self.escaped = torch.empty(0, device=x.device)
        return attended, escaped


def inputs(tokens: int, device: str = "cpu") -> list[Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=rng).bfloat16() * 2
    return [x.to(device), (torch.arange(tokens) * 5 % POSITIONS).to(device)]
