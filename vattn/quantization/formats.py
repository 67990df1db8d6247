"""Formats of KV caches, queries and attention outputs, by name.

`vattn.quantization.codecs` encodes and decodes them. Everywhere **dequantised value = stored value * scale**.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vattn.errors import ConfigError

FP8_E4M3_MAX = 448.0
FP8_E5M2_MAX = 57344.0
FP4_E2M1_MAX = 6.0
NVFP4_GROUP_SIZE = 16
MX_GROUP_SIZE = 32
INT8_MAX = 127.0
INT8_RANGE = 255.0

MODEL_DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the bare name of a dtype, `torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


ROTATIONS: tuple[str, ...] = ("none", "hadamard", "signed_hadamard", "block_hadamard")
"""How a row is rotated before it is encoded: not, by a Hadamard transform of the whole row, by the same after fixed
signs, or by fixed signs and a transform of each block; a block is as wide as the largest power of two that divides the
row (`vattn.quantization.packed.hadamard`)."""


@dataclass(frozen=True)
class PackedPart:
    """Codes and scales of the keys, or of the values, of a packed format.

    A row is one token's key or value in one head.

    Attributes:
        codec: name in `vattn.quantization.packed.CODECS`; encodes and decodes a row.
        bits: of one code. Codes of a row are contiguous, from the lowest bit of its first byte on.
        scale_dtype: dtype of the stored scales; `None` for none.
        scales: scales of a row if `group_size` is 0.
        group_size: columns that share one scale; 0: scales of the whole row.
        rotation: name in `ROTATIONS`.
    """

    codec: str
    bits: int
    scale_dtype: torch.dtype | None = None
    scales: int = 0
    group_size: int = 0
    rotation: str = "none"

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of a row of `width` columns."""
        return -(-width * self.bits // 8)

    def num_scales(self, width: int) -> int:
        """Scales of a row of `width` columns."""
        return -(-width // self.group_size) if self.group_size else self.scales

    def scale_bytes(self, width: int) -> int:
        """Bytes of the scales of a row of `width` columns."""
        return 0 if self.scale_dtype is None else self.num_scales(width) * self.scale_dtype.itemsize

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` columns: codes and scales."""
        return self.code_bytes(width) + self.scale_bytes(width)

    def width_problem(self, width: int) -> str | None:
        """Return which widths this part takes, `None` if it takes `width`."""
        if self.rotation in ("hadamard", "signed_hadamard") and width & (width - 1):
            return "a power of two, for its Hadamard rotation"
        if self.group_size and width % self.group_size:
            return f"a multiple of {self.group_size}, the columns that share a scale"
        return "a number of columns that fills whole bytes" if width * self.bits % 8 else None


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored in a cache.

    Attributes:
        name: canonical name.
        storage_dtype: dtype of the raw storage tensor. Quantised formats use `uint8`, which `model.to(dtype)` does not
            convert.
        value_dtype: dtype that the stored bytes are viewed as.
        quantised: whether the format takes `k_scale` and `v_scale`, beside scales that it stores itself.
        max_value: largest finite magnitude under a scale of 1; encoding clamps to it.
        key, value: how rows are packed; `None` for formats that store every element as a `value_dtype`.
    """

    name: str
    storage_dtype: torch.dtype
    value_dtype: torch.dtype
    quantised: bool = False
    max_value: float = float("inf")
    key: PackedPart | None = None
    value: PackedPart | None = None

    @property
    def packed(self) -> bool:
        """Whether the storage is bytes per block, with scales beside codes that may be smaller than a byte."""
        return self.key is not None

    @property
    def parts(self) -> tuple[PackedPart, PackedPart]:
        """How keys and values are packed (packed formats only)."""
        assert self.key is not None and self.value is not None
        return self.key, self.value

    @property
    def element_size(self) -> int:
        """Bytes per stored key or value element (plain formats only)."""
        return self.value_dtype.itemsize

    def token_bytes(self, head_size: int, head_size_v: int) -> int:
        """Bytes of a token in one KV head, scales included.

        Example:
            >>> KV_FORMATS["turboquant_4bit_nc"].token_bytes(128, 128)
            134
        """
        if self.packed:
            key, value = self.parts
            return key.row_bytes(head_size) + value.row_bytes(head_size_v)
        return (head_size + head_size_v) * self.element_size

    def head_size_problems(self, head_size: int, head_size_v: int) -> list[str]:
        """Return why the format does not take these head sizes; empty if it does."""
        found = []
        for name, size, part in (("head_size", head_size, self.key), ("head_size_v", head_size_v, self.value)):
            problem = None if part is None else part.width_problem(size)
            if problem is not None:
                found.append(f"{name} {size} with kv_cache_dtype {self.name} (takes {problem})")
        return found

    def block_problems(self, rows: int, head_size: int, head_size_v: int) -> list[str]:
        """Return why blocks of `rows` rows, tokens times KV heads, cannot hold the format; empty if they can.

        The scales of a block follow its codes, and a scale of two bytes starts at an even one.
        """
        start = 0
        for part, width in ((self.key, head_size), (self.value, head_size_v)) if self.packed else ():
            assert part is not None
            start += rows * part.code_bytes(width)
            if part.scale_dtype is not None and start % part.scale_dtype.itemsize:
                return [f"kv_cache_dtype {self.name} in blocks of {rows} rows (takes an even number of tokens)"]
            start += rows * part.scale_bytes(width)
        return []


def _packed(name: str, key: PackedPart, value: PackedPart, quantised: bool = False, largest: float = 0.0) -> KVFormat:
    return KVFormat(name, torch.uint8, torch.uint8, quantised, largest or float("inf"), key, value)


def _packed_formats() -> dict[str, KVFormat]:
    int8, fp8 = (PackedPart(codec, 8, torch.float32, 1) for codec in ("int8", "fp8"))
    int4 = PackedPart("int4", 4, torch.float32, 1, rotation="block_hadamard")
    nvfp4 = PackedPart("nvfp4", 4, torch.float8_e4m3fn, group_size=NVFP4_GROUP_SIZE)
    key4, key3 = (PackedPart("codebook", bits, torch.float16, 1, rotation="hadamard") for bits in (4, 3))
    value4, value3 = (PackedPart("uniform", bits, torch.float16, 2) for bits in (4, 3))
    signed4, signed3 = (replace(key, rotation="signed_hadamard") for key in (key4, key3))
    formats = [
        _packed("int8_per_token_head", int8, int8),
        _packed("fp8_per_token_head", fp8, fp8),
        _packed("int4_per_token_head", int4, int4),
        _packed("nvfp4", nvfp4, nvfp4, quantised=True, largest=FP4_E2M1_MAX * FP8_E4M3_MAX),
        _packed("turboquant_k8v4", PackedPart("e4m3", 8), value4),
        _packed("turboquant_4bit_nc", key4, value4),
        _packed("turboquant_k3v4_nc", key3, value4),
        _packed("turboquant_3bit_nc", key3, value3),
        _packed("turboquant_4bit_nc_signed", signed4, value4),
        _packed("turboquant_k3v4_nc_signed", signed3, value4),
        _packed("turboquant_3bit_nc_signed", signed3, value3),
    ]
    return {fmt.name: fmt for fmt in formats}


KV_FORMATS: dict[str, KVFormat] = {
    **{name: KVFormat(name, dtype, dtype) for name, dtype in MODEL_DTYPES.items()},
    "fp8_e4m3": KVFormat("fp8_e4m3", torch.uint8, torch.float8_e4m3fn, True, FP8_E4M3_MAX),
    "fp8_e5m2": KVFormat("fp8_e5m2", torch.uint8, torch.float8_e5m2, True, FP8_E5M2_MAX),
    **_packed_formats(),
}

KV_ALIASES = {"fp8": "fp8_e4m3", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "half": "float16"}


def kv_cache_dtypes() -> tuple[str, ...]:
    """Return the names that `CacheConfig.cache_dtype` accepts."""
    return "auto", *KV_FORMATS, *KV_ALIASES


def resolve_kv_cache_dtype(name: str, model_dtype: torch.dtype) -> str:
    """Return the canonical format name of a cache dtype: `"auto"`, an alias or a canonical name.

    Raises:
        ConfigError: the name is unknown; the message lists all names.
    """
    name = dtype_name(model_dtype) if name == "auto" else KV_ALIASES.get(name, name)
    if name not in KV_FORMATS:
        raise ConfigError(
            f"cache_dtype {name!r} is not a KV cache format", ", ".join(kv_cache_dtypes()), "choose one of these names"
        )
    return name


@dataclass(frozen=True)
class OutputFormat:
    """How an attention output `[num_tokens, num_heads, head_size_v]` is written.

    Attributes:
        name: canonical name.
        container: dtype of the output tensor; `None` means the model dtype. `uint8` holds two e2m1 values a byte,
            the even column in the low nibble, so its last dimension is `head_size_v // 2`. `int8` is -128 to 127.
        static_scale: whether `output_scale` (one fp32 value) is an input: the FP8 scale, or NVFP4's global scale.
        group_size: columns of the flattened row `num_heads * head_size_v` that share one scale; 0: none,
            -1: the whole row (per token).
        power_of_two: scales are rounded up to powers of two.
        column_major: `output_block_scale` is `[num_tokens, groups]` with strides `(1, num_tokens)`.
        swizzled: NVFP4 scales in tiles of 128 x 4, padded with zeros to whole tiles.
        exponents: of MX formats, whose scales are e8m0, kept in `uint8` since Inductor has no e8m0 on a CPU. `"ceil"`
            rounds maximum / 448 up to a power of two, `"floor"` takes the power of two at or below maximum / 256.
        limit: computed scales are maximum / limit.
    """

    name: str
    container: torch.dtype | None = None
    static_scale: bool = False
    group_size: int = 0
    power_of_two: bool = False
    column_major: bool = False
    swizzled: bool = False
    exponents: str = ""
    limit: float = FP8_E4M3_MAX

    @property
    def has_fp32_scales(self) -> bool:
        """Whether the op computes scales and stores them in fp32."""
        return self.block_scale_dtype is torch.float32

    @property
    def arithmetics(self) -> tuple[str, ...]:
        """Names of `OUTPUT_ARITHMETICS` that the format can have."""
        if self.container is None:
            return ("divide",)
        if self.container is torch.uint8 or self.exponents:
            return "divide", "approximate_divide"
        return OUTPUT_DIVISIONS if self.static_scale or self.power_of_two else OUTPUT_ARITHMETICS

    @property
    def block_scale_dtype(self) -> torch.dtype | None:
        """Dtype of `output_block_scale`, `None` if the format writes none."""
        if self.container is torch.uint8:
            return torch.float8_e4m3fn
        if self.exponents:
            return torch.uint8
        return torch.float32 if self.group_size else None

    def output_columns(self, head_size_v: int) -> int:
        """Last dimension of the output tensor."""
        return head_size_v // 2 if self.container is torch.uint8 else head_size_v

    def block_scale_shape(self, num_tokens: int, num_columns: int) -> tuple[int, int] | None:
        """Shape of `output_block_scale` for rows of `num_columns = num_heads * head_size_v`, `None` without one."""
        if not self.group_size:
            return None
        groups = 1 if self.group_size < 0 else num_columns // self.group_size
        if self.swizzled:
            return (num_tokens + 127) // 128 * 128, (groups + 3) // 4 * 4
        return num_tokens, groups

    def allocate(self, query: Tensor, head_size_v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return uninitialised output and block scales (or `None`) for a query `[T, H, D]`.

        Args:
            dtype: model dtype.
        """
        tokens, heads, _ = query.shape
        output = query.new_empty((tokens, heads, self.output_columns(head_size_v)), dtype=self.container or dtype)
        shape = self.block_scale_shape(tokens, heads * head_size_v) if self.group_size else None
        if shape is None:
            return output, None
        if self.column_major:
            return output, query.new_empty(shape[::-1], dtype=self.block_scale_dtype).t()
        return output, query.new_empty(shape, dtype=self.block_scale_dtype)


def _output_formats() -> dict[str, OutputFormat]:
    e4m3 = torch.float8_e4m3fn
    formats = [
        OutputFormat("none"),
        OutputFormat("fp8_static", e4m3, static_scale=True),
        OutputFormat("fp8_per_token", e4m3, group_size=-1),
        OutputFormat("int8_per_token", torch.int8, group_size=-1, limit=INT8_MAX),
        OutputFormat("int8_per_token_full", torch.int8, group_size=-1, limit=INT8_RANGE / 2),
        OutputFormat("mxfp8_ceil", e4m3, group_size=MX_GROUP_SIZE, exponents="ceil"),
        OutputFormat("mxfp8_floor", e4m3, group_size=MX_GROUP_SIZE, exponents="floor"),
        OutputFormat("nvfp4", torch.uint8, static_scale=True, group_size=NVFP4_GROUP_SIZE),
        OutputFormat("nvfp4_swizzled", torch.uint8, static_scale=True, group_size=NVFP4_GROUP_SIZE, swizzled=True),
    ]
    for group, pow2, col in itertools.product((64, 128), ("", "_pow2"), ("", "_col")):
        name = f"fp8_group{group}{pow2}{col}"
        formats.append(OutputFormat(name, e4m3, group_size=group, power_of_two=bool(pow2), column_major=bool(col)))
    return {f.name: f for f in formats}


OUTPUT_FORMATS: dict[str, OutputFormat] = _output_formats()

QUERY_FORMATS: tuple[str, ...] = ("none", "fp8_e4m3")
"""Dtype of the query in the product: the model dtype, or e4m3 with `q_scale`."""

OUTPUT_DIVISIONS: tuple[str, ...] = ("divide", "multiply", "approximate_divide", "approximate_multiply")
"""How values are scaled by a scale: divided by it, or multiplied by its reciprocal in fp32. The two round ties
differently, so a fused epilogue uses the arithmetic of the code that it replaces. The approximate ones divide as
Inductor's generated CUDA code does: by the hardware's `div.full` (at most two units in the last place off), and by
multiplying with the reciprocal of a divisor that is known at compile time."""

OUTPUT_FACTORS: tuple[str, ...] = ("factor", "factor_inverse", "quotient", "quotient_inverse")
"""How values are scaled by a factor made of their maximum, in fp32: `"factor"` is (1 / maximum) * limit, which is what
`448.0 / maximum` computes in Python, `"quotient"` is limit / maximum, rounded once. The stored scale is maximum /
limit, or the reciprocal of the factor (`"_inverse"`)."""

OUTPUT_ARITHMETICS: tuple[str, ...] = (
    *OUTPUT_DIVISIONS,
    *OUTPUT_FACTORS,
    *(f"approximate_{name}" for name in OUTPUT_FACTORS),
)
"""How output values are scaled."""

OUTPUT_FLOORS: tuple[str, ...] = ("scale", "rounded_scale", "zero", "maximum")
"""What `output_min_scale` raises: a scale that is smaller, before or after it is rounded up to a power of two, a scale
of zero alone, or a maximum that is smaller, where a factor is made of it."""

QUERY_LOADS: tuple[str, ...] = ("plain", *OUTPUT_DIVISIONS)
"""How an e4m3 query is passed to the op: as e4m3 (`"plain"`), or in the model dtype; the kernel then quantises it with
`q_scale` and this arithmetic of `OUTPUT_DIVISIONS`."""

SCALE_KINDS: tuple[str, ...] = ("none", "tensor", "head")
"""Granularity of k/v/q scales: none, one value, or one value per KV head."""
