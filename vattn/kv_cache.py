"""KV caches of a whole model: what each layer needs, one storage per layer, and blocks moved between storages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from vattn.errors import CacheError, ConfigError, DeviceError, DtypeError
from vattn.formats import MODEL_DTYPES, dtype_name
from vattn.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from vattn.ops.cache_layout import CacheGeometry, kv_cache_dtype, kv_cache_shape

__all__ = [
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheAllocation",
    "KVCacheLayer",
    "KVCacheSpec",
    "LayerCache",
    "MLAAttentionSpec",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "TQFullAttentionSpec",
    "allocate_kv_cache",
    "copy_blocks",
    "format_bytes",
    "parse_bytes",
    "swap_blocks",
]

BlockMapping: TypeAlias = Tensor | Sequence[tuple[int, int]]

_NO_PAIRS = torch.empty((0, 2), dtype=torch.int64, device="cpu")


class KVCacheLayer(Protocol):
    """What `allocate_kv_cache` looks for in a model: any module with these methods."""

    def get_kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec | None:
        """Return what the layer stores in a model of `dtype`, `None` for nothing of its own."""

    def resolve_config(self, dtype: torch.dtype, device: torch.device | str, target: Any = None) -> Any:
        """Raise what `bind_kv_cache` would raise for a request that no backend runs; change nothing."""

    def bind_kv_cache(self, storage: Tensor, dtype: torch.dtype, target: Any = None) -> None:
        """Take a storage; `target` is the layer that owns it when it is shared."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of an allocation.

    Attributes:
        name: the layer's prefix, or its path in the model.
        spec: what it stores; that of the target for a shared cache.
        storage: the raw storage.
        shared_with: name of the layer that owns the storage, `None` for its own.
    """

    name: str
    spec: KVCacheSpec
    storage: Tensor = field(repr=False)
    shared_with: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this layer adds: 0 if it shares another's."""
        return 0 if self.shared_with else self.storage.numel() * self.storage.element_size()


@dataclass(frozen=True)
class KVCacheAllocation:
    """The KV caches of a model, and what they cost.

    Attributes:
        num_blocks: blocks in every storage, block 0 (which `BlockPool` keeps back) included.
        block_size: tokens per block.
        dtype: model dtype that the layers were bound for.
        device: where the storages lie.
        layers: one entry per layer, in the model's order.
    """

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerCache, ...]
    groups: tuple[()] = ()

    @property
    def kv_caches(self) -> list[Tensor]:
        """Every storage once, in the order of the layers that own them."""
        return [layer.storage for layer in self.layers if layer.shared_with is None]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return sum(layer.spec.page_size_bytes for layer in self.layers if layer.shared_with is None)

    @property
    def bytes_per_layer(self) -> dict[str, int]:
        """Bytes of each layer's storage; 0 where it is shared."""
        return {layer.name: layer.num_bytes for layer in self.layers}

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold, those of block 0 included."""
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        lines = [
            f"KV cache: {self.num_blocks} blocks of {self.block_size} tokens = {self.num_tokens} tokens, "
            f"{format_bytes(self.total_bytes)} on {self.device} "
            f"({format_bytes(self.bytes_per_block)} a block over {len(self.layers)} layers)"
        ]
        groups = Counter(
            f"{type(c.spec).__name__} {c.spec.kv_cache_dtype} {c.spec.layout}, {c.spec.num_kv_heads} KV heads of "
            f"{c.spec.head_size}"
            + (f" and {c.spec.head_size_v}" if c.spec.head_size_v != c.spec.head_size else "")
            + (", shared" if c.shared_with else f", {format_bytes(c.num_bytes)} each")
            for c in self.layers
        )
        return "\n".join(lines + [f"  {count} x {text}" for text, count in groups.items()])


def format_bytes(count: int) -> str:
    """Write a byte count in the largest binary unit that keeps it at least 1, `1572864` -> `"1.50 MiB"`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def parse_bytes(memory: int | str) -> int:
    """Read a byte count: an int, or a number with a unit such as `"2GiB"`, `"1.5 GB"`, `"512 MiB"`.

    Raises:
        ConfigError: not a positive count in a known unit.
    """
    units = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    units |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
    count = 0
    if isinstance(memory, int) and not isinstance(memory, bool):
        count = memory
    elif isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory)
        if match and match[2].upper() in units:
            count = int(float(match[1]) * units[match[2].upper()])
    if count < 1:
        raise ConfigError(f"memory={memory!r}", "a positive int of bytes, or such as '2GiB', '512MB'", "memory='1GiB'")
    return count


