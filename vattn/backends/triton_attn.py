"""TRITON_ATTN: the whole mask algebra and every format in Triton kernels, on CUDA and in Triton's interpreter.

Nothing is read from the device and grids come from shapes, so any call can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from vattn.backends.base import PACKED_DCP, Backend, Capabilities, Package
from vattn.config.attention import AttentionConfig
from vattn.config.dcp import without_dcp
from vattn.config.device import DeviceInfo, Sizes
from vattn.config.features import FEATURES, requested_features
from vattn.config.rope import RopeConfig
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, PlanArgs, RopeUpdateArgs, VarlenAttentionArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS, QUERY_FORMATS, QUERY_LOADS


class TritonAttentionBackend(Backend):
    """Run every feature of decoder attention in two kernels at most."""

    name = "TRITON_ATTN"
    capabilities = Capabilities(
        devices=("cuda", "interpreter"),
        dtypes=tuple(MODEL_DTYPES),
        kv_cache_dtypes=tuple(KV_FORMATS),
        query_formats=QUERY_FORMATS,
        output_formats=tuple(OUTPUT_FORMATS),
        attn_types=("decoder", "encoder", "encoder_only", "encoder_decoder"),
        head_sizes=Sizes(8, 8, 512),
        block_sizes=Sizes(8, 8, 256),
        features=frozenset(FEATURES),
        exclusions=(PACKED_DCP,),
        # FP8 is decoded and encoded in software where the hardware has none.
        minimum_capability=(8, 0),
        package=Package(module="triton", distribution="triton", minimum=(3, 6), extra="triton"),
        query_loads=QUERY_LOADS,
        output_variants=True,
        approximate_division=True,
        rope_update=True,
        cuda_graphs="full",
    )

    def notes(self, config: AttentionConfig) -> list[str]:
        """Say how many columns the kernels multiply for a head, where there are more than it has, and what is fixed."""
        from vattn.kernels.triton.attention import encoder
        from vattn.kernels.triton.common.tiles import padded_widths

        columns = padded_widths(config)[0] if encoder.refusals(config) else encoder.padded_width(config.head_size)
        found = []
        if columns != config.head_size:
            found.append(
                f"head_size {config.head_size} is computed as {columns} (columns of zeros in the kernel, not in memory)"
            )
        taker = takes_rounded_queries(config)
        if taker:
            found.append(f"{taker} takes the query rounded: a small kernel does that first")
        if config.batch_invariant:
            found.append(
                "batch_invariant: the general kernel with tiles of one size and no splits; a row is bitwise the same "
                "alone, with any neighbours, in any order and in chunks of any size, chunks of one included"
            )
        return found

    def general_steps(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Say which steps of a layer with a paged cache run on the general kernel on Hopper, which has faster ones."""
        from vattn.kernels.hopper import availability as hopper

        if device.type != "cuda" or device.capability != hopper.CAPABILITY or config.block_size == 0:
            return []
        return [
            f"{steps} run on the general kernel, not on Hopper's: {'; '.join(dict.fromkeys(reasons))}"
            for steps, reasons in _missed_paths(config, device).items()
            if reasons
        ]

    def plan_shape(self, config: AttentionConfig, num_tokens: int, num_reqs: int, table_width: int) -> tuple[int, ...]:
        """Return the shape of the schedule of the paths made for Hopper; `()` where neither runs the layer."""
        if config.context_parallel or not any(_fast_paths(config)):
            return ()
        from vattn.kernels.hopper.decode import launch as decode_fast

        device = torch.device("cuda", torch.cuda.current_device())
        return decode_fast.plan_shape(config, num_tokens, num_reqs, device)

    def plan_key(self, config: AttentionConfig) -> str:
        """Return a key that is equal for layers that can share one schedule."""
        names = ("num_heads", "num_kv_heads", "head_size", "dtype", "kv_cache_dtype", "query_format", "sliding_window")
        paths = zip(("decode", "prefill"), _fast_paths(config), strict=True)
        fast = [f"fast_{name}" for name, runs in paths if runs]
        return " ".join([self.name, *(f"{name}={getattr(config, name)}" for name in names), *fast])

    def plan(self, args: PlanArgs, config: AttentionConfig) -> None:
        """Fill the schedule of a step for the path that takes it, which its shapes tell; otherwise leave it alone."""
        from vattn.kernels.hopper import mixed_launch
        from vattn.kernels.hopper.decode import launch as decode_fast
        from vattn.kernels.hopper.prefill import launch as prefill_launch

        decodes, prefills = _fast_paths(config)
        num_reqs = args.seq_lens.shape[0]
        num_tokens = decode_fast.tokens_of_plan(args.schedule, config, num_reqs)
        if KV_FORMATS[config.kv_cache_dtype].packed:
            from vattn.kernels.hopper.decode_packed import launch as decode_packed

            if num_tokens == num_reqs:
                decode_packed.plan(args.query_start_loc, args.seq_lens, args.schedule, config)
            return
        rows, route = decode_fast.rows_at_a_time(config, num_tokens, num_reqs, args.seq_lens.device), ""
        if decodes and prefills:
            route = mixed_launch.route_of(config, num_tokens, num_reqs, args.seq_lens.device)
        if route:
            mixed_launch.plan(args.query_start_loc, args.seq_lens, args.schedule, num_tokens, config, route)
        elif decodes and rows:
            decode_fast.plan(
                args.query_start_loc, args.seq_lens, args.schedule, config, tokens=rows, num_tokens=num_tokens
            )
        elif prefills and prefill_launch.is_prefill(num_tokens, num_reqs):
            prefill_launch.plan(args.query_start_loc, args.seq_lens, args.schedule, num_tokens, config)

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::attention`."""
        run_fast = run_fast_dcp if config.context_parallel else run_fast_path
        if args.query.is_cuda and run_fast(args, config):
            return
        from vattn.kernels.triton.attention.launch import paged_attention

        paged_attention(args, config)

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::varlen_attention`."""
        from vattn.kernels.triton.attention import encoder

        if encoder.accepts(args, config):
            encoder.attend(args, config)
            return
        if config.query_load != "plain":
            from vattn.kernels.triton.attention.round_query import after_rounding, round_query

            if encoder.accepts(args, after_rounding(config)):
                encoder.attend(round_query(args, config), after_rounding(config))
                return
        from vattn.kernels.triton.attention.launch import packed_attention

        packed_attention(args, config)

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        """Run `vattn::kv_cache_update`."""
        from vattn.kernels.triton.attention.launch import update_kv_cache

        update_kv_cache(args, config)

    def rope_kv_cache_update(self, args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> None:
        """Run `vattn::rope_kv_cache_update`: in one launch, for packed formats in two."""
        from vattn.kernels.triton.cache.rope_update import rope_update

        rope_update(args, rope, config, next_may_start=_next_may_start(config))


@lru_cache(maxsize=4096)
def _next_may_start(config: AttentionConfig) -> bool:
    """Return whether the kernel after RoPE's may be launched while that one runs.

    Our own kernels wait before they read. Programs that are launched early go where there is memory for them, several
    to a multiprocessor unless they fill it, as clusters do. Triton's decode kernel does not: the cache must be one with
    which it is not launched early.
    """
    from vattn.kernels.hopper.decode.launch import choose_tuning

    if KV_FORMATS[config.kv_cache_dtype].packed:
        config = config.replace(kv_cache_dtype=config.dtype, kv_scale="none")
    split = choose_tuning(config, 1)
    return config.backend == "TRITON_ATTN" and (not split.overlap or split.slots > 0)


def takes_rounded_queries(config: AttentionConfig) -> str:
    """Return which kernel takes rounded alone the queries that the op is to round, empty if none may run."""
    if config.query_load == "plain" or config.batch_invariant:
        return ""
    from vattn.kernels.hopper import availability as hopper
    from vattn.kernels.hopper.prefill import launch as prefill_launch
    from vattn.kernels.triton.attention import encoder
    from vattn.kernels.triton.attention.round_query import after_rounding

    plain = after_rounding(config)
    if not encoder.refusals(plain):
        return "the kernel for long encoder inputs"
    on_hopper = DeviceInfo("cuda", hopper.CAPABILITY, "Hopper")
    return "" if prefill_launch.refusals(plain, on_hopper) else "Hopper's prefill kernel"


def _fast_paths(config: AttentionConfig) -> tuple[bool, bool]:
    """Return whether the current GPU runs a layer's decode steps and its prefills by the paths made for Hopper."""
    if not torch.cuda.is_available():
        return False, False
    from vattn.kernels.hopper.decode import launch as decode_fast
    from vattn.kernels.hopper.decode_packed import launch as decode_packed
    from vattn.kernels.hopper.prefill import launch as prefill_launch
    from vattn.kernels.triton.attention.round_query import after_rounding

    device = torch.device("cuda", torch.cuda.current_device())
    if KV_FORMATS[config.kv_cache_dtype].packed:
        return decode_packed.runs(config, device), False
    # Where the kernel does not round the query, it is rounded first.
    plain = after_rounding(config)
    return decode_fast.runs(plain, device), prefill_launch.runs(plain, device)


