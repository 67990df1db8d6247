"""vattn: paged attention for `torch.compile`. Needs torch alone; optional packages are imported where they are used."""

from vattn import errors
from vattn.backends import dispatch as dispatch  # registers the kernels of the ops
from vattn.backends.flash_attn.libraries import load_flash_attn
from vattn.backends.register_kv_format import register_kv_format
from vattn.backends.selector import explain, register_backend
from vattn.cache.allocation import allocate_kv_cache
from vattn.cache.block_pool import BlockPool
from vattn.cache.copies import copy_blocks, move_slots, swap_blocks
from vattn.cache.hybrid_block_table import HybridBlockTable
from vattn.cache.layout import kv_cache_shape
from vattn.cache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from vattn.calibration.audit import Audit, audit
from vattn.calibration.calibrate import Calibration, calibrate
from vattn.calibration.quantise_linears import quantise_linears
from vattn.compilation.compile import compile
from vattn.compilation.cuda_graph import CUDAGraphRunner
from vattn.compilation.export import export_step
from vattn.compilation.regions import compile_regions
from vattn.compilation.warmup import WarmupReport, warmup
from vattn.config.attention import AttentionConfig, AttentionType, CacheConfig, boundary_layers
from vattn.config.mla import MLAConfig
from vattn.config.rope import RopeConfig
from vattn.generation import (
    AsyncGenerator,
    Chat,
    DraftModel,
    EagleDraft,
    Embedder,
    Generator,
    Grammar,
    MtpDraft,
    PromptEmbeddings,
    PromptLookup,
    Request,
    Sampling,
    Submission,
)
from vattn.kv_transfer import FileConnector, HostMemoryConnector, KVConnector, KVTransfer, TransferRequest, block_keys
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
    save_encoder_scales_when_full,
)
from vattn.layers.functional import (
    AttentionOutput,
    merge_attn_states,
    paged_attention,
    rope_update_kv_cache,
    update_kv_cache,
    varlen_attention,
)
from vattn.layers.kv_transfer_utils import maybe_transfer_kv_layer
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.fast_prefill import fast_prefill, kept_rows
from vattn.metadata.flash_attn import DecodeInput, FlashAttentionMetadata
from vattn.metadata.flash_attn_builder import FlashAttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context
from vattn.metadata.hybrid import GroupedMetadata
from vattn.metadata.hybrid_builder import GroupedMetadataBuilder
from vattn.metadata.plans import plan_key
from vattn.metadata.token_order import token_order
from vattn.metadata.token_tree import TokenTree
from vattn.metadata.tree_builder import TreeAttentionMetadataBuilder
from vattn.metadata.xformers import XFormersMetadata, XFormersMetadataBuilder
from vattn.passes.entry import backend, disable, enable, options
from vattn.passes.report import FusionReport, clear_fusion_report, fusion_report
from vattn.version import __version__ as __version__

__all__ = [
    "AsyncGenerator",
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
    "Chat",
    "ChunkedLocalAttentionSpec",
    "CrossAttention",
    "CrossAttentionSpec",
    "DecodeInput",
    "DifferentialAttention",
    "DraftModel",
    "EagleDraft",
    "Embedder",
    "EncoderFP8Config",
    "EncoderOnlyAttention",
    "EncoderOnlyAttentionSpec",
    "FileConnector",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "FullAttentionSpec",
    "FusionReport",
    "Generator",
    "Grammar",
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
    "MtpDraft",
    "PromptEmbeddings",
    "PromptLookup",
    "QuantConfig",
    "Request",
    "RopeConfig",
    "Sampling",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "StaticSinkAttention",
    "Submission",
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
    "clear_fusion_report",
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
    "plan_key",
    "quantise_linears",
    "read_encoder_scales",
    "register_backend",
    "register_kv_format",
    "rope_update_kv_cache",
    "save_encoder_scales",
    "save_encoder_scales_when_full",
    "swap_blocks",
    "token_order",
    "update_kv_cache",
    "varlen_attention",
    "warmup",
]
