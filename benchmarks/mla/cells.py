"""Inputs of the latent attention benchmark, and the steps that are timed on them: vattn's and its peers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vattn.cache.layout import mla_cache_dtype, mla_cache_shape
from vattn.config.mla import MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference.mla_absorb import quantised_query
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Columns of the attention; the tiny ones are for a CPU."""

    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    block: int = 64
    dtype: str = "bfloat16"


DEEPSEEK = Sizes()
NARROW = Sizes(nope=64, value=64)
TINY = Sizes(latent=64, rope=16, nope=32, value=32, block=16, dtype="float32")


@dataclass(frozen=True)
class Cell:
    """One row of the benchmark.

    Attributes:
        kind: "decode" (absorbed queries alone, as peers take them), "op" (projections included), "sparse", "prefill"
            (attention to expanded keys alone, as peers take them), "ways" (the op by kernels for Hopper and by plain
            ones).
        heads, batch, length, tokens: query heads, requests, their length (negative: skewed, up to that), rows of each.
        bar: what the first ratio must reach, `None` for none.
        against: changes of the layer that this one is compared with, beside or instead of peers.
        changes: of the layer that is timed.
        sizes: columns of the attention.
    """

    kind: str
    heads: int
    batch: int
    length: int
    tokens: int = 1
    bar: float | None = None
    against: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes = DEEPSEEK

    @property
    def name(self) -> str:
        """What it is called in results."""
        size = f"{self.batch} x {self.length}, {self.heads} heads, {self.tokens} tokens"
        if self.sizes != DEEPSEEK:
            size += f", {self.sizes.nope + self.sizes.rope}/{self.sizes.value}"
        return f"{self.kind}: {size}" + "".join(f", {k}={v}" for k, v in self.changes.items())