def _missed_paths(config: AttentionConfig, device: DeviceInfo) -> dict[str, list[str]]:
    """Return why decodes and prompts do not run by the paths made for Hopper; empty lists where they do."""
    from vattn.kernels.hopper.decode import launch as decode_fast
    from vattn.kernels.hopper.decode_packed import launch as decode_packed
    from vattn.kernels.hopper.prefill import launch as prefill_launch
    from vattn.kernels.triton.attention.round_query import after_rounding

    packed = KV_FORMATS[config.kv_cache_dtype].packed
    path = decode_packed if packed else decode_fast
    whole = without_dcp(config) if config.context_parallel else config
    # Where the kernel does not round the query, it is rounded first.
    plain = whole if packed else after_rounding(whole)
    decodes = path.refusals(plain, device)
    prompts = prefill_launch.refusals(plain, device)
    if config.context_parallel:
        decodes += [f"{name} over a rank's keys" for name in sorted(requested_features(config) - _ORDER_FREE)]
        prompts.append("context_parallel")
    return {"decodes": decodes, "prompts": prompts}


_ORDER_FREE = frozenset(
    "logits_soft_cap sinks unequal_head_sizes head_pairs kv_scale_per_head query_scale_per_head lse context_parallel "
    "hnd_layout".split()
)
"""Features of a single causal row that do not ask where its keys sit."""


