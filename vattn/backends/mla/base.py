"""What a backend of latent attention is: its capabilities as data, and its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vattn.backends.base import Backend, Capabilities, Package
from vattn.config.device import Sizes, not_allowed
from vattn.config.mla import WEIGHT_FORMATS, MLAConfig
from vattn.config.rope import RopeConfig
from vattn.errors import CacheError
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs, rotated_rows
from vattn.quantization.formats import MODEL_DTYPES

MLA_FEATURES: tuple[str, ...] = ("lse", "sparse", "context_parallel")
"""What a latent attention may request beyond the plain one, one name each."""

ANY_SIZE = Sizes(step=1, low=1, high=1 << 16)


@dataclass(frozen=True)
class MLACapabilities(Capabilities):
    """Everything a latent attention backend can do, as data. `head_sizes` are the columns of a cached row, L + R.

    Attributes:
        num_heads: allowed numbers of query heads.
        latent_sizes, rope_sizes: allowed `kv_lora_rank` and `qk_rope_head_dim`.
        weight_formats: allowed names of `vattn.config.mla.WEIGHT_FORMATS`.
    """

    num_heads: Sizes = ANY_SIZE
    latent_sizes: Sizes = ANY_SIZE
    rope_sizes: Sizes = ANY_SIZE
    weight_formats: tuple[str, ...] = ("none",)

    def _of_values(self, config: Any) -> list[str]:
        allowed: dict[str, tuple[str, ...] | Sizes] = {
            "dtype": self.dtypes,
            "kv_cache_dtype": self.kv_cache_dtypes,
            "query_format": self.query_formats,
            "weight_format": self.weight_formats,
            "output_format": self.output_formats,
            "num_heads": self.num_heads,
            "kv_lora_rank": self.latent_sizes,
            "qk_rope_head_dim": self.rope_sizes,
            "head_size": self.head_sizes,
            "block_size": self.block_sizes,
        }
        found = not_allowed(config, allowed)
        mixed = config.kv_cache_dtype in MODEL_DTYPES and config.kv_cache_dtype != config.dtype
        if mixed and "mixed_cache" not in self.features:
            found.append(f"kv_cache_dtype {config.kv_cache_dtype} in a {config.dtype} model (stores the model dtype)")
        return found + self._of_arithmetic(config)

    def _of_features(self, config: Any) -> list[str]:
        return [f"{name} is not implemented" for name in _requested(config) if name not in self.features]


def _requested(config: Any) -> list[str]:
    return [name for name in MLA_FEATURES if getattr(config, name)]


class MLABackend(Backend):
    """Run the latent attention requests that its capabilities accept."""

    capabilities: MLACapabilities

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return `(num_blocks, block_size, head_size)`, the shape of a plain cache of latents; `num_kv_heads` is 1."""
        shape = super().get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)
        if num_kv_heads != 1:
            raise CacheError(f"num_kv_heads={num_kv_heads} of a cache of latents", "1", "one row serves all heads")
        return shape[1], shape[2], shape[4]

    def parts(self, config: Any) -> frozenset[str]:
        fields: tuple[str, ...] = ("dtype", "kv_cache_dtype", "weight_format", "output_format")
        if config.query_format != "none":
            fields = (*fields, "query_format")
        return frozenset(_requested(config)) | {f"{name}={getattr(config, name)}" for name in fields}

    def mla_attention(self, args: MLAAttentionArgs, config: MLAConfig) -> None:
        """Run `vattn::mla_attention`. Arguments are checked already."""
        raise NotImplementedError

    def scratch_bytes(self, config: MLAConfig, num_tokens: int, workspace_tokens: int | None) -> int:
        """Return the bytes of rows in the latent space, and of what is expanded at a time, in a call of some tokens.

        Args:
            workspace_tokens: tokens that the caller's workspace holds, `None` if it gives none.
        """
        itemsize = MODEL_DTYPES[config.dtype].itemsize
        return num_tokens * config.num_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim) * itemsize

    def mla_kv_cache_update(self, args: MLACacheUpdateArgs, config: MLAConfig) -> None:
        """Run `vattn::mla_kv_cache_update`. Arguments are checked already."""
        raise NotImplementedError

    def mla_rope_kv_cache_update(self, args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig) -> None:
        """Run `vattn::mla_rope_kv_cache_update`, by default in two steps. Arguments are checked already."""
        self.mla_kv_cache_update(rotated_rows(args, rope, config), config)


def library_capabilities(package: Package, minimum_capability: tuple[int, int], block_sizes: Sizes) -> MLACapabilities:
    """Return the capabilities of another library's kernels for DeepSeek's sizes, which absorb every query."""
    return MLACapabilities(
        devices=("cuda",),
        dtypes=("float16", "bfloat16"),
        kv_cache_dtypes=("float16", "bfloat16"),
        query_formats=("none",),
        output_formats=("none",),
        attn_types=("decoder",),
        head_sizes=Sizes(values=(576,)),
        block_sizes=block_sizes,
        features=frozenset({"lse"}),
        minimum_capability=minimum_capability,
        package=package,
        latent_sizes=Sizes(values=(512,)),
        rope_sizes=Sizes(values=(64,)),
        weight_formats=WEIGHT_FORMATS,
        cuda_graphs="never",
        rounded_lse=True,
        negative_scales=False,
        strided_caches=False,
        garbage_safe=False,
    )


class TritonMLAUpdate:
    """Write the cache by vattn's kernels, which have every format."""

    def mla_kv_cache_update(self, args: MLACacheUpdateArgs, config: MLAConfig) -> None:
        from vattn.kernels.triton.mla.launch import update_cache

        update_cache(args, config)

    def mla_rope_kv_cache_update(self, args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig) -> None:
        """Run `vattn::mla_rope_kv_cache_update` in one launch."""
        from vattn.kernels.triton.mla.rope_update import rope_update

        rope_update(args, rope, config)
