"""Add a KV format of your own: its entry, its codecs, and what Triton kernels load and store it with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vattn.backends import selector
from vattn.errors import ConfigError
from vattn.quantization.formats import KV_FORMATS, KVFormat, kv_cache_dtypes
from vattn.quantization.packed import CODECS, Codec


def register_kv_format(
    fmt: KVFormat, codecs: Mapping[str, Codec] | None = None, triton: Mapping[str, tuple[Any, Any]] | None = None
) -> None:
    """Make a packed KV format known under its name, from `CacheConfig.cache_dtype` to the kernels.

    Specs, allocation, sharing, block copies, `explain` and the reference take it from its entry alone; TORCH_SDPA runs
    it by its codecs, TRITON_ATTN where there are Triton functions for all of them. Register before any config names it.

    Args:
        fmt: the entry; `key` and `value` say what a row takes and which codecs it has.
        codecs: codecs by name, in addition to those in `vattn.quantization.packed.CODECS`.
        triton: for each codec, a load and a store as in `vattn.kernels.triton.cache.packed_rows`; `None`: not in Triton
        kernels.

    Raises:
        ConfigError: no KVFormat, the name is taken, the format is not packed, or a codec is missing or taken.

    Example:
        `examples/12_a_kv_format_of_your_own.py` adds one in 76 lines.

        >>> from vattn.quantization.formats import KV_FORMATS
        >>> try:
        ...     register_kv_format(KV_FORMATS["nvfp4"])
        ... except ConfigError as error:
        ...     print(error)
        KV format 'nvfp4' exists already. Allowed: a new name. Try: rename the format.
    """
    if not isinstance(fmt, KVFormat):
        raise ConfigError(
            f"a KV format of type {type(fmt).__name__}",
            "vattn.quantization.formats.KVFormat",
            "pass KVFormat(name, ...)",
        )
    codecs, used = dict(codecs or {}), {part.codec for part in (fmt.key, fmt.value) if part is not None}
    if fmt.name in kv_cache_dtypes():
        raise ConfigError(f"KV format {fmt.name!r} exists already", "a new name", "rename the format")
    if fmt.key is None or fmt.value is None:
        raise ConfigError(
            f"KV format {fmt.name!r} without key and value parts", "a packed format", "give it key= and value="
        )
    taken = sorted(set(codecs) & set(CODECS))
    missing = sorted(used - set(CODECS) - set(codecs))
    if taken or missing:
        raise ConfigError(
            f"codecs {', '.join(taken)} are taken" if taken else f"codecs {', '.join(missing)} of {fmt.name!r}",
            "new names" if taken else ", ".join((*CODECS, *codecs)),
            "rename them" if taken else "pass them as codecs=",
        )
    CODECS.update(codecs)
    KV_FORMATS[fmt.name] = fmt
    for name in ("TORCH_SDPA", "TRITON_ATTN") if _in_triton(used, triton) else ("TORCH_SDPA",):
        backend = selector.get_backend(name)
        can = backend.capabilities
        backend.capabilities = dataclasses.replace(can, kv_cache_dtypes=(*can.kv_cache_dtypes, fmt.name))
    selector.forget_decisions()


def _in_triton(codecs: set[str], given: Mapping[str, tuple[Any, Any]] | None) -> bool:
    """Add the Triton functions that are given; return whether every codec has them now."""
    try:
        from vattn.kernels.triton.cache.packed_rows import TRITON_CODECS, TritonCodec
    except ImportError:
        return False
    TRITON_CODECS.update({name: TritonCodec(*pair) for name, pair in (given or {}).items()})
    return codecs <= set(TRITON_CODECS)
