"""LoRA adapters of PEFT on a model over packed tokens: several at once, each request with its own or none."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.bindings import take_cache
from vattn.config.arguments import check_switches, read_count
from vattn.config.keywords import known_keywords
from vattn.config.other_names import ENABLE_ADAPTERS
from vattn.errors import ConfigError, UnsupportedRequestError
from vattn.integrations.transformers.checks import model_dtype
from vattn.integrations.transformers.media import LANGUAGE, takes_media
from vattn.integrations.transformers.merged_linear import MergedLinear
from vattn.integrations.transformers.observe import ordinary_tokens
from vattn.integrations.transformers.packed_model import PackedModel
from vattn.integrations.transformers.swapped_linears import SWAPPED, merged_linears, merged_product, restore, swap
from vattn.layers.lora import Adapter, AdapterRows, Adapters, LoRAProduct
from vattn.layers.weight_parts import ranks_of
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context
from vattn.metadata.hybrid_builder import GroupedMetadataBuilder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

USED = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "alpha_pattern", "init_lora_weights"}
"""Entries of an adapter's configuration that decide what it computes."""

UNUSED = {
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules",
    "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "rank_pattern", "megatron_core",
    "eva_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "bias",
}  # fmt: skip
"""Entries about training, or that repeat what the weights show. All others must be off."""

REASONS = {
    "modules_to_save": "whole modules besides its matrices",
    "use_dora": "DoRA, which scales the rows of the base's weights",
    "bias": "biases that it has trained",
    "lora_bias": "biases of its own",
    "init_lora_weights": "an initialisation that changes the base's weights",
    "trainable_token_indices": "embeddings of its own",
    "target_parameters": "parameters besides linear layers, such as experts",
}

UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


