"""`VattnBackend`: SGLang's interface of attention backends over vattn's ops, in SGLang's own KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from vattn.errors import UnsupportedRequestError
from vattn.integrations.engine_layer import EngineLayer
from vattn.integrations.sglang.layers import ANOTHER_BACKEND, Layer, check_engine, find_layers, read_layer
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder


class VattnBackend(AttentionBackend):
    """Attention of decoder layers for prompts, decodes and both in one batch.

    One step's lengths, block tables and schedules are copied on the stream into buffers at fixed addresses, so that a
    captured decode step reads them at each replay. The cache stays SGLang's: each call writes and reads views of
    the layer's key and value buffers.

    Args:
        model_runner: SGLang's, with model and cache loaded.

    Raises:
        UnsupportedRequestError: the model, its cache or an option of the server is none that vattn serves.
    """

    needs_cpu_seq_lens: bool = False
    extend_dummy_seqs_capped_by_req_pool: bool = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        check_engine(model_runner)
        # Models read these three of a backend.
        self.token_to_kv_pool, self.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self.page_size: int = self.token_to_kv_pool.page_size
        self._runner, self._req_to_token = model_runner, model_runner.req_to_token_pool.req_to_token
        self._layers = find_layers(model_runner)
        self._max_seq_len = self._req_to_token.shape[1]
        options = resolved_view(model_runner.server_args)
        # Without chunks, a prompt of any length may follow others in one step; with mixed ones, decodes do.
        tokens = max(options.chunked_prefill_size or 0, options.max_prefill_tokens or 0) + sum(self._req_to_token.shape)
        self._allocate(self._req_to_token.shape[0], tokens)

    def _allocate(self, max_reqs: int, max_tokens: int) -> None:
        """Make the buffers of steps of at most this size: one set for each pool of the cache."""
        self._max_reqs, self._max_tokens = max_reqs, max_tokens
        device = self._req_to_token.device
        self._decode_starts = torch.arange(max_reqs + 1, dtype=torch.int32, device=device)
        self._builders = {
            windowed: AttentionMetadataBuilder(
                max_reqs,
                max_tokens,
                self._req_to_token.shape[1],
                self.page_size,
                device,
                layers=(layer.config for layer in self._layers.values() if layer.windowed == windowed),
            )
            for windowed in ((False, True) if isinstance(self.token_to_kv_pool, SWAKVPool) else (False,))
        }

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for the largest decode step that SGLang will capture."""
        if max_bs > self._max_reqs or max_num_tokens > self._max_tokens:
            self._allocate(max(max_bs, self._max_reqs), max(max_num_tokens, self._max_tokens))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of padded requests."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Note how long the requests may be; a captured step is replayed with any lengths.

        Raises:
            UnsupportedRequestError: a whole prompt step is to be captured.
        """
        if in_capture and not forward_batch.forward_mode.is_decode_or_idle():
            raise UnsupportedRequestError(
                "a CUDA graph of whole prompt steps with --attention-backend vattn",
                "prompt graphs of kind 'breakable' or 'tc_piecewise', and decode graphs",
                "choose one of these kinds for prefill",
            )
        lens = None if in_capture else forward_batch.seq_lens_cpu
        bound = self._req_to_token.shape[1]
        self._max_seq_len = bound if lens is None or not lens.numel() else min(bound, int(lens.max()))

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Fill the step's lengths, block tables, slots and schedules from device tensors; a graph can capture it.

        Raises:
            UnsupportedRequestError: a step of speculative decoding, a diffusion model or another unserved kind.
        """
        mode, num_reqs = forward_batch.forward_mode, forward_batch.batch_size
        if num_reqs == 0:
            return
        if mode.is_decode_or_idle():
            starts, max_query_len = self._decode_starts[: num_reqs + 1], 1
        elif mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            starts = torch.zeros_like(self._decode_starts[: num_reqs + 1])
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
            max_query_len = max(forward_batch.extend_seq_lens_cpu)
        else:
            raise UnsupportedRequestError(f"a step of kind {mode.name}", "EXTEND, DECODE and MIXED", ANOTHER_BACKEND)
        slots = forward_batch.out_cache_loc
        first_slots = self._req_to_token[:, : self._max_seq_len : self.page_size][forward_batch.req_pool_indices]
        # SGLang sets this to None for idle steps.
        self.forward_metadata: dict[bool, AttentionMetadata] = {}
        for windowed, builder in self._builders.items():
            if windowed:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
                first_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(first_slots)
            self.forward_metadata[windowed] = builder.build_from_tensors(
                starts,
                forward_batch.seq_lens,
                first_slots // self.page_size,
                slots,
                max_query_len=max_query_len,
                max_seq_len=self._max_seq_len,
            )

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Store and attend the new tokens of each request; return `[T, num_heads * head_size_v]`."""
        return self._attend(q, k, v, layer, save_kv_cache, **kwargs)

    forward_extend = forward_decode

    def _attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        radix: RadixAttention,
        store: bool,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        _refuse_given(kwargs.items())
        layer = self._layer(radix, sinks is not None)
        config, step, calls = layer.config, self.forward_metadata[layer.windowed], self._calls(radix.layer_id, layer)
        query = query.view(-1, config.num_heads, config.head_size)
        if store and key is not None and value is not None:
            key = key.view(-1, config.num_kv_heads, config.head_size)
            value = value.view(-1, config.num_kv_heads, config.head_size_v)
            calls.write(key, value, step.slot_mapping[: key.shape[0]])
        output = query.new_empty(query.shape[0], config.num_heads, config.head_size_v)
        calls.attend(query, step, output, sinks=sinks)
        return output.view(query.shape[0], -1)

    def _layer(self, radix: RadixAttention, sinks: bool) -> Layer:
        layer = self._layers.get(radix)
        if layer is None or layer.config.sinks != sinks:
            layer = self._layers[radix] = read_layer(radix, self._runner, sinks)
        return layer

    def _calls(self, layer_id: int, layer: Layer) -> EngineLayer:
        """Return a layer over its buffers, which SGLang may have to load, or put elsewhere."""
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer_id)
        place = keys.data_ptr(), values.data_ptr(), keys.shape
        if layer.calls is None or layer.place != place:
            pages = self._pages(keys), self._pages(values)
            layer.calls, layer.place = EngineLayer(layer.config, *pages, layer.k_scale, layer.v_scale), place
        return layer.calls

    def _pages(self, buffer: Tensor) -> Tensor:
        if buffer.dim() == 4:  # [pages, heads, page_size, columns]
            return buffer.transpose(1, 2)
        # Slots of a last, partial page are never given out.
        pages = buffer.shape[0] // self.page_size
        return buffer[: pages * self.page_size].unflatten(0, (pages, self.page_size))


def _refuse_given(options: Iterable[tuple[str, Any]]) -> None:
    """Refuse arguments of a layer's call that change the result; `None` and `False` do not."""
    for name, value in options:
        if value is not None and value is not False:
            raise UnsupportedRequestError(f"attention with {name}", "sinks", ANOTHER_BACKEND)
