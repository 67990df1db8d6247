"""KV caches of a whole model: what each layer needs, its storage, and what it costs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from vattn.cache.bindings import count_binding, let_groups_share
from vattn.cache.groups import CacheGroup, Grouping, KVCacheGroup, common_block_size, group_layers
from vattn.cache.specs import CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec
from vattn.cache.state_cache import StateCache, allocate_states, find_state_layers, memory_for_blocks
from vattn.config.arguments import format_bytes, parse_bytes, read_count
from vattn.config.device import DeviceInfo
from vattn.config.typed import typed
from vattn.errors import CacheError, ConfigError, DeviceError, DtypeError
from vattn.quantization.formats import MODEL_DTYPES


class KVCacheLayer(Protocol):
    """What `allocate_kv_cache` looks for in a model: any module with these methods."""

    def get_kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec | None:
        """Return what the layer stores in a model of `dtype`, `None` for nothing of its own."""

    def resolve_config(self, dtype: torch.dtype, device: torch.device | str, target: Any = None) -> Any:
        """Raise what `bind_kv_cache` would raise for a request that no backend runs; change nothing."""

    def bind_kv_cache(self, storage: Tensor, /, *, dtype: torch.dtype, target: Any = ...) -> None:
        """Take a storage; `target` is the layer that owns it when it is shared."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of an allocation.

    Attributes:
        name: the layer's prefix, or its path in the model.
        spec: what it stores; that of the target for a shared cache.
        storage: the raw storage.
        shared_with: name of the layer that owns the cache it reads, `None` for its own.
        group: index of its group; 0 without groups.
        adds_storage: whether the storage was made for this layer; not if an earlier layer of another group has it too.
    """

    name: str
    spec: KVCacheSpec
    storage: Tensor = field(repr=False)
    shared_with: str | None = None
    group: int = 0
    adds_storage: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes that this layer adds: 0 if the storage is another's."""
        adds = self.adds_storage and self.shared_with is None
        return self.storage.numel() * self.storage.element_size() if adds else 0


@dataclass(frozen=True)
class KVCacheAllocation:
    """The KV caches of a model, and what they cost.

    Attributes:
        num_blocks: blocks in every storage, block 0 (which `BlockPool` keeps back) included.
        block_size: tokens per block.
        dtype: model dtype that the layers were bound for.
        device: of the storages.
        layers: one entry per layer, in the model's order.
        groups: which layers share a block table; empty where all do, in a cache without groups.
        max_seq_len: length of the request that the groups were chosen for; 0 without groups.
        waste: share of the memory of such a request that no layer uses; 0 without groups.
        states: the states of layers that keep one for each request, in addition to the blocks; `None` without any.
    """

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerCache, ...]
    groups: tuple[KVCacheGroup, ...] = ()
    max_seq_len: int = 0
    waste: float = 0.0
    states: StateCache | None = None

    @property
    def kv_caches(self) -> list[Tensor]:
        """Every storage once, in the order of the layers that they were made for."""
        return [layer.storage for layer in self.layers if layer.shared_with is None and layer.adds_storage]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id takes over all storages."""
        return self.total_bytes // self.num_blocks

    @property
    def reserved_blocks(self) -> int:
        """First blocks that belong to no request, for `BlockPool(reserved=)`: the null block, and blocks of sinks."""
        return 1 + max((getattr(layer.spec, "sink_blocks", 0) for layer in self.layers), default=0)

    def blocks_per_request(self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None) -> int:
        """Return how many blocks one request can need at once, over all groups; arguments of `KVCacheSpec.max_blocks`.

        Without groups all layers read one table; blocks are kept for the layer that needs them longest; blocks of
        encoder states come on top.
        """
        arguments = (max_seq_len, max_new_tokens, max_encoder_len)
        if self.groups:
            return sum(group.spec.max_blocks(*arguments) for group in self.groups)
        specs = [layer.spec for layer in self.layers]
        own = [spec.max_blocks(*arguments) for spec in specs if not isinstance(spec, CrossAttentionSpec)]
        cross = [spec.max_blocks(*arguments) for spec in specs if isinstance(spec, CrossAttentionSpec)]
        return max(own, default=0) + max(cross, default=0)

    @property
    def bytes_per_layer(self) -> dict[str, int]:
        """Bytes of each layer's storage; 0 where it is shared."""
        return {layer.name: layer.num_bytes for layer in self.layers}

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages of blocks."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold, block 0 included."""
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
            + (", shared" if c.shared_with or not c.adds_storage else f", {format_bytes(c.num_bytes)} each")
            for c in self.layers
        )
        lines += [f"  {count} x {text}" for text, count in groups.items()]
        lines += [
            f"  group {index}: {len(group.layer_names)} layers, {type(group.spec).__name__}"
            for index, group in enumerate(self.groups)
        ]
        if self.groups:
            lines.append(f"  {self.waste:.1%} of a request of {self.max_seq_len} tokens is unused")
        return "\n".join(lines if self.states is None else [*lines, str(self.states)])


