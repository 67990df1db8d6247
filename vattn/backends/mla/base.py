"""What a backend of latent attention is, and those there are; `vattn.backends.selector` chooses among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vattn.backends.base import Backend, Capabilities
from vattn.config.device import Sizes
from vattn.config.mla import MLAConfig
from vattn.config.rope import RopeConfig
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs, turned_rows
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

MLA_FEATURES: tuple[str, ...] = ("lse", "sparse", "context_parallel")
"""What a latent attention can ask for beyond the plain one, one name each."""

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


class MLABackend(Backend):
    """Run the latent attention requests that its capabilities accept."""

    capabilities: MLACapabilities

    def _name_reasons(self, config: Any) -> list[str]:
        can = self.capabilities
        names = {
            "dtype": can.dtypes,
            "kv_cache_dtype": can.kv_cache_dtypes,
            "query_format": can.query_formats,
            "weight_format": can.weight_formats,
            "output_format": can.output_formats,
        }
        found = [
            f"{name} {getattr(config, name)} (runs {', '.join(allowed)})"
            for name, allowed in names.items()
            if getattr(config, name) not in allowed
        ]
        plain = config.kv_cache_dtype in ("float16", "bfloat16", "float32")
        if plain and config.kv_cache_dtype != config.dtype and "mixed_cache" not in can.features:
            found.append(f"kv_cache_dtype {config.kv_cache_dtype} in a {config.dtype} model (stores the model dtype)")
        sizes = {
            "num_heads": can.num_heads,
            "kv_lora_rank": can.latent_sizes,
            "qk_rope_head_dim": can.rope_sizes,
            "head_size": can.head_sizes,
            "block_size": can.block_sizes,
        }
        found += [
            f"{name} {getattr(config, name)} (runs {allowed})"
            for name, allowed in sizes.items()
            if getattr(config, name) not in allowed
        ]
        if config.scale <= 0 and not can.negative_scales:
            found.append(f"scale {config.scale} (runs scales above 0)")
        arithmetic = config.output_arithmetic != "divide" or config.output_min_scale is not None
        if arithmetic and not can.output_variants and OUTPUT_FORMATS[config.output_format].container is not None:
            found.append(f"output_arithmetic {config.output_arithmetic} or another minimum of scales (has the default)")
        if config.output_arithmetic.startswith("approximate") and not can.approximate_division:
            found.append(f"output_arithmetic {config.output_arithmetic} (divides exactly)")
        return found

    def _feature_reasons(self, config: Any) -> list[str]:
        asked = {name for name in MLA_FEATURES if getattr(config, name)}
        return [f"{name} is not implemented" for name in MLA_FEATURES if name in asked - self.capabilities.features]

    def parts(self, config: Any) -> frozenset[str]:
        """Return what a request consists of, by the names that recorded runs have for it."""
        fields = ("dtype", "kv_cache_dtype", "weight_format", "output_format")
        asked = {name for name in MLA_FEATURES if getattr(config, name)}
        if config.query_format != "none":
            asked.add(f"query_format={config.query_format}")
        return frozenset(asked | {f"{name}={getattr(config, name)}" for name in fields})

    def mla_attention(self, args: MLAAttentionArgs, config: MLAConfig) -> None:
        """Run `vattn::mla_attention`. Arguments are checked already."""
        raise NotImplementedError

    def scratch_bytes(self, config: MLAConfig, num_tokens: int, workspace_tokens: int | None) -> int:
        """Return the bytes of rows in the latent space, and of what is expanded at a time, in a call of some tokens.

        Args:
            workspace_tokens: tokens that the caller's workspace holds, `None` if it gives none.
        """
        return num_tokens * config.num_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim) * _item(config)

    def mla_kv_cache_update(self, args: MLACacheUpdateArgs, config: MLAConfig) -> None:
        """Run `vattn::mla_kv_cache_update`. Arguments are checked already."""
        raise NotImplementedError

    def mla_rope_kv_cache_update(self, args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig) -> None:
        """Run `vattn::mla_rope_kv_cache_update`, by default in two steps. Arguments are checked already."""
        self.mla_kv_cache_update(turned_rows(args, rope, config), config)


def _item(config: MLAConfig) -> int:
    return MODEL_DTYPES[config.dtype].itemsize


class TritonMLAUpdate:
    """Write the cache by our own kernels, which every format has."""

    def mla_kv_cache_update(self, args: MLACacheUpdateArgs, config: MLAConfig) -> None:
        """Run `vattn::mla_kv_cache_update`."""
        from vattn.kernels.triton.mla.launch import update_cache

        update_cache(args, config)

    def mla_rope_kv_cache_update(self, args: MLARopeUpdateArgs, rope: RopeConfig, config: MLAConfig) -> None:
        """Run `vattn::mla_rope_kv_cache_update` in one launch."""
        from vattn.kernels.triton.mla.rope_update import update_turned

        update_turned(args, rope, config)
