"""What a backend is: capabilities as data, reasons that choose, explain and make the error, and the ops.

A backend file imports nothing heavy at its top: packages are imported inside the methods that use them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from vattn.cache.copies import BlockMapping, copy_blocks, swap_blocks
from vattn.cache.layout import CacheGeometry
from vattn.cache.memory import CacheMemory
from vattn.cache.specs import FullAttentionSpec, MLAAttentionSpec
from vattn.config.arguments import integer, read_count
from vattn.config.attention import AttentionConfig
from vattn.config.device import BLOCK_SIZES, DeviceInfo, Sizes, not_allowed, parse_version
from vattn.config.features import FEATURES, request_parts, requested_features
from vattn.config.rope import RopeConfig
from vattn.errors import CacheError, GraphContractError, UnsupportedRequestError
from vattn.ops.arguments import (
    AttentionArgs,
    CacheUpdateArgs,
    HostPlanArgs,
    PlanArgs,
    RopeUpdateArgs,
    VarlenAttentionArgs,
)
from vattn.quantization.formats import KV_FORMATS, OUTPUT_FORMATS, dtype_name


def refuse_capture(query: torch.Tensor, backend: str, why: str, instead: str = "choose another attn_backend") -> None:
    """Refuse a call to a backend that cannot be captured in a CUDA graph.

    Raises:
        GraphContractError: a graph is being captured.
    """
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise GraphContractError(
            f"{backend} was called while a CUDA graph is captured; {why}",
            "a backend with cuda_graphs='full' in its capabilities",
            f"{instead}, or run this model without graphs",
        )


@dataclass(frozen=True)
class Exclusion:
    """A combination that a backend cannot run though it runs each part.

    Attributes:
        names: feature names or `field=value` pairs of the config, all of which must be present to exclude.
        why: the reason, with what to do instead.
    """

    names: frozenset[str]
    why: str


PACKED_DCP = Exclusion(
    frozenset({"context_parallel", "contiguous_kv"}),
    "context_parallel without a paged cache (it is a rank's cache that holds a share of the keys)",
)


@dataclass(frozen=True)
class Package:
    """An optional package that a backend runs on.

    Attributes:
        module: import name.
        distribution: name to look the version up by.
        minimum: lowest version, as a tuple.
        extra: the extra of vattn that installs it, `""` where no index has a wheel.
    """

    module: str
    distribution: str
    minimum: tuple[int, ...]
    extra: str

    def version(self) -> str | None:
        """Return the version that is installed, `None` if none is."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def problem(self) -> str | None:
        """Return why the package cannot be used, `None` if it can."""
        want, found = ".".join(map(str, self.minimum)), self.version()
        if found is None:
            return f"package {self.distribution} is not installed (pip install 'vattn[{self.extra}]', >= {want})"
        if parse_version(found) < self.minimum:
            hint = f" (pip install -U 'vattn[{self.extra}]')" if self.extra else ""
            return f"package {self.distribution} {found} is older than {want}{hint}"
        return None


