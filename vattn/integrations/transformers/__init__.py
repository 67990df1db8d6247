"""Put a Hugging Face model on vattn: `enable(model)` swaps attention, masks and the cache, and keeps the model's code.

The model then runs steps of packed tokens, `[1, T]` and no padding between requests, under `vattn.forward_context`.
What a model does is found out by running it once on a few tokens: which modules attend, with which heads, scale,
window, soft cap and sinks, under which mask, and whether tokens meet anywhere else. What vattn cannot express is
refused there, before anything is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vattn.cache.allocation import check_skip_layers
from vattn.calibration.calibrate import Calibration, as_calibration
from vattn.calibration.fp8_saving import own_config
from vattn.compilation.regions import restore_regions
from vattn.config.arguments import check_switches
from vattn.config.attention import CacheConfig
from vattn.config.keywords import known_keywords
from vattn.errors import ConfigError, ScaleError, UnsupportedRequestError
from vattn.integrations.transformers import linears
from vattn.integrations.transformers.adapters import LoRAAdapters as LoRAAdapters
from vattn.integrations.transformers.adapters import enable_adapters as enable_adapters
from vattn.integrations.transformers.adapters import remove_adapters
from vattn.integrations.transformers.attention_interface import (
    NAME,
    PACKED,
    REPLACED,
    ModelAttention,
    attend,
    register,
)
from vattn.integrations.transformers.available import transformers
from vattn.integrations.transformers.checkpoint_scales import (
    checkpoint_configs,
    remove_cache_hooks,
    restore_cache_hooks,
)
from vattn.integrations.transformers.checks import model_dtype
from vattn.integrations.transformers.continuous_batching import (
    continuous_batching as continuous_batching,
)
from vattn.integrations.transformers.continuous_batching import (
    register_batched,
)
from vattn.integrations.transformers.dense_attention import register_dense
from vattn.integrations.transformers.fp8_checkpoint import load_fp8_linears as load_fp8_linears
from vattn.integrations.transformers.observe import AttentionCall, find_states, observe, set_attention
from vattn.integrations.transformers.packed_model import PackedCache, PackedModel
from vattn.integrations.transformers.pipeline import stage_of, use_stage
from vattn.integrations.transformers.prove import Proof
from vattn.integrations.transformers.replaced_forwards import replace_forwards, replaced_modules, restore_forwards
from vattn.integrations.transformers.rope_frequencies import fix_frequencies, restore_frequencies
from vattn.integrations.transformers.state_layers import restore_states
from vattn.layers import QuantConfig
from vattn.layers.weight_parts import heads_of_rank, ranks_of, take_back, use_parts
from vattn.quantization.formats import KV_FORMATS, resolve_kv_cache_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

register_dense()
register_batched()


@known_keywords(kv_cache_dtype="cache_config", cache_dtype="cache_config", max_num_seqs="max_num_reqs")
def enable(
    model: Any,
    *,
    cache_config: CacheConfig | None = None,
    quant_config: QuantConfig | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    scales_per_head: bool = False,
    query_format: str = "none",
    attn_backend: str | None = None,
    batch_invariant: bool = False,
    merge_projections: bool | None = None,
    vattn_linears: bool | None = None,
    rope_length: int | None = None,
    num_blocks: int | None = None,
    memory: int | str | None = None,
    max_num_reqs: int | None = None,
    prove: bool = True,
) -> PackedModel:
    """Put the attention of a transformers model on vattn, in place.

    Args:
        model: a causal language model of transformers 5 in eval mode, on its device and in its dtype.
        cache_config, quant_config, attn_backend, batch_invariant: of every `vattn.Attention`. A layer's own window
            comes from the model. Scales of the cache in a checkpoint (`k_scale` and `v_scale` on the
            attention modules, or in the local folder that the model was loaded from) are used for an FP8 cache where
            neither `quant_config` nor `calibration` is given; another cache warns that it has no use for them.
        calibration: scales of a quantised cache, each layer its own: what `vattn.calibrate` returned, or its file.
        scales_per_head: take one scale per KV head from the calibration instead of one.
        query_format: with a calibration, as in `QuantConfig`; each layer's scale of the query is the calibration's.
        merge_projections: compute query, key and value by one product, and gate and up by one; their weights become
            views of one storage. FP8 linears merge where their format and the scale of their input are the same.
            Default: wherever the layers allow it; `True`: all of them, or an error.
        vattn_linears: run linear layers by `vattn::linear`, which has faster kernels for steps of few tokens on GPUs of
            compute capability 9.0; elsewhere, and for larger steps, it runs torch's. Weights must not be written in the
            step: they are read before it begins. Default: on such GPUs, for 16-bit models, wherever the layers allow
            it, but not with `batch_invariant`; `True`: for all linear layers, or an error.
        rope_length: the longest request, for models whose RoPE frequencies go by the length of the sequence
            (`longrope`, `dynamic`): all get the frequencies that the model has for a sequence of so many tokens.
        num_blocks, memory: allocate the paged cache too; see `vattn.allocate_kv_cache`. Neither: allocate it later.
        max_num_reqs: for models with layers that keep a state for each request (Mamba, linear attention, short
            convolutions), with `num_blocks` or `memory`: see `vattn.allocate_kv_cache`.
        prove: run two requests of 21 and 4 tokens by the model itself and on vattn, with a small cache in the model's
            dtype, and refuse the model if they differ. `False` saves four runs of the model; a model that vattn
            misunderstands then gives wrong results without an error.

    Returns:
        The model as a function of packed tokens. The model itself has changed too: every attention module has a
        `vattn.Attention` named `vattn`, and calls outside of `vattn.forward_context`, `model.generate()` among them,
        raise an error that says what to call.

    Raises:
        ConfigError: no transformers model, one in training mode, or one that is enabled already; a switch that is
            neither `True` nor `False`; projections or linear layers that cannot do what `True` requests; a
            `rope_length` that a model has no use for; quantised outputs; an entry of `kv_cache_dtype_skip_layers` that
            matches no layer; `max_num_reqs` without a cache to allocate.
        UnsupportedRequestError: tokens meet outside of attention, a mask or an argument of attention that vattn does
            not know, layers without attention, frequencies of RoPE that go by lengths without a `rope_length`, heads
            that the ranks of a sharded model cannot share; the text says which.
        ScaleError, ...: as `vattn.Attention` and `vattn.allocate_kv_cache`.
            After any of these the model is as after `disable`: it can be used, and enabled again.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers import enable
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> packed = enable(transformers.LlamaForCausalLM(config).eval(), num_blocks=8)
        >>> builder = vattn.AttentionMetadataBuilder(4, 16, max_seq_len=64, layers=packed)
        >>> step = builder.build(query_lens=[3, 2], seq_lens=[3, 2], block_tables=[[1], [2]])
        >>> with torch.no_grad(), vattn.forward_context(step):
        ...     packed(torch.arange(5), step.positions, torch.tensor([2, 4])).shape
        torch.Size([2, 64])
    """
    check_model(model)
    check_switches(
        scales_per_head=scales_per_head,
        batch_invariant=batch_invariant,
        prove=prove,
    )
    wanted = {"merge_projections": merge_projections, "vattn_linears": vattn_linears}
    check_switches(**{name: value for name, value in wanted.items() if value is not None})
    if cache_config is not None and not isinstance(cache_config, CacheConfig):
        raise ConfigError(f"cache_config={cache_config!r}", "vattn.CacheConfig(...)", "CacheConfig(cache_dtype=...)")
    if cache_config is not None and cache_config.sliding_window is not None:
        raise ConfigError(
            f"CacheConfig(sliding_window={cache_config.sliding_window}) for a model of transformers",
            "no window: each layer's own comes from the model",
            "leave sliding_window out",
        )
    if max_num_reqs is not None and num_blocks is None and memory is None:
        raise ConfigError("max_num_reqs without num_blocks and memory", "one of them too", "give it to allocate()")
    check_quant_config(quant_config)
    found = None if calibration is None else as_calibration(calibration)
    scales = _scales(found, quant_config, cache_config, scales_per_head, query_format)
    own_config(model)
    frequencies = fix_frequencies(model, rope_length)
    model.__dict__["_vattn_before"] = model.config._attn_implementation, remove_cache_hooks(model), frequencies
    try:
        undo = model.__dict__["_vattn_parts"] = use_parts(model)
        undo += use_stage(model)
        states = find_states(model)
        if states is not None and stage_of(model) is not None:
            raise UnsupportedRequestError(
                f"{type(model).__name__}, which keeps states for requests, in a pipeline",
                "models of attention layers in pipelines, states on one device",
                "load it without pp_size",
            )
        seen = observe(model, PackedCache(), states)
        calls = seen.calls
        if found is not None:
            scales = _of_rank(scales, _find_heads(found, calls, ranks_of(model)))
        if calibration is None and quant_config is None:
            scales = checkpoint_configs(model, list(calls), cache_config).get
        layers = {
            name: _layer(call, name, cache_config, scales(name), attn_backend, batch_invariant)
            for name, call in calls.items()
        }
        check_skip_layers(layers, whole=True)
        for name, layer in layers.items():
            layer.resolve_config(model_dtype(model), next(calls[name].module.parameters()).device)
        modules = {name: call.module for name, call in calls.items()}
        with_states = {} if states is None else states.modules
        proven = {**modules, **with_states}
        proven = {name: proven[name] for name, _ in model.named_modules() if name in proven}
        proof = Proof(model, proven, rope_length, seen.first_position) if prove else None
        replaced = bool(replaced_modules(model))
        register()
        replace_forwards(model, attend)
        set_attention(model, REPLACED if replaced else PACKED)
        if states is not None:
            states.install()
        packed = PackedModel(model, rope_length, seen.first_position, seen.takes_embeddings)
        if proof is not None:
            plain, backend = plain_cache(cache_config), attn_backend if stores_plainly(cache_config) else None
            install(modules, {n: _layer(call, n, plain, None, backend, batch_invariant) for n, call in calls.items()})
            proof.check(packed, plain.block_size)
        install(modules, layers)
        if states is not None:
            states.install()
        model.__dict__[linears.NAME] = own = linears.Linears(
            model, seen.shared, merge_projections, vattn_linears, batch_invariant
        )
        own.apply()
        if num_blocks is not None or memory is not None:
            packed.allocate(num_blocks=num_blocks, memory=memory, max_num_reqs=max_num_reqs)
    except BaseException:
        disable(model)
        raise
    return packed


def disable(model: nn.Module) -> None:
    """Take a model off vattn: its attention, masks and cache are transformers' again, its paged cache is dropped.

    Args:
        model: what `enable` was called with, or what it returned. One that is not on vattn, or not any more, stays as
            it is.

    Raises:
        ConfigError: no module, or one that `enable` does not take, such as a part of a model.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"disable with {type(model).__name__}", "a model, or what enable returned for it", "pass the model"
        )
    inner: Any = getattr(model, "wrapped", model)
    before = inner.__dict__.pop("_vattn_before", None)
    if before is None:
        if not isinstance(inner, transformers.PreTrainedModel) or not _has_head(inner):
            raise ConfigError(
                f"disable() of {type(inner).__name__}, a model that is not on vattn",
                "what enable was called with, or what it returned",
                "pass the whole model",
            )
        return
    restore_regions(inner)
    restore_forwards(inner)
    restore_states(inner)
    remove_adapters(inner)
    own = inner.__dict__.pop(linears.NAME, None)
    if own is not None:
        own.undo()
    take_back(inner.__dict__.pop("_vattn_parts", []))
    for module in list(inner.modules()):
        module._modules.pop(NAME, None)
    implementation, hooks, frequencies = before
    set_attention(inner, implementation)
    restore_cache_hooks(hooks)
    restore_frequencies(frequencies)
    for packed in inner.__dict__.pop("_vattn_packed", ()):
        packed.enabled = False