class LoRAAdapters(Adapters):
    """The LoRA adapters of a model, as `enable_adapters` returns them; `load`, `remove`, `get` and `loaded`."""

    def __init__(self, rows: AdapterRows, products: Mapping[str, tuple[LoRAProduct, int]], base: str) -> None:
        super().__init__(rows, products)
        self._base = base

    def load(self, name: str, folder: str | os.PathLike[str], *, check_base: bool = True) -> Adapter:
        """Load an adapter, at any time; no code is compiled and no graph captured for it.

        Args:
            name: what requests call it.
            folder: with `adapter_config.json` and `adapter_model.safetensors`, as PEFT saves them. Weights are cast to
                the model's dtype.
            check_base: refuse an adapter that names another model as its base.

        Raises:
            ConfigError: a name in use, no slot left, no such folder, an adapter of another base, ranks beyond
                `max_rank`, or layers that are not among the targets.
            UnsupportedRequestError: no LoRA, or a kind of it that adds more than products: DoRA, biases, whole modules.
        """
        check_switches(check_base=check_base)
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigError(f"an adapter in {folder!r:.60}", "a folder", "load('name', folder)")
        path = Path(folder)
        config = _read_config(path)
        self._check_config(config, path, check_base)
        parts = self._parts(_read_weights(path), config)

        def store(slot: int) -> None:
            for layer, (a, b, scale) in parts.items():
                product, part = self.products[layer]
                product.put(slot, part, a, b, scale)

        return self._add(name, store)

    def _check_config(self, config: Mapping[str, Any], path: Path, check_base: bool) -> None:
        if config.get("peft_type") != "LORA":
            raise UnsupportedRequestError(
                f"an adapter of type {config.get('peft_type')!r} in {str(path)!r}", "LORA", "merge it into the model"
            )
        wrong = [key for key, value in config.items() if value and key not in USED | UNUSED]
        wrong += ["bias"] * (config.get("bias", "none") != "none")
        wrong += ["init_lora_weights"] * (config.get("init_lora_weights", True) not in UNCHANGED_BASE)
        if wrong:
            raise UnsupportedRequestError(
                f"an adapter in {str(path)!r} with {wrong[0]}={config[wrong[0]]!r:.60}"
                + (f": {REASONS[wrong[0]]}" if wrong[0] in REASONS else ""),
                "LoRA and rsLoRA of linear layers",
                "merge the adapter into the model, and enable that",
            )
        base = config.get("base_model_name_or_path")
        if check_base and base and self._base and _last(base) != _last(self._base):
            raise ConfigError(
                f"an adapter of {base!r} for the model {self._base!r}",
                "adapters of this model",
                "check_base=False, if both names mean the same weights",
            )

    def _parts(
        self, weights: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> dict[str, tuple[Tensor, Tensor, float]]:
        """Return A, B and the scale of each layer, all checked."""
        parts: dict[str, dict[str, Tensor]] = {}
        for key, weight in weights.items():
            layer, _, kind = key.removeprefix(PREFIX).rpartition(".lora_")
            if not layer or kind not in ("A.weight", "B.weight"):
                raise UnsupportedRequestError(
                    f"an adapter with {key!r}", "lora_A and lora_B of linear layers", "merge it into the model"
                )
            parts.setdefault(layer, {})[kind[0]] = weight
        if not parts:
            raise ConfigError("an adapter without weights", "lora_A and lora_B of linear layers", "save it again")
        return {layer: self._part(layer, pair, config) for layer, pair in parts.items()}

    def _part(self, layer: str, pair: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[Tensor, Tensor, float]:
        if layer not in self.products:
            raise ConfigError(
                f"an adapter for {layer!r}",
                f"{len(self.products)} layers, such as {next(iter(self.products))!r}",
                "load an adapter of this model, or enable_adapters(model, target_modules=...) with this layer",
            )
        product, part = self.products[layer]
        if len(pair) != 2:
            raise ConfigError(f"{layer!r} with lora_{min(pair)} alone", "both matrices", "save the adapter again")
        a, b = pair["A"], pair["B"]
        features = product.sizes[part]
        if a.dim() != 2 or a.shape[1] != product.in_features or tuple(b.shape) != (features, a.shape[0]):
            raise ConfigError(
                f"matrices {tuple(a.shape)} and {tuple(b.shape)} for {layer!r}",
                f"[rank, {product.in_features}] and [{features}, rank]",
                "load an adapter of this model",
            )
        rank = a.shape[0]
        if rank > product.max_rank:
            raise ConfigError(
                f"rank {rank} of {layer!r}", f"max_rank={product.max_rank}", f"enable_adapters(model, max_rank={rank})"
            )
        alpha = _of_pattern(config.get("alpha_pattern") or {}, layer, config.get("lora_alpha", 8))
        return a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


@known_keywords(ENABLE_ADAPTERS)
@torch.inference_mode(False)
def enable_adapters(
    model: PackedModel,
    *,
    max_adapters: int = 8,
    max_rank: int = 16,
    target_modules: Iterable[str] | None = None,
    max_num_tokens: int = 8192,
) -> LoRAAdapters:
    """Let the requests of a model on vattn use LoRA adapters, several in one batch. Call it before `vattn.Generator`.

    It runs the model, in blocks of its cache: a generator that has the cache already refuses further steps.

    Args:
        model: what `enable` returned.
        max_adapters: how many can be loaded at once.
        max_rank: largest rank of an adapter. Memory and time are those of this rank, whatever ranks are loaded.
        target_modules: the last names of the linear layers that can have adapters, such as `["q_proj", "v_proj"]`;
            default all in repeated layers. Those of a vision tower cannot. Merged projections share one product: see
            `enable(merge_projections=...)`.
        max_num_tokens: of a step; a generator makes room for its own steps.

    Returns:
        The adapters, empty; also `model.adapters`. Requests choose one by `Generator.add(prompt, adapter=name)`.

    Raises:
        ConfigError: no model that `enable` returned, one that has adapters already, names that match no layer.
        UnsupportedRequestError: a model with states or with sharded weights, or target modules that do not run once on
            all tokens of a step, such as experts.

    Example:
        >>> import transformers
        >>> from vattn.integrations.transformers import enable, enable_adapters
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = enable(transformers.LlamaForCausalLM(config).eval(), num_blocks=8)
        >>> enable_adapters(model, max_adapters=4, target_modules=["q_proj", "v_proj"])
        LoRAAdapters(0 of 4: )
    """
    for name, count in {"max_adapters": max_adapters, "max_rank": max_rank, "max_num_tokens": max_num_tokens}.items():
        read_count(name, count, 1, f"change {name}")
    _check_model(model)
    targets = _targets(model.model, target_modules)
    _check_rows(model, targets)
    device, dtype = next(model.parameters()).device, model_dtype(model.model)
    rows = AdapterRows(max_adapters, max_num_tokens, device)
    products: dict[str, tuple[LoRAProduct, int]] = {}
    merged: dict[MergedLinear, LoRAProduct] = {}
    for name, linear in targets.items():
        whole = merged_product(linear)
        if whole is None:
            product, index = LoRAProduct(rows, [linear.out_features], linear.in_features, max_rank, dtype, device), 0
        else:
            if whole not in merged:
                merged[whole] = LoRAProduct(rows, whole.sizes, linear.in_features, max_rank, dtype, device)
            product, index = merged[whole], whole.parts.index(linear)
        products[name] = product, index
    for whole, product in merged.items():
        whole.lora = product
    for name, linear in targets.items():
        if merged_product(linear) is None:
            swap(linear, "adapters", lora=products[name][0])
    model.adapters = LoRAAdapters(rows, products, str(getattr(model.model.config, "_name_or_path", "") or ""))
    return model.adapters


def remove_adapters(model: nn.Module) -> None:
    """Undo `enable_adapters` in a model of transformers."""
    for merged in merged_linears(model):
        merged.lora = None
    restore(model.modules(), "adapters")
    for packed in model.__dict__.get("_vattn_packed", ()):
        packed.adapters = None


def _check_model(model: Any) -> None:
    if not isinstance(model, PackedModel) or not model.enabled:
        raise ConfigError(
            f"enable_adapters({type(model).__name__})", "what enable returned", "enable_adapters(enable(model, ...))"
        )
    if model.adapters is not None:
        raise ConfigError("a second enable_adapters of one model", "one call for a model", "load into model.adapters")
    if model._states:
        raise UnsupportedRequestError(
            "adapters of a model with layers that keep a state for each request",
            "models whose linear layers run once on all tokens of a step",
            "merge the adapter into the model, and enable that",
        )
    if getattr(model, "max_encoder_len", 0):
        raise UnsupportedRequestError(
            "adapters of an encoder-decoder model", "causal language models", "merge the adapter, and enable the model"
        )
    if ranks_of(model) is not None:
        raise UnsupportedRequestError(
            "adapters of a model whose weights are sharded over ranks", "models on one device", "merge the adapter"
        )


def _targets(model: Any, names: Iterable[str] | None) -> dict[str, nn.Linear]:
    """Return the linear layers that can have adapters."""
    if isinstance(names, str) or not (names is None or isinstance(names, Iterable)):
        raise ConfigError(f"target_modules={names!r}", "a list of names", f"target_modules=[{str(names)!r}]")
    wanted = None if names is None else set(names)
    if wanted is not None and not wanted:
        raise ConfigError("target_modules without a name", "names of linear layers", "leave it out for all of them")
    parts = model.base_model._modules if takes_media(model) else {}
    # A vision tower runs outside of steps.
    others = [part for name, part in parts.items() if name != LANGUAGE]
    outside = tuple(f"{name}." for name, module in model.named_modules() if module in others)
    lists = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        kind = type(module) in SWAPPED["adapters"] or merged_product(module) is not None
        inside = any(name.startswith(each) for each in lists) and not name.startswith(outside)
        if kind and inside and (last in wanted if wanted is not None else True):
            found[name] = module  # type: ignore[assignment]
    missing = set() if wanted is None else wanted - {name.rpartition(".")[2] for name in found}
    if missing or not found:
        raise ConfigError(
            f"target_modules with {min(missing)!r}" if missing else "adapters of a model without linear layers",
            f"linear layers in {type(model).__name__}'s repeated layers",
            "look at model.named_modules()",
        )
    return found


@torch.no_grad()
def _check_rows(model: PackedModel, targets: Mapping[str, nn.Linear]) -> None:
    """Refuse layers that do not run once on all tokens of a step, in their order.

    The model runs three requests of one token each, the same in reverse, and then with another first token. The rows of
    a layer's input must be reversed too, and only the first one may change.
    """
    cache = model.kv_cache
    groups = 1 if cache is None else max(1, len(cache.groups))
    if cache is None:
        own = model.allocate(num_blocks=8)
        model.kv_cache = None
        first = own.reserved_blocks
    else:
        first = cache.reserved_blocks
        # The runs write to blocks that requests of an earlier generator may hold.
        take_cache(cache.kv_caches[0])
    kind = GroupedMetadataBuilder if cache is not None and cache.groups else AttentionMetadataBuilder
    builder = kind(3, 3, 4, layers=model, device=next(model.parameters()).device)
    tables: Any = [[[first + 3 * group + row] for row in range(3)] for group in range(groups)]
    step = builder.build([1] * 3, [1] * 3, tables if kind is GroupedMetadataBuilder else tables[0])
    *tokens, other = ordinary_tokens(model.model, 4)
    runs: list[dict[str, list[Tensor]]] = []
    for ids in (tokens, tokens[::-1], [other, *tokens[1:]]):
        seen: dict[str, list[Tensor]] = {name: [] for name in targets}
        hooks = [
            linear.register_forward_pre_hook(lambda _, args, name=name, seen=seen: seen[name].append(args[0].clone()))
            for name, linear in targets.items()
        ]
        try:
            with forward_context(step):
                model(torch.tensor(ids, device=builder.device), step.positions)
        finally:
            for hook in hooks:
                hook.remove()
        runs.append(seen)
    for name in targets:
        inputs = [run[name] for run in runs]
        rows = [x[0].reshape(-1, x[0].shape[-1]).float() for x in inputs if len(x) == 1]
        if len(rows) == 3 and all(x.shape[0] == 3 for x in rows):
            ordered, reverse, changed = rows
            # Rounding differs at most; another order of rows gives other values.
            bound = 2.0**-5 * ordered.norm()
            if (ordered - reverse.flip(0)).norm() <= bound and (ordered - changed)[1:].norm() <= bound:
                continue
        raise UnsupportedRequestError(
            f"adapters of {name!r}, which does not run once on all tokens of a step in their order",
            "linear layers that do, unlike experts and what attention absorbs",
            "enable_adapters(model, target_modules=[...]) without it",
        )


def _read_config(path: Path) -> dict[str, Any]:
    """Return an adapter's configuration."""
    try:
        config = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"an adapter in {str(path)!r}: {error}",
            f"a folder with {CONFIG} and {WEIGHTS}",
            "save it with peft_model.save_pretrained(folder), or download it with huggingface_hub.snapshot_download",
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{CONFIG} with a {type(config).__name__}", "an object", "save the adapter again")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"weights of an adapter in {str(path)!r}: {error}",
            f"{WEIGHTS}",
            "save the adapter with safe_serialization=True",
        ) from error


def _of_pattern(pattern: Mapping[str, Any], layer: str, default: Any) -> Any:
    """Return the entry of a layer in a PEFT pattern: a key is a regular expression of the end of a name."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def _last(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