@dataclass(frozen=True)
class Capabilities:
    """Everything a backend can do, as data: read by the selector, the docs, the conformance tests and the fuzz.

    Attributes:
        devices: device types; `"interpreter"` means CPU tensors under Triton's interpreter.
        dtypes, kv_cache_dtypes, query_formats, output_formats, attn_types: allowed names.
        query_loads: names of `vattn.quantization.formats.QUERY_LOADS` that the backend has.
        head_sizes, block_sizes: allowed sizes (key and value head sizes alike).
        features: allowed names of `FEATURES`.
        required_features: names of `FEATURES` that every request must have; the backend runs nothing else.
        exclusions: combinations that are refused.
        minimum_capability: lowest compute capability on CUDA.
        format_capability: lowest compute capability for a KV, query or output format by name.
        format_head_sizes: head sizes that a KV, query or output format narrows `head_sizes` to, by name.
        package: what must be installed.
        output_variants: whether FP8 output codes can be multiplied instead of divided and scales have another minimum.
        approximate_division: whether, in addition, quotients can equal those that Inductor's CUDA code computes.
        rope_update: whether there is `rope_kv_cache_update`, for every KV format that the backend stores.
        cuda_graphs: `"full"` (captures anywhere), `"manual"` (plan outside the graph) or `"never"`.
        rounded_lse: whether softmax weights are summed after they were rounded to the model dtype, so that a
            log-sum-exp is off by up to half a step of it.
        fp8_weights: whether softmax weights may be rounded to e4m3 over an FP8 cache, each by up to 2^-4 of itself, and
            scores summed with less than fp32.
        negative_scales: whether the scores may be multiplied by 0 or less.
        tree_masks_only: whether a tree's biases must be 0 or -inf; a call with others is refused.
        strided_caches: whether blocks, tokens and heads of keys and values may have gaps between them.
        row_alignment: bytes; rows of keys and values must start at multiples of it.
        garbage_safe: NaN in unused table entries, unwritten block tails and blocks outside a window never reaches a
            result.
    """

    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    query_formats: tuple[str, ...]
    output_formats: tuple[str, ...]
    attn_types: tuple[str, ...]
    head_sizes: Sizes
    block_sizes: Sizes
    features: frozenset[str]
    required_features: frozenset[str] = frozenset()
    exclusions: tuple[Exclusion, ...] = ()
    minimum_capability: tuple[int, int] = (0, 0)
    format_capability: dict[str, tuple[int, int]] = field(default_factory=dict)
    format_head_sizes: dict[str, Sizes] = field(default_factory=dict)
    package: Package | None = None
    query_loads: tuple[str, ...] = ("plain",)
    output_variants: bool = False
    approximate_division: bool = False
    rope_update: bool = False
    cuda_graphs: str = "full"
    rounded_lse: bool = False
    fp8_weights: bool = False
    negative_scales: bool = True
    tree_masks_only: bool = False
    strided_caches: bool = True
    row_alignment: int = 1
    garbage_safe: bool = True

    def refusals(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return what of a request is not allowed, with the value and what is allowed; empty if all of it is."""
        return self._of_device(config, device) + self._of_values(config) + self._of_features(config)

    @property
    def reads_any_memory(self) -> bool:
        """Whether a cache of any strides may be given."""
        return self.strided_caches and self.row_alignment == 1

    def memory_refusals(self, memory: CacheMemory) -> list[str]:
        """Return what of the memory of a cache is not allowed; empty if kernels can read it."""
        found = []
        if not (self.strided_caches or memory.dense):
            found.append(
                "gaps between the blocks, tokens or heads of a cache, or keys in another order than values (reads one "
                "order without gaps)"
            )
        if memory.row_alignment < self.row_alignment:
            found.append(
                f"rows of a cache at multiples of {memory.row_alignment} bytes (reads multiples of "
                f"{self.row_alignment})"
            )
        return found

    def _of_device(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        kinds = (device.type, "interpreter") if device.triton_interpreter else (device.type,)
        if not set(kinds) & set(self.devices):
            hint = " (set TRITON_INTERPRET=1 to run it slowly on CPU)" if "interpreter" in self.devices else ""
            return [f"device {device.type} (runs on {', '.join(self.devices)}){hint}"]
        if device.type != "cuda":
            return []
        formats = (config.kv_cache_dtype, config.query_format, config.output_format)
        needs = [(str(device), self.minimum_capability)]
        needs += [(f"format {name} on {device}", self.format_capability.get(name, (0, 0))) for name in formats]
        return [f"{what} (needs sm_{a}{b} or newer)" for what, (a, b) in needs if device.capability < (a, b)]

    def _of_values(self, config: AttentionConfig) -> list[str]:
        allowed = {
            "dtype": self.dtypes,
            "kv_cache_dtype": self.kv_cache_dtypes,
            "query_format": self.query_formats,
            "query_load": self.query_loads,
            "output_format": self.output_formats,
            "attn_type": self.attn_types,
        }
        found = not_allowed(config, allowed)
        stored = KV_FORMATS[config.kv_cache_dtype]
        found += stored.head_size_problems(config.head_size, config.head_size_v)
        if stored.packed and config.block_size == 0:
            found.append(f"kv_cache_dtype {stored.name} without a paged cache (its rows lie in blocks)")
        formats = dict.fromkeys((config.kv_cache_dtype, config.query_format, config.output_format))
        for size in dict.fromkeys((config.head_size, config.head_size_v)):
            if size not in self.head_sizes:
                found.append(f"head_size {size} (runs {self.head_sizes})")
                continue
            narrower = {name: self.format_head_sizes[name] for name in formats if name in self.format_head_sizes}
            found += [f"head_size {size} with {name} (runs {of})" for name, of in narrower.items() if size not in of]
        if config.block_size:
            found += not_allowed(config, {"block_size": self.block_sizes})
            found += stored.block_problems(
                config.block_size * config.num_kv_heads, config.head_size, config.head_size_v
            )
        found += self._of_arithmetic(config)
        fmt = OUTPUT_FORMATS[config.output_format]
        if fmt.group_size > 0 and config.head_size_v % fmt.group_size and fmt.group_size % config.head_size_v:
            found.append(
                f"output_format {config.output_format} with head_size_v {config.head_size_v} "
                "(one of group and head must divide the other)"
            )
        return found

    def _of_arithmetic(self, config: Any) -> list[str]:
        """Return what of the factor of scores and of the output's quotients is not allowed, of any kind of config."""
        found = []
        if config.scale <= 0 and not self.negative_scales:
            found.append(f"scale {config.scale} (runs scales above 0)")
        if not self.output_variants:
            if config.output_arithmetic != "divide":
                found.append(f"output_arithmetic {config.output_arithmetic} (divides)")
            if config.output_min_scale is not None:
                found.append(f"output_min_scale {config.output_min_scale} (has the default)")
        elif config.output_arithmetic.startswith("approximate") and not self.approximate_division:
            found.append(f"output_arithmetic {config.output_arithmetic} (divides exactly)")
        return found

    def _of_features(self, config: AttentionConfig) -> list[str]:
        requested, present = requested_features(config), request_parts(config)
        found = [f"{name} is not implemented" for name in FEATURES if name in requested - self.features]
        missing = sorted(self.required_features - requested)
        found += [f"no {name}, which every request to this backend has" for name in missing]
        return found + [rule.why for rule in self.exclusions if rule.names <= present]


class Backend:
    """Run the attention requests that its capabilities accept.

    Subclasses set `name` and `capabilities` and fill in the ops.
    """

    name: str
    capabilities: Capabilities
    replayable: frozenset[str] = frozenset()
    """Ops whose calls on a GPU do nothing but launch kernels, each by `vattn.kernels.triton.common.launching.launch` or
    marked as `vattn.kernels.replay.unrecorded`."""
    builder: ClassVar[type]
    """What makes the metadata of its steps; `vattn.metadata`, which is above this room, sets it."""

    @classmethod
    def get_builder_cls(cls) -> type:
        """Return the class that makes the metadata of its steps."""
        return cls.builder

    def get_supported_head_sizes(self) -> list[int]:
        """Return the head sizes of the capabilities; for latent attention the columns of a cached row."""
        return list(self.capabilities.head_sizes)

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return `(2, num_blocks, block_size, num_kv_heads, head_size)`, the shape of a plain cache.

        Other formats, unequal head sizes and heads before tokens: `vattn.kv_cache_shape`.

        Raises:
            CacheError: sizes that no cache has.

        Example:
            >>> from vattn.backends.triton_attn import TritonAttentionBackend
            >>> TritonAttentionBackend.get_kv_cache_shape(100, 16, 8, 128)
            (2, 100, 16, 8, 128)
        """
        size = integer(block_size)
        if size is None or size not in BLOCK_SIZES:
            raise CacheError(f"block_size={block_size!r:.40}", str(BLOCK_SIZES), "use 16")
        blocks, heads, width = (
            read_count(name, count, 1, "pass the size of the cache", CacheError)
            for name, count in (("num_blocks", num_blocks), ("num_kv_heads", num_kv_heads), ("head_size", head_size))
        )
        return 2, blocks, size, heads, width

    @staticmethod
    def swap_blocks(source: Tensor, destination: Tensor, source_to_destination: BlockMapping) -> None:
        """Copy blocks, keys and values, from one storage to another: `vattn.swap_blocks` of plain storages.

        Args:
            source, destination: `[2, num_blocks, block_size, num_kv_heads, head_size]`, or
                `[num_blocks, block_size, width]` of latents, on the same device or not.
            source_to_destination: pairs `(source block, destination block)`, or int64 `[n, 2]`.

        Raises:
            CacheError: another shape or dtype, an id out of range, or a destination named twice; nothing is copied.
        """
        swap_blocks(source, destination, source_to_destination, _geometry(source))

    @staticmethod
    def copy_blocks(kv_caches: Sequence[Tensor], source_to_destinations: BlockMapping) -> None:
        """Copy blocks inside of every layer's storage: `vattn.copy_blocks`."""
        copy_blocks(kv_caches, source_to_destinations)

    def problem(self) -> str | None:
        """Return why this backend cannot be used in this process at all, `None` if it can."""
        package = self.capabilities.package
        return None if package is None else package.problem()

    def running(self) -> tuple[str, str] | None:
        """Return the package that runs the attention in this process and its version; `None` if it is not installed.

        Recorded runs hold for one version of one package.
        """
        package = self.capabilities.package
        if package is None:
            return "torch", torch.__version__.split("+")[0]
        version = package.version()
        return None if version is None else (package.distribution, version)

    def reasons(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return why this backend refuses a request, with the value and what is allowed; empty if it accepts."""
        problem = self.problem()
        return ([] if problem is None else [problem]) + self.limits(config, device)

    def limits(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return the reasons that remain once everything is installed: what the capabilities refuse."""
        return self.capabilities.refusals(config, device)

    def parts(self, config: AttentionConfig) -> frozenset[str]:
        """Return the parts of a request, by the names that recorded runs use."""
        return request_parts(config)

    def runs_on(self, config: AttentionConfig, device: DeviceInfo) -> str:
        """Return the name of the backend that runs a request: this one, unless it delegates to another."""
        return self.name

    def notes(self, config: AttentionConfig) -> list[str]:
        """Return what this backend does to run a request that it accepts, such as padding; for `explain`."""
        return []

    def general_steps(
        self, config: AttentionConfig, device: DeviceInfo, memory: CacheMemory | None = None
    ) -> list[str]:
        """Return which steps of a request miss the kernels made for a device, and why; for `explain`.

        Args:
            memory: of the cache, if it is known.
        """
        return []

    def plan_shape(self, config: AttentionConfig, num_tokens: int, num_reqs: int, table_width: int) -> tuple[int, ...]:
        """Return the shape of the int32 schedule that `plan` fills for such a step; `()`: this backend needs none."""
        return ()

    def plan_key(self, config: AttentionConfig) -> str:
        """Return a key that is equal for layers that can share one schedule."""
        return self.name

    def plan(self, args: PlanArgs, config: AttentionConfig) -> None:
        """Fill `args.schedule` from the step's lengths, on the device, without a sync."""
        raise UnsupportedRequestError(
            f"vattn::plan on backend {self.name}, which runs without schedules",
            "a backend whose plan_shape() is not ()",
            "call the attention op with plan=[]",
        )

    def host_plan_size(self, config: AttentionConfig) -> int:
        """Return how many int64 `plan_on_host` writes in addition to the schedule; 0: the device plans, by `plan`."""
        return 0

    def plan_on_host(self, args: HostPlanArgs, config: AttentionConfig) -> None:
        """Fill `args.schedule` and `args.host_plan` from lengths on the host, outside of any graph, without a sync."""
        raise NotImplementedError

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::attention`. Arguments are checked already."""
        raise NotImplementedError

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::varlen_attention`. Arguments are checked already."""
        raise NotImplementedError

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        """Run `vattn::kv_cache_update`. Arguments are checked already."""
        raise NotImplementedError

    def rope_kv_cache_update(self, args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> None:
        """Run `vattn::rope_kv_cache_update`. Arguments are checked already."""
        raise NotImplementedError


def _geometry(storage: Tensor) -> CacheGeometry:
    """Return the spec of a plain storage: a uint8 one holds FP8."""
    latents = isinstance(storage, Tensor) and storage.dim() == 3
    if not latents and (not isinstance(storage, Tensor) or storage.dim() != 5 or storage.shape[0] != 2):
        raise CacheError(
            f"a storage of shape {tuple(getattr(storage, 'shape', ()))} and type {type(storage).__name__}",
            "[2, num_blocks, block_size, num_kv_heads, head_size], or [num_blocks, block_size, width] of latents",
            "vattn.swap_blocks takes storages of every format with their spec",
        )
    stored = "fp8_e4m3" if storage.dtype == torch.uint8 else dtype_name(storage.dtype)
    if latents:
        return MLAAttentionSpec(1, storage.shape[2], kv_cache_dtype=stored, block_size=storage.shape[1])
    block_size, heads, width = storage.shape[2:]
    return FullAttentionSpec(heads, width, kv_cache_dtype=stored, block_size=block_size)
