"""DIFFERENTIAL_FLASH_ATTN: the halves of differential attention (arXiv 2410.05258) on another backend.

`vattn.DifferentialAttention` makes the halves and their difference. This backend runs only those; it delegates each
half to the first backend of the device that reads pairs of heads: TRITON_ATTN on a GPU, TORCH_SDPA on a CPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vattn.backends.base import Backend, Capabilities
from vattn.cache.memory import CacheMemory
from vattn.config.arguments import integer, read_count
from vattn.config.attention import AttentionConfig
from vattn.config.device import BLOCK_SIZES, DeviceInfo, Sizes
from vattn.config.features import FEATURES
from vattn.errors import CacheError, ConfigError
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS, QUERY_FORMATS, QUERY_LOADS


class DifferentialFlashAttentionBackend(Backend):
    """Run one half of pairs of heads by an underlying backend."""

    name = "DIFFERENTIAL_FLASH_ATTN"
    capabilities = Capabilities(
        devices=("cpu", "cuda", "interpreter"),
        dtypes=tuple(MODEL_DTYPES),
        kv_cache_dtypes=tuple(name for name, fmt in KV_FORMATS.items() if not fmt.packed),
        query_formats=QUERY_FORMATS,
        output_formats=tuple(OUTPUT_FORMATS),
        attn_types=("decoder",),
        head_sizes=Sizes(8, 8, 512),
        block_sizes=BLOCK_SIZES,
        features=frozenset(FEATURES)
        - {"context_parallel", "batch_invariant", "hnd_layout", "contiguous_kv", "unequal_head_sizes"},
        required_features=frozenset({"head_pairs"}),
        query_loads=QUERY_LOADS,
        output_variants=True,
        approximate_division=True,
    )

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return `(2, 2, num_blocks, block_size, num_kv_heads // 2, head_size)`: halves, then keys and values.

        It is the shape of `kv_cache_view`, not of the storage.

        Raises:
            ConfigError: an odd number of KV heads, or a block size that is no multiple of 16.

        Example:
            >>> from vattn.backends.differential_flash_attn import DifferentialFlashAttentionBackend
            >>> DifferentialFlashAttentionBackend.get_kv_cache_shape(100, 16, 8, 64)
            (2, 2, 100, 16, 4, 64)
        """
        heads, size = integer(num_kv_heads), integer(block_size)
        if heads is None or heads % 2 or heads < 2:
            raise ConfigError(f"num_kv_heads={num_kv_heads!r:.40}", "a number divisible by 2", "heads are in pairs")
        if size is None or size % 16 or size < 16:
            raise ConfigError(f"block_size={block_size!r:.40}", "a multiple of 16", "block_size=16")
        num_blocks = read_count("num_blocks", num_blocks, 1, "pass the size of the cache")
        return 2, 2, num_blocks, size, heads // 2, read_count("head_size", head_size, 1, "pass the size of the cache")

    @staticmethod
    def kv_cache_view(kv_cache: Tensor) -> Tensor:
        """Return the view `[half, key or value, num_blocks, block_size, num_kv_heads / 2, head_size]` of a storage.

        Args:
            kv_cache: `[2, num_blocks, block_size, num_kv_heads, head_size]`, as a layer has it. Not copied: what is
                written to the view is in the cache.

        Example:
            >>> import torch
            >>> from vattn.backends.differential_flash_attn import DifferentialFlashAttentionBackend
            >>> DifferentialFlashAttentionBackend.kv_cache_view(torch.zeros(2, 100, 16, 8, 64)).shape
            torch.Size([2, 2, 100, 16, 4, 64])
        """
        fits = isinstance(kv_cache, Tensor) and kv_cache.dim() == 5 and kv_cache.shape[0] == 2
        if not fits or kv_cache.shape[3] % 2:
            raise CacheError(
                f"a cache of shape {tuple(getattr(kv_cache, 'shape', ()))} and type {type(kv_cache).__name__}",
                "[2, num_blocks, block_size, num_kv_heads, head_size] with an even num_kv_heads",
                "pass layer.kv_cache of a vattn.DifferentialAttention",
            )
        return kv_cache.unflatten(3, (kv_cache.shape[3] // 2, 2)).permute(4, 0, 1, 2, 3, 5)

    def limits(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return why no underlying backend runs a half, or why the request is not a half."""
        found = super().limits(config, device)
        refusals = {} if found else _refusals(config, device)
        if found or not all(refusals.values()):
            return found
        return [f"{name}: {'; '.join(reasons)}" for name, reasons in refusals.items()]

    def running(self) -> tuple[str, str] | None:
        """Return the torch version: which kernels run depends on the device."""
        return "torch", torch.__version__.split("+")[0]

    def runs_on(self, config: AttentionConfig, device: DeviceInfo) -> str:
        """Return the name of the underlying backend."""
        return underlying(config, device) or self.name

    def notes(self, config: AttentionConfig) -> list[str]:
        """Say what runs the halves."""
        return ["the two halves run on the first other backend of the device that reads pairs of heads"]

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::attention` of one half."""
        backend, inner = _delegate(config, args.query.device, CacheMemory.of(args.key_cache, args.value_cache))
        backend.attention(args._replace(config=inner.encode()), inner)

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        """Run `vattn::kv_cache_update` of one half's keys and of the values of both."""
        backend, inner = _delegate(config, args.key.device, CacheMemory.of(args.key_cache, args.value_cache))
        backend.kv_cache_update(args._replace(config=inner.encode()), inner)


@lru_cache(maxsize=4096)
def _delegate(config: AttentionConfig, device: torch.device, memory: CacheMemory) -> tuple[Backend, AttentionConfig]:
    """Return the underlying backend of a device and the request for it."""
    from vattn.backends import selector

    name = underlying(config, DeviceInfo.of(device))
    assert name is not None  # `reasons` refused the call otherwise
    inner = config.replace(backend=name)
    return selector.choose(inner, device, memory=memory), inner


@lru_cache(maxsize=4096)
def underlying(config: AttentionConfig, device: DeviceInfo) -> str | None:
    """Return the first backend of a device that runs one half, `None` if there is none."""
    return next((name for name, reasons in _refusals(config, device).items() if not reasons), None)


def _refusals(config: AttentionConfig, device: DeviceInfo) -> dict[str, list[str]]:
    """Return the reasons of every backend that reads pairs of heads, in the device's order."""
    from vattn.backends import selector

    others = (selector.get_backend(name) for name in selector.priority(device))
    return {
        other.name: other.reasons(config.replace(backend=other.name), device)
        for other in others
        if "head_pairs" in other.capabilities.features and not other.capabilities.required_features
    }
