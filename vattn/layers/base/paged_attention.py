"""`CachedAttention`: the forward pass of every attention layer with a paged KV cache, whatever it attends to.

A subclass says which tensors of a step it reads (`_layer_step`) and when it takes keys and values (`_check_given`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from vattn.errors import CacheError, MetadataError, ShapeError, UnsupportedRequestError, VattnError
from vattn.layers.base.cache_binding import BoundCache
from vattn.layers.base.checks import check_bound, check_inputs, check_no_gradients, given_step
from vattn.layers.base.dcp import all_heads, attend_parts, check_step_ranks, partial_arguments
from vattn.layers.base.own_heads import attend_own_heads
from vattn.layers.base.step import CacheViews, LayerResult, LayerStep, given, part_of, split_heads
from vattn.layers.base.two_parts import Part, attend_in_parts, cascade_parts, step_parts, suffix_config
from vattn.layers.base.varlen import attend_without_cache
from vattn.layers.kv_transfer_utils import save_kv_layer, wait_for_layer_load
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.hybrid import GroupedMetadata
from vattn.metadata.lineage import called
from vattn.ops import checks
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs
from vattn.ops.fusion_notes import noted
from vattn.quantization.codecs import encode_query


class _OwnTensors(SimpleNamespace):
    """Parameters and buffers of a layer; the layer gives what is kept elsewhere, as by a parametrization."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["layer"], name)


