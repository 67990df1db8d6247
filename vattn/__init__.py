"""vattn: paged attention for `torch.compile`. Needs torch alone; optional packages are imported where they are used."""

from vattn import errors
from vattn.backends.selector import explain, register_backend
from vattn.block_pool import BlockPool
from vattn.block_tables import HybridBlockTable
from vattn.cache_audit import Audit, audit
from vattn.calibration import Calibration, calibrate
from vattn.compilation import compile, compile_regions
from vattn.config import AttentionConfig, AttentionType, CacheConfig, boundary_layers
from vattn.context import forward_context
from vattn.cuda_graph import CUDAGraphRunner
from vattn.export import export_step
from vattn.flash_attn_builder import FlashAttentionMetadataBuilder
from vattn.flash_attn_metadata import DecodeInput, FlashAttentionMetadata
from vattn.fp8_linears import quantise_linears
from vattn.functional import AttentionOutput, merge_attn_states, paged_attention, rope_update_kv_cache, update_kv_cache
from vattn.generation import Generator, PromptLookup, Request, Sampling
from vattn.grouped_builder import GroupedMetadataBuilder
from vattn.grouped_metadata import GroupedMetadata
from vattn.kv_cache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
    allocate_kv_cache,
    copy_blocks,
    swap_blocks,
)
from vattn.kv_cache_slots import move_slots
from vattn.kv_format_registry import register_kv_format
from vattn.kv_transfer import (
    FileConnector,
    HostMemoryConnector,
    KVConnector,
    KVTransfer,
    TransferRequest,
    block_keys,
)
from vattn.layers import (
    Attention,
    CrossAttention,
    DifferentialAttention,
    EncoderFP8Config,
    EncoderOnlyAttention,
    MLAAttention,
    MMEncoderAttention,
    QuantConfig,
    StaticSinkAttention,
    check_cu_seqlens,
    clip_rates,
    differential_lambda_init,
    observe_clipping,
    pad_cu_seqlens,
    read_encoder_scales,
    save_encoder_scales,
)
from vattn.layers.kv_transfer_utils import maybe_transfer_kv_layer
from vattn.logits_rows import fast_prefill, kept_rows
from vattn.metadata import AttentionMetadata
from vattn.metadata_builder import AttentionMetadataBuilder
from vattn.mla_config import MLAConfig
from vattn.ops.cache_layout import kv_cache_shape
from vattn.ops.flash_attention import load_flash_attn
from vattn.passes.entry import backend, disable, enable, options
from vattn.passes.report import FusionReport, fusion_report
from vattn.rope_config import RopeConfig
from vattn.token_order import token_order
from vattn.token_tree import TokenTree
from vattn.tree_metadata import TreeAttentionMetadataBuilder
from vattn.warm_up import WarmupReport, warmup
from vattn.xformers_metadata import XFormersMetadata, XFormersMetadataBuilder

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "AttentionConfig",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionOutput",
    "AttentionType",
    "Audit",
    "BlockPool",
    "CUDAGraphRunner",
    "CacheConfig",
    "Calibration",
    "ChunkedLocalAttentionSpec",
    "CrossAttention",
    "CrossAttentionSpec",
    "DecodeInput",
    "DifferentialAttention",
    "EncoderFP8Config",
    "EncoderOnlyAttention",
    "EncoderOnlyAttentionSpec",
    "FileConnector",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "FullAttentionSpec",
    "FusionReport",
    "Generator",
    "GroupedMetadata",
    "GroupedMetadataBuilder",
    "HostMemoryConnector",
    "HybridBlockTable",
    "KVCacheSpec",
    "KVConnector",
    "KVTransfer",
    "MLAAttention",
    "MLAAttentionSpec",
    "MLAConfig",
    "MMEncoderAttention",
    "PromptLookup",
    "QuantConfig",
    "Request",
    "RopeConfig",
    "Sampling",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "StaticSinkAttention",
    "TQFullAttentionSpec",
    "TokenTree",
    "TransferRequest",
    "TreeAttentionMetadataBuilder",
    "WarmupReport",
    "XFormersMetadata",
    "XFormersMetadataBuilder",
    "allocate_kv_cache",
    "audit",
    "backend",
    "block_keys",
    "boundary_layers",
    "calibrate",
    "check_cu_seqlens",
    "clip_rates",
    "compile",
    "compile_regions",
    "copy_blocks",
    "differential_lambda_init",
    "disable",
    "enable",
    "errors",
    "explain",
    "export_step",
    "fast_prefill",
    "forward_context",
    "fusion_report",
    "kept_rows",
    "kv_cache_shape",
    "load_flash_attn",
    "maybe_transfer_kv_layer",
    "merge_attn_states",
    "move_slots",
    "observe_clipping",
    "options",
    "pad_cu_seqlens",
    "paged_attention",
    "quantise_linears",
    "read_encoder_scales",
    "register_backend",
    "register_kv_format",
    "rope_update_kv_cache",
    "save_encoder_scales",
    "swap_blocks",
    "token_order",
    "update_kv_cache",
    "warmup",
]
