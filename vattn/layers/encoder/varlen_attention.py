"""`VarlenAttention`: the base of attention layers without a cache; keys and values are arguments of the call.

Nothing is bound: the op selects its backend by the request, the dtype and the device when it is called. The request is
encoded once per model dtype when a layer is made, so that compiled code looks up a finished string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.errors import DtypeError
from vattn.layers.base.buffers import OwnBuffers
from vattn.layers.base.checks import check_no_gradients
from vattn.ops import checks
from vattn.ops.arguments import VarlenAttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, dtype_name, resolve_kv_cache_dtype


class VarlenAttention(OwnBuffers):
    """Base of the layers that attend the rows of one call to each other.

    A subclass registers its buffers, then calls `_set_request`.
    """

    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    output_scale: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    kv_cache = None
    config = None

    def _set_request(self, scale: float, cache_dtype: str = "auto", **request: Any) -> None:
        """Describe the request for every model dtype; `request` are further fields of `AttentionConfig`."""
        self.scale = scale
        configs = {
            name: AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                head_size_v=self.head_size_v,
                scale=scale,
                dtype=name,
                kv_cache_dtype=resolve_kv_cache_dtype(cache_dtype, dtype),
                block_size=0,
                causality="bidirectional",
                backend=self.attn_backend,
                **request,
            )
            for name, dtype in MODEL_DTYPES.items()
        }
        self._ops = {name: config.encode() for name, config in configs.items()}
        self._kv_formats = {name: config.kv_cache_dtype for name, config in configs.items()}

    def get_kv_cache_spec(self, dtype: torch.dtype) -> None:
        """Return `None`: this layer has no cache."""

    def resolve_config(self, dtype: torch.dtype, device: torch.device | str) -> AttentionConfig:
        """Return the request for a model of `dtype`, with the backend that runs it on a device.

        Raises:
            DtypeError: no model dtype.
            UnsupportedRequestError: no backend, or not the requested one, runs the request there.
        """
        config = AttentionConfig.parse(self._op_config(dtype))
        return config.replace(backend=selector.choose(config, device, self.prefix).name)

    def _op_config(self, dtype: torch.dtype) -> str:
        name = dtype_name(dtype)
        if name not in self._ops:
            raise DtypeError(
                f"query is {name} in layer {self.prefix!r}", ", ".join(MODEL_DTYPES), "convert query, key and value"
            )
        return self._ops[name]

    def _check_call(self, args: tuple[Any, ...], inputs: Sequence[Tensor | None]) -> None:
        """Refuse what the op would refuse, before any state of the layer changes. Eager calls only."""
        check_no_gradients(self, inputs)
        packed = VarlenAttentionArgs(*args)
        config = AttentionConfig.parse(packed.config)
        selector.choose(config, packed.query.device)
        checks.check_varlen_attention(packed)

    def _backend_repr(self) -> str:
        return "backend=auto" if self.attn_backend == "auto" else f"backend={self.attn_backend} (requested)"
