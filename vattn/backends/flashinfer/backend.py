"""FLASHINFER: attention by FlashInfer's prefill wrappers, decodes too; the cache is written by vattn's kernel.

FlashInfer plans on the host. `AttentionMetadataBuilder(layers=...)` plans once a step, without a sync, and the calls
read the plan: so they are captured in a CUDA graph and replayed with other lengths (`cuda_graphs="manual"`). Calls
without a plan (no builder, cross attention, trees, a step that changes the layers' causality, hybrid caches) read the
lengths, which is a sync and no work for a graph.

Values in memory that no request owns must be finite, block ids that name no block are read as the nearest one, and a
sequence longer than its row of the block table ends with it. Sinks join the result afterwards, through the
log-sum-exp. A tree goes in as a mask, so its biases are 0 or -inf. A query in e4m3 is widened for
the kernels, which have none; but planned steps of decodes on an FP8 cache run on FlashInfer's XQA, which rounds the
weights to e4m3 too, up to 2^-4 of a result. FlashInfer's log-sum-exp is of weights rounded to the model dtype.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vattn.backends.base import Backend, Capabilities, Exclusion, Package
from vattn.backends.external_rows import TritonCacheUpdate, valid_rows, zero_invalid_rows
from vattn.backends.flashinfer import plan as flashinfer_plan
from vattn.backends.flashinfer.jit import INSTALL, can_compile, compiler_problem, is_built
from vattn.backends.flashinfer.plan import kernel_family, offsets_of, plan_options, plan_text, used_blocks, workspace
from vattn.cache.layout import key_value_views
from vattn.cache.memory import ALIGNED
from vattn.config.attention import AttentionConfig
from vattn.config.device import BLOCK_SIZES, DeviceInfo, Sizes
from vattn.errors import GraphContractError, MissingPackageError, UnsupportedRequestError
from vattn.ops.arguments import AttentionArgs, HostPlanArgs, PlanArgs, VarlenAttentionArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES

FLASHINFER = Capabilities(
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    kv_cache_dtypes=("float16", "bfloat16", "fp8_e4m3"),
    query_formats=("none", "fp8_e4m3"),
    output_formats=("none",),
    attn_types=("decoder", "encoder", "encoder_only", "encoder_decoder"),
    head_sizes=Sizes(values=(64, 128, 256)),
    block_sizes=BLOCK_SIZES,
    strided_caches=False,
    row_alignment=ALIGNED,
    features=frozenset(
        "bidirectional sliding_window logits_soft_cap sinks tree_bias kv_scale_per_head "
        "query_scale_per_head lse hnd_layout contiguous_kv".split()
    ),
    exclusions=(
        Exclusion(frozenset({"bidirectional", "sliding_window"}), "FlashInfer's windows reach only to the left"),
        Exclusion(frozenset({"kv_cache_dtype=fp8_e4m3", "contiguous_kv"}), "FP8 keys and values outside a paged cache"),
        Exclusion(frozenset({"tree_bias", "contiguous_kv"}), "trees over keys and values outside a paged cache"),
    ),
    minimum_capability=(8, 0),
    package=Package(module="flashinfer", distribution="flashinfer-python", minimum=(0, 6), extra="flashinfer"),
    cuda_graphs="manual",
    rounded_lse=True,
    negative_scales=False,
    fp8_weights=True,
    tree_masks_only=True,
    garbage_safe=False,
)
"""What FlashInfer does where it can compile its kernels; also what the documentation shows."""


class FlashInferBackend(TritonCacheUpdate, Backend):
    """Run what FlashInfer's batch prefill kernels can run; they take decodes too."""

    name = "FLASHINFER"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What FlashInfer can do here: without a compiler, its prebuilt kernels."""
        assert FLASHINFER.package is not None
        return FLASHINFER if can_compile() or FLASHINFER.package.problem() is not None else _of_built_kernels()

    def problem(self) -> str | None:
        return super().problem() or compiler_problem()

    def limits(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return what the capabilities refuse, and a kernel that is neither built nor can be."""
        found = super().limits(config, device)
        if found and self.capabilities is not FLASHINFER:
            by_all = FLASHINFER.refusals(config, device)
            return by_all or [f"{reason}, by kernels that are not built ({INSTALL})" for reason in found]
        if found or device.type != "cuda" or self.problem() is not None or can_compile():
            return found
        missing = [family for family in _families(config, device) if not is_built(config, family)]
        return [f"its {family} kernel for this request is not built ({INSTALL})" for family in missing]

    def plan_shape(self, config: AttentionConfig, num_tokens: int, num_reqs: int, table_width: int) -> tuple[int, ...]:
        """Return the size of a schedule; `()` for requests that only their calls plan."""
        if config.block_size == 0 or config.tree_bias or config.causality == "per_request":
            return ()
        return (flashinfer_plan.sections(num_tokens, num_reqs, table_width).size,)

    def plan_key(self, config: AttentionConfig) -> str:
        return f"{self.name} {plan_text(config)}"

    def host_plan_size(self, config: AttentionConfig) -> int:
        """Return the size of the host plan: the number that this process knows it by."""
        return flashinfer_plan.NUMBERS if self.plan_shape(config, 2, 2, 1) else 0

    def plan_on_host(self, args: HostPlanArgs, config: AttentionConfig) -> None:
        """Plan a step for all layers like `config`."""
        with torch.cuda.device(args.schedule.device):
            _building(config, lambda: flashinfer_plan.plan(args, config))

    def plan(self, args: PlanArgs, config: AttentionConfig) -> None:
        """Refuse: the lengths are on the device."""
        raise UnsupportedRequestError(
            "vattn::plan on FLASHINFER, which plans from lengths on the host",
            "steps of AttentionMetadataBuilder(layers=...)",
            "build the metadata with the layers, or call attention without a plan",
        )

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        key, value = key_value_views(args.key_cache, args.value_cache, config)
        if config.kv_cache_layout == "HND":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        cache = key, value
        with torch.cuda.device(args.query.device):
            plan = flashinfer_plan.find(args.plan, config, args.query.shape[0], args.block_table)
            if plan is not None:
                _attend_planned(args, config, plan, cache)
            else:
                _attend_paged(args, config, cache)

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        starts, kv_starts = _host(args.query, args.query_start_loc, args.kv_start_loc)
        wrapper = _packed_wrapper(args.query.device)

        def run(query: Tensor, output: Tensor) -> Tensor:
            options = plan_options(config, args.key.dtype)
            _building(config, lambda: wrapper.plan(qo_indptr=starts, kv_indptr=kv_starts, **options))
            result: Tensor = wrapper.run(query, args.key, args.value, out=output, return_lse=True)[1]
            return result

        _attend(args, config, int(starts[-1]), args.kv_start_loc.diff(), bool(kv_starts.any()), run)