class CachedAttention(BoundCache):
    """Base of the layers that read keys and values from a paged cache."""

    _update_op = ""
    """Encoded config of the op that writes keys; empty: the attention op's."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output_shape: torch.Size | Sequence[int] | None = None,
        *,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write the new keys and values to the cache and attend.

        Args:
            query: `[T, num_heads * head_size]` or `[T, num_heads, head_size]`; padding rows may hold anything.
            key, value: same with KV heads; both `None` for a layer that shares a cache.
            output_shape: shape of the result; default `[T, num_heads * head_size_v]`.
            metadata: this step's; default the one of `vattn.forward_context`. Without any this is a profiling call: the
                result is zero and no cache is needed. `Attention` needs none either in steps without block tables.

        Returns:
            The output in the query's dtype (or the output format's container); rows of padding are zero. With an output
            format that computes scales, `(output, block_scale)`.

        Raises:
            CacheNotBoundError: metadata but no cache.
            ShapeError, DtypeError: tensors that contradict the layer.
        """
        metadata = self._own_part(metadata)
        parallel = self.context_parallel
        heads = self.num_heads if parallel is None else self.num_heads // parallel.world_size
        query = split_heads("query", query, heads, self.head_size)
        self._check_given(key, value, metadata)
        result = LayerResult.empty(query, self.head_size_v, self.quant_config.output_format, output_shape)
        if metadata is None:
            return result.zeroed()
        if self._ops_without_cache and self.config is None and not metadata.block_table.shape[-1]:
            assert key is not None and value is not None  # `_check_given`
            attend_without_cache(self, self._ops_without_cache, (query, key, value), metadata, result)
            return result.returned()
        compiling = torch.compiler.is_compiling()
        # A module looks for a tensor in three dictionaries, and an eager step reads ten of them.
        own = self if compiling else _OwnTensors(layer=self, **self._parameters, **self._buffers)
        check_bound(self, "query", query)
        step = self._layer_step(metadata)
        if self.fast_prefill:
            step = step.kept(metadata)
        op_config = self._op_config(step)
        cache = own.key_cache, own.value_cache
        if cache[0] is None:  # A storage that was set by hand.
            cache = self.cache_views()
        args, update = step.arguments(own, cast(CacheViews, cache), query, result, noted(op_config)), None
        if key is not None and value is not None:
            key = split_heads("key", key, self.num_kv_heads, self.head_size)
            value = split_heads("value", value, self.num_kv_heads, self.head_size_v)
            update = step.update(args, key, value, self._update_op or op_config)
        parts = self._parts(args, step, key, value)
        if compiling:
            self._run(query, step, update, parts, result, args, own.kv_transfer_token)
        else:
            check_step_ranks(self.prefix, parallel, metadata)
            try:
                self._check_step(query, key, value, step, update, parts, own.kv_transfer_token)
                # Gradients are refused by now: the ops need not look for them again.
                with torch._C._AutoDispatchBelowAutograd():
                    self._run(query, step, update, parts, result, args, own.kv_transfer_token)
            except BaseException as error:
                checks.forget()
                if isinstance(error, VattnError) and called(self) not in error.got:
                    error.args = (f"{called(self)}: {error.got}", *error.args[1:])
                raise
        return result.returned()

    def _run(
        self,
        query: Tensor,
        step: LayerStep,
        update: CacheUpdateArgs | None,
        parts: tuple[Part, ...],
        result: LayerResult,
        args: AttentionArgs,
        transfer: Tensor | None,
    ) -> None:
        """Write the keys and values of the step, then attend."""
        if transfer is not None:
            wait_for_layer_load(args.key_cache, args.value_cache)
        if update is not None:
            self._write_cache(query, step.query_slots, update)
        if self._own_heads is None or not attend_own_heads(self._own_heads, args, step, self):
            self._attend(query, parts, result)
        if transfer is not None:
            save_kv_layer(args.key_cache, args.value_cache, transfer)

    def _parts(
        self, args: AttentionArgs, step: LayerStep, key: Tensor | None, value: Tensor | None
    ) -> tuple[Part, ...]:
        """Return the calls of attention ops that share the work: one, or two with results that are merged."""
        if step.prefix is not None:
            return cascade_parts(args, step.prefix, self._cascade_ops)
        if self._step_ops and key is not None and value is not None:
            return step_parts(args, key, value, self._step_ops[step.kind()])
        return (args,)

    def _attend(self, query: Tensor, parts: tuple[Part, ...], result: LayerResult) -> None:
        """Run the attention ops; with context parallelism `query` has this rank's heads."""
        if self.context_parallel is not None:
            args, op = cast(AttentionArgs, parts[0]), torch.ops.vattn.attention
            attend_parts(op, args, query, result, self, self.head_size_v, sinks=self.sinks, encode=self._encode)
            return
        if parts[0].q_scale is not None:
            encoded = self._encode(query)
            parts = tuple([part._replace(query=encoded) for part in parts])
        if len(parts) == 1:
            torch.ops.vattn.attention(*parts[0])
        else:
            attend_in_parts(parts, result, self.quant_config.output_format, self.output_scale)

    def _encode(self, query: Tensor) -> Tensor:
        return query if self.q_scale is None else encode_query(query, self.q_scale, self.num_kv_heads)

    def _own_part(self, metadata: AttentionMetadata | None) -> AttentionMetadata | None:
        """Return the metadata to use: that of the call or of the forward context, or its part for the layer's group."""
        if self.kv_cache_group is not None:
            metadata = part_of(self.kv_cache_group, metadata)
        metadata = given_step(self, metadata)
        if isinstance(metadata, GroupedMetadata):
            raise MetadataError(
                f"metadata with groups in layer {self.prefix!r}, with a cache without groups",
                "metadata of AttentionMetadataBuilder",
                "allocate the cache with hybrid=True, or build steps without groups",
            )
        return metadata

    def _check_given(self, key: Tensor | None, value: Tensor | None, metadata: AttentionMetadata | None) -> None:
        """Refuse a key or value that is missing or too many."""
        if (key is None) != (value is None) or (key is None) != (self.kv_sharing_target_layer_name is not None):
            raise ShapeError(
                f"layer {self.prefix!r} got key {given(key)} and value {given(value)}",
                "both for a layer with its own cache, neither for one that shares a cache",
                "pass key and value, or None for both",
            )

    def _layer_step(self, metadata: AttentionMetadata) -> LayerStep:
        """Return what this layer reads of a step."""
        if metadata.block_table.shape[-1] == 0:
            raise MetadataError(
                f"metadata without block tables in layer {self.prefix!r}, which has a KV cache",
                "a table with a column per block",
                "pass block_tables to builder.build",
            )
        return LayerStep.of(metadata, self._plan_key)

    def _op_config(self, step: LayerStep) -> str:
        if step.prefix is not None:
            return suffix_config(self._cascade_ops, step, self.prefix)
        variant = step.kind()
        if variant not in self._ops:
            raise UnsupportedRequestError(
                f"layer {self.prefix!r} cannot run this step: causality {variant[0]}, tree bias {variant[1]}, "
                f"multimodal ranges {variant[2]}; {self._refused[variant]}",
                "what its backend accepts",
                "build the step without what the reason names, or choose another attn_backend",
            )
        return self._ops[variant]

    def _check_step(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        step: LayerStep,
        update: CacheUpdateArgs | None,
        parts: tuple[Part, ...],
        transfer: Tensor | None,
    ) -> None:
        """Refuse what any op but the first would refuse, before that one writes. Eager calls only."""
        for target in self._target:
            if target.kv_cache is not self.kv_cache or target.value_cache is not self.value_cache:
                raise CacheError(
                    f"the KV sharing target of layer {self.prefix!r} has another cache by now",
                    "the cache that both were bound to",
                    "bind the sharing layer again, or use vattn.allocate_kv_cache for the whole model",
                )
        inputs = {"query": query, "key": key, "value": value}
        fix = "pass vattn.kept_rows of the queries, or of what they are projected from" if self.fast_prefill else ""
        check_inputs(self, inputs, step.query_slots, step.block_size, fix)
        arguments = (x for args in ((query, key, value, *self._learned()), update or (), *parts) for x in args)
        check_no_gradients(self, (x for x in arguments if isinstance(x, Tensor)))
        changes_first = self.calculate_kv_scales or self.observing or transfer is not None
        if update is not None and changes_first:
            # Scales, counts and awaited loads change before the update, which checks its tensors before it writes.
            checks.check_kv_cache_update(update)
        if self.context_parallel is not None:
            gathered = all_heads(query, self.context_parallel)
            parts = (partial_arguments(cast(AttentionArgs, parts[0]), gathered, self.head_size_v, query.dtype),)
        for part in parts:
            if part.q_scale is not None:
                # The scale may be calculated as keys are written, so the query is not encoded yet.
                part = part._replace(query=torch.empty_like(part.query, dtype=torch.float8_e4m3fn))
            if isinstance(part, AttentionArgs):
                checks.check_attention.ahead(part)
            else:
                checks.check_varlen_attention.ahead(part)

    def _learned(self) -> tuple[Tensor | None, ...]:
        """Return tensors of the layer that may want a gradient and that are no arguments of its ops."""
        return ()
