"""Attention layers as `nn.Module`s."""

from vattn.layers.attention import Attention
from vattn.layers.base.scales import QuantConfig, clip_rates, observe_clipping
from vattn.layers.cross_attention import CrossAttention
from vattn.layers.differential_attention import DifferentialAttention, differential_lambda_init
from vattn.layers.encoder.cu_seqlens import check_cu_seqlens, pad_cu_seqlens
from vattn.layers.encoder.encoder_only_attention import EncoderOnlyAttention
from vattn.layers.encoder.fp8_scales import (
    EncoderFP8Config,
    read_encoder_scales,
    save_encoder_scales,
    save_encoder_scales_when_full,
)
from vattn.layers.encoder.mm_encoder_attention import MMEncoderAttention
from vattn.layers.mla.mla_attention import MLAAttention
from vattn.layers.static_sink_attention import StaticSinkAttention

__all__ = [
    "Attention",
    "CrossAttention",
    "DifferentialAttention",
    "EncoderFP8Config",
    "EncoderOnlyAttention",
    "MLAAttention",
    "MMEncoderAttention",
    "QuantConfig",
    "StaticSinkAttention",
    "check_cu_seqlens",
    "clip_rates",
    "differential_lambda_init",
    "observe_clipping",
    "pad_cu_seqlens",
    "read_encoder_scales",
    "save_encoder_scales",
    "save_encoder_scales_when_full",
]
