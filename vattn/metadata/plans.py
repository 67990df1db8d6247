"""Find the schedules that a builder's layers need, and make them for each step at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from vattn.backends import selector
from vattn.cache.bindings import cached_blocks
from vattn.config.attention import AttentionConfig, CacheConfig
from vattn.config.mla import MLAConfig
from vattn.config.typed import typed
from vattn.distributed.group import ContextParallel
from vattn.errors import CacheNotBoundError, ConfigError
from vattn.metadata.attention_metadata import AttentionMetadata, host_plan_key, sink_plan_key, with_sinks
from vattn.metadata.block_conflicts import Reach
from vattn.metadata.dcp import check_ranks
from vattn.metadata.step import Limits, Step
from vattn.ops.arguments import HostPlanArgs


@dataclass
class FoundLayers:
    """What a builder learns of its layers."""

    num_blocks: int | None
    """Blocks of the cache: as the caller says, else those of the first bound cache."""

    configs: dict[str, AttentionConfig] = field(default_factory=dict)
    """One per kind of schedule that the layers need."""

    sink_lens: dict[str, int] = field(default_factory=dict)
    """Sink tokens before every request, by kind of schedule."""

    sink_layers: list[Any] = field(default_factory=list)
    backends: set[str] = field(default_factory=set)

    host_backends: set[str] = field(default_factory=set)
    """Those that plan on the host."""

    bound: list[nn.Module] = field(default_factory=list)
    """The layers that have a cache."""

    reaches: set[Reach] = field(default_factory=set)
    """How far back the layers see that read the requests' own tokens from a cache."""

    requests: list[str] = field(default_factory=list)
    """What each layer requests of ranks that share a cache, for the ranks to agree on."""


def all_layers(layers: nn.Module | Iterable[nn.Module | AttentionConfig]) -> list[Any]:
    """Return the modules of a model, or of the layers that were given, and configs; each once.

    Raises:
        ConfigError: neither modules nor configs, or none of them is an attention layer or has one.
    """
    if isinstance(layers, (str, Tensor)) or not isinstance(layers, (nn.Module, Iterable)):
        raise ConfigError(f"layers={layers!r:.60}", "a model, layers or configs", "pass the model itself")
    given = [layers] if isinstance(layers, nn.Module) else list(layers)
    for place, layer in enumerate(given):
        if not isinstance(layer, (nn.Module, AttentionConfig, MLAConfig)):
            raise ConfigError(
                f"layers[{place}]={layer!r:.60} of type {type(layer).__name__}",
                "attention layers of vattn, modules that have some, and configs",
                "pass the model itself",
            )
    found = [part for layer in given for part in (layer.modules() if isinstance(layer, nn.Module) else [layer])]
    has = [name for part in found for name in ("bind_kv_cache", "get_kv_cache_spec") if hasattr(part, name)]
    if given and not has and all(isinstance(part, nn.Module) for part in found):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in given}))
        raise ConfigError(
            f"layers of type {kinds:.80}, without any attention layer of vattn",
            "a model that has some, layers, or configs",
            "leave layers out for a builder that knows none",
        )
    return list({id(part): part for part in found}.values())


def block_size_of(layers: Iterable[nn.Module | AttentionConfig]) -> int:
    """Return the tokens per block of the first layer with a cache; that of `CacheConfig` where there is none."""
    configs = (_config_of(layer) for layer in layers)
    return next((config.block_size for config in configs if config is not None), CacheConfig().block_size)


def device_of(layers: Iterable[nn.Module | AttentionConfig]) -> torch.device:
    """Return where the first cache of the layers is; the CPU where there is none that holds numbers."""
    caches = (getattr(layer, "kv_cache", None) for layer in layers)
    devices = (cache.device for cache in caches if isinstance(cache, Tensor) and not cache.is_meta)
    return next(devices, torch.device("cpu"))


