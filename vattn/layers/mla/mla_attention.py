"""`MLAAttention`: multi-head latent attention over a paged cache of latents, as DeepSeek's models have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.backends.mla.registry import mla_backends
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape
from vattn.config.arguments import read_count
from vattn.errors import ConfigError
from vattn.layers.base.checks import check_bound, check_inputs, check_no_gradients
from vattn.layers.base.dcp import all_heads, attend_parts, check_step_ranks, partial_arguments, whole_arguments
from vattn.layers.base.step import LayerResult, split_heads
from vattn.layers.mla.arguments import latent_rows, listed_positions, plain_step
from vattn.layers.mla.cache_binding import BoundLatents
from vattn.layers.mla.kv_b_proj import weights_version
from vattn.layers.mla.rotary import LatentRotary, check_table, rope_string
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.whole_keys import KEYS_PER_ROW
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.checks_mla import check_mla_attention, check_mla_kv_cache_update
from vattn.ops.fusion_notes import noted
from vattn.ops.index_dtypes import as_int32, as_int64


class MLAAttention(BoundLatents):
    """Attend new tokens to everything their requests have seen, through a paged cache of one latent row per token.

    Args:
        num_heads, scale: query heads, factor of the scores.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: columns of a query head without and with rotation, and of a
            value: P, R and V.
        q_lora_rank: rank of the query's own projection, `None` for none; the layer gets finished queries and only
            shows it.
        kv_lora_rank: columns of the latent, L.
        kv_b_proj: linear module from L to `num_heads * (P + V)` columns: `nn.Linear`, one with e4m3 weights and scales,
            or any other; it stays the caller's, and only `process_weights_after_loading` reads it.
        cache_config: block size and cache dtype (`vattn.quantization.mla_formats.MLA_FORMATS`); default
        `CacheConfig()`.
        quant_config: `k_scale` of an FP8 cache, unless `CacheConfig(calculate_kv_scales=True)` makes it of the first
            tokens' latents and rotated keys; `query_format` with `q_scale`, which quantise queries once they are
            absorbed; output quantisation.
        prefix: unique name of the layer in its model.
        attn_backend: name of a backend, never replaced by another; default: the first that accepts.
        use_sparse: rows see the positions alone that `indexer` lists.
        indexer: with `use_sparse`: an object with `topk_indices`, int32 `[max_tokens, K]`, filled before the layer
            runs: positions in its request that each row sees, -1 for none.
        decode_threshold: longest query that is absorbed into the latent space.
        workspace_tokens: how many tokens' keys and values are expanded at a time; default: as the op chooses.
        context_parallel: the ranks that share the cache; the layer then takes its rank's part of the `num_heads` query
            heads, while `kv_b_proj` has all of them, or on every rank its own.

    Raises:
        ConfigError, ScaleError, ShapeError, DtypeError, UnknownOptionError, UnsupportedRequestError: at construction
            where the values alone decide, at `bind_kv_cache` where dtype, device or weights decide.

    State: the prepared weights are a buffer outside of the state dict, written in place. The cache is one too; moving
    the layer to another device drops it.

    Compile: one graph for equal layers; lengths are tensors and never recompile.

    Example:
        >>> import torch, vattn
        >>> kv_b_proj = torch.nn.Linear(32, 4 * (16 + 16), bias=False)
        >>> layer = vattn.MLAAttention(4, 24**-0.5, 16, 8, 16, None, 32, kv_b_proj)
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, layers=layer)
        >>> step = builder.build(query_lens=[3], seq_lens=[3], block_tables=[[1]])
        >>> with torch.no_grad():
        ...     out = layer(torch.randn(3, 4, 24), torch.randn(3, 32), torch.randn(3, 1, 8), metadata=step)
        >>> out.shape
        torch.Size([3, 64])
    """

    def forward(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        output_shape: torch.Size | Sequence[int] | None = None,
        *,
        metadata: AttentionMetadata | None = None,
        rotary: LatentRotary | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write the new latents and rotated keys to the cache and attend.

        Args:
            q: `[T, num_heads, P + R]` or flattened; the last R columns of a head are rotated. Padding rows may hold
                anything.
            kv_c_normed: `[T, L]`, the latents after their norm.
            k_pe: `[T, 1, R]` or `[T, R]`, rotated.
            output_shape: shape of the result; default `[T, num_heads * V]`.
            metadata: this step's; default the one of `vattn.forward_context`. Without any this is a profiling call: the
                result is zero and no cache is needed.
            rotary: norm and rotation that the store itself does, in one launch: pass `kv_c_normed` before its norm
                and `k_pe` before its rotation. Queries are rotated by the caller in any case.

        Returns:
            The output in the query's dtype (or the output format's container); rows of padding are zero. With an output
            format that computes scales, `(output, block_scale)`.

        Raises:
            CacheNotBoundError: metadata but no cache.
            ShapeError, DtypeError: tensors that contradict the layer.
        """
        metadata = plain_step(self, metadata)
        rope = "" if rotary is None else rope_string(rotary, self.prefix)
        parallel = self.context_parallel
        heads = self.num_heads if parallel is None else self.num_heads // parallel.world_size
        q = split_heads("q", q, heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        kv_c_normed, k_pe = latent_rows(kv_c_normed, k_pe, self)
        result = LayerResult.empty(q, self.v_head_dim, self.quant_config.output_format, output_shape)
        if metadata is None:
            if not torch.compiler.is_compiling():
                # A profiling run that measures memory sees what a step may take.
                q.new_empty(self.scratch_bytes(q.shape[0], q.dtype, q.device), dtype=torch.uint8)
            return result.zeroed()
        check_bound(self, "q", q)
        if self.kv_b_weight is None:
            raise ConfigError(
                f"kv_b_proj of layer {self.prefix!r} had no values, or wrong ones, when the cache was bound",
                "weights that are read",
                "load them, then call layer.process_weights_after_loading()",
            )
        slots, cache, config = as_int64(metadata.slot_mapping), self.kv_cache, self._op_config
        assert cache is not None
        topk = listed_positions(self, q.shape[0])
        plan = metadata.plans.get(self._plan_key)
        args = MLAAttentionArgs(
            q, cache, as_int32(metadata.query_start_loc), as_int32(metadata.seq_lens), as_int32(metadata.block_table),
            self.kv_b_weight, None,
            result.output, result.block_scale, None, self.output_scale, self.q_scale, self.k_scale, topk,
            metadata.local_seq_lens, [] if plan is None else [plan], self.workspace, noted(config),
        )  # fmt: skip
        update = MLACacheUpdateArgs(kv_c_normed, k_pe, cache, slots, self.k_scale, config)
        if not torch.compiler.is_compiling():
            check_step_ranks(self.prefix, parallel, metadata)
            if rotary is not None:
                check_table(rotary, metadata, self.prefix)
            self._check_step(update, args, metadata)
        if self.scales_ready is not None:
            if rotary is not None:
                raise ConfigError(
                    f"rotary= in layer {self.prefix!r}, which calculates its scale",
                    "latents after their norm and rotated keys: the scale is made of them",
                    "norm and rotate before the layer, or give k_scale",
                )
            self._calculate_scale(update)
        if rotary is None:
            torch.ops.vattn.mla_kv_cache_update(*update)
        else:
            torch.ops.vattn.mla_rope_kv_cache_update(
                kv_c_normed, k_pe, rotary.cos, rotary.sin, rotary.positions, cache, slots, rotary.norm_weight,
                self.k_scale, rope, config,
            )  # fmt: skip
        if metadata.whole_blocks is not None and self._own_heads is not None:
            assert parallel is not None
            encoded = noted(self._own_op_config)
            torch.ops.vattn.mla_attention(*whole_arguments(args, metadata, self._own_heads, encoded, parallel))
        elif parallel is not None:
            attend_parts(torch.ops.vattn.mla_attention, args, q, result, self, self.v_head_dim)
        else:
            torch.ops.vattn.mla_attention(*args)
        return result.returned()

    def scratch_bytes(
        self, num_tokens: int, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> int:
        """Return how many bytes a step of some tokens takes apart from its result, workspace included.

        They are freed after each layer. Partial results of requests that are split are not counted. Under context
        parallelism it is enough for the longest requests of which ranks gather the latents, in whole blocks.

        Args:
            num_tokens: tokens of the step.
            dtype, device: of the model, for a layer without a cache.

        Raises:
            ConfigError: neither a cache nor a dtype, or a number of tokens that is none.
            UnsupportedRequestError: no backend runs the layer.
        """
        num_tokens = read_count("num_tokens", num_tokens, 0, "pass the tokens of a step")
        config: Any = self.config
        if config is None:
            if dtype is None:
                raise ConfigError(
                    f"scratch_bytes of layer {self.prefix!r} without a cache", "a dtype and a device", "pass both"
                )
            config = self.resolve_config(dtype, device)
        parallel, backend = self.context_parallel, mla_backends()[config.backend]
        own = backend.scratch_bytes(config, num_tokens, self.workspace_tokens)
        if parallel is None:
            return own
        heads = num_tokens * config.num_heads * (config.qk_head_dim + config.v_head_dim)
        all_heads = own + heads * getattr(torch, config.dtype).itemsize
        if not self._may_gather_latents():
            return all_heads
        world = parallel.world_size
        stored = math.prod(mla_cache_shape(config, 1)) * mla_cache_dtype(config).itemsize // config.block_size
        keys = KEYS_PER_ROW * num_tokens
        if self.kv_cache is not None:
            keys = min(keys, world * self.kv_cache.shape[0] * config.block_size)
        # What this rank sends, what all ranks have sent, and the same in the order of tokens.
        latents = -(-keys * (2 * world + 1) // world) * stored
        own_heads = config.replace(num_heads=config.num_heads // world)
        return max(all_heads, latents + backend.scratch_bytes(own_heads, num_tokens, self.workspace_tokens))

    def _check_step(self, update: MLACacheUpdateArgs, args: MLAAttentionArgs, metadata: AttentionMetadata) -> None:
        """Refuse what either op would refuse, before the first one writes. Compiled code leaves it to the ops."""
        q = args.query
        inputs = {"q": q, "kv_c_normed": update.kv_c, "k_pe": update.k_pe}
        check_inputs(self, inputs, metadata.slot_mapping, metadata.block_size)
        check_no_gradients(self, inputs.values())
        if self._weights_read != weights_version(self._kv_b_proj[0]):
            raise ConfigError(
                f"the weights of layer {self.prefix!r}'s kv_b_proj have changed since the layer read them",
                "the weights that it has read",
                "call layer.process_weights_after_loading()",
            )
        check_mla_kv_cache_update(update)
        if self.context_parallel is not None:
            args = partial_arguments(args, all_heads(q, self.context_parallel), self.v_head_dim, q.dtype)
        check_mla_attention(args)