def install(modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> None:
    """Give every attention module its layer, on its device, in place of the one that it has."""
    for name, module in modules.items():
        module._modules.pop(NAME, None)
        module.add_module(NAME, layers[name].to(next(module.parameters()).device))


def stores_plainly(config: CacheConfig | None) -> bool:
    """Return whether a cache holds keys and values in the model's dtype."""
    return config is None or config.cache_dtype == "auto"


def plain_cache(config: CacheConfig | None) -> CacheConfig:
    """Return the cache for a proof: blocks as they are configured, keys and values in the model's dtype."""
    return CacheConfig() if config is None else CacheConfig(config.block_size, kv_cache_layout=config.kv_cache_layout)


def check_quant_config(quant_config: object) -> None:
    """Refuse what is no `QuantConfig`, and quantised outputs, which the model's own projection would get.

    Raises:
        ConfigError: either.
    """
    if quant_config is not None and not isinstance(quant_config, QuantConfig):
        raise ConfigError(f"quant_config={quant_config!r}", "vattn.QuantConfig(...)", "QuantConfig(k_scale=...)")
    if isinstance(quant_config, QuantConfig) and quant_config.output_format != "none":
        raise ConfigError(
            f"QuantConfig(output_format={quant_config.output_format!r}) for a model of transformers",
            "outputs in the model's dtype, which its own projection takes",
            "vattn.quantise_linears(model, ...) and vattn.enable(): the passes quantise outputs",
        )


def _find_heads(found: Calibration, calls: dict[str, AttentionCall], group: ProcessGroup | None) -> dict[str, slice]:
    """Return which KV heads of a calibration a rank has, by layer: all of them for a model on one device.

    Raises:
        ScaleError: a layer has another number of heads than it had, as in another model with the same layer names.
    """
    own: dict[str, slice] = {}
    for name, call in calls.items():
        seen = found.layers.get(name)
        if seen is None:
            continue
        heads = len(seen["query"]), len(seen["key"])
        of_rank = heads_of_rank(heads[1], call.num_kv_heads, group)
        if of_rank is None or heads_of_rank(heads[0], call.num_heads, group) is None:
            raise ScaleError(
                f"a calibration in which layer {name!r} has {heads[0]} query and {heads[1]} KV heads",
                f"{call.num_heads} and {call.num_kv_heads}, as the model has" + (" on this rank" if group else ""),
                "calibrate this model",
            )
        own[name] = of_rank
    return own


def _of_rank(
    scales: Callable[[str], QuantConfig | None], heads: dict[str, slice]
) -> Callable[[str], QuantConfig | None]:
    """Return what gives a layer the scales of this rank's KV heads."""

    def of(name: str) -> QuantConfig | None:
        config = scales(name)
        if config is None or not isinstance(config.k_scale, torch.Tensor) or config.k_scale.numel() == 1:
            return config
        assert isinstance(config.v_scale, torch.Tensor)
        return replace(config, k_scale=config.k_scale[heads[name]], v_scale=config.v_scale[heads[name]])

    return of


def _scales(
    calibration: Calibration | None,
    quant_config: QuantConfig | None,
    cache_config: CacheConfig | None,
    per_head: bool,
    query_format: str,
) -> Callable[[str], QuantConfig | None]:
    """Return what gives a layer its scales."""
    if calibration is None:
        if per_head:
            raise ConfigError("scales_per_head without calibration", "both", "give QuantConfig scales per head itself")
        if query_format != "none":
            raise ConfigError("query_format without calibration", "both", "QuantConfig(query_format=..., q_scale=...)")
        return lambda name: quant_config
    if quant_config is not None:
        raise ConfigError("quant_config and calibration", "one of them", "drop one of them")
    dtype = "auto" if cache_config is None else cache_config.cache_dtype
    if dtype == "auto" or not KV_FORMATS[resolve_kv_cache_dtype(dtype, torch.bfloat16)].quantised:
        raise ConfigError(
            f"calibration with cache_dtype={dtype!r}", "formats with given scales, such as fp8", "drop it"
        )
    return lambda name: calibration.quant_config(name, cache_dtype=dtype, per_head=per_head, query_format=query_format)


def _layer(
    call: AttentionCall,
    name: str,
    cache_config: CacheConfig | None,
    quant_config: QuantConfig | None,
    attn_backend: str | None,
    batch_invariant: bool,
) -> ModelAttention:
    layer = ModelAttention(
        call.num_heads,
        call.head_size,
        call.scale,
        call.num_kv_heads,
        alibi_slopes=call.alibi_slopes,
        cache_config=cache_config,
        quant_config=quant_config,
        logits_soft_cap=call.soft_cap,
        per_layer_sliding_window=call.window,
        prefix=name,
        attn_backend=attn_backend,
        head_size_v=call.head_size_v,
        sinks=call.sinks,
        batch_invariant=batch_invariant,
    )
    layer._expected = call.expected_options()
    return layer


def check_model(model: Any, pools: bool = False) -> None:
    """Refuse what is no whole model in eval mode that is not on vattn yet, and without `pools` no causal one."""
    if isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            f"enable({str(model)!r:.80}), a name or a folder",
            "a model of transformers",
            "load it first: enable(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())",
        )
    if not isinstance(model, transformers.PreTrainedModel):
        inside = model.named_modules() if isinstance(model, nn.Module) else ()
        path = next((name for name, part in inside if isinstance(part, transformers.PreTrainedModel)), None)
        if path is not None:
            raise ConfigError(
                f"enable() of {type(model).__name__}, a module around a model of transformers",
                "the model itself",
                f"enable(model.{path}); adapters in its layers stay where they are",
            )
        raise ConfigError(
            f"enable() of {type(model).__name__}", "a model of transformers", "use vattn.Attention in your own models"
        )
    if model.training:
        raise ConfigError("enable() of a model in training mode", "a model in eval mode", "call model.eval() first")
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise ConfigError(
            f"enable() of a model in which {empty!r} has no values (device meta), as after offloading",
            "a model with all weights on its device",
            "load it whole, with device_map=None or one device",
        )
    if "_vattn_before" in model.__dict__:
        raise ConfigError("enable() of a model that is on vattn", "a model that is not", "call disable(model) first")
    if not pools and not _has_head(model):
        raise ConfigError(
            f"enable() of {type(model).__name__}",
            "a causal language model with its head",
            "load it with transformers.AutoModelForCausalLM; enable_pooling of vattn.integrations.transformers.pooling "
            "takes models that give embeddings or scores",
        )


def _has_head(model: Any) -> bool:
    """Return whether a model of transformers is a causal language model with its head."""
    generates = callable(getattr(model, "prepare_inputs_for_generation", None))
    return generates and model.get_output_embeddings() is not None