def run_fast_dcp(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Run a decode step over a rank's share of the keys by a path made for Hopper; return whether one takes it.

    A row that sees all keys up to its own sees all that this rank holds of them, in whatever order they lie.
    """
    from vattn.kernels.hopper.decode import launch as decode_fast
    from vattn.kernels.hopper.decode_packed import launch as decode_packed
    from vattn.kernels.triton.attention.dcp_rows import attention_rows

    rows, whole = args.query.shape[0], without_dcp(config)
    path = decode_packed if KV_FORMATS[config.kv_cache_dtype].packed else decode_fast
    if rows != args.seq_lens.shape[0] or requested_features(config) - _ORDER_FREE or not path.accepts(args, whole):
        return False
    return run_fast_path(attention_rows(args, config), whole)


def run_fast_path(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Run a call by one of the paths made for Hopper; return whether one takes it."""
    from vattn.kernels.hopper.decode import launch as decode_fast
    from vattn.kernels.hopper.decode_packed import launch as decode_packed

    if KV_FORMATS[config.kv_cache_dtype].packed:
        fast = decode_packed.accepts(args, config)
        if fast:
            decode_packed.decode(args, config)
        return fast
    if decode_fast.accepts(args, config):
        decode_fast.decode(args, config)
        return True
    from vattn.kernels.hopper import mixed_launch
    from vattn.kernels.hopper.prefill import launch as prefill_launch

    if mixed_launch.accepts(args, config):
        mixed_launch.attend(args, config)
        return True
    if prefill_launch.accepts(args, config):
        prefill_launch.prefill(args, config)
        return True
    if config.query_load == "plain":
        return False
    # Rounding the query first costs less than the general kernel.
    from vattn.kernels.triton.attention.round_query import after_rounding, round_query

    plain = after_rounding(config)
    if any(path.accepts(args, plain) for path in (decode_fast, mixed_launch, prefill_launch)):
        return run_fast_path(round_query(args, config), plain)
    return False