class Inputs:
    """Tensors of one cell on a device."""

    def __init__(self, cell: Cell, sizes: Sizes, device: str) -> None:
        self.cell, self.sizes, self.device = cell, sizes, device
        rng = torch.Generator(device=device).manual_seed(0)
        longest = abs(cell.length)
        lengths = torch.full((cell.batch,), longest, dtype=torch.int32, device=device)
        if cell.length < 0:
            # A few long requests among many short ones.
            share = torch.rand(cell.batch, generator=rng, device=device) ** 4
            lengths = (cell.tokens + share * (longest - cell.tokens)).int()
            lengths[0] = longest
        self.seq_lens, self.per_request = lengths, -(-longest // sizes.block)
        self.blocks = cell.batch * self.per_request
        ids = torch.randperm(self.blocks, generator=rng, device=device).int() + 1
        self.table = ids.view(cell.batch, self.per_request)
        self.starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.tokens
        self.dtype, self.rng = MODEL_DTYPES[sizes.dtype], rng
        self.query_scale = torch.full((1,), 0.02, device=device)
        self._caches: dict[str, Tensor] = {}
        self.cache = self.cache_of(self.config())

    def config(self, **changes: Any) -> MLAConfig:
        """Return the layer of this cell."""
        s = self.sizes
        values: dict[str, Any] = {"kv_cache_dtype": s.dtype, "block_size": s.block, **changes}
        values["kv_scale"] = "tensor" if values["kv_cache_dtype"] == "fp8_e4m3" else "none"
        scale = (s.nope + s.rope) ** -0.5
        return MLAConfig(self.cell.heads, s.nope, s.rope, s.value, s.latent, scale, s.dtype, **values)

    def cache_of(self, config: MLAConfig) -> Tensor:
        """Return a cache in the layer's format, always the same one."""
        if config.kv_cache_dtype not in self._caches:
            self._caches[config.kv_cache_dtype] = self._filled(config)
        return self._caches[config.kv_cache_dtype]

    def _filled(self, config: MLAConfig) -> Tensor:
        """Return a cache of random rows in the layer's format."""
        cache = torch.zeros(mla_cache_shape(config, self.blocks + 1), dtype=mla_cache_dtype(config), device=self.device)
        scale = self.scale_of(config)
        slots = torch.arange((self.blocks + 1) * config.block_size, device=self.device)
        for part in slots.split(1 << 16):
            rows = 0.3 * torch.randn(len(part), config.head_size, generator=self.rng, device=self.device)
            rows = rows.to(self.dtype)
            latent, rope = rows[:, : config.kv_lora_rank], rows[:, config.kv_lora_rank :]
            torch.ops.vattn.mla_kv_cache_update(*MLACacheUpdateArgs(latent, rope, cache, part, scale, config.encode()))
        return cache

    def scale_of(self, config: MLAConfig) -> Tensor | None:
        """Return the scale of an FP8 cache."""
        return None if config.kv_scale == "none" else torch.full((1,), 0.005, device=self.device)

    def absorbed(self) -> Tensor:
        """Return absorbed queries `[T, N, L + R]`."""
        shape = (self.cell.batch * self.cell.tokens, self.cell.heads, self.sizes.latent + self.sizes.rope)
        return torch.randn(shape, generator=self.rng, device=self.device).to(self.dtype)

    def arguments(self, config: MLAConfig, cache: Tensor, topk: Tensor | None = None) -> MLAAttentionArgs:
        """Return a call of the op."""
        tokens, device = self.cell.batch * self.cell.tokens, self.device
        query = torch.randn(tokens, config.num_heads, config.qk_head_dim, generator=self.rng, device=device)
        query = query.to(self.dtype)
        wide = config.qk_nope_head_dim + config.v_head_dim
        weight = torch.randn(config.num_heads, wide, config.kv_lora_rank, generator=self.rng, device=device)
        fmt = OUTPUT_FORMATS[config.output_format]
        output, block_scale = fmt.allocate(query, config.v_head_dim, self.dtype)
        one = torch.full((1,), 0.005, device=device)
        return MLAAttentionArgs(
            query, cache, self.starts, self.seq_lens, self.table, (weight * config.kv_lora_rank**-0.5).to(self.dtype),
            None, output, block_scale, None, one if fmt.static_scale else None,
            one if config.query_format != "none" else None, one if config.kv_scale == "tensor" else None, topk, None,
            [], None, config.encode(),
        )  # fmt: skip

    def on_any_gpu(self, **changes: Any) -> Step:
        """Return a call of `vattn::mla_attention` by the kernels of any GPU."""
        from vattn.kernels import mla_route
        from vattn.kernels.triton.common.tiles import Limits

        config = self.config(**changes)
        topk = self.listed() if config.sparse else None
        args = self.arguments(config, self.cache_of(config), topk)
        limits = Limits.of(args.query.device)

        def step() -> Tensor:
            mla_route.attend(args, config, limits)
            return args.output

        return step

    def op(self, **changes: Any) -> Step:
        """Return a call of `vattn::mla_attention`, planned before where there is a plan."""
        config = self.config(**changes)
        cache = self.cache_of(config)
        topk = self.listed() if config.sparse else None
        args = self.arguments(config, cache, topk)
        if self.device == "cuda":
            from vattn.kernels.hopper.mla import launch as mla_launch

            if mla_launch.accepts(self.absorbed(), args, config):
                shape = mla_launch.plan_shape(config, len(args.query), self.cell.batch, args.query.device)
                schedule = torch.zeros(shape, dtype=torch.int32, device=self.device)
                mla_launch.plan(self.starts, self.seq_lens, schedule, config)
                args = args._replace(plan=[schedule])

        def step() -> Tensor:
            torch.ops.vattn.mla_attention(*args)
            return args.output

        return step

    def listed(self, count: int = 2048) -> Tensor:
        """Return `count` positions of every row, spread over its request."""
        count, rows = min(count, abs(self.cell.length)), self.cell.batch * self.cell.tokens
        chosen = [torch.randperm(abs(self.cell.length), generator=self.rng, device=self.device) for _ in range(rows)]
        return torch.stack([positions[:count].sort().values for positions in chosen]).int()

    def decode(self, query: Tensor | None = None, **changes: Any) -> tuple[Step, Tensor]:
        """Return a step of vattn's decode path on absorbed queries, its schedule made before, and the queries."""
        from vattn.kernels.hopper.mla import launch as mla_launch

        config = self.config(**changes)
        query = self.absorbed() if query is None else query
        if config.query_format != "none":
            query = quantised_query(query, self.query_scale, config)
        shape = mla_launch.plan_shape(config, len(query), self.cell.batch, query.device)
        schedule = torch.zeros(shape, dtype=torch.int32, device=self.device)
        mla_launch.plan(self.starts, self.seq_lens, schedule, config)
        none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
        args = MLAAttentionArgs(**{
            **none, "query": query, "kv_cache": self.cache_of(config), "query_start_loc": self.starts,
            "seq_lens": self.seq_lens, "block_table": self.table, "q_scale": self.query_scale,
            "k_scale": self.scale_of(config), "plan": [schedule], "config": config.encode(),
        })  # fmt: skip
        return lambda: mla_launch.attend_latents(query, args, config), query

    def prefill(self, planned: bool = False, **changes: Any) -> Step:
        """Return the attention of equal prompts to keys and values that lie expanded in a workspace.

        `planned`: row tiles are listed before, not by the step.
        """
        from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch
        from vattn.kernels.triton.common.tiles import Limits
        from vattn.kernels.triton.mla.epilogue import finish_rows, kind_of
        from vattn.kernels.triton.mla.prefill import longest_absorbed

        config, cell, limits = self.config(**changes), self.cell, Limits.of(self.seq_lens.device)
        args, width = self.arguments(config, self.cache_of(config)), config.qk_nope_head_dim + config.v_head_dim
        stretch = -(-abs(cell.length) // 128) * 128
        line = torch.arange(cell.batch + 1, dtype=torch.int32, device=self.device) * stretch
        expanded, ropes = (
            torch.randn(cell.batch * stretch * columns, generator=self.rng, device=self.device).to(self.dtype)
            for columns in (cell.heads * width, config.qk_rope_head_dim)
        )
        longest, rows = longest_absorbed(config), None
        if kind_of(config) == "rows":
            rows = torch.empty((*args.query.shape[:2], config.v_head_dim), dtype=self.dtype, device=self.device)
        tiles = mla_prefill_launch.plan_tiles(args, longest) if planned else None

        def step() -> Tensor:
            mla_prefill_launch.attend_expanded(
                args, config, line, expanded, ropes, rows, longest, limits, schedule=tiles
            )
            if rows is not None:
                finish_rows(rows, args, config, limits)
            return args.output

        return step

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cache that one step must read."""
        return int(self.seq_lens.sum()) * (self.sizes.latent + self.sizes.rope) * self.cache.itemsize

    def error(self, query: Tensor, result: Tensor, **changes: Any) -> float:
        """Return the worst relative L2 error of absorbed results over a few requests, against fp32."""
        cell, width, config = self.cell, self.sizes.latent, self.config(**changes)
        step = 1.0 if config.query_format == "none" else float(self.query_scale)
        cache, scale = self.cache_of(config), self.scale_of(config)
        result = result.view(cell.batch, cell.tokens, cell.heads, width).float()
        found = []
        for request in sorted({0, cell.batch // 2, cell.batch - 1}):
            length = int(self.seq_lens[request])
            rows = cache[self.table[request].long()].flatten(0, 1)[:length]
            rows = rows.float() if scale is None else rows.view(torch.float8_e4m3fn).float() * scale
            part = query[request * cell.tokens : (request + 1) * cell.tokens].float() * step
            scores = torch.einsum("qnd,sd->qns", part, rows) * config.scale
            position = length - cell.tokens + torch.arange(cell.tokens, device=rows.device)
            hidden = torch.arange(length, device=rows.device)[None, :] > position[:, None]
            expected = torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1) @ rows[:, :width]
            found.append(float((result[request] - expected).norm() / expected.norm()))
        return max(found)


def flash_mla(inputs: Inputs, query: Tensor) -> Step:
    """Return a step of FlashMLA with its metadata made before."""
    decode, cell, scale = torch.ops._flashmla_C.dense_decode_fwd, inputs.cell, inputs.config().scale
    lens, table = inputs.seq_lens, inputs.table
    query, cache = query.view(cell.batch, cell.tokens, cell.heads, -1), inputs.cache.unsqueeze(2)
    _, _, metadata, splits = decode(query, cache, 512, lens, table, scale, True, None, None, None)
    return lambda: decode(query, cache, 512, lens, table, scale, True, metadata, splits, None)[0]


def flashinfer_mla(inputs: Inputs, query: Tensor) -> Step:
    """Return a step of FlashInfer's MLA wrapper (FA3), planned before."""
    import flashinfer

    block, cell = inputs.sizes.block, inputs.cell
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=False, backend="fa3"
    )
    used = (inputs.seq_lens + block - 1) // block
    pages = torch.arange(inputs.per_request, device="cuda") < used[:, None]
    wrapper.plan(
        qo_indptr=inputs.starts, kv_indptr=torch.nn.functional.pad(used.cumsum(0), (1, 0)).int(),
        kv_indices=inputs.table[pages].contiguous(), kv_len_arr=inputs.seq_lens, num_heads=cell.heads,
        head_dim_ckv=512, head_dim_kpe=64, page_size=block, causal=cell.tokens > 1, sm_scale=inputs.config().scale,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    parts = [part.contiguous() for part in (*query.split((512, 64), -1), *inputs.cache.split((512, 64), -1))]
    return lambda: wrapper.run(*parts)


def fa3_prefill(inputs: Inputs) -> Step:
    """Return FlashAttention-3 over expanded keys and values of equal prompts; expanding them is not part of it."""
    cell, sizes = inputs.cell, inputs.sizes
    shape = (cell.batch * cell.tokens, cell.heads)
    wide = sizes.nope + sizes.rope
    query, key, value = (
        torch.randn(*shape, columns, generator=inputs.rng, device="cuda").bfloat16()
        for columns in (wide, wide, sizes.value)
    )
    out, scale, none = torch.empty_like(value), wide**-0.5, None
    forward = torch.ops._vllm_fa3_C.fwd

    def step() -> Tensor:
        forward(
            query, key, value, none, none, none, out, inputs.starts, inputs.starts, none, none, none, cell.tokens,
            cell.tokens, none, none, none, none, none, none, none, none, none, scale, True, -1, -1, 0.0, True,
            none, 1, none, 0, none, 1, 0, none,
        )  # fmt: skip
        return out

    return step


def load_peers(folder: Path) -> tuple[dict[str, Callable[[Inputs, Tensor], Step]], dict[str, str]]:
    """Load what is found; return the decode peers, and why others are left out."""
    found: dict[str, Callable[[Inputs, Tensor], Step]] = {}
    missing = {}
    for name in ("flashmla.so", "flashmla_ext.so", "fa3.so"):
        path = folder / name
        try:
            if path.exists():
                torch.ops.load_library(str(path))
            else:
                missing[name] = "not there"
        except OSError as error:
            missing[name] = str(error)[:200]
    if "flashmla.so" not in missing:
        found["flashmla"] = flash_mla
    try:
        import flashinfer  # noqa: F401

        found["flashinfer"] = flashinfer_mla
    except ImportError as error:
        missing["flashinfer"] = repr(error)[:200]
    return found, missing
