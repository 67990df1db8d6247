"""`LayerStep`: what one attention layer reads of a step, and the arguments of the op that it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vattn.cache.groups import CacheGroup
from vattn.errors import MetadataError, ShapeError, StrideError
from vattn.layers.base.arguments import StepKind
from vattn.metadata.attention_metadata import AttentionMetadata, host_plan_key
from vattn.metadata.forward_context import current_step
from vattn.metadata.hybrid import GroupedMetadata
from vattn.metadata.whole_keys import WholeKeys, whole_keys_of
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.index_dtypes import as_int32, as_int64
from vattn.quantization.formats import OUTPUT_FORMATS

Args = TypeVar("Args", AttentionArgs, MLAAttentionArgs)

CacheViews = tuple[Tensor, Tensor | None]
"""`key_cache` and `value_cache` of the ops."""


def part_of(group: CacheGroup, metadata: AttentionMetadata | None) -> AttentionMetadata | None:
    """Return a group's part of a step: of `metadata`, or of the one in the forward context; `None` for neither.

    Raises:
        MetadataError: metadata without groups, or of another model's.
    """
    if metadata is not None:
        step = metadata.parts[group.index] if isinstance(metadata, GroupedMetadata) else None
    elif current_step() is None:
        return None
    else:
        step = group.step
    if step is None:
        raise MetadataError(
            f"metadata without a part for group {group.index} of {group.count}",
            "metadata of the model's own GroupedMetadataBuilder",
            "build steps with GroupedMetadataBuilder(..., layers=model)",
        )
    return step


class CascadeStep(NamedTuple):
    """The prefix that all requests share, as two requests: all rows of the step, and none.

    Attributes:
        start_loc, lens: int32 `[3]` and `[2]`.
        block_table: int32 `[2, W]`, the table of the step's first two requests.
    """

    start_loc: Tensor
    lens: Tensor
    block_table: Tensor


class LayerStep(NamedTuple):
    """A layer's own choice among the tensors of `AttentionMetadata`, which has their shapes.

    Attributes:
        query_slots: one entry per query row, negative for rows that are padding or not stored.
        key_slots: one slot per row of key and value; `None` where this step writes none.
        plan: the schedule of this kind of layer, if the builder made one, and its half on the CPU, for a backend that
            plans on the host.
        block_size: tokens per block that table and slots count in; 0: unknown.
        local_seq_lens: keys that this rank holds; `None` without context parallelism.
        prefix: what all requests share, if it is attended apart; lengths and table then exclude it.
        whole_keys: how ranks gather the keys of a step with prompts; `None` where they do not.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    query_slots: Tensor
    key_slots: Tensor | None
    plan: list[Tensor]
    causal: bool | Tensor = True
    tree_bias: Tensor | None = None
    tree_id: Tensor | None = None
    mm_ranges: Tensor | None = None
    block_size: int = 0
    local_seq_lens: Tensor | None = None
    prefix: CascadeStep | None = None
    whole_keys: WholeKeys | None = None

    @staticmethod
    def of(metadata: AttentionMetadata, plan_key: str) -> LayerStep:
        """Return the step as a layer of plain decoder attention reads it."""
        seq_lens, table, prefix = as_int32(metadata.seq_lens), as_int32(metadata.block_table), None
        slots, plans = as_int64(metadata.slot_mapping), metadata.plans
        if metadata.prefix_lens is not None:
            if metadata.prefix_start_loc is None or metadata.suffix_lens is None or metadata.suffix_block_table is None:
                raise MetadataError(
                    "metadata with prefix_lens and without other fields of a shared prefix",
                    "prefix_lens, prefix_start_loc, suffix_lens and suffix_block_table together, or none",
                    "pass shared_prefix_len= to builder.build",
                )
            prefix = CascadeStep(metadata.prefix_start_loc, metadata.prefix_lens, table[:2])
            seq_lens, table = metadata.suffix_lens, metadata.suffix_block_table
        return LayerStep(
            query_start_loc=as_int32(metadata.query_start_loc),
            seq_lens=seq_lens,
            block_table=table,
            query_slots=slots,
            key_slots=slots,
            causal=metadata.causal,
            tree_bias=metadata.tree_bias,
            tree_id=metadata.tree_id,
            mm_ranges=metadata.mm_ranges,
            plan=[plans[key] for key in (plan_key, host_plan_key(plan_key)) if key in plans] if plans else [],
            block_size=metadata.block_size,
            local_seq_lens=metadata.local_seq_lens,
            prefix=prefix,
            whole_keys=whole_keys_of(metadata),
        )

    def kept(self, metadata: AttentionMetadata) -> LayerStep:
        """Return the step of the rows that a layer with `fast_prefill` takes; itself where all are kept.

        Raises:
            MetadataError: the step has trees; their rows count from the first new token.
        """
        if metadata.logits_indices is None or metadata.logits_start_loc is None:
            return self
        if self.tree_bias is not None:
            raise MetadataError(
                "a step with tree_bias and num_logits", "one of them in layers with fast_prefill", "keep all tokens"
            )
        # Rows that are kept are a request's last ones, so lengths alone place them. The schedule is for other rows, and
        # one without elements counts as none.
        return self._replace(
            query_start_loc=metadata.logits_start_loc,
            query_slots=metadata.logits_indices,
            plan=[plan[:0] for plan in self.plan],
        )

    def kind(self) -> StepKind:
        """Return what this step changes about a layer's config.

        Raises:
            MetadataError: `causal` is neither a bool nor a tensor.
        """
        if isinstance(self.causal, Tensor):
            causality = "per_request"
        elif isinstance(self.causal, bool):
            causality = "causal" if self.causal else "bidirectional"
        else:
            raise MetadataError(
                f"metadata.causal={self.causal!r}", "a bool, or int32 flags [B]", "make it with builder.build"
            )
        return causality, self.tree_bias is not None, self.mm_ranges is not None

    def update(self, args: AttentionArgs, key: Tensor, value: Tensor, op_config: str) -> CacheUpdateArgs | None:
        """Return the arguments of `vattn::kv_cache_update` into the cache of `args`; `None`: no keys are written."""
        if self.key_slots is None:
            return None
        return CacheUpdateArgs(
            key, value, args.key_cache, args.value_cache, self.key_slots, args.k_scale, args.v_scale, op_config
        )

    def arguments(
        self, layer: Any, cache: CacheViews, query: Tensor, result: LayerResult, op_config: str
    ) -> AttentionArgs:
        """Return the arguments of `vattn::attention`; scales, slopes and sinks are the layer's own."""
        return AttentionArgs(
            query=query,
            key_cache=cache[0],
            value_cache=cache[1],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            output=result.output,
            output_block_scale=result.block_scale,
            lse=None,
            output_scale=layer.output_scale,
            q_scale=layer.q_scale,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            alibi_slopes=layer.alibi_slopes,
            sinks=layer.sinks,
            causal_flags=self.causal if isinstance(self.causal, Tensor) else None,
            bias=self.tree_bias,
            tree_id=self.tree_id if self.tree_bias is not None else None,
            mm_ranges=self.mm_ranges,
            local_seq_lens=self.local_seq_lens,
            plan=self.plan,
            workspace=None,
            config=op_config,
        )