def find_layers(
    layers: Iterable[nn.Module | AttentionConfig],
    limits: Limits,
    device: torch.device,
    context_parallel: ContextParallel | None,
) -> FoundLayers:
    """Return what a builder must know of its layers, or refuse those that it cannot build for.

    Args:
        layers: what `all_layers` returned.
        limits: the capacity of a step; without a number of blocks, that of the layers is taken.
    """
    found = FoundLayers(limits.num_blocks)
    for layer in layers:
        config = _config_of(layer)
        if config is None:
            continue
        if config.block_size != limits.block_size:
            raise ConfigError(
                f"a layer has block_size={config.block_size}, the builder {limits.block_size}",
                "one block size for all layers and the builder",
                "leave block_size out of the builder, and give all layers one CacheConfig(block_size=...)",
            )
        found.requests.append(check_ranks(layer, config, context_parallel))
        backend = selector.choose(config, device)
        found.backends.add(backend.name)
        if backend.host_plan_size(config):
            found.host_backends.add(backend.name)
        if config.attn_type != "encoder_decoder":
            found.reaches.add(Reach.of(config))
        sink_len = getattr(layer, "sink_len", 0)
        if sink_len:
            found.sink_layers.append(layer)
        # The schedule of cross attention would need other lengths; no backend has one.
        planned = config.attn_type != "encoder_decoder" and not config.context_parallel
        # A plan made on the host holds the pages of one block table.
        planned = planned and not (backend.host_plan_size(config) and (sink_len or limits.tables > 1))
        if planned and backend.plan_shape(config, limits.num_tokens, limits.num_reqs, limits.table_width):
            key = sink_plan_key(backend.plan_key(config), sink_len)
            found.sink_lens[key] = sink_len
            found.configs.setdefault(key, config)
        if isinstance(layer, nn.Module):
            num_blocks = cached_blocks(layer)
            if config.attn_type != "encoder_decoder":
                _check_blocks(layer, num_blocks, limits.num_blocks)
            found.bound.append(layer)
            found.num_blocks = num_blocks if found.num_blocks is None else found.num_blocks
    if found.num_blocks is None:
        # Without it a block id outside of the cache cannot be recognised.
        by_device = {key: c for key, c in found.configs.items() if not selector.choose(c, device).host_plan_size(c)}
        found.configs = by_device
    return found


@typed
def plan_key(config: AttentionConfig | MLAConfig, device: torch.device | str) -> str:
    """Return the key in `AttentionMetadata.plans` of the schedule that layers of a config share.

    For code that calls the ops itself: layers find theirs. Take it once per layer; a step without that key has no
    schedule for the config, and the op plans for itself.

    Raises:
        UnsupportedRequestError: no backend runs the config on the device.

    Example:
        >>> import vattn
        >>> config = vattn.AttentionConfig(2, 1, 16, 16, 0.25, "float32", "float32", block_size=8)
        >>> builder = vattn.AttentionMetadataBuilder(4, 8, 64, layers=[config])
        >>> step = builder.build([1], [5], [[3]])
        >>> plans = [step.plans[key] for key in [vattn.plan_key(config, "cpu")] if key in step.plans]
    """
    key = selector.choose(config, device).plan_key(cast(AttentionConfig, config))
    # The lengths of cross attention are others; no schedule is made for them.
    return f"{key} encoder_decoder" if config.attn_type == "encoder_decoder" else key


