"""A step's metadata: vLLM's device tensors as they are, and one schedule for each kind of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from vattn.errors import UnsupportedRequestError
from vattn.integrations.vllm.impl import VattnImpl
from vattn.integrations.vllm.warm_up import warm_up
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.plans import StepPlans, find_layers
from vattn.metadata.step import Limits


class VattnMetadataBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """Make each step's metadata on the device, without a sync: vLLM's own tensors, and schedules at fixed addresses.

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
        device, block_size, scheduler = torch.device(device), kv_cache_spec.block_size, vllm_config.scheduler_config
        attention = vllm_config.compilation_config.static_forward_context
        layers = {name: attention[name] for name in layer_names if isinstance(attention[name].impl, VattnImpl)}
        configs = [layer.impl.config(layer, block_size, "HND", device) for layer in layers.values()]
        # Schedules have a size for requests and tokens, whatever the length of a request is.
        limits = Limits(
            num_reqs=scheduler.max_num_seqs, num_tokens=scheduler.max_num_batched_tokens, seq_len=block_size,
            block_size=block_size, num_blocks=None, mm_ranges=0, trees=0, tree_size=0,
        )  # fmt: skip
        self._plans = StepPlans(find_layers(configs, limits, device, None), limits, device)
        if device.type == "cuda":
            warm_up(layers, kv_cache_spec, vllm_config, device, self.step)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttentionMetadata:
        """Return a step's metadata; `common_attn_metadata` keeps its tensors, which are neither copied nor changed."""
        given = common_attn_metadata
        refused = [name for name in ("mm_req_doc_ranges", "rswa_prefix_lens") if getattr(given, name, None) is not None]
        if given.causal is not True:
            refused.append("causal")
        if refused or common_prefix_len:
            raise UnsupportedRequestError(
                f"a step with {', '.join(refused) or 'a common prefix'}", "causal steps", "use another backend"
            )
        # Steps of piecewise graphs have slots for their padding too.
        slots = given.slot_mapping[: given.num_actual_tokens]
        step = self.step(given.query_start_loc, given.seq_lens, given.block_table_tensor, slots)
        step.max_query_len, step.max_seq_len = given.max_query_len, given.max_seq_len
        return step

    def update_block_table(
        self, metadata: AttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> AttentionMetadata:
        """Return the same step over other blocks: schedules depend on lengths alone."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping[: metadata.num_actual_tokens])

    def step(self, query_start_loc: Tensor, seq_lens: Tensor, table: Tensor, slots: Tensor) -> AttentionMetadata:
        """Return metadata of these tensors, with the schedules of their lengths."""
        num_reqs, num_tokens = seq_lens.shape[0], slots.shape[0]
        step = AttentionMetadata(
            query_start_loc, seq_lens, table, slots, num_reqs=num_reqs, num_actual_tokens=num_tokens
        )
        self._plans.fill_on_device(step)
        return step
