"""TRITON_ATTN: the whole mask algebra and every format in Triton kernels, on CUDA and in Triton's interpreter.

Nothing is read from the device and grids come from shapes, so any call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from vattn.backends.base import PACKED_DCP, Backend, Capabilities, Package
from vattn.cache.memory import CacheMemory
from vattn.config.attention import AttentionConfig
from vattn.config.device import BLOCK_SIZES, DeviceInfo, Sizes
from vattn.config.features import FEATURES
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
        block_sizes=BLOCK_SIZES,
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
    replayable = frozenset({"attention", "kv_cache_update", "plan"})

    def notes(self, config: AttentionConfig) -> list[str]:
        """Say how many columns the kernels multiply for a head, where there are more than it has, and what is fixed."""
        from vattn.backends.hopper_routes import takes_rounded_queries
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
                "batch_invariant: one kernel attends decodes and prompts, over parts of the keys with fixed limits or "
                "none; a row is bitwise the same alone, with any neighbours, in any order and in chunks of any size, "
                "chunks of one included"
            )
        return found

    def general_steps(
        self, config: AttentionConfig, device: DeviceInfo, memory: CacheMemory | None = None
    ) -> list[str]:
        """Say which steps of a layer with a paged cache run on the general kernel on Hopper, which has faster ones."""
        from vattn.backends import hopper_routes

        on_hopper = device.type == "cuda" and device.capability == hopper_routes.availability.CAPABILITY
        if not on_hopper or config.block_size == 0:
            return []
        return hopper_routes.availability.missed_steps(hopper_routes.missed(config, device, memory))

    def plan_shape(self, config: AttentionConfig, num_tokens: int, num_reqs: int, table_width: int) -> tuple[int, ...]:
        """Return the shape of the schedule of the kernels made for Hopper; `()` where none runs the layer."""
        from vattn.backends import hopper_routes

        if config.context_parallel or not any(hopper_routes.routes(config)):
            return ()
        device = torch.device("cuda", torch.cuda.current_device())
        return hopper_routes.decode.plan_shape(config, num_tokens, num_reqs, device)

    def plan_key(self, config: AttentionConfig) -> str:
        from vattn.backends.hopper_routes import routes

        names = (
            "num_heads", "num_kv_heads", "head_size", "dtype", "kv_cache_dtype", "query_format", "sliding_window",
            "batch_invariant",
        )  # fmt: skip
        fast = [f"fast_{name}" for name, runs in zip(("decode", "prefill"), routes(config), strict=True) if runs]
        return " ".join([self.name, *(f"{name}={getattr(config, name)}" for name in names), *fast])

    def plan(self, args: PlanArgs, config: AttentionConfig) -> None:
        """Fill the schedule of a step for the kernel that takes it, which its shapes determine."""
        from vattn.backends import hopper_routes

        hopper_routes.plan(args, config)

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        from vattn.backends import hopper_routes
        from vattn.kernels.triton.attention.launch import paged_attention

        if not (args.query.is_cuda and hopper_routes.run(args, config)):
            paged_attention(args, config)

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        from vattn.kernels.triton.attention import encoder
        from vattn.kernels.triton.attention.launch import packed_attention
        from vattn.kernels.triton.attention.round_query import after_rounding, round_query

        if encoder.accepts(args, config):
            encoder.attend(args, config)
            return
        if config.query_load != "plain" and encoder.accepts(args, after_rounding(config)):
            encoder.attend(round_query(args, config), after_rounding(config))
            return
        packed_attention(args, config)

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        from vattn.kernels.triton.attention.launch import update_kv_cache

        update_kv_cache(args, config)

    def rope_kv_cache_update(self, args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> None:
        """Run `vattn::rope_kv_cache_update`: in one launch, for packed formats in two."""
        from vattn.backends.hopper_routes import next_may_start
        from vattn.kernels.triton.cache.rope_update import rope_update

        rope_update(args, rope, config, next_may_start=next_may_start(config))