@lru_cache(maxsize=1)
def _of_built_kernels() -> Capabilities:
    """Return the capabilities of FlashInfer's prebuilt kernels; combinations without a kernel have a reason."""
    plain = AttentionConfig(2, 2, 64, 64, 1.0, "bfloat16", "bfloat16", block_size=16)
    requested: dict[str, dict[str, Any]] = {
        "": {},
        "sliding_window": {"sliding_window": 8},
        "logits_soft_cap": {"logits_soft_cap": 1.0},
        "tree_bias": {"tree_bias": True},
    }
    dtypes, sizes, features = set(), set(), set()
    for dtype, size, feature in itertools.product(FLASHINFER.dtypes, FLASHINFER.head_sizes.values, requested):
        config = plain.replace(
            dtype=dtype, kv_cache_dtype=dtype, head_size=size, head_size_v=size, **requested[feature]
        )
        if is_built(config, "fa2"):
            dtypes.add(dtype)
            sizes.add(size)
            features.add(feature)
    stored = (name for name in FLASHINFER.kv_cache_dtypes if KV_FORMATS[name].quantised or name in dtypes)
    return replace(
        FLASHINFER,
        dtypes=tuple(name for name in FLASHINFER.dtypes if name in dtypes),
        kv_cache_dtypes=tuple(stored),
        head_sizes=Sizes(values=tuple(sorted(sizes)) or FLASHINFER.head_sizes.values),
        features=FLASHINFER.features - (set(requested) - features),
    )


def _families(config: AttentionConfig, device: DeviceInfo) -> tuple[str, ...]:
    """Return the kernels that the steps of a config may run on."""
    plain = not (KV_FORMATS[config.kv_cache_dtype].quantised or config.tree_bias)
    return ("fa2", "fa3") if plain and device.capability[0] == 9 else ("fa2",)


