"""Small tensors of a layer that keep their dtype, their values and their identity, whatever happens to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.backends import selector
from vattn.cache.bindings import count_binding
from vattn.cache.layout import CACHE_BUFFERS
from vattn.config.attention import AttentionConfig
from vattn.config.typed import is_plain
from vattn.errors import ConfigError, ShapeError
from vattn.layers.base.scales import as_numbers

_OWN_BUFFERS = (
    "k_scale",
    "v_scale",
    "q_scale",
    "output_scale",
    "scales_ready",
    "clip_counts",
    "alibi_slopes",
    "sinks",
    "sink_blocks",
    "lambda_q1",
    "lambda_k1",
    "lambda_q2",
    "lambda_k2",
    "amax_history",
    "amax_steps",
)
"""Small tensors that follow the cache to its device and keep their dtype; sinks and lambdas only where they are no
parameter."""


_LARGEST = torch.finfo(torch.float32).max


def own_tensor(name: str, source: Tensor | Sequence[float], least: float = -_LARGEST) -> Tensor:
    """Return an fp32 copy of what a user gave. Numbers keep their values where modules are made on meta.

    Raises:
        ConfigError: `source` holds no numbers, NaN, infinity, or a value below `least`.
    """
    values = as_numbers(source)
    if values is None:
        raise ConfigError(f"{name}: {source!r:.60} instead of numbers", "a tensor or a list of floats", "correct it")
    # NaN fails every comparison; tensors of a FakeTensorMode have no values.
    known = is_plain(values) and not values.is_meta
    if known and not bool(((values >= least) & (values <= _LARGEST)).all()):
        allowed = "finite numbers" + (", or -inf" if least < -_LARGEST else "")
        raise ConfigError(f"{name}={values.tolist()!s:.80}", allowed, "check the checkpoint's values")
    return values


class OwnBuffers(nn.Module):
    """Attention layer with buffers named in `_OWN_BUFFERS`, and maybe a cache; any of them may be missing or `None`."""

    prefix: str
    num_heads: int
    config: AttentionConfig | None
    kv_cache: Tensor | None
    """What was bound: the raw storage, or an engine's keys."""
    num_blocks: int | None = None
    """Blocks of the cache that steps count in; `None` without one, and for encoder states."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "kv_cache":
            self._buffers.update(dict.fromkeys(self._buffers.keys() & CACHE_BUFFERS[1:]))
            count_binding()

    def _set_sizes(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None,
        head_size_v: int | None,
        prefix: str,
        attn_backend: str | None,
    ) -> None:
        """Keep the arguments that every layer has, with defaults for `None`; refuse a backend that does not exist."""
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.prefix, self.attn_backend = prefix, "auto" if attn_backend is None else attn_backend
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix={prefix!r}", "a string", "name the layer, such as 'model.layers.3.attn'")
        if not isinstance(self.attn_backend, str):
            raise ConfigError(f"attn_backend={attn_backend!r:.60}", "a backend's name", "attn_backend='TRITON_ATTN'")
        if self.attn_backend != "auto":
            selector.get_backend(self.attn_backend)

    def _sizes_repr(self) -> str:
        text = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_size={self.head_size}"
        text += "" if self.head_size_v == self.head_size else f", head_size_v={self.head_size_v}"
        return f"{text}, scale={self.scale:.4g}"

    def _register_per_head(self, name: str, values: Tensor | Sequence[float] | None) -> None:
        """Keep sinks that are a parameter, or an fp32 copy of anything else, with one value per query head.

        A parameter may get its values later, so they are not looked at.
        """
        if values is None or (isinstance(values, nn.Parameter) and name == "sinks"):
            tensor: Tensor | None = values
        else:
            tensor = own_tensor(name, values, -torch.inf if name == "sinks" else -_LARGEST)  # A sink of -inf is none.
        if tensor is not None and tuple(tensor.shape) != (self.num_heads,):
            allowed = f"({self.num_heads},), one per query head"
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}", allowed, "check num_heads")
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor, persistent=False)

    def _own_buffers(self) -> dict[str, Tensor]:
        found = {name: self._buffers.get(name) for name in _OWN_BUFFERS}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def _check_values(self) -> None:
        """Refuse tensors that were given without values, and never got any."""
        empty = [name for name, buffer in self._own_buffers().items() if buffer.is_meta]
        if empty:
            raise ConfigError(
                f"{', '.join(empty)} of layer {self.prefix!r} on meta, without values",
                "values at construction or in the state dict",
                "give numbers instead of a tensor made under torch.device('meta')",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnBuffers:
        """Move with the module, but keep dtypes: under `model.to(dtype)` a scale stays fp32, a cache keeps its bytes.

        A cache does not move to another device: it is dropped, and using the layer then says so.
        """
        found = {name: self._buffers.get(name) for name in CACHE_BUFFERS}
        caches = {name: cache for name, cache in found.items() if cache is not None}
        kept = self._own_buffers() | caches
        for name in kept:
            self._buffers[name] = None
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(kept)
        for name, buffer in kept.items():
            device = fn(torch.empty(0, dtype=buffer.dtype, device=buffer.device)).device
            if name in caches and device != buffer.device:
                self.config = self._buffers[name] = self.num_blocks = None
                count_binding()
            elif not buffer.is_meta:
                self._buffers[name] = buffer.to(device)
            elif name not in self._non_persistent_buffers_set:
                # A state dict will fill it. What no state dict holds stays on meta, and binding a cache says so.
                self._buffers[name] = torch.empty_like(buffer, device=device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load scales into the tensors there are, with `assign=True` too: other layers and CUDA graphs hold them."""
        for name in self._own_buffers():
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and saved.dim() == 0:
                state_dict[prefix + name] = saved.reshape(1)  # checkpoints often hold scalars
        kept = self._own_buffers()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, buffer in kept.items():
            loaded = self._buffers[name]
            if loaded is not None and loaded is not buffer:
                self._buffers[name] = loaded.to(buffer.dtype) if buffer.is_meta else buffer.copy_(loaded)
