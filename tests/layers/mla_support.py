"""Random batches of latent attention, full of garbage where garbage is allowed, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support import moved, poisoned_empty, relative_l2
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape
from vattn.config.mla import MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference import mla as mla_reference
from vattn.ops.reference.mla_absorb import weight_scale_shape, weight_values
from vattn.quantization.codecs import dequantise_output, quantise_output
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS


def make_mla_config(**changes: Any) -> MLAConfig:
    """Return a small fp32 config with some fields changed; dependent fields follow."""
    values: dict[str, Any] = {
        "num_heads": 3,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "kv_lora_rank": 20,
        "dtype": "float32",
        "block_size": 8,
        "decode_threshold": 2,
        **changes,
    }
    values.setdefault("kv_cache_dtype", values["dtype"])
    values.setdefault("scale", (values["qk_nope_head_dim"] + values["qk_rope_head_dim"]) ** -0.5)
    if "kv_scale" not in values:
        values["kv_scale"] = "tensor" if MLA_FORMATS[values["kv_cache_dtype"]].scaled else "none"
    return MLAConfig(**values)


def deepseek(**changes: Any) -> MLAConfig:
    """Return a config of DeepSeek's sizes in bf16, with some fields changed."""
    values: dict[str, Any] = {
        "num_heads": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
        "dtype": "bfloat16", "block_size": 64, **changes,
    }  # fmt: skip
    return make_mla_config(**values)