def not_strided(name: str, tensor: Tensor) -> StrideError:
    """Return the error of a sparse or nested tensor."""
    kind = "nested" if tensor.is_nested else str(tensor.layout)
    return StrideError(f"{name} is {kind}", "a plain strided tensor", f"pass {name}.to_dense(), or its rows packed")


def split_heads(name: str, tensor: Tensor, heads: int, width: int) -> Tensor:
    """Return `[tokens, heads, width]` of a tensor that has two or three dimensions.

    Raises:
        ShapeError: other sizes, or no tensor.
        StrideError: a sparse or nested tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ShapeError(
            f"{name} is {None if tensor is None else type(tensor).__name__}",
            f"a tensor [tokens, {heads * width}] or [tokens, {heads}, {width}]",
            f"pass {name} as a tensor",
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise not_strided(name, tensor)
    shape = tensor.shape
    if len(shape) == 2 and shape[1] == heads * width:
        # No unflatten: where a default device is set, Dynamo breaks the graph at it.
        return tensor.view(shape[0], heads, width)
    if len(shape) == 3 and shape[1] == heads and shape[2] == width:
        return tensor
    raise ShapeError(
        f"{name} has shape {tuple(shape)}",
        f"[tokens, {heads * width}] or [tokens, {heads}, {width}]",
        "reshape it, or check the head counts of the layer",
    )


class LayerResult(NamedTuple):
    """What a layer returns, before its heads are joined, and the scales of the output format."""

    output: Tensor
    block_scale: Tensor | None
    shape: torch.Size | Sequence[int] | None

    @staticmethod
    def empty(
        query: Tensor, head_size_v: int, output_format: str, shape: torch.Size | Sequence[int] | None
    ) -> LayerResult:
        """Allocate the result of a query `[T, num_heads, head_size]`; refuse a shape that does not hold it."""
        output, block_scale = OUTPUT_FORMATS[output_format].allocate(query, head_size_v, query.dtype)
        if shape is not None:
            check_output_shape(output, shape)
        return LayerResult(output, block_scale, shape)

    def zeroed(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return zeros and scales of zero, the result of a profiling call."""
        self.output.zero_()
        if self.block_scale is not None:
            self.block_scale.zero_()
        return self.returned()

    def returned(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output in the requested shape, by default `[T, num_heads * head_size_v]`, and its scales."""
        output = self.output.flatten(1) if self.shape is None else self.output.view(*self.shape)
        return output if self.block_scale is None else (output, self.block_scale)


def with_own_result(args: Args, head_size_v: int, dtype: torch.dtype) -> Args:
    """Return an op's arguments with a result of its own `[T, heads, head_size_v]` of `dtype`, and with an LSE."""
    tokens, heads = args.query.shape[0], args.query.shape[1]
    return args._replace(
        output=args.query.new_empty((tokens, heads, head_size_v), dtype=dtype),
        output_block_scale=None,
        lse=args.query.new_empty((tokens, heads), dtype=torch.float32),
        output_scale=None,
    )


def check_output_shape(output: Tensor, shape: torch.Size | Sequence[int]) -> None:
    """Refuse an output shape that does not hold the output's elements."""
    if isinstance(shape, AttentionMetadata):
        raise ShapeError("metadata in the place of output_shape", "a shape, or None", "pass it as metadata=step")
    if not isinstance(shape, (tuple, list)):
        raise ShapeError(f"output_shape={shape!r:.60}", "a shape, or None", "leave it out for the layer's own")
    size: Any = 1
    for length in shape:
        size = size * length if isinstance(length, (int, torch.SymInt)) and length >= 0 else -1
        if size < 0:
            break
    if size != output.numel():
        raise ShapeError(
            f"output_shape={tuple(shape)} for {output.numel()} elements",
            f"a shape of {tuple(output.shape)}'s size, without -1",
            "leave it out for [tokens, num_heads * head_size_v]",
        )


def given(tensor: Tensor | None) -> str:
    """Return what a message says about an optional tensor."""
    return "None" if tensor is None else f"of shape {tuple(tensor.shape)}"
