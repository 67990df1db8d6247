"""Refuse wrong tensors before anything is written: shapes, dtypes, devices, strides, presence and absence.

Nothing is read from a device and no value of a tensor matters, so each combination of shapes, strides, dtypes and
devices is checked once for a config (`OncePerSignature`). Letters are as in `vattn.ops.arguments`.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from vattn.cache.layout import kv_cache_dtype, num_blocks_of, shape_of_storage, storage_alignment
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.errors import ConfigError, ShapeError, StrideError
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, MergeArgs, PlanArgs, RopeUpdateArgs, VarlenAttentionArgs
from vattn.ops.index_dtypes import INDEX_DTYPES
from vattn.ops.tensor_checks import (
    OncePerSignature,
    check_optional,
    check_rows,
    check_scale,
    check_tensor,
    count_of,
    is_given,
    refuse,
    refuse_dtype,
)
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS

_FP32 = (torch.float32,)
_INT32 = (torch.int32,)
_FLOATS = tuple(MODEL_DTYPES.values())
_CPU = torch.device("cpu")


@OncePerSignature
def check_kv_cache_update(args: CacheUpdateArgs) -> None:
    """Check the arguments of `vattn::kv_cache_update`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError, ConfigError: by kind of mistake.
    """
    config, device = AttentionConfig.parse(args.config), args.key.device
    num_tokens, num_kv_heads = args.key.shape[0] if args.key.ndim else 0, config.num_kv_heads
    dtypes = _stored_or_not(config)
    check_rows("key", args.key, (num_tokens, num_kv_heads, config.head_size), dtypes, device)
    check_rows("value", args.value, (num_tokens, num_kv_heads, config.head_size_v), dtypes, device)
    check_tensor("slot_mapping", args.slot_mapping, (num_tokens,), INDEX_DTYPES, device)
    check_cache(args.key_cache, args.value_cache, config, device)
    check_scale("k_scale", args.k_scale, config.kv_scale, num_kv_heads, device)
    check_scale("v_scale", args.v_scale, config.kv_scale, num_kv_heads, device)


def _stored_or_not(config: AttentionConfig) -> tuple[torch.dtype, ...]:
    """Return the dtypes that keys and values to be stored may have: the model's, and FP8 that is stored as it is."""
    fmt, model = KV_FORMATS[config.kv_cache_dtype], MODEL_DTYPES[config.dtype]
    return (model, fmt.value_dtype) if fmt.quantised and not fmt.packed else (model,)


