"""What runs when a `vattn::` op is called on a device: parse the config, check the tensors, ask the backend.

Every entry has the name of its op and takes the op's arguments in the schema's order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vattn.backends import linear as products
from vattn.backends import lora, selector
from vattn.cache.memory import CacheMemory
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, has_triton
from vattn.config.mla import MLAConfig
from vattn.config.rope import RopeConfig
from vattn.errors import UnsupportedRequestError
from vattn.kernels.replay import replay_or_run, tensors_of
from vattn.ops import checks, checks_mla, kv_transfer_points, schemas
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, MergeArgs, PlanArgs, RopeUpdateArgs, VarlenAttentionArgs
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.fusion_notes import read_note
from vattn.ops.index_dtypes import with_read_dtypes
from vattn.ops.linear_arguments import LinearArgs, check_linear
from vattn.ops.lora_arguments import LoRAArgs, check_lora
from vattn.ops.reference import mla_indexer
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs, check_mla_rope_update
from vattn.quantization import codecs


@lru_cache(maxsize=4096)
def _resolve(text: str, device: torch.device, memory: CacheMemory | None = None) -> tuple[Any, Any]:
    """Return the backend and the config of a config string; `memory`: of a cache that not every backend reads."""
    config = (MLAConfig if text.startswith(MLAConfig.head) else AttentionConfig).parse(text)
    read_note(text)
    return selector.choose(config, DeviceInfo.of(device), memory=memory), config


def read_notes_again() -> None:
    """Have the next call of each op read the fusion note of its config string, even one that was read before."""
    _resolve.cache_clear()


def _memory_of(args: Any) -> CacheMemory | None:
    """Return how the cache of an op's arguments lies; `None` for an op without one."""
    if hasattr(args, "key_cache"):
        return CacheMemory.of(args.key_cache, args.value_cache)
    return CacheMemory.of(args.kv_cache) if hasattr(args, "kv_cache") else None


def _by_backend(name: str, kind: Any, tensor: str, check: Callable[[Any], dict[Any, Any]]) -> Callable[..., None]:
    """Return an op that a backend runs by its method of that name; `tensor`: the argument that has the device."""

    def run(*arguments: Any) -> None:
        args = kind(*arguments)
        plan = getattr(args, "plan", ())
        if plan and not all(schedule.numel() for schedule in plan):
            # AOTInductor passes a schedule of no elements for an empty list.
            args = args._replace(plan=[schedule for schedule in plan if schedule.numel()])
        backend, config = _resolve(args.config, getattr(args, tensor).device)
        recordings = check(args)
        if name == "kv_cache_update":
            checks.refuse_lost_offset(args.key_cache, args.value_cache)
        if not backend.capabilities.reads_any_memory:
            backend, config = _resolve(args.config, getattr(args, tensor).device, _memory_of(args))
        if name in backend.replayable and getattr(args, tensor).is_cuda:
            tensors = tensors_of(args)
            replay_or_run(recordings, tensors, lambda: getattr(backend, name)(with_read_dtypes(args), config))
        else:
            getattr(backend, name)(with_read_dtypes(args), config)

    return run


kv_cache_update = _by_backend("kv_cache_update", CacheUpdateArgs, "key", checks.check_kv_cache_update)
attention = _by_backend("attention", AttentionArgs, "query", checks.check_attention)
varlen_attention = _by_backend("varlen_attention", VarlenAttentionArgs, "query", checks.check_varlen_attention)
plan = _by_backend("plan", PlanArgs, "seq_lens", checks.check_plan)
mla_kv_cache_update = _by_backend(
    "mla_kv_cache_update", MLACacheUpdateArgs, "kv_c", checks_mla.check_mla_kv_cache_update
)
mla_attention = _by_backend("mla_attention", MLAAttentionArgs, "query", checks_mla.check_mla_attention)


def rope_kv_cache_update(*arguments: Any) -> None:
    args = RopeUpdateArgs(*arguments)
    backend, config = _resolve(args.config, args.query.device)
    rope = RopeConfig.parse(args.rope)
    if not backend.capabilities.rope_update:
        raise UnsupportedRequestError(
            f"rope_kv_cache_update on backend {backend.name}",
            "a backend with rope_update=True in its capabilities",
            "rotate before kv_cache_update and attention",
        )
    checks.check_rope_kv_cache_update(args, rope, config)
    checks.refuse_lost_offset(args.key_cache, args.value_cache)
    backend.rope_kv_cache_update(with_read_dtypes(args), rope, config)


def mla_rope_kv_cache_update(*arguments: Any) -> None:
    args = MLARopeUpdateArgs(*arguments)
    backend, config = _resolve(args.config, args.kv_c.device)
    rope = RopeConfig.parse(args.rope)
    check_mla_rope_update(args, rope, config)
    backend.mla_rope_kv_cache_update(with_read_dtypes(args), rope, config)


def mla_indexer_update(*arguments: Any) -> None:
    args = mla_indexer.IndexerUpdateArgs(*arguments)
    mla_indexer.check_indexer_update(args)
    _indexer(args.key).mla_indexer_update(with_read_dtypes(args))


def mla_indexer_select(*arguments: Any) -> None:
    args = mla_indexer.IndexerSelectArgs(*arguments)
    mla_indexer.check_indexer_select(args)
    _indexer(args.query).mla_indexer_select(with_read_dtypes(args))


def _indexer(tensor: Tensor) -> Any:
    """Return the module that runs the indexer's ops for a tensor."""
    if tensor.is_cuda and has_triton():
        from vattn.kernels.triton.mla import indexer as kernels

        return kernels
    return mla_indexer


def merge_attn_states(*arguments: Any) -> None:
    args = MergeArgs(*arguments)
    checks.check_merge(args)
    if args.output.is_cuda and has_triton():
        from vattn.kernels.triton.attention.merge import merge_attn_states as merge
    else:
        from vattn.ops.reference.attention import merge_attn_states as merge
    merge(args)


def kv_transfer_wait(key_cache: Tensor, value_cache: Tensor | None, kv_cache: Tensor | None) -> None:
    kv_transfer_points.kv_transfer_wait(key_cache)


def kv_transfer_save(key_cache: Tensor, value_cache: Tensor | None, kv_cache: Tensor | None, token: Tensor) -> None:
    kv_transfer_points.kv_transfer_save(key_cache, token)


def quant_fp8_static(input: Tensor, scale: Tensor) -> Tensor:
    checks.check_quantiser_input("quant_fp8_static", input, scale)
    return codecs.quant_fp8_static(input, scale)


def quant_fp8_per_token(input: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_quantiser_input("quant_fp8_per_token", input)
    return codecs.quant_fp8_per_token(input)


def quant_fp8_group(input: Tensor, group_size: int, power_of_two: bool, column_major: bool) -> tuple[Tensor, Tensor]:
    checks.check_quantiser_input("quant_fp8_group", input, group_size=group_size)
    return codecs.quant_fp8_group(input, group_size, power_of_two, column_major)


def quant_nvfp4(input: Tensor, scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    checks.check_quantiser_input("quant_nvfp4", input, scale, group_size=16)
    return codecs.quant_nvfp4(input, scale, swizzled)


def linear(*arguments: Any) -> Tensor:
    args = LinearArgs(*arguments)
    check_linear(args)
    return products.linear(args)


def add_lora(*arguments: Any) -> None:
    args = LoRAArgs(*arguments)
    check_lora(args)
    lora.add_lora(args)


for _name in schemas.all_ops():
    schemas.implement(_name, globals()[_name])