@typed
def allocate_kv_cache(
    model: nn.Module,
    *,
    num_blocks: int | None = None,
    memory: int | str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    hybrid: bool = False,
    max_seq_len: int = 32768,
    max_num_reqs: int | None = None,
) -> KVCacheAllocation:
    """Allocate and bind the KV cache of every attention layer in a model.

    Args:
        model: any module that contains layers with `get_kv_cache_spec` and `bind_kv_cache`, such as `vattn.Attention`.
        num_blocks: blocks per layer, the null block 0 included. Give this or `memory`.
        memory: bytes for all layers together, as an int or such as `"2GiB"`; rounded down to whole blocks.
        device: default that of the model's parameters.
        dtype: model dtype; default that of most of the model's parameters.
        hybrid: put layers that keep their tokens for differently long (full, window, chunks, encoder states) into
            groups, each with a block table of its own over one pool of block ids: `HybridBlockTable` frees blocks
            before a window, `GroupedMetadataBuilder` builds the steps. Layers of different groups share
            storages.
        max_seq_len: with `hybrid`, length of the requests that the groups are chosen for.
        max_num_reqs: for models with layers that keep a state for each request, how many requests have one at once;
            default 64. Their memory is part of `memory`.

    Returns:
        What was allocated. Storages are zeroed and contiguous; layers that share a cache get their target's tensor.

    Raises:
        ConfigError: neither or both of `num_blocks` and `memory`, a value out of range, or numbers in
            `kv_cache_dtype_skip_layers` where no layer has one. Entries that match no layer here, and may match one of
            another pipeline rank, are warned of.
        CacheError: no layer found, memory too small for one block, block sizes that differ, an invalid sharing target,
            or a layer class that knows no groups.
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
            "pass either memory='1GiB' or num_blocks=1024",
        )
    max_seq_len = read_count("max_seq_len", max_seq_len, 1, "pass the longest request that is usual")
    dtype = _model_dtype(model) if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in MODEL_DTYPES.values():
        allowed = ", ".join(map(str, MODEL_DTYPES.values()))
        raise DtypeError(f"model dtype {dtype!r}", allowed, "pass dtype=torch.bfloat16")
    device = _model_device(model) if device is None else _device(device)
    modules = find_layers(model)
    check_skip_layers(modules, whole=False)
    found = {name: m.get_kv_cache_spec(dtype) for name, m in modules.items()}
    specs = {name: s for name, s in found.items() if s is not None and not isinstance(s, EncoderOnlyAttentionSpec)}
    targets = _sharing_targets(modules, specs)
    block_size = common_block_size(specs)
    grouping = _grouping(modules, specs, max_seq_len) if hybrid else None
    state_layers, num_slots = find_state_layers(model, max_num_reqs)
    per_block = grouping.bytes_per_block if grouping else sum(spec.page_size_bytes for spec in specs.values())
    count = _count_blocks(num_blocks, memory_for_blocks(memory, state_layers, num_slots), per_block, len(specs))
    for name, module in modules.items():
        # Every refusal comes before the first binding, so that none leaves a model half bound.
        module.resolve_config(dtype, device, modules.get(targets.get(name, "")))
    states = allocate_states(state_layers, num_slots, device)
    one_group = (KVCacheGroup(tuple(specs), tuple(specs.values()), tuple(range(len(specs)))),)
    groups = grouping.groups if grouping else one_group
    places = {
        name: (index, place, spec)
        for index, group in enumerate(groups)
        for name, spec, place in zip(group.layer_names, group.specs, group.storages, strict=True)
    }
    storages: dict[int, Tensor] = {}
    holders = [CacheGroup(index, len(groups), group.spec) for index, group in enumerate(groups)]
    layers = []
    for name, module in modules.items():
        owner = targets.get(name, name)
        if owner not in places:
            continue
        index, place, spec = places[owner]
        adds = place not in storages
        if adds:
            storages[place] = _zeros(spec, count, device)
        elif name not in targets:
            let_groups_share(storages[place])
        if name in targets:
            module.bind_kv_cache(storages[place], dtype=dtype, target=modules[owner])
        else:
            module.bind_kv_cache(storages[place], dtype=dtype)
        if hasattr(module, "kv_cache_group"):
            module.kv_cache_group = holders[index] if grouping else None
        layers.append(LayerCache(name, spec, storages[place], targets.get(name), index, adds))
    count_binding()
    chosen = (grouping.groups, max_seq_len, grouping.waste) if grouping else ((), 0, 0.0)
    return KVCacheAllocation(count, block_size, dtype, device, tuple(layers), *chosen, states)


def _grouping(modules: dict[str, KVCacheLayer], specs: dict[str, KVCacheSpec], max_seq_len: int) -> Grouping:
    unaware = [name for name, module in modules.items() if name in specs and not hasattr(module, "kv_cache_group")]
    if unaware:
        raise CacheError(
            f"layer {unaware[0]!r} is a {type(modules[unaware[0]]).__name__}, which has no attribute kv_cache_group",
            "layers that take their part of a step with groups",
            "allocate without hybrid=True",
        )
    return group_layers(specs, max_seq_len)


def _model_dtype(model: nn.Module) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in MODEL_DTYPES.values():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()


def _device(device: torch.device | str) -> torch.device:
    DeviceInfo.of(device)  # refuses what is no device
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise DeviceError(f"a KV cache on {found}", "cpu or cuda", "move the model first, or pass device='cpu'")
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
            f"{type(model).__name__} contains no attention layer that has a KV cache",
            "a module with vattn.Attention layers in it; encoder layers have no cache and need no allocation",
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


def _count_blocks(num_blocks: int | None, memory: int | str | None, per_block: int, num_layers: int) -> int:
    if memory is None:
        return read_count("num_blocks", num_blocks, 1, "pass num_blocks=64")
    budget = parse_bytes(memory)
    if budget < per_block:
        raise CacheError(
            f"memory={memory!r} is {budget} bytes, and one block takes {per_block} bytes over {num_layers} layers",
            f"at least {per_block} bytes; for requests {2 * per_block}, since the first block is no request's",
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


WINDOW = "sliding_window"
"""The entry of `kv_cache_dtype_skip_layers` for every layer with a window."""


def skip_names(prefix: str, window: int | None) -> frozenset[str]:
    """Return the entries that mean a layer, `{"3", "sliding_window"}` for `"model.layers.3.attn"` with a window."""
    names = [str(int(part)) for part in prefix.split(".") if part.isdigit()][:1]
    return frozenset(names if window is None else [*names, WINDOW])


def check_skip_layers(layers: Mapping[str, object], *, whole: bool) -> None:
    """Refuse entries that mean none of the layers, or warn of them where other ranks may have the layers.

    Args:
        layers: by name; those without `cache_config` and `skip_names` do not count, nor do unquantised caches.
        whole: these are all layers of the model, not only the layers of one pipeline rank.

    Raises:
        ConfigError: an entry means no layer of a whole model, or is a number where no layer has one.
    """
    found = [
        (config.kv_cache_dtype_skip_layers, names)
        for layer in layers.values()
        if (config := getattr(layer, "cache_config", None)) is not None
        and (names := getattr(layer, "skip_names", None)) is not None
        and config.cache_dtype != "auto"
    ]
    given = dict.fromkeys(entry for entries, _ in found for entry in entries)
    unmatched = [entry for entry in given if not any(entry in entries and entry in names for entries, names in found)]
    if not unmatched:
        return
    there = frozenset[str]().union(*(names for _, names in found))
    numbers = sorted(int(name) for name in there if name != WINDOW)
    got = f"kv_cache_dtype_skip_layers entries {', '.join(map(repr, unmatched))}, which match no layer"
    allowed = f"the layers' numbers {', '.join(map(str, numbers))}" if numbers else "no number: no prefix has one"
    allowed += f", and {WINDOW!r}" if WINDOW in there else f"; no {WINDOW!r}: no layer has a window"
    fix = "leave them out" if numbers else "number the layers in their prefix, such as 'layers.0', or leave them out"
    if whole or (not numbers and any(entry != WINDOW for entry in unmatched)):
        raise ConfigError(got, allowed, fix)
    # Ranks of a pipeline have one config and layers of their own each.
    warnings.warn(f"{got}. Here: {allowed}. Right only if another rank has them.", stacklevel=3)