def allocate_kv_cache(
    model: nn.Module,
    *,
    num_blocks: int | None = None,
    memory: int | str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> KVCacheAllocation:
    """Allocate and bind the KV cache of every attention layer in a model.

    Args:
        model: any module that contains layers with `get_kv_cache_spec` and `bind_kv_cache`, such as `vattn.Attention`.
        num_blocks: blocks per layer, the null block 0 included. Give this or `memory`.
        memory: bytes for all layers together, as an int or such as `"2GiB"`; rounded down to whole blocks.
        device: default that of the model's parameters.
        dtype: model dtype; default that of most of the model's parameters.

    Returns:
        What was allocated. Storages are zeroed and contiguous; layers that share a cache get their target's tensor.

    Raises:
        ConfigError: neither or both of `num_blocks` and `memory`, or a value out of range.
        CacheError: no layer found, memory too small for one block, block sizes that differ, an invalid sharing target.
        DtypeError, DeviceError: a dtype or device that a cache cannot have.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.Attention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2)
        >>> print(vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32))
        KV cache: 4 blocks of 16 tokens = 64 tokens, 16.00 KiB on cpu (4.00 KiB a block over 1 layers)
          1 x FullAttentionSpec float32 NHD, 2 KV heads of 16, 16.00 KiB each
    """
    if (num_blocks is None) == (memory is None):
        raise ConfigError(
            f"num_blocks={num_blocks!r} and memory={memory!r}",
            "exactly one of them",
            "allocate_kv_cache(model, memory='1GiB')",
        )
    dtype = _model_dtype(model) if dtype is None else dtype
    if dtype not in MODEL_DTYPES.values():
        raise DtypeError(f"model dtype {dtype}", ", ".join(MODEL_DTYPES), "pass dtype=torch.bfloat16")
    device = _model_device(model) if device is None else _device(device)
    modules = find_layers(model)
    specs = {name: spec for name, m in modules.items() if (spec := m.get_kv_cache_spec(dtype)) is not None}
    targets = _sharing_targets(modules, specs)
    block_size = _common_block_size(specs)
    count = _count_blocks(num_blocks, memory, specs)
    for name, module in modules.items():
        # Every refusal comes before the first binding, so that none leaves a model half bound.
        module.resolve_config(dtype, device, modules.get(targets.get(name, "")))
    storages = {name: _zeros(spec, count, device) for name, spec in specs.items()}
    layers = []
    for name, module in modules.items():
        if name in specs:
            module.bind_kv_cache(storages[name], dtype)
            layers.append(LayerCache(name, specs[name], storages[name]))
        elif name in targets:
            target = targets[name]
            module.bind_kv_cache(storages[target], dtype, modules[target])
            layers.append(LayerCache(name, specs[target], storages[target], target))
    return KVCacheAllocation(count, block_size, dtype, device, tuple(layers))


def _model_dtype(model: nn.Module) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in MODEL_DTYPES.values():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device={device!r}", "'cpu' or 'cuda'", "pass device='cpu'") from error
    if found.type not in ("cpu", "cuda"):
        raise DeviceError(f"a KV cache on {found}", "cpu or cuda", "move the model first, or pass device='cpu'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device {found} without a usable CUDA GPU", "cpu here", "run `python -m vattn doctor`")
    return found


def _model_device(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise DeviceError(
            f"model with parameters on {', '.join(sorted(map(str, devices)))}", "one device", "pass device=..."
        )
    return _device(devices.pop())


def find_layers(model: nn.Module) -> dict[str, KVCacheLayer]:
    """Return the attention layers by prefix, or by path where they have none, in the model's order."""
    found: dict[str, KVCacheLayer] = {}
    for path, module in model.named_modules():
        if not (hasattr(module, "get_kv_cache_spec") and hasattr(module, "bind_kv_cache")):
            continue
        name = getattr(module, "prefix", "") or path or type(module).__name__
        if name in found:
            raise CacheError(
                f"two layers of the prefix {name!r}", "unique prefixes", "number the layers in their prefix"
            )
        found[name] = cast(KVCacheLayer, module)
    if not found:
        raise CacheError(
            f"{type(model).__name__} contains no attention layer of vattn",
            "a module with vattn.Attention layers in it",
            "build the model with vattn.Attention, or swap its attention first",
        )
    return found


def _sharing_targets(modules: dict[str, KVCacheLayer], specs: dict[str, KVCacheSpec]) -> dict[str, str]:
    """Return the target of each layer that shares a cache, checked: an earlier owner of the same class."""
    order = list(modules)
    targets = {}
    for name, module in modules.items():
        target = getattr(module, "kv_sharing_target_layer_name", None)
        if target is None or name in specs:
            continue
        wrong = ""
        if target not in modules:
            wrong = "is no attention layer of the model"
        elif order.index(target) >= order.index(name):
            wrong = "does not come before it"
        elif target not in specs:
            wrong = "has no cache of its own"
        elif type(modules[target]) is not type(module):
            wrong = f"is a {type(modules[target]).__name__}, the layer a {type(module).__name__}"
        if wrong:
            raise CacheError(
                f"layer {name!r} shares the KV cache of {target!r}, which {wrong}",
                f"an earlier layer with a cache: {', '.join(specs) or 'none'}",
                "correct kv_sharing_target_layer_name",
            )
        targets[name] = target
    return targets


def _common_block_size(specs: dict[str, KVCacheSpec]) -> int:
    if not specs:
        raise CacheError("no layer of the model has a KV cache of its own", "at least one", "check the sharing targets")
    sizes = sorted({spec.block_size for spec in specs.values()})
    if len(sizes) > 1:
        raise CacheError(
            f"layers with block sizes {', '.join(map(str, sizes))}",
            "one block size: all layers read the same block table",
            "give every layer the same CacheConfig.block_size",
        )
    return sizes[0]


def _count_blocks(num_blocks: int | None, memory: int | str | None, specs: dict[str, KVCacheSpec]) -> int:
    if memory is None:
        if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks!r}", "an int >= 1", "pass num_blocks=64")
        return num_blocks
    budget, per_block = parse_bytes(memory), sum(spec.page_size_bytes for spec in specs.values())
    if budget < per_block:
        raise CacheError(
            f"memory={memory!r} is {budget} bytes, and one block takes {per_block} bytes over {len(specs)} layers",
            f"at least {per_block} bytes",
            "give more memory, or use a smaller block_size or an FP8 cache",
        )
    return budget // per_block


def _zeros(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> Tensor:
    try:
        # A storage made in inference mode could not be updated outside of it.
        with torch.inference_mode(False):
            return torch.zeros(spec.storage_shape(num_blocks), dtype=spec.storage_dtype, device=device)
    except RuntimeError as error:
        raise CacheError(
            f"{format_bytes(num_blocks * spec.page_size_bytes)} for one layer's KV cache could not be allocated on "
            f"{device}: {str(error).splitlines()[0]}",
            "what the device has free",
            "use fewer blocks, or an FP8 cache",
        ) from error


def swap_blocks(source: Tensor, destination: Tensor, block_mapping: BlockMapping, geometry: CacheGeometry) -> None:
    """Copy whole blocks, keys and values, from one storage to another, on the same device or not.

    All sources are read before any destination is written, so both may be the same storage.

    Args:
        source, destination: raw storages of the same geometry; their numbers of blocks may differ.
        block_mapping: pairs `(source block, destination block)`, or int64 `[n, 2]`; a GPU tensor costs a sync.
        geometry: the layer's `KVCacheSpec` or `AttentionConfig`.

    Raises:
        CacheError: an id out of range, a destination named twice, or a storage of another geometry; nothing is copied.
    """
    for name, storage in (("source", source), ("destination", destination)):
        axis = _block_axis(storage)
        shape, dtype = kv_cache_shape(geometry, storage.shape[axis]), kv_cache_dtype(geometry)
        if tuple(storage.shape) != shape or storage.dtype != dtype:
            raise CacheError(
                f"{name} storage {tuple(storage.shape)} of {dtype_name(storage.dtype)}",
                f"{shape} of {dtype_name(dtype)}",
                "pass the spec that the storage was allocated for",
            )
    pairs = _check_mapping(
        block_mapping, source.shape[_block_axis(source)], destination.shape[_block_axis(destination)]
    )
    _copy_pairs(source, destination, pairs)


def copy_blocks(
    kv_caches: Sequence[Tensor] | Mapping[str, Tensor] | KVCacheAllocation, block_mapping: BlockMapping
) -> None:
    """Copy whole blocks, keys and values, inside every layer's storage: what copy on write needs.

    All sources are read before any destination is written. A storage that several layers share is copied once.

    Args:
        kv_caches: the storages, by layer or in any order, or what `allocate_kv_cache` returned.
        block_mapping: pairs `(source block, destination block)`, or int64 `[n, 2]`; a GPU tensor costs a sync.

    Raises:
        CacheError: an id out of range or a destination named twice; nothing is copied, in no layer.
    """
    if isinstance(kv_caches, KVCacheAllocation):
        kv_caches = kv_caches.kv_caches
    elif isinstance(kv_caches, Mapping):
        kv_caches = list(kv_caches.values())
    distinct = list({(cache.device, cache.data_ptr(), cache.shape): cache for cache in kv_caches}.values())
    num_blocks = min((cache.shape[_block_axis(cache)] for cache in distinct), default=0)
    pairs = _check_mapping(block_mapping, num_blocks, num_blocks)
    for cache in distinct:
        _copy_pairs(cache, cache, pairs)


def _block_axis(storage: Tensor) -> int:
    """Return the block dimension: plain storages are `[2, blocks, ...]`, those in bytes `[blocks, bytes]`."""
    if storage.dim() not in (2, 5):
        raise CacheError(
            f"a storage of shape {tuple(storage.shape)}",
            "2 or 5 dimensions, as vattn.kv_cache_shape makes them",
            "pass the raw storage, not a view of its keys or values",
        )
    return 0 if storage.dim() == 2 else 1


def _check_mapping(mapping: BlockMapping, num_sources: int, num_destinations: int) -> Tensor:
    """Return the mapping on the CPU, checked."""
    if not isinstance(mapping, Tensor):
        mapping = _as_tensor(mapping)
    if mapping.dtype != torch.int64 or mapping.dim() != 2 or mapping.shape[1] != 2:
        raise CacheError(
            f"block_mapping of shape {tuple(mapping.shape)} and {dtype_name(mapping.dtype)}",
            "int64 [n, 2], rows (source block, destination block)",
            "torch.tensor([(3, 7)])",
        )
    pairs = mapping.cpu()
    for column, name, limit in ((0, "source", num_sources), (1, "destination", num_destinations)):
        ids = pairs[:, column]
        wrong = ids[(ids < 0) | (ids >= limit)].tolist()
        if wrong:
            raise CacheError(f"{name} block(s) {wrong} in block_mapping", f"0 to {limit - 1}", "check the block tables")
    twice = [block for block, count in Counter(pairs[:, 1].tolist()).items() if count > 1]
    if twice:
        raise CacheError(
            f"destination block(s) {twice} named twice in block_mapping", "each once", "drop one of the rows"
        )
    return pairs


def _as_tensor(pairs: Sequence[tuple[int, int]]) -> Tensor:
    try:
        return torch.tensor([tuple(pair) for pair in pairs], device="cpu") if len(pairs) else _NO_PAIRS
    except (TypeError, ValueError) as error:
        raise CacheError(
            f"block_mapping {pairs!r}", "pairs (source block, destination block)", "pass [(3, 7)]"
        ) from error


def _copy_pairs(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    axis = _block_axis(source)
    blocks = source.index_select(axis, pairs[:, 0].to(source.device)).to(destination.device)
    destination.index_copy_(axis, pairs[:, 1].to(destination.device), blocks)
