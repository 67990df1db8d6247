"""`AttentionMetadataBuilder`: turn a scheduler's host numbers into metadata at fixed addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vattn.backends.base import Backend
from vattn.errors import MetadataError
from vattn.metadata.advance import DecodeRun, advanced, write_advance
from vattn.metadata.attention_metadata import AttentionMetadata, CaptureKey, refuse_contradiction, refuse_overflow
from vattn.metadata.builder_base import BuilderBase
from vattn.metadata.cascade import read_shared_prefix
from vattn.metadata.cross_attention import read_cross_step
from vattn.metadata.dcp import check_dcp_step, step_facts, telling_others
from vattn.metadata.fast_prefill import read_num_logits
from vattn.metadata.halves import HostLengths
from vattn.metadata.inputs import Lengths, Masks, Tables, read_per_token, read_step
from vattn.metadata.state_slots import read_state_slots
from vattn.metadata.step import Step
from vattn.metadata.whole_keys import find_whole_keys, gathers_keys


class AttentionMetadataBuilder(BuilderBase):
    """Make `AttentionMetadata` in buffers at fixed addresses.

    Args:
        max_num_reqs, max_num_tokens, max_seq_len: capacity of one step; the block table has
            `ceil(max_seq_len / block_size)` columns.
        block_size: tokens per cache block; default: that of `layers`, 16 without any.
        device: where the metadata lives; default: that of the caches of `layers`, else the CPU.
        layers: a model, attention layers, modules that contain some, or configs. Their backends get a schedule
            (`plans`) once a step.
        num_blocks: blocks of the cache, to refuse block ids and slots beyond it; default: that of `layers`, else
            untested.
        decode_threshold: longest query that still counts as a decode.
        max_mm_ranges: multimodal ranges per request.
        max_trees, max_tree_size: tree biases of one step, and the side of the largest.
        max_encoder_len: encoder states of one request, for cross attention; the table of their blocks has
            `ceil(max_encoder_len / block_size)` columns.
        max_encoder_tokens: encoder states that one step writes; default `max_num_reqs * max_encoder_len`.
        context_parallel: the ranks that share the cache. Lengths and positions stay those of whole requests, and every
            rank gets the same arguments. A block holds `block_size` tokens of each rank, so that a table has
            `ceil(tokens of the first rank / block_size)` entries, equal on all ranks; slots are this rank's.

    Attributes:
        backends: names of the backends that `layers` run on.

    Raises:
        ConfigError: a capacity below one, `layers` that are none, or layers of another block size.
        DeviceError: no device of this machine, or meta.
        CacheNotBoundError: a layer without a KV cache, so that its backend is not known yet.

    A step has at least 2 (padded) requests, so that a batch of one does not compile a graph of its own. Each `build`
    writes into the same buffers, so that metadata of earlier steps is refused from then on, by contexts, layers and
    runners. On CUDA it enqueues copies on the current stream and does not wait for the device. Where `layers` holds
    `StaticSinkAttention`, it also writes sinks with changed weights into their caches, and refuses blocks that
    are reserved for them.

    Example:
        >>> import vattn
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=4, max_num_tokens=8, max_seq_len=64, block_size=16)
        >>> step = builder.build(query_lens=[3, 1], seq_lens=[3, 18], block_tables=[[1], [2, 5]])
        >>> step.slot_mapping.tolist(), step.positions.tolist()
        ([16, 17, 18, 81], [0, 1, 2, 17])
        >>> step.num_prefills, step.num_decodes
        (1, 1)
    """

    def build(
        self,
        query_lens: Lengths,
        seq_lens: Lengths | None = None,
        block_tables: Tables | None = None,
        *,
        slot_mapping: Lengths | None = None,
        positions: Lengths | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        causal: bool | Lengths = True,
        tree_bias: Tensor | None = None,
        tree_id: Lengths | None = None,
        mm_ranges: Sequence[Sequence[tuple[int, int]]] | Tensor | None = None,
        encoder_lens: Lengths | None = None,
        new_encoder: Lengths | None = None,
        cross_block_tables: Tables | None = None,
        num_encoder_tokens_padded: int | None = None,
        num_logits: Lengths | None = None,
        logits_indices: Lengths | None = None,
        num_logits_padded: int | None = None,
        shared_prefix_len: int | None = None,
        state_slots: Lengths | None = None,
        capture_key: CaptureKey | None = None,
    ) -> AttentionMetadata:
        """Check a step, copy it into the buffers and return views of them.

        Args:
            query_lens, seq_lens: new, and cached plus new, tokens of each request. Host values, as all arguments.
                `seq_lens=None`: nothing is cached.
            block_tables: block ids of each request, in order: lists, or a NumPy array or CPU tensor `[B, W]`, which is
                read faster. Rows may be longer than needed. Requests may share blocks that they read; one that the
                step writes into is one entry of one request, or filled by the request that stores a prefix after
                which others begin. Entries before the windows of all `layers` do not count; without `layers`, put 0
                for blocks that were freed there: `BlockPool` hands out no block 0, which is a block as any other here.
                `None`: a step of layers without a cache (`EncoderOnlyAttention`); its table has no columns, and layers
                with a cache refuse it.
            slot_mapping: one slot per token; default from the tables: token i of a request goes to position
                `seq_len - query_len + i`.
            positions: one position per token for the model, such as by depth in a tree of drafts; default those of the
                slots. Masks, windows and ALiBi count places in the cache whatever is given here.
            num_reqs_padded, num_tokens_padded: pad to these sizes; default no padding beyond 2 requests.
            causal: `True` (each layer's own rule), `False` (bidirectional), or one flag per request.
            tree_bias, tree_id: fp32 `[trees, n, n]`, and per request which one it uses, -1 for none. Both or neither.
            mm_ranges: per request its `(start, end)` ranges of absolute positions, both inclusive.
            encoder_lens: encoder states of each request, cached or new, 0 for none; in every step of a model with
                `CrossAttention`.
            new_encoder: one flag per request: its encoder ran in this step, and its states are among the rows that the
                cross layers get, one request after the other. Default: none ran.
            cross_block_tables: block ids of each request's encoder states.
            num_encoder_tokens_padded: pad the rows of encoder states to this many.
            num_logits: how many of its last tokens each request keeps in layers with `fast_prefill`. A step in which
                every request keeps all is like one without.
            logits_indices: instead of `num_logits`, the rows that are kept, in order.
            num_logits_padded: pad the kept rows to this many, also in a step that keeps all.
            shared_prefix_len: cached tokens that all requests have in the same blocks, whole blocks of them: layers
                attend them once for all rows, unless the step has more new tokens than these. Results equal those of
                `None` but for rounding. A number, 0 too, and `None` need separate CUDA graphs.
            state_slots: the slot of each request in a cache of states, for models with layers that keep a state; 1 or
                more, and its own from its first to its last token. Every request then has a new token.
            capture_key: the key of a CUDA graph that will replay this step: the step is padded to its sizes.

        Raises:
            MetadataError: values that contradict each other, the capacity or the cache, or a block that the step writes
                and another entry uses; no buffer was touched.
            GraphContractError: the step contradicts `capture_key`; no buffer was touched.
            CacheError: a layer was bound to another cache since the builder was made; no buffer was touched.
            RankError: the other ranks build another step, or none; no buffer was touched.
        """
        number, parallel = next(self._builds), self.context_parallel
        with contextlib.nullcontext() if parallel is None else telling_others(parallel):
            self._lineage.check_caches()
            masks = causal, tree_bias, tree_id, mm_ranges
            step = self._read(query_lens, seq_lens, block_tables, slot_mapping, masks)
            num_reqs, num_tokens = step.query_lens.shape[0], step.num_tokens
            if parallel is not None:
                check_dcp_step(step, slot_mapping, encoder_lens, shared_prefix_len)
            if positions is not None:
                step.positions = read_per_token("positions", positions, num_tokens, 0)
            step.given_places = positions is not None or slot_mapping is not None
            if encoder_lens is not None or new_encoder is not None or cross_block_tables is not None:
                step.cross = read_cross_step(self._limits, num_reqs, encoder_lens, new_encoder, cross_block_tables)
            if num_logits is not None or logits_indices is not None:
                step.num_logits = read_num_logits(step.query_lens, num_logits, logits_indices)
            if shared_prefix_len is not None:
                step.shared_prefix_len = read_shared_prefix(step, shared_prefix_len, self.block_size)
            step.state_slots = read_state_slots(step, state_slots, self._num_state_slots)
            if capture_key is not None:
                captured = _sizes_of(capture_key)
                num_encoder_tokens_padded = captured.get("cross_slot_mapping", num_encoder_tokens_padded)
                num_logits_padded = captured.get("logits_indices", num_logits_padded)
                num_reqs_padded = capture_key.num_reqs if num_reqs_padded is None else num_reqs_padded
                num_tokens_padded = capture_key.num_tokens if num_tokens_padded is None else num_tokens_padded
                refuse_overflow(step, capture_key)
            padded_reqs, padded_tokens = self._padded(num_reqs, num_tokens, num_reqs_padded, num_tokens_padded)
            metadata = self._buffers.describe(step, padded_reqs, padded_tokens, self.decode_threshold)
            metadata.block_size, metadata.dcp_shard = self.block_size, self._limits.dcp_shard
            if not step.packed:
                metadata.plans = self._plans.views(padded_tokens, padded_reqs)
            self._derived.describe(metadata, step, num_encoder_tokens_padded, num_logits_padded)
            sizes = num_reqs_padded, num_tokens_padded
            # Steps of given sizes are for graphs, and the numbers of these keys vary.
            if self._gathers_keys and sizes == (None, None) and gathers_keys(step):
                shard = self._limits.dcp_shard
                assert shard is not None
                keys = find_whole_keys(step, shard, self.block_size, padded_reqs, self.device)
                metadata.whole_blocks, metadata.whole_rows, metadata.whole_table = keys
            if capture_key is not None:
                refuse_contradiction(capture_key, metadata.capture_key())
        if parallel is not None:
            parallel.agree(step_facts(step, metadata, number))
        for layer in self._sink_layers:
            layer.write_changed_sinks()
        self._built, metadata._built = None, self._lineage.begin()
        self._write(step, padded_reqs, padded_tokens)
        self._plans.fill(metadata, self._derived.write(metadata), step)
        # A graph replays its step: Dynamo, which takes a quarter of this time, sees none.
        if capture_key is None or self.device.type != "cuda":
            metadata.mark_dynamic()
        # What the caller passed may change afterwards.
        step.query_lens, step.seq_lens = step.query_lens.clone(), step.seq_lens.clone()
        metadata._lengths = HostLengths(step.query_lens, step.seq_lens, self.decode_threshold)
        self._built = metadata, step
        return metadata

    def _read(self, query_lens: Any, seq_lens: Any, block_tables: Any, slot_mapping: Any, masks: Masks) -> Step:
        """Return what `read_step` makes of the arguments of `build`."""
        return read_step(self._limits, self._conflicts, query_lens, seq_lens, block_tables, slot_mapping, masks)

    def advance(self, metadata: AttentionMetadata, new_blocks: Sequence[Any] | Tensor) -> AttentionMetadata:
        """Return the step that follows a step of decodes: each of its requests gets one new token more.

        The metadata is what `build` would return for the same requests with lengths one larger; only what differs is
        checked, written and copied, so that it takes a fraction of the time.

        Args:
            metadata: what `build` or `advance` returned last, with one new token for each request. Its buffers are
                rewritten, so it is an older step from then on.
            new_blocks: ids of the blocks that begin with a new token, in the order of their requests: one wherever
                `seq_lens` of the step before is a multiple of the block size, whether or not the table that `build`
                got had an entry to spare. A list, or 1-D integers of numpy or torch on the host.

        Raises:
            MetadataError: another step than the last one, or one with more than lengths, tables and encoder states of
                earlier steps; other blocks than those that are needed, or one that a request of the step reads; or a
                request that becomes too long. No buffer was touched.

        Example:
            >>> import vattn
            >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=4, max_num_tokens=8, max_seq_len=64)
            >>> step = builder.build(query_lens=[1, 1], seq_lens=[16, 20], block_tables=[[1], [2, 5]])
            >>> step = builder.advance(step, new_blocks=[7])
            >>> step.seq_lens.tolist(), step.slot_mapping.tolist()
            ([17, 21], [112, 84])
        """
        if self._built is None or self._built[0] is not metadata:
            raise self._not_the_last(metadata)
        self._lineage.check_caches()
        before, run = self._built
        if isinstance(run, Step):
            run = DecodeRun(self._limits, run, self._host_table[: run.table.shape[0]], self._conflicts)
        step = run.next(new_blocks)
        for layer in self._sink_layers:
            layer.write_changed_sinks()
        self._built, built = None, self._lineage.begin()
        write_advance(step, self._staging.next(), self._buffers)
        self._staging.copied()
        # It shares the tensors of the previous step, which Dynamo knows as dynamic.
        after = advanced(before, built)
        after._lengths = HostLengths(step.query_lens, step.seq_lens, self.decode_threshold)
        self._plans.fill(after, after.seq_lens, step)
        run.commit(step)
        self._built = after, run
        return after

    def _not_the_last(self, metadata: object) -> MetadataError:
        """Return the error of `advance` after something else than the newest step of this builder."""
        built = getattr(metadata, "_built", None)
        what = f"metadata of type {type(metadata).__name__} that is not this builder's newest step itself"
        if built is not None and built.rewritten is not None:
            what = built.rewritten
        elif built is not None and built.lineage is self._lineage and self._built is None:
            what = "a step of build_from_tensors(), without lengths on the host"
        return MetadataError(
            f"advance() after {what}",
            "the metadata itself that build() or advance() of this builder returned last",
            "pass that, or call build() for this step",
        )

    def _write(self, step: Step, num_reqs: int, num_tokens: int) -> None:
        """Fill a staging set and enqueue its copies; on CPU the staging set is the buffers themselves."""
        staging = self._staging.next()
        staging.fill(step, num_reqs, num_tokens)
        # `advance` writes its entries elsewhere, so that this table stays until the next build.
        self._host_table = staging.block_table
        if staging is not self._buffers:
            for source, target in staging.pieces(self._buffers, step, num_reqs, num_tokens):
                target.copy_(source, non_blocking=True)
        self._staging.copied()


def _sizes_of(capture_key: Any) -> dict[str, int]:
    """Return the sizes of the optional tensors of a captured step."""
    if not isinstance(capture_key, CaptureKey):
        raise MetadataError(
            f"capture_key={capture_key!r:.60}", "what metadata.capture_key() returned", "pass that, or None"
        )
    return {name: shape[0] for name, shape in capture_key.optional}


Backend.builder = AttentionMetadataBuilder
