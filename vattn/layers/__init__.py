"""Attention layers as `nn.Module`s."""

from vattn.layers.attention import Attention
from vattn.layers.scales import QuantConfig, clip_rates, observe_clipping

__all__ = ["Attention", "QuantConfig", "clip_rates", "observe_clipping"]