def random_mla_batch(
    config: MLAConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    seed: int = 0,
    padding_tokens: int = 0,
    padding_reqs: int = 0,
    topk: int = 0,
    device: torch.device | str = "cpu",
) -> MLAAttentionArgs:
    """Return complete arguments; NaN fills unused blocks, unwritten tails, padding rows of the query and outputs."""
    rng = torch.Generator().manual_seed(seed)
    dtype = MODEL_DTYPES[config.dtype]
    size, reqs = config.block_size, len(query_lens) + padding_reqs
    held = seq_lens if config.dcp_shard is None else [config.dcp_shard.count(length) for length in seq_lens]
    needed = [-(-length // size) for length in held]
    blocks = sum(needed) + 3
    table = torch.randint(-9, 3 * blocks, (reqs, max([1, *needed]) + 1), generator=rng, dtype=torch.int32)
    free = torch.randperm(blocks, generator=rng).tolist()
    slots: list[int] = []
    for request, count in enumerate(needed):
        own, free = free[:count], free[count:]
        table[request, :count] = torch.tensor(own, dtype=torch.int32)
        places = {at if config.dcp_shard is None else config.dcp_shard.position(at): at for at in range(held[request])}
        local = [places.get(position, -1) for position in range(seq_lens[request])]
        slots += [-1 if at < 0 else own[at // size] * size + at % size for at in local]
    cache = poisoned_empty(mla_cache_shape(config, blocks), mla_cache_dtype(config))
    k_scale = torch.tensor([0.017]) if config.kv_scale == "tensor" else None
    latent = torch.randn(len(slots), config.kv_lora_rank, generator=rng)
    rope = 2 * torch.randn(len(slots), config.qk_rope_head_dim, generator=rng)
    update = MLACacheUpdateArgs(latent.to(dtype), rope.to(dtype), cache, torch.tensor(slots).long(), k_scale, "")
    mla_reference.mla_kv_cache_update(update, config)
    tokens = sum(query_lens) + padding_tokens
    query = torch.randn(tokens, config.num_heads, config.qk_head_dim, generator=rng).to(dtype)
    query[sum(query_lens) :] = torch.nan
    ends = torch.tensor([0, *query_lens, *[0] * padding_reqs]).cumsum(0).int()
    weight, scale = random_weight(config, rng)
    fmt = OUTPUT_FORMATS[config.output_format]
    output, block_scale = fmt.allocate(query, config.v_head_dim, dtype)
    for written in (output, block_scale):
        if written is not None:
            (written.t() if fmt.column_major and written.ndim == 2 else written).view(torch.uint8).fill_(0xFF)
    args = MLAAttentionArgs(
        query=query,
        kv_cache=cache,
        query_start_loc=ends,
        seq_lens=torch.tensor([*seq_lens, *[0] * padding_reqs], dtype=torch.int32),
        block_table=table,
        kv_b_weight=weight,
        kv_b_scale=scale,
        output=output,
        output_block_scale=block_scale,
        lse=poisoned_empty((tokens, config.num_heads), torch.float32) if config.lse else None,
        output_scale=torch.tensor([0.013]) if fmt.static_scale else None,
        q_scale=torch.tensor([0.021]) if config.query_format != "none" else None,
        k_scale=k_scale,
        topk_indices=random_topk(query_lens, seq_lens, tokens, topk, rng) if config.sparse else None,
        local_seq_lens=None
        if config.dcp_shard is None
        else torch.tensor([*held, *[0] * padding_reqs], dtype=torch.int32),
        plan=[],
        workspace=None,
        config=config.encode(),
    )
    args = moved(args, device)
    if fmt.column_major and block_scale is not None:
        args = args._replace(output_block_scale=block_scale.t().to(device).t())
    return args


def random_topk(
    query_lens: Sequence[int], seq_lens: Sequence[int], tokens: int, topk: int, rng: torch.Generator
) -> Tensor:
    """Return int32 `[tokens, topk]`: random positions of each row's past in any order, then -1."""
    found = torch.full((tokens, topk), -1, dtype=torch.int32)
    row = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        for i in range(query_len):
            past = max(0, seq_len - query_len + i + 1)
            chosen = torch.randperm(past, generator=rng)[:topk]
            found[row, : len(chosen)] = chosen.int()
            row += 1
    return found


def random_weight(config: MLAConfig, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Return `kv_b_weight` and `kv_b_scale`."""
    shape = (config.num_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
    weight = torch.randn(shape, generator=rng) * config.kv_lora_rank**-0.5
    scale_shape = weight_scale_shape(config)
    if scale_shape is None:
        return weight.to(MODEL_DTYPES[config.dtype]), None
    scale = 0.5 + torch.rand(scale_shape, generator=rng)
    return weight.to(torch.float8_e4m3fn), scale


def exact(args: MLAAttentionArgs, config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Return what the un-absorbed formula gives in fp64, on the CPU."""
    return mla_reference.attend_latents(moved(args, "cpu"), config, torch.float64)


def rounded_formula(args: MLAAttentionArgs, config: MLAConfig) -> Tensor:
    """Return what the un-absorbed formula gives where every step rounds to the model dtype: what eager models do."""
    args = moved(args, "cpu")
    dtype = MODEL_DTYPES[config.dtype]
    weight = weight_values(args.kv_b_weight, args.kv_b_scale, config, dtype)
    out = torch.zeros((args.query.shape[0], config.num_heads, config.v_head_dim), dtype=dtype)
    rows = mla_reference.row_view(args.kv_cache, config)
    for request, length in enumerate(args.seq_lens.tolist()):
        start, end = args.query_start_loc[request : request + 2].tolist()
        if end <= start or length <= 0:
            continue
        held = min(length, args.block_table.shape[1] * config.block_size)
        blocks, offsets, exists = mla_reference.locate_keys(
            args.block_table[request], held, config.block_size, rows.shape[0]
        )
        latent, rope = mla_reference.read_rows(rows[blocks, offsets], args.k_scale, config)
        topk = None if args.topk_indices is None else args.topk_indices[start:end]
        visible = mla_reference.times_seen(end - start, length, torch.arange(held), topk) * exists
        latent, rope = (torch.where(exists[:, None], part, 0.0) for part in (latent, rope))
        kv = torch.einsum("sl,nxl->snx", latent.to(dtype).float(), weight.float()).to(dtype)
        key = torch.cat(
            (kv[..., : config.qk_nope_head_dim], rope.to(dtype)[:, None].expand(-1, config.num_heads, -1)), -1
        )
        scores = torch.einsum("qnd,snd->nqs", args.query[start:end].float(), key.float()) * config.scale
        scores = mla_reference.weigh(scores, visible)
        weights = torch.softmax(scores, -1).nan_to_num(0.0).to(dtype)
        value = kv[..., config.qk_nope_head_dim :]
        out[start:end] = torch.einsum("nqs,snv->qnv", weights.float(), value.float()).to(dtype)
    return out


def run_mla(args: MLAAttentionArgs, config: MLAConfig) -> tuple[Tensor, Tensor | None]:
    """Call the op; return the output as fp32 `[T, N, V]`, dequantised, and the LSE."""
    torch.ops.vattn.mla_attention(*args)
    out = dequantise_output(args.output, config.output_format, args.output_block_scale, args.output_scale)
    return out, args.lse


def compare_with_formula(args: MLAAttentionArgs, config: MLAConfig, real: int, limit: float, lse_limit: float) -> None:
    """Run the op and compare its first `real` rows with the formula; the others are zero."""
    got, lse = run_mla(args, config)
    expected, expected_lse = exact(args, config)
    assert relative_l2(got, expected) < limit
    assert not got[real:].any()
    if lse is not None:
        assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
        assert relative_l2(lse.exp(), expected_lse.exp()) < lse_limit


HALF_STEP = {"fp8": 2.0**-4, "nvfp4": 0.25}
"""Largest relative error of one rounding to an output format; of e2m1 values and their e4m3 scales."""


def half_step(config: MLAConfig) -> float:
    """Return by how much rounding to the config's output format may move a value, relatively."""
    return next((step for name, step in HALF_STEP.items() if config.output_format.startswith(name)), 0.0)


def error_of(args: MLAAttentionArgs, config: MLAConfig, real: int) -> float:
    """Run the op and compare: at most twice as wrong as the formula computed in the model dtype, or half a step of the
    output format on top; returns the relative L2 error."""
    got, lse = run_mla(args, config)
    expected, expected_lse = exact(args, config)
    found = relative_l2(got, expected)
    allowed = max(2 * relative_l2(rounded_formula(args, config), expected), 3e-6) + half_step(config)
    assert found <= allowed, f"output: relative L2 error {found:.2e}, allowed {allowed:.2e}"
    assert not got[real:].any(), "output: a padding row is not zero"
    if lse is not None:
        check_lse(lse, expected_lse, config)
    return found


def check_lse(lse: Tensor, expected: Tensor, config: MLAConfig, rounded: float = 3e-2) -> None:
    """Compare log-sum-exps; in narrow dtypes, and where a query may become either of two codes, less closely."""
    lse, finite = lse.cpu().double(), expected.isfinite()
    assert torch.equal(lse == -torch.inf, expected == -torch.inf), "lse: other rows are empty"
    limit = 2e-4 if config.dtype == "float32" and config.query_format == "none" else rounded
    assert not finite.any() or (lse - expected)[finite].abs().amax() <= limit, "lse: off"


def quantised(values: Tensor, args: MLAAttentionArgs, config: MLAConfig) -> MLAAttentionArgs:
    """Return arguments whose outputs hold rows `[T, N, V]` quantised by the reference."""
    out, scales = OUTPUT_FORMATS[config.output_format].allocate(args.query, config.v_head_dim, values.dtype)
    variant = config.output_arithmetic, config.output_min_scale, config.output_floor
    quantise_output(values, config.output_format, out, scales, args.output_scale, *variant)
    return args._replace(output=out, output_block_scale=scales)


def check_layer(layer: Any, out: Tensor, query: Tensor, step: Any, topk: Tensor | None = None) -> None:
    """Compare a layer's output with the formula over its cache: at most twice as wrong as in the model dtype."""
    config = layer.config.replace(lse=False)
    nothing: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    given = {
        "query": query, "kv_cache": layer.kv_cache, "query_start_loc": step.query_start_loc, "seq_lens": step.seq_lens,
        "block_table": step.block_table, "kv_b_weight": layer.kv_b_weight, "topk_indices": topk, "plan": [],
        "config": config.encode(),
    }  # fmt: skip
    args = MLAAttentionArgs(**{**nothing, **given})
    expected, _ = exact(args, config)
    allowed = 2 * relative_l2(rounded_formula(args, config), expected)
    assert relative_l2(out.view(expected.shape), expected) <= allowed