def _building(config: AttentionConfig, plan: Any) -> None:
    """Plan, which compiles a kernel that FlashInfer has not built yet; say what to do where it cannot.

    Raises:
        MissingPackageError: the compiler failed or is missing.
    """
    try:
        plan()
    except (RuntimeError, OSError) as error:
        words = ("ninja", "nvcc", "cuda_home", "jit cache", "could not find cuda")
        if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error).lower() for word in words):
            raise
        raise MissingPackageError(
            f"FlashInfer could not build its kernel for {plan_text(config)}: {str(error).strip().splitlines()[-1]}",
            "a prebuilt kernel, or a working nvcc and ninja",
            INSTALL,
        ) from error


@lru_cache(maxsize=16)
def _paged_wrapper(device: torch.device, layout: str, family: str) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout, backend=family)


@lru_cache(maxsize=8)
def _packed_wrapper(device: torch.device) -> Any:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    return BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD")


def _host(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Copy small int32 tensors to the host in one sync."""
    if torch.cuda.is_current_stream_capturing():
        raise GraphContractError(
            f"FLASHINFER in a CUDA-graph capture on {query.device}, without a plan",
            "a step that AttentionMetadataBuilder(layers=...) planned, or a backend with cuda_graphs='full'",
            "give the builder the model's layers, pass attn_backend='TRITON_ATTN', or run without a graph",
        )
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    return list(packed.split([tensor.numel() for tensor in tensors]))


def _attend_paged(args: AttentionArgs, config: AttentionConfig, cache: tuple[Tensor, ...]) -> None:
    """Run a call that has no plan."""
    starts, lengths = _host(args.query, args.query_start_loc, args.seq_lens)
    size, num_reqs = config.block_size, lengths.shape[0]
    lengths = lengths.clamp(0, args.block_table.shape[1] * size)
    pages = (lengths + size - 1) // size
    last = lengths - (pages - 1).clamp(min=0) * size
    options = plan_options(config, cache[0].dtype)
    if config.tree_bias:
        options |= {"custom_mask": _tree_mask(args, config, starts, lengths), "window_left": -1}
        # FlashInfer places the masks by the pages and their fill, also for requests without a key.
        last = torch.where(pages > 0, last, size)
    family = kernel_family(config, args.query.shape[0], num_reqs, args.query.device)
    wrapper = _paged_wrapper(args.query.device, config.kv_cache_layout, family)

    def run(query: Tensor, output: Tensor) -> Tensor:
        num_blocks = args.key_cache.shape[0]
        _building(
            config,
            lambda: wrapper.plan(
                qo_indptr=starts,
                paged_kv_indptr=offsets_of(pages),
                paged_kv_indices=used_blocks(args.block_table, pages, num_blocks),
                paged_kv_last_page_len=last.to(torch.int32),
                page_size=size,
                **options,
            ),
        )
        result: Tensor = wrapper.run(query, cache, out=output, return_lse=True)[1]
        return result

    _attend(args, config, int(starts[-1]), args.seq_lens, bool(lengths.any()), run)


def _tree_mask(args: AttentionArgs, config: AttentionConfig, starts: Tensor, lengths: Tensor) -> Tensor:
    """Return bool, one element per row and key of each request, request after request: what it sees.

    Args:
        starts, lengths: on the host.

    Raises:
        UnsupportedRequestError: a bias that is neither 0 nor -inf.
    """
    bias, tree_id = args.bias, args.tree_id
    assert bias is not None and tree_id is not None  # the checks of the op
    if not bool(((bias == 0) | (bias == -torch.inf)).all()):
        raise UnsupportedRequestError(
            "a tree_bias of other values than 0 and -inf on FLASHINFER",
            "0 (seen) and -inf (hidden)",
            "give the tree as a mask, or pass attn_backend='TRITON_ATTN'",
        )
    device, trees, size = bias.device, bias.shape[0], bias.shape[1]
    query_lens, areas = starts.diff().long(), starts.diff().long() * lengths.long()
    total, first = int(areas.sum()), areas.cumsum(0) - areas
    queries, keys, areas, first = (t.to(device) for t in (query_lens, lengths.long(), areas, first))
    request = torch.repeat_interleave(torch.arange(len(keys), device=device), areas, output_size=total)
    place = torch.arange(total, device=device) - first[request]
    keys, context = keys[request], (keys - queries)[request]
    row, column = place // keys, place % keys
    seen = column <= context + row
    if config.sliding_window is not None:
        seen &= context + row - column < config.sliding_window
    new, tree = column - context, tree_id.long()[request]
    inside = (row < size) & (new >= 0) & (new < size) & (tree >= 0) & (tree < trees)
    hidden = bias[tree.clamp(0, trees - 1), row.clamp(max=size - 1), new.clamp(0, size - 1)] == -torch.inf
    return seen & ~(inside & hidden)


def _attend(
    args: AttentionArgs | VarlenAttentionArgs,
    config: AttentionConfig,
    num_tokens: int,
    lengths: Tensor,
    any_keys: bool,
    run: Any,
) -> None:
    """Run a call on the rows of requests; their number is known on the host."""
    args.output.zero_()
    if args.lse is not None:
        args.lse.fill_(float("-inf"))
    if not num_tokens:
        return
    query, output = args.query[:num_tokens], args.output[:num_tokens]
    valid = valid_rows(args.query_start_loc, lengths, num_tokens, config)
    if any_keys:
        logs = run(_scaled_query(query, args, config), output) * math.log(2)
    else:
        logs = torch.full((num_tokens, config.num_heads), float("-inf"), device=output.device)
    _finish(args, config, output, logs, valid)


def _attend_planned(
    args: AttentionArgs, config: AttentionConfig, plan: flashinfer_plan.Plan, cache: tuple[Tensor, Tensor]
) -> None:
    """Run a call on all rows, padding included, with nothing of the host in it."""
    from vattn.kernels.triton.attention.planned_rows import finish_planned

    if torch.cuda.is_current_stream_capturing():
        plan.captured = plan.launch()
    if plan.family == "xqa":
        assert args.q_scale is not None and args.k_scale is not None and args.v_scale is not None
        # XQA takes the scales itself.
        scales = (args.q_scale * args.k_scale * config.scale, args.v_scale)
        query, v_scale = args.query.to(MODEL_DTYPES[config.dtype]), None
    else:
        query, scales, v_scale = _scaled_query(args.query, args, config), None, args.v_scale
    found = plan.run(query, cache, args.output, scales)
    kind = plan.kind(args.plan[0])
    finish_planned(args.output, args.lse, found, kind, v_scale, args.sinks, config.group_size)


def _finish(
    args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, output: Tensor, logs: Tensor, valid: Tensor
) -> None:
    """Apply the value scale and the sinks, and zero rows that see no key.

    Args:
        output: the rows of requests.
        logs: fp32, one row per row of the output.
        valid: bool `[rows, 1]`: rows that lie in their sequence.
    """
    if args.v_scale is not None:
        output.copy_(_scaled(output, args.v_scale, config, output.dtype))
    seen = valid & logs.isfinite()
    logs = logs.masked_fill(~seen, float("-inf"))
    lse = None if args.lse is None else args.lse[: logs.shape[0]]
    zero_invalid_rows(output, lse, logs, seen)
    if args.sinks is None:
        return
    sinks = args.sinks.float()
    # The sink is only in the denominator: exp(log) / (exp(log) + exp(sink)).
    output.mul_(torch.sigmoid(logs - sinks).unsqueeze(2))
    if lse is not None:
        lse.copy_(torch.logaddexp(logs, sinks.expand_as(logs)))


def _scaled_query(query: Tensor, args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig) -> Tensor:
    """Return the query in the model dtype, times the scales of query and keys, per KV head: scores stay the same."""
    if config.scale <= 0:
        # The plan has the magnitude of the scale.
        query = query.to(MODEL_DTYPES[config.dtype]) * (-1.0 if config.scale < 0 else 0.0)
    scales = [scale for scale in (args.q_scale, args.k_scale) if scale is not None]
    if not scales:
        return query
    product = scales[0] if len(scales) == 1 else scales[0] * scales[1]
    return _scaled(query, product, config, MODEL_DTYPES[config.dtype])


def _scaled(rows: Tensor, scale: Tensor, config: AttentionConfig, dtype: torch.dtype) -> Tensor:
    wide = rows.float() if rows.itemsize == 1 else rows
    if scale.numel() == 1:
        return (wide * scale).to(dtype)
    groups = wide.unflatten(1, (config.num_kv_heads, config.group_size))
    return (groups * scale.view(-1, 1, 1)).flatten(1, 2).to(dtype)