def check_rope_kv_cache_update(args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> None:
    """Check the arguments of `vattn::rope_kv_cache_update`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError, ConfigError: by kind of mistake.
    """
    device, model = args.query.device, MODEL_DTYPES[config.dtype]
    num_tokens = args.query.shape[0] if args.query.ndim else 0
    if rope.rotary_dim > config.head_size:
        raise ConfigError(
            f"rotary_dim={rope.rotary_dim} for heads of {config.head_size} columns",
            f"an even number up to {config.head_size}",
            "give the columns of one head that turn",
        )
    if rope.query_arithmetic != "divide" and config.query_format == "none":
        raise ConfigError(
            f"query_arithmetic={rope.query_arithmetic!r} with query_format='none'",
            "'divide' for a query that is not quantised",
            "leave query_arithmetic out",
        )
    query_shape = (num_tokens, config.num_heads, config.head_size)
    check_rows("query", args.query, query_shape, (model,), device)
    check_rows("key", args.key, (num_tokens, config.num_kv_heads, config.head_size), (model,), device)
    value_shape = (num_tokens, config.num_kv_heads, config.head_size_v)
    check_rows("value", args.value, value_shape, _stored_or_not(config), device)
    check_tables(args, rope, num_tokens, device)
    out_dtype = model if config.query_format == "none" else torch.float8_e4m3fn
    check_tensor("query_out", args.query_out, query_shape, (out_dtype,), device)
    check_tensor("slot_mapping", args.slot_mapping, (num_tokens,), INDEX_DTYPES, device)
    check_cache(args.key_cache, args.value_cache, config, device)
    for name, weight in (("q_weight", args.q_weight), ("k_weight", args.k_weight)):
        if weight is not None:
            check_optional(name, weight, rope.norm != "none", (config.head_size,), (torch.float32, model), device)
    check_scale("q_scale", args.q_scale, config.query_scale, config.num_kv_heads, device)
    check_scale("k_scale", args.k_scale, config.kv_scale, config.num_kv_heads, device)
    check_scale("v_scale", args.v_scale, config.kv_scale, config.num_kv_heads, device)
    _check_no_overlap("query_out", args.query_out, args[:3])


def check_tables(
    args: Any, rope: RopeConfig, num_tokens: int, device: torch.device, dtypes: tuple[torch.dtype, ...] = _FLOATS
) -> None:
    """Check cos, sin and positions; strides of the tables are free."""
    rows, columns = args.cos.shape if args.cos.ndim == 2 else (0, 0)
    if args.positions is None:
        rows = num_tokens
    else:
        check_tensor("positions", args.positions, (num_tokens,), INDEX_DTYPES, device)
        rows = max(1, rows)
    if columns != rope.rotary_dim:
        columns = rope.rotary_dim // 2
    refuse("cos", args.cos, (rows, columns), dtypes, device)
    refuse("sin", args.sin, (rows, columns), (args.cos.dtype,), device)


@OncePerSignature
def check_attention(args: AttentionArgs) -> None:
    """Check the arguments of `vattn::attention`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError, ConfigError: by kind of mistake.
    """
    config, device = AttentionConfig.parse(args.config), args.query.device
    check_cache(args.key_cache, args.value_cache, config, device, written=False)
    num_reqs = check_lengths(args, device)
    check_optional("local_seq_lens", args.local_seq_lens, config.context_parallel, (num_reqs,), _INT32, device)
    _check_shared(args, config, num_reqs, device)


@OncePerSignature
def check_varlen_attention(args: VarlenAttentionArgs) -> None:
    """Check the arguments of `vattn::varlen_attention`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ScaleError, ConfigError: by kind of mistake.
    """
    config, device = AttentionConfig.parse(args.config), args.query.device
    if config.block_size:
        raise ConfigError(
            f"varlen_attention with block_size={config.block_size}", "block_size=0", "use a config without a cache"
        )
    num_reqs = count_of("kv_start_loc", args.kv_start_loc, 2) - 1
    num_keys, num_kv_heads = args.key.shape[0] if args.key.ndim else 0, config.num_kv_heads
    dtypes = (KV_FORMATS[config.kv_cache_dtype].value_dtype,)
    check_rows("key", args.key, (num_keys, num_kv_heads, config.head_size), dtypes, device)
    check_rows("value", args.value, (num_keys, num_kv_heads, config.head_size_v), dtypes, device)
    check_tensor("query_start_loc", args.query_start_loc, (num_reqs + 1,), INDEX_DTYPES, device)
    check_tensor("kv_start_loc", args.kv_start_loc, (num_reqs + 1,), INDEX_DTYPES, device)
    _check_shared(args, config, num_reqs, device)


def check_lengths(args: Any, device: torch.device) -> int:
    """Check lengths and block table of an op that reads a paged cache, and return the number of requests."""
    num_reqs = count_of("seq_lens", args.seq_lens, 1)
    check_tensor("seq_lens", args.seq_lens, (num_reqs,), INDEX_DTYPES, device)
    width = args.block_table.shape[1] if args.block_table.ndim == 2 else 0
    check_rows("block_table", args.block_table, (num_reqs, max(1, width)), INDEX_DTYPES, device)
    check_tensor("query_start_loc", args.query_start_loc, (num_reqs + 1,), INDEX_DTYPES, device)
    return num_reqs


@OncePerSignature
def check_plan(args: PlanArgs) -> None:
    """Check the arguments of `vattn::plan`; the schedule's shape is checked by the backend that made it.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError: by kind of mistake.
    """
    device = args.seq_lens.device
    num_reqs = count_of("seq_lens", args.seq_lens, 1)
    check_tensor("seq_lens", args.seq_lens, (num_reqs,), INDEX_DTYPES, device)
    check_tensor("query_start_loc", args.query_start_loc, (num_reqs + 1,), INDEX_DTYPES, device)
    check_tensor("schedule", args.schedule, tuple(args.schedule.shape), _INT32, device)


def check_schedules(plan: list[Tensor], device: torch.device) -> None:
    """Check the schedules that an attention op is given; schedules of shapes that no path makes are not read.

    Raises:
        DtypeError, DeviceError, StrideError: by kind of mistake.
    """
    for schedule in plan:
        if schedule.dtype not in (torch.int32, torch.int64):
            refuse_dtype("plan", schedule, (torch.int32, torch.int64))
        home = device if schedule.dtype == torch.int32 else _CPU  # Half of a plan on the host stays there.
        check_tensor("plan", schedule, tuple(schedule.shape), (schedule.dtype,), home)


def check_merge(args: MergeArgs) -> None:
    """Check the arguments of `vattn::merge_attn_states`.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError: by kind of mistake; StrideError also where the output shares
            its storage with an input.
    """
    device, shape = args.output.device, tuple(args.output.shape)
    if len(shape) != 3:
        raise ShapeError(f"output has shape {shape}", "[T, H, V]", "pass three dimensions")
    check_tensor("output", args.output, shape, _FLOATS, device)
    check_rows("prefix_output", args.prefix_output, shape, _FLOATS, device)
    check_rows("suffix_output", args.suffix_output, shape, (args.prefix_output.dtype,), device)
    check_rows("prefix_lse", args.prefix_lse, shape[:2], _FP32, device)
    check_rows("suffix_lse", args.suffix_lse, shape[:2], _FP32, device)
    if args.output_lse is not None:
        check_tensor("output_lse", args.output_lse, shape[:2], _FP32, device)
        _check_no_overlap("output_lse", args.output_lse, args[2:])
    _check_no_overlap("output", args.output, args[2:])


def check_quantiser_input(name: str, input: Tensor, scale: Tensor | None = None, group_size: int | None = None) -> None:
    """Check the input `[T, N]` of the quantising op `name`, its scale and its group size.

    Raises:
        ShapeError, DtypeError, DeviceError, ScaleError: by kind of mistake.
    """
    if input.ndim != 2 or input.shape[1] == 0:
        raise ShapeError(f"{name}: input has shape {tuple(input.shape)}", "[T, N] with N >= 1", "flatten the heads")
    if input.dtype not in _FLOATS:
        refuse_dtype(f"{name}: input", input, _FLOATS)
    if group_size is not None and (group_size < 1 or input.shape[1] % group_size):
        raise ShapeError(
            f"{name}: input has {input.shape[1]} columns for groups of {group_size}",
            "a positive group size that divides the columns",
            "pad the columns or choose another group size",
        )
    if scale is not None:
        check_scale("scale", scale, "tensor", 1, input.device)


def _check_shared(
    args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, num_reqs: int, device: torch.device
) -> None:
    """Check what both attention ops have in common."""
    num_tokens, num_heads = args.query.shape[0] if args.query.ndim else 0, config.num_heads
    query_dtype = torch.float8_e4m3fn if config.takes_fp8_query else MODEL_DTYPES[config.dtype]
    check_rows("query", args.query, (num_tokens, num_heads, config.head_size), (query_dtype,), device)
    check_outputs(args, config, num_tokens, config.head_size_v, device)
    check_scale("q_scale", args.q_scale, config.query_scale, config.num_kv_heads, device)
    check_scale("k_scale", args.k_scale, config.kv_scale, config.num_kv_heads, device)
    check_scale("v_scale", args.v_scale, config.kv_scale, config.num_kv_heads, device)
    _check_mask_inputs(args, config, num_reqs, device)
    check_schedules(args.plan, device)
    if args.workspace is not None:
        check_tensor("workspace", args.workspace, tuple(args.workspace.shape), (args.workspace.dtype,), device)


def check_outputs(args: Any, config: Any, num_tokens: int, value_size: int, device: torch.device) -> None:
    """Check what an attention op writes: the output, its scales, and the LSE; `value_size`: columns of a head."""
    fmt, num_heads = OUTPUT_FORMATS[config.output_format], config.num_heads
    dtype = MODEL_DTYPES[config.dtype] if fmt.container is None else fmt.container
    check_tensor("output", args.output, (num_tokens, num_heads, fmt.output_columns(value_size)), (dtype,), device)
    check_optional("lse", args.lse, config.lse, (num_tokens, num_heads), _FP32, device)
    check_scale("output_scale", args.output_scale, "tensor" if fmt.static_scale else "none", 1, device)
    scales, shape = args.output_block_scale, fmt.block_scale_shape(num_tokens, num_heads * value_size)
    if is_given(scales, "output_block_scale", shape is not None):
        assert shape is not None and fmt.block_scale_dtype is not None
        dtypes = (fmt.block_scale_dtype,)
        check_tensor("output_block_scale", scales, shape, dtypes, device, column_major=fmt.column_major)


def _check_mask_inputs(
    args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, num_reqs: int, device: torch.device
) -> None:
    num_heads, bias, ranges = config.num_heads, args.bias, args.mm_ranges
    model_dtype = (torch.float32, MODEL_DTYPES[config.dtype])
    check_optional("alibi_slopes", args.alibi_slopes, config.alibi != "none", (num_heads,), _FP32, device)
    check_optional("sinks", args.sinks, config.sinks, (num_heads,), model_dtype, device)
    check_optional("causal_flags", args.causal_flags, config.causality == "per_request", (num_reqs,), _INT32, device)
    check_optional("tree_id", args.tree_id, config.tree_bias, (num_reqs,), _INT32, device)
    trees, size = bias.shape[:2] if bias is not None and bias.ndim == 3 else (1, 1)
    check_optional("bias", bias, config.tree_bias, (trees, size, size), _FP32, device)
    count = ranges.shape[1] if ranges is not None and ranges.ndim == 3 else 1
    check_optional("mm_ranges", ranges, config.mm_prefix != "none", (num_reqs, count, 2), _INT32, device)


def check_cache(
    key_cache: Tensor, value_cache: Tensor | None, config: AttentionConfig, device: torch.device, written: bool = True
) -> None:
    """Check the keys and values of a cache as the ops take them, for a config with any backend.

    Args:
        written: whether the op writes the cache; blocks that are only read may overlap.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ConfigError: by kind of mistake.
    """
    if config.block_size == 0:
        raise ConfigError(
            "a paged op with block_size=0", "a positive block_size", "use varlen_attention without a cache"
        )
    fmt, blocks = KV_FORMATS[config.kv_cache_dtype], max(1, key_cache.shape[0]) if key_cache.ndim else 1
    if fmt.packed:
        _check_storage(key_cache, value_cache, config, blocks, device)
        return
    if value_cache is None:
        raise ShapeError(
            "key_cache without value_cache",
            f"both, for a cache of {fmt.name}",
            "pass both views, or kv_cache of vattn.kv_cache_shape to vattn.paged_attention",
        )
    heads, width = config.num_kv_heads, config.head_size_v
    if config.head_pairs != "none":
        heads, width = 2 * heads, config.head_size
    dtypes = tuple(dict.fromkeys((fmt.value_dtype, fmt.storage_dtype)))
    for name, view, columns in (("key_cache", key_cache, config.head_size), ("value_cache", value_cache, width)):
        refuse(name, view, (blocks, config.block_size, heads, columns), dtypes, device)
        if overlaps_itself(view if written else view[:1]):
            raise StrideError(
                f"{name} has strides {view.stride()}, in which elements overlap or columns lie apart",
                "rows of adjacent elements, each in memory of its own",
                f"pass {name} as a view of memory with room for all of its elements",
            )
    if config.head_pairs != "none" and value_cache.stride(2) != width:
        raise StrideError(
            f"value_cache has heads {value_cache.stride(2)} elements apart",
            f"{width}: the values of a pair of heads are read as one row",
            "keep the heads of a token together",
        )


def check_storage(kv_cache: Tensor, config: AttentionConfig) -> None:
    """Check a raw storage of `kv_cache_shape`.

    Raises:
        ShapeError, DtypeError, StrideError: by kind of mistake.
    """
    shape = shape_of_storage(kv_cache, config, max(1, num_blocks_of(kv_cache, config)))
    check_tensor("kv_cache", kv_cache, shape, (kv_cache_dtype(config),), kv_cache.device)


def _check_storage(
    storage: Tensor, value_cache: Tensor | None, config: AttentionConfig, blocks: int, device: torch.device
) -> None:
    """Check the storage of a packed format; its blocks may lie apart."""
    if value_cache is not None:
        raise ShapeError(
            f"value_cache beside a cache of {config.kv_cache_dtype}",
            "None: a block of the format holds keys and values",
            "pass the storage as key_cache alone",
        )
    meaning = "vattn.kv_cache_shape(config, num_blocks) with num_blocks >= 1"
    refuse("key_cache", storage, shape_of_storage(storage, config, blocks), (torch.uint8,), device, meaning)
    alignment = storage_alignment(config)
    by_block, by_byte = storage.stride()
    if by_byte != 1 or by_block % alignment or overlaps_itself(storage) or storage.storage_offset() % alignment:
        raise StrideError(
            f"key_cache has strides {storage.stride()} and starts at byte {storage.storage_offset()} of its memory",
            f"adjacent bytes, and blocks that start at multiples of {alignment}, the size of one element",
            "align the allocation that the cache is cut from",
        )


def refuse_lost_offset(key_cache: Tensor, value_cache: Tensor | None) -> None:
    """Refuse keys and values that begin at the same byte, at each call: compiled code can lose where values begin.

    Inductor writes a view of an input at the input's start if the view's offset depends on a size that varies
    (pytorch/pytorch#198068): values would overwrite keys.

    Raises:
        StrideError: they do.
    """
    if value_cache is not None and key_cache.data_ptr() == value_cache.data_ptr() and key_cache.numel():
        raise StrideError(
            "key_cache and value_cache begin at the same byte",
            "memory of their own; in compiled code Inductor loses the offset of values in a storage of varying size",
            "pass (layer.key_cache, layer.value_cache) in place of the storage, or compile with dynamic=False",
        )


def overlaps_itself(view: Tensor) -> bool:
    """Return whether elements of a view may share memory, or the last dimension has gaps. Sound, not complete."""
    sizes = sorted((stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1)
    if not view.numel():
        return False
    end = 1
    for stride, size in sizes:
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return view.shape[-1] > 1 and view.stride(-1) != 1


def _check_no_overlap(name: str, output: Tensor, inputs: tuple[Any, ...]) -> None:
    """Refuse an output that overlaps an input in memory; compiled code may place both in one storage."""
    for part in inputs:
        start, first = output.data_ptr(), part.data_ptr()
        overlap = start < first + _extent(part) * part.itemsize and first < start + output.numel() * output.itemsize
        if overlap and output.numel() and part.numel():
            raise StrideError(f"{name} overlaps an input", "memory of its own", f"allocate {name} separately")


def share_elements(first: Tensor, second: Tensor) -> bool:
    """Return whether two views with elements of their own have some in common, unless their strides show otherwise."""
    if not first.numel() or not second.numel() or first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        return False
    first, second = sorted((first, second), key=Tensor.data_ptr)
    offset = (second.data_ptr() - first.data_ptr()) // first.itemsize
    if offset >= _extent(first):
        return False
    if first.stride() != second.stride() or first.itemsize != second.itemsize:
        return True
    for pitch in sorted({stride for stride, size in zip(first.stride(), first.shape, strict=True) if size > 1})[:0:-1]:
        offset %= pitch
        if _extent(first, pitch) <= offset and offset + _extent(second, pitch) <= pitch:
            return False
    return True


def _extent(view: Tensor, pitch: float = inf) -> int:
    """Return how many elements the dimensions with strides below `pitch` span."""
    steps = zip(view.stride(), view.shape, strict=True)
    return 1 + sum((size - 1) * stride for stride, size in steps if stride < pitch)


def forget() -> None:
    """Drop arguments that were checked for an attention op which will not run."""
    check_attention.forget()
    check_varlen_attention.forget()
