"""A step's metadata: vLLM's device tensors as they are, and one schedule for each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from vattn.backends import selector
from vattn.backends.base import Backend
from vattn.config.attention import AttentionConfig
from vattn.errors import UnsupportedRequestError
from vattn.integrations.vllm.impl import VattnImpl
from vattn.integrations.vllm.warm_up import warm_up
from vattn.metadata.plans import plan_key


@dataclass
class VattnMetadata:
    """One step, as the layers of one kind of cache read it.

    Attributes:
        num_actual_tokens: rows of the step; full CUDA graphs count their padding.
        max_query_len, max_seq_len: upper bounds.
        query_start_loc, seq_lens, block_table, slot_mapping: vLLM's own device tensors.
        plans: schedules by `vattn.plan_key`, one in each list.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    plans: dict[str, list[Tensor]]


class VattnMetadataBuilder(AttentionMetadataBuilder[VattnMetadata]):
    """Make each step's metadata on the device, at fixed addresses, without a sync.

    Kernels take any split of a step's rows over its requests, so full graphs may hold steps of any kind.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise UnsupportedRequestError(
                "a model with reference sliding windows", "plain sliding windows", "use TRITON_ATTN"
            )
        device = torch.device(device)
        attention = vllm_config.compilation_config.static_forward_context
        layers = {name: attention[name] for name in layer_names if isinstance(attention[name].impl, VattnImpl)}
        self._configs: dict[str, AttentionConfig] = {}
        self._backends: dict[str, Backend] = {}
        for name, layer in layers.items():
            config = layer.impl.config(layer, kv_cache_spec.block_size, "HND", device)
            backend = selector.choose(config, device, layer=name)
            key = plan_key(config, device)
            self._configs[key], self._backends[key] = config, backend
        scheduler = vllm_config.scheduler_config
        self._buffers: dict[str, Tensor] = {}
        for key, backend in self._backends.items():
            shape = self._shape(backend, key, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
            if shape:
                self._buffers[key] = torch.zeros(torch.Size(shape).numel(), dtype=torch.int32, device=device)
        self._texts = {key: config.encode() for key, config in self._configs.items()}
        if device.type == "cuda":
            warm_up(layers, kv_cache_spec, vllm_config, device, self._plan)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> VattnMetadata:
        """Return a step's metadata; `common_attn_metadata` keeps its tensors, which are neither copied nor changed."""
        step = common_attn_metadata
        refused = [name for name in ("mm_req_doc_ranges", "rswa_prefix_lens") if getattr(step, name, None) is not None]
        if step.causal is not True:
            refused.append("causal")
        if refused or common_prefix_len:
            raise UnsupportedRequestError(
                f"a step with {', '.join(refused) or 'a common prefix'}", "causal steps", "use another backend"
            )
        query_start_loc, seq_lens = step.query_start_loc, step.seq_lens
        return VattnMetadata(
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=step.block_table_tensor,
            slot_mapping=step.slot_mapping,
            plans=self._plan(query_start_loc, seq_lens, step.num_actual_tokens),
        )

    def update_block_table(self, metadata: VattnMetadata, blk_table: Tensor, slot_mapping: Tensor) -> VattnMetadata:
        """Return the same step over other blocks: schedules depend on lengths alone."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def _plan(self, query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> dict[str, list[Tensor]]:
        """Fill the schedules of a step on the device and return views of them."""
        plans = {}
        for key, buffer in self._buffers.items():
            shape = self._shape(self._backends[key], key, num_tokens, seq_lens.shape[0])
            schedule = buffer[: torch.Size(shape).numel()].view(shape)
            torch.ops.vattn.plan(query_start_loc, seq_lens, schedule, self._texts[key])
            plans[key] = [schedule]
        return plans

    def _shape(self, backend: Backend, key: str, num_tokens: int, num_reqs: int) -> tuple[int, ...]:
        return backend.plan_shape(self._configs[key], num_tokens, num_reqs, 1)
