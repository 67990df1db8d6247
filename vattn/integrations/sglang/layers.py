"""Read SGLang's attention layers and cache, and refuse what vattn does not serve when the engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.errors import UnsupportedRequestError
from vattn.integrations.engine_layer import EngineLayer
from vattn.quantization.formats import dtype_name

ANOTHER_BACKEND = "choose another --attention-backend"

KV_FORMAT_NAMES = {
    **{dtype: dtype_name(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)},
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}

OPTIONS = {
    "speculative_algorithm": None,
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_torch_compile": False,
    "enable_hisparse": False,
    "enable_prefill_cp": False,
    "dllm_algorithm": None,
    "dcp_size": 1,
    "attn_cp_size": 1,
}
"""Options of the server that change what an attention backend must do, each with the only value that is served."""


@dataclass(eq=False)
class Layer:
    """One attention layer of SGLang's.

    Attributes:
        config: what it requests.
        windowed: its cache lies in the pool of sliding-window layers, which has block tables of its own.
        k_scale, v_scale: fp32 of one value for an FP8 cache; the engine's own tensors where it has some.
        calls, place: the layer over its buffers, and where these are; `None` before its first call.
    """

    config: AttentionConfig
    windowed: bool
    k_scale: Tensor | None
    v_scale: Tensor | None
    calls: EngineLayer | None = None
    place: tuple[int, int, torch.Size] | None = None


def check_engine(model_runner: Any) -> None:
    """Refuse a model, a cache or an option of the server that vattn does not serve.

    Raises:
        UnsupportedRequestError: one of these.
    """
    options = resolved_view(model_runner.server_args)
    for name, served in OPTIONS.items():
        if (value := getattr(options, name)) not in (served, None):
            raise UnsupportedRequestError(
                f"SGLang's {name}={value!r} with --attention-backend vattn", repr(served), ANOTHER_BACKEND
            )
    pool = model_runner.token_to_kv_pool
    pools = (pool.full_kv_pool, pool.swa_kv_pool) if type(pool) is SWAKVPool else (pool,)
    for part in pools:
        known = type(part) is MHATokenToKVPool and not part.is_quantized_kv_cache
        if not known or part.kv_cache_layout not in ("nhd", "hnd") or part.dtype not in KV_FORMAT_NAMES:
            raise UnsupportedRequestError(
                f"SGLang's cache {type(part).__name__} of {dtype_name(part.dtype)}",
                f"MHATokenToKVPool and SWAKVPool of {', '.join(KV_FORMAT_NAMES.values())}",
                ANOTHER_BACKEND,
            )
    if getattr(getattr(model_runner, "kv_index_translator", None), "is_translating", False):
        raise UnsupportedRequestError(
            "SGLang's unified memory pool, in which ids move", "pools with fixed ids", ANOTHER_BACKEND
        )


def find_layers(model_runner: Any) -> dict[RadixAttention, Layer]:
    """Return the attention layers of a model, each as `read_layer` does."""
    found = {}
    for module in model_runner.model.modules():
        # The names under which SGLang's models keep their sinks.
        sinks = any(getattr(module, name, None) is not None for name in ("sinks", "attention_sink_bias"))
        for child in module.children():
            if isinstance(child, RadixAttention):
                found[child] = read_layer(child, model_runner, sinks)
    return found


def read_layer(layer: RadixAttention, model_runner: Any, sinks: bool) -> Layer:
    """Return what vattn needs of an attention layer.

    Raises:
        UnsupportedRequestError: vattn does not serve such a layer, or no backend of vattn does on this device.
    """
    served = {
        "attn_type": AttentionType.DECODER,
        "is_cross_attention": False,
        "use_irope": False,
        "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh",
        "xai_temperature_len": -1,
    }
    for name, value in served.items():
        if getattr(layer, name) != value:
            got = f"layer {layer.layer_id} of the model with {name}={getattr(layer, name)!r}"
            raise UnsupportedRequestError(got, repr(value), ANOTHER_BACKEND)
    pool, dtype = model_runner.token_to_kv_pool, dtype_name(model_runner.dtype)
    device, fp8 = model_runner.req_to_token_pool.req_to_token.device, pool.dtype.itemsize == 1
    window = layer.sliding_window_size
    config = AttentionConfig(
        num_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_size=layer.qk_head_dim,
        head_size_v=layer.v_head_dim,
        scale=layer.scaling,
        dtype=dtype,
        kv_cache_dtype=KV_FORMAT_NAMES[pool.dtype],
        kv_scale="tensor" if fp8 else "none",
        block_size=pool.page_size,
        # SGLang counts the tokens to the left of a row, vattn the row too.
        sliding_window=None if window is None or window < 0 else window + 1,
        logits_soft_cap=layer.logit_cap or None,
        sinks=sinks,
    )
    try:
        selector.choose(config, device)
    except UnsupportedRequestError as error:
        got, fix = f"layer {layer.layer_id} of the model: {error.got}", "change what it names (block_size: --page-size)"
        raise UnsupportedRequestError(got, error.allowed, f"{fix}, or {ANOTHER_BACKEND}") from error
    return Layer(
        config,
        type(pool) is SWAKVPool and pool.layers_mapping[layer.layer_id][1],
        _scale(layer.k_scale, device) if fp8 else None,
        _scale(layer.v_scale, device) if fp8 else None,
    )


def _scale(scale: Tensor | float | None, device: torch.device) -> Tensor:
    """Return a layer's scale as a tensor; SGLang has a parameter, a number from a file of scales, or `None` for 1."""
    return torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device).detach()
