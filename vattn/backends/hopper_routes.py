"""Which calls of TRITON_ATTN run by the kernels made for Hopper, and by which of them.

The kernels need Triton: TRITON_ATTN imports this file when it first runs or explains a request.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from vattn.cache.memory import CacheMemory
from vattn.config.attention import AttentionConfig
from vattn.config.dcp import without_dcp
from vattn.config.device import DeviceInfo
from vattn.config.features import requested_features
from vattn.kernels.hopper import availability, mixed_launch
from vattn.kernels.hopper.decode import cluster_launch
from vattn.kernels.hopper.decode import launch as decode
from vattn.kernels.hopper.decode_packed import launch as decode_packed
from vattn.kernels.hopper.prefill import fixed_launch, split_launch
from vattn.kernels.hopper.prefill import launch as prefill
from vattn.kernels.triton.attention import encoder
from vattn.kernels.triton.attention.dcp_rows import attention_rows
from vattn.kernels.triton.attention.round_query import after_rounding, round_query
from vattn.ops.arguments import AttentionArgs, PlanArgs
from vattn.quantization.formats import KV_FORMATS

_ORDER_FREE = frozenset(
    "logits_soft_cap sinks unequal_head_sizes head_pairs kv_scale_per_head query_scale_per_head lse context_parallel "
    "hnd_layout".split()
)
"""Features of a single causal row that do not depend on where its keys lie."""


def _is_packed(config: AttentionConfig) -> bool:
    return KV_FORMATS[config.kv_cache_dtype].packed


def routes(config: AttentionConfig) -> tuple[bool, bool]:
    """Return whether the current GPU runs a layer's decode steps and its prefills by kernels made for Hopper."""
    if not torch.cuda.is_available():
        return False, False
    device = torch.device("cuda", torch.cuda.current_device())
    if config.batch_invariant:
        return (fixed_launch.runs(config, device),) * 2
    if _is_packed(config):
        return decode_packed.runs(config, device), False
    # Where the kernel does not round the query, it is rounded first.
    plain = after_rounding(config)
    return decode.runs(plain, device), prefill.runs(plain, device)


def missed(config: AttentionConfig, device: DeviceInfo, memory: CacheMemory | None = None) -> dict[str, list[str]]:
    """Return why decodes and prompts do not run by the kernels made for Hopper; empty lists where they do."""
    if config.batch_invariant:
        of_both = fixed_launch.refusals(config, device) + ([] if memory is None else memory.row_refusals())
        return {"decodes": of_both, "prompts": of_both}
    whole = without_dcp(config)
    plain = whole if _is_packed(config) else after_rounding(whole)
    decodes = (decode_packed if _is_packed(config) else decode).refusals(plain, device)
    prompts = prefill.refusals(plain, device)
    if config.context_parallel:
        decodes += [f"{name} over a rank's keys" for name in sorted(requested_features(config) - _ORDER_FREE)]
        prompts.append("context_parallel")
    elif not prompts and config.group_size <= split_launch.MAX_GROUP_SIZE:
        decodes = []  # The prefill kernel takes those of larger groups than the decode kernel.
    of_memory = [] if memory is None else memory.row_refusals()
    return {"decodes": decodes + of_memory, "prompts": prompts + of_memory}


def takes_rounded_queries(config: AttentionConfig) -> str:
    """Return which kernel takes only rounded queries where the op is to round them, empty if none may run."""
    if config.query_load == "plain" or config.batch_invariant:
        return ""
    plain = after_rounding(config)
    if not encoder.refusals(plain):
        return "the kernel for long encoder inputs"
    on_hopper = DeviceInfo("cuda", availability.CAPABILITY, "Hopper")
    return "" if prefill.refusals(plain, on_hopper) else "Hopper's prefill kernel"


@lru_cache(maxsize=4096)
def next_may_start(config: AttentionConfig) -> bool:
    """Return whether the kernel after RoPE's may be launched while that one runs.

    Our own kernels wait before they read. Programs that are launched early go where there is memory for them, several
    to a multiprocessor unless they fill it, as clusters do. Triton's decode kernel does not: the cache must be one with
    which it is not launched early.
    """
    if _is_packed(config):
        config = config.replace(kv_cache_dtype=config.dtype, kv_scale="none")
    split = decode.choose_tuning(config, 1)
    return config.backend == "TRITON_ATTN" and (not split.overlap or split.slots > 0)


def plan(args: PlanArgs, config: AttentionConfig) -> None:
    """Fill the schedule of a step for the kernel that takes it, which its shapes determine; else leave it alone."""
    decodes, prefills = routes(config)
    starts, lengths, schedule, num_reqs = args.query_start_loc, args.seq_lens, args.schedule, args.seq_lens.shape[0]
    num_tokens = decode.tokens_of_plan(schedule, config, num_reqs)
    if config.batch_invariant:
        if decodes:
            fixed_launch.plan(starts, lengths, schedule, num_tokens, config)
        return
    if _is_packed(config):
        if num_tokens == num_reqs:
            decode_packed.plan(starts, lengths, schedule, config)
        return
    rows, route = decode.rows_at_a_time(config, num_tokens, num_reqs), ""
    if prefills:
        route = mixed_launch.route_of(config, num_tokens, num_reqs, lengths.device)
    if route:
        mixed_launch.plan(starts, lengths, schedule, num_tokens, config, route)
    elif decodes and rows:
        decode.plan(starts, lengths, schedule, config, tokens=rows, num_tokens=num_tokens)
    elif prefills and prefill.is_prefill(num_tokens, num_reqs):
        prefill.plan(starts, lengths, schedule, num_tokens, config)


def run(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Run a call by one of the kernels made for Hopper; return whether one takes it."""
    if config.batch_invariant:
        fits = fixed_launch.accepts(args, config)
        if fits:
            fixed_launch.attend(args, config)
        return fits
    if config.context_parallel:
        return _run_dcp(args, config)
    if _is_packed(config):
        fits = decode_packed.accepts(args, config)
        if fits:
            decode_packed.decode(args, config)
        return fits
    kernels = ((decode, _decode), (mixed_launch, mixed_launch.attend), (prefill, prefill.prefill))
    for kernel, attend in kernels:
        if kernel.accepts(args, config):
            attend(args, config)
            return True
    if config.query_load == "plain":
        return False
    # Rounding the query first costs less than the general kernel.
    plain = after_rounding(config)
    if any(kernel.accepts(args, plain) for kernel, _ in kernels):
        return run(round_query(args, config), plain)
    return False


def _decode(args: AttentionArgs, config: AttentionConfig) -> None:
    in_clusters = cluster_launch.takes(args, config)
    (cluster_launch if in_clusters else decode).decode(args, config)


def _run_dcp(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Run a decode step over a rank's share of the keys.

    A row that sees all keys up to its own sees all that this rank holds of them, in whatever order they lie.
    """
    whole = without_dcp(config)
    if args.query.shape[0] != args.seq_lens.shape[0] or requested_features(config) - _ORDER_FREE:
        return False
    if not (decode_packed if _is_packed(config) else decode).accepts(args, whole):
        return False
    return run(attention_rows(args, config), whole)