class StepPlans:
    """The schedules of a step, one for each kind that the layers need, in buffers at fixed addresses."""

    def __init__(self, found: FoundLayers, limits: Limits, device: torch.device) -> None:
        self._configs, self._sink_lens, self._num_blocks = found.configs, found.sink_lens, found.num_blocks or 0
        self._limits, self.host_backends = limits, frozenset(found.host_backends)
        self._backends = {key: selector.choose(config, device) for key, config in self._configs.items()}
        self._buffers = {}
        for key in self._configs:
            size = torch.Size(self._shape(key, limits.num_tokens, limits.num_reqs)).numel()
            self._buffers[key] = torch.zeros(size, dtype=torch.int32, device=device)
        sizes = {key: self._backends[key].host_plan_size(config) for key, config in self._configs.items()}
        self._host_plans = {
            key: torch.zeros(size, dtype=torch.int64, device="cpu") for key, size in sizes.items() if size
        }

    @property
    def host_planned(self) -> frozenset[str]:
        """Names of the backends that plan on the host."""
        return frozenset(self._backends[key].name for key in self._host_plans)

    def views(self, num_tokens: int, num_reqs: int) -> dict[str, Tensor]:
        """Return the schedules of a step of these sizes, to be filled."""
        plans = {}
        for key in self._configs:
            plans[key] = self._view(key, num_tokens, num_reqs)
            if key in self._host_plans:
                plans[host_plan_key(key)] = self._host_plans[key]
        return plans

    def fill(self, metadata: AttentionMetadata, seq_lens: Tensor, step: Step) -> None:
        """Fill the schedules of a step, on the device or by a plan made on the host.

        `seq_lens`: lengths of the part of the step that goes by requests.
        """
        for key in self._configs if metadata.plans else ():
            if key in self._host_plans:
                self._plan_on_host(key, metadata, step)
            else:
                self._plan_on_device(key, metadata, seq_lens)

    def fill_on_device(self, metadata: AttentionMetadata) -> None:
        """Give a step schedules for the rows that it has now, and fill them from the lengths on the device."""
        metadata.plans.update(self.views(metadata.slot_mapping.shape[0], metadata.seq_lens.shape[0]))
        for key in self._configs:
            self._plan_on_device(key, metadata, metadata.seq_lens)

    def _shape(self, key: str, num_tokens: int, num_reqs: int) -> tuple[int, ...]:
        width = self._limits.table_width + self._sink_lens[key] // self._limits.block_size
        return self._backends[key].plan_shape(self._configs[key], num_tokens, num_reqs, width)

    def _view(self, key: str, num_tokens: int, num_reqs: int) -> Tensor:
        shape = self._shape(key, num_tokens, num_reqs)
        return self._buffers[key][: torch.Size(shape).numel()].view(shape).data

    def _plan_on_device(self, key: str, metadata: AttentionMetadata, seq_lens: Tensor) -> None:
        lengths = with_sinks(seq_lens, self._sink_lens[key])
        torch.ops.vattn.plan(metadata.query_start_loc, lengths, metadata.plans[key], self._configs[key].encode())

    def _plan_on_host(self, key: str, metadata: AttentionMetadata, step: Step) -> None:
        """Have a backend plan a step; if the step has other masks than the layers, each call plans for itself."""
        host_plan, config = self._host_plans[key], self._configs[key]
        extras = (metadata.tree_bias, metadata.mm_ranges, metadata.prefix_lens)
        if metadata.causal is not True or any(tensor is not None for tensor in extras):
            host_plan.zero_()
            return
        args = HostPlanArgs(
            query_lens=step.query_lens,
            kv_lens=step.seq_lens,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            num_tokens=metadata.slot_mapping.shape[0],
            num_blocks=self._num_blocks,
            schedule=metadata.plans[key],
            host_plan=host_plan,
        )
        self._backends[key].plan_on_host(args, config)


def _config_of(layer: nn.Module | AttentionConfig) -> AttentionConfig | None:
    """Return a config, or what a layer's cache was bound for; `None` for a module that is no attention layer."""
    if not isinstance(layer, nn.Module):
        return layer
    if not hasattr(layer, "bind_kv_cache"):
        return None
    config = getattr(layer, "config", None)
    if isinstance(config, MLAConfig):
        # What a builder reads of a config, this one has too.
        return cast(AttentionConfig, config)
    if not isinstance(config, AttentionConfig):
        raise CacheNotBoundError(
            f"layer {getattr(layer, 'prefix', '')!r} has no KV cache, so its backend is not known yet",
            "layers with a bound cache",
            "call vattn.allocate_kv_cache(model, num_blocks=...) before making the builder",
        )
    return config


def _check_blocks(layer: nn.Module, own: int | None, given: int | None) -> None:
    """Refuse a builder's number of blocks that the layer's cache does not have: kernels see no keys past its end."""
    if own is not None and given is not None and given > own:
        raise ConfigError(
            f"num_blocks={given} of the builder, and {own} blocks in the cache of layer {layer.prefix!r}",
            f"at most {own}",
            "leave num_blocks out of the builder, or allocate that many with vattn.allocate_kv_cache",
        )
