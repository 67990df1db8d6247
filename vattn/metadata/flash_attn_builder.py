"""`FlashAttentionMetadataBuilder`: steps with prefills first, in buffers that a CUDA graph may keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vattn.backends.flash_attn.backend import FlashAttentionBackend
from vattn.config.arguments import read_count
from vattn.errors import ConfigError, MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata, CaptureKey
from vattn.metadata.block_conflicts import refuse_conflicts, used_entries
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.flash_attn import FlashAttentionMetadata
from vattn.metadata.halves import is_decode
from vattn.metadata.inputs import Lengths, Tables, check_count, over_capacity, read_integers, read_table


class FlashAttentionMetadataBuilder:
    """Make `FlashAttentionMetadata` in buffers at fixed addresses.

    Args:
        *capacity, **options: `max_num_reqs`, `max_num_tokens`, `max_seq_len`, `block_size`, `device`, `layers`,
            `num_blocks`, `decode_threshold`, `max_encoder_len` and `max_encoder_tokens`, as for
            `AttentionMetadataBuilder`; `block_size` a multiple of 16.

    Raises:
        ConfigError: another block size, or what `AttentionMetadataBuilder` refuses.

    Example:
        >>> import vattn
        >>> builder = vattn.FlashAttentionMetadataBuilder(max_num_reqs=4, max_num_tokens=8, max_seq_len=64)
        >>> step = builder.build(query_lens=[3, 1], seq_lens=[3, 18], block_tables=[[1], [2, 5]])
        >>> step.num_prefills, step.num_prefill_tokens, step.num_decode_tokens
        (1, 3, 1)
        >>> step.decode_metadata.query_start_loc.tolist(), step.decode_metadata.slot_mapping.tolist()
        ([0, 1], [81])
    """

    def __init__(self, *capacity: Any, **options: Any) -> None:
        # Named here, so that Python refuses ranks: this metadata has no place for them.
        self._inner = AttentionMetadataBuilder(*capacity, context_parallel=None, **options)
        size = self._inner.block_size
        if size % 16:
            got = f"block_size={size}: Block size must be a multiple of 16."
            raise ConfigError(got, "16, 32, ...", "use 16, in the CacheConfig of the layers too")
        with torch.inference_mode(False):
            reqs, device = self._inner.max_num_reqs, self._inner.device
            self._context_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
            self._seq_start_loc = torch.zeros(reqs + 1, dtype=torch.int32, device=device)
            self._encoder_start_loc = torch.zeros(reqs + 1, dtype=torch.int32, device=device)

    def build(
        self,
        query_lens: Lengths,
        seq_lens: Lengths,
        block_tables: Tables | None,
        *,
        batch_size: int | None = None,
        num_lookahead_slots: int = 0,
        encoder_lens: Lengths | None = None,
        new_encoder: Lengths | None = None,
        cross_block_tables: Tables | None = None,
        num_encoder_tokens_padded: int | None = None,
        capture_key: CaptureKey | None = None,
    ) -> FlashAttentionMetadata:
        """Check a step, copy it into the buffers and return views of them, as `AttentionMetadataBuilder.build` does.

        Args:
            query_lens, seq_lens: new, and cached plus new, tokens of each request: prefills first, then decodes.
            block_tables: block ids of each request; `None`: a step of whole texts without a cache.
            batch_size: requests that a CUDA graph was captured for. The step is padded to them, with one row for each
                request that is missing, and has `use_cuda_graph` set. Default: no padding.
            num_lookahead_slots: tokens that `advance_step` will add: the block tables must have room for them.
            encoder_lens, new_encoder, cross_block_tables, num_encoder_tokens_padded, capture_key: as there.

        Raises:
            MetadataError: a prefill after a decode, a request without new tokens, block tables too short for the
                lookahead, or what `AttentionMetadataBuilder.build` refuses; no buffer was touched.
            GraphContractError: the step contradicts `capture_key`; no buffer was touched.
        """
        queries = read_integers("query_lens", query_lens).tolist()
        lengths = read_integers("seq_lens", seq_lens).tolist()
        lookahead = read_count("num_lookahead_slots", num_lookahead_slots, 0, "leave it out", MetadataError)
        if batch_size is not None:
            batch_size = read_count("batch_size", batch_size, 1, "leave it out for no padding", MetadataError)
        prefills = self._count_prefills(queries, lengths)
        padding = {}
        if batch_size is not None:
            missing = batch_size - len(queries)
            padding = {"num_reqs_padded": batch_size, "num_tokens_padded": sum(queries) + missing}
        common = self._inner.build(
            queries,
            lengths,
            None if block_tables is None else self._table(block_tables, queries, lengths, lookahead),
            encoder_lens=encoder_lens,
            new_encoder=new_encoder,
            cross_block_tables=cross_block_tables,
            num_encoder_tokens_padded=num_encoder_tokens_padded,
            capture_key=capture_key,
            **padding,
        )
        num_seqs = len(queries) if batch_size is None else batch_size
        num_rows, prefill_tokens = common.slot_mapping.shape[0], sum(queries[:prefills])
        context_lens, seq_start_loc = self._offsets(common)
        encoder = self._encoder(common, encoder_lens, num_seqs)
        return FlashAttentionMetadata(
            num_prefills=prefills,
            num_prefill_tokens=prefill_tokens,
            num_decode_tokens=num_rows - prefill_tokens,
            slot_mapping=common.slot_mapping,
            seq_lens=lengths,
            seq_lens_tensor=common.seq_lens[:num_seqs],
            max_prefill_seq_len=max(lengths[:prefills], default=0),
            max_decode_seq_len=max(lengths[prefills:], default=0),
            context_lens_tensor=context_lens[:num_seqs],
            block_tables=common.block_table[:num_seqs],
            use_cuda_graph=batch_size is not None,
            max_query_len=common.max_query_len,
            max_decode_query_len=max(queries[prefills:], default=0),
            query_start_loc=common.query_start_loc[: num_seqs + 1],
            seq_start_loc=seq_start_loc[: num_seqs + 1],
            block_size=self._inner.block_size,
            lookahead=lookahead,
            cross_slot_mapping=common.cross_slot_mapping,
            _common=common,
            _padded=(context_lens, seq_start_loc),
            _replan=self._inner._plans.fill_on_device,
            _built=common._built,
            **encoder,
        )

    def _count_prefills(self, queries: list[int], lengths: list[int]) -> int:
        threshold = self._inner.decode_threshold
        decodes = [is_decode(q, s, threshold) for q, s in zip(queries, lengths, strict=False)]
        for row, query in enumerate(queries):
            if query < 1:
                raise MetadataError(f"request {row} has {query} new tokens", "at least 1", "leave the request out")
        first = decodes.index(True) if True in decodes else len(decodes)
        late = [row for row in range(first, len(decodes)) if not decodes[row]]
        if late:
            raise MetadataError(
                f"request {late[0]}, a prefill of {queries[late[0]]} tokens, after request {first}, a decode",
                "prefills first",
                "order the requests by vattn.token_order(query_lens, seq_lens, first='prefill')",
            )
        return first

    def _table(self, tables: Tables, queries: list[int], lengths: list[int], lookahead: int) -> Tensor:
        """Return the tables with -1 after the last block of each request, where `advance_step` writes nothing."""
        size, most = self._inner.block_size, self._inner.max_seq_len
        ends = torch.tensor(lengths, dtype=torch.int64, device="cpu") + lookahead
        check_count("seq_lens", len(lengths), len(queries))
        longest = max(lengths, default=0) + lookahead
        if longest > most:
            raise over_capacity("positions in one request, those to come included", longest, most, "max_seq_len")
        needed = (ends + (size - 1)) // size
        given = read_table("block_tables", tables, ends, needed, size)[:, : self._inner.table_width]
        table = torch.full((given.shape[0], self._inner.table_width), -1, dtype=given.dtype, device="cpu")
        columns = torch.arange(given.shape[1], device="cpu")
        table[:, : given.shape[1]] = torch.where(columns < needed.unsqueeze(1), given, -1)
        if lookahead:
            self._check_coming(
                table, torch.tensor(queries, device="cpu"), torch.tensor(lengths, device="cpu"), lookahead
            )
        return table

    def _check_coming(self, table: Tensor, queries: Tensor, lengths: Tensor, lookahead: int) -> None:
        """Refuse blocks that the device will write in later steps and that another entry uses."""
        size, columns, contexts = self._inner.block_size, torch.arange(table.shape[1], device="cpu"), lengths - queries
        now, then = (-(-count // size) for count in (lengths, lengths + lookahead))
        used = used_entries(self._inner._conflicts.reaches, table.shape[1], then, contexts, size)
        coming = used & (columns >= now.unsqueeze(1))
        places = coming.view(-1).nonzero().squeeze(1)
        refuse_conflicts(table, used, places, table[coming] * size, contexts, size)

    def _offsets(self, common: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Write what follows from the lengths, on the device, in buffers that stay."""
        reqs = common.seq_lens.shape[0]
        context_lens, starts = self._context_lens[:reqs], self._seq_start_loc[: reqs + 1]
        torch.sub(common.seq_lens, common.query_start_loc.diff(), out=context_lens)
        torch.cumsum(common.seq_lens, 0, dtype=torch.int32, out=starts[1:])
        return context_lens, starts

    def _encoder(self, common: AttentionMetadata, lens: Lengths | None, num_seqs: int) -> dict[str, Any]:
        """Return the fields of the encoder and of cross attention."""
        if lens is None or common.encoder_seq_lens is None:
            return {}
        lengths = read_integers("encoder_lens", lens).tolist()
        starts = self._encoder_start_loc[: num_seqs + 1]
        torch.cumsum(common.encoder_seq_lens[:num_seqs], 0, dtype=torch.int32, out=starts[1:])
        tables = common.cross_block_table
        return {
            "encoder_seq_lens": lengths,
            "encoder_seq_lens_tensor": common.encoder_seq_lens[:num_seqs],
            "encoder_seq_start_loc": starts,
            "max_encoder_seq_len": max(lengths, default=0),
            "num_encoder_tokens": sum(lengths),
            "cross_block_tables": None if tables is None else tables[:num_seqs],
        }


FlashAttentionBackend.builder = FlashAttentionMetadataBuilder
