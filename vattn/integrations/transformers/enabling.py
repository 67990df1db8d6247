"""`enable` and `disable`: put a model of transformers on vattn in place, and take it off."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from vattn.cache.allocation import check_skip_layers
from vattn.calibration.calibrate import Calibration, as_calibration
from vattn.calibration.fp8_saving import own_config
from vattn.compilation.compile_ahead import compiling_ahead
from vattn.compilation.regions import restore_regions
from vattn.config.arguments import check_switches
from vattn.config.attention import CacheConfig
from vattn.config.keywords import known_keywords
from vattn.config.other_names import ENABLE
from vattn.errors import ConfigError, UnsupportedRequestError
from vattn.integrations.transformers import linears
from vattn.integrations.transformers.adapters import remove_adapters
from vattn.integrations.transformers.attention_interface import NAME, PACKED, REPLACED, ModelAttention, attend, register
from vattn.integrations.transformers.available import transformers
from vattn.integrations.transformers.checkpoint_scales import (
    checkpoint_configs,
    remove_cache_hooks,
    restore_cache_hooks,
)
from vattn.integrations.transformers.checks import check_model, check_quant_config, model_dtype
from vattn.integrations.transformers.model_layers import (
    find_heads,
    install,
    make_layer,
    one_of_each,
    plain_cache,
    scales_of,
    scales_of_rank,
    stores_plainly,
)
from vattn.integrations.transformers.observe import find_states, observe, set_attention
from vattn.integrations.transformers.packed_model import PackedCache, PackedModel
from vattn.integrations.transformers.pipeline import stage_of, use_stage
from vattn.integrations.transformers.prove import Proof, compile_for_proof
from vattn.integrations.transformers.replaced_forwards import replace_forwards, replaced_modules, restore_forwards
from vattn.integrations.transformers.rope_frequencies import fix_frequencies, restore_frequencies
from vattn.integrations.transformers.state_layers import restore_states
from vattn.layers import QuantConfig
from vattn.layers.weight_parts import ranks_of, take_back, use_parts


@known_keywords(ENABLE)
@torch.inference_mode(False)
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
    scales = scales_of(found, quant_config, cache_config, scales_per_head, query_format)
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
            scales = scales_of_rank(scales, find_heads(found, calls, ranks_of(model)))
        if calibration is None and quant_config is None:
            scales = checkpoint_configs(model, list(calls), cache_config).get
        make = partial(make_layer, ModelAttention, attn_backend=attn_backend, batch_invariant=batch_invariant)
        layers = {
            name: make(call, name, cache_config=cache_config, quant_config=scales(name)) for name, call in calls.items()
        }
        check_skip_layers(layers, whole=True)
        for name, layer in layers.items():
            layer.resolve_config(model_dtype(model), next(calls[name].module.parameters()).device)
        modules = {name: call.module for name, call in calls.items()}
        with_states = {} if states is None else states.modules
        proven = {**modules, **with_states}
        proven = {name: proven[name] for name, _ in model.named_modules() if name in proven}
        with compiling_ahead(next(model.parameters()).device) if prove else nullcontext():
            if prove:
                plain, backend = plain_cache(cache_config), attn_backend if stores_plainly(cache_config) else None
                trial = {n: make(call, n, attn_backend=backend, cache_config=plain) for n, call in calls.items()}
                compile_for_proof(one_of_each(calls, trial), model, plain.block_size)
                proof = Proof(model, proven, rope_length, seen.first_position)
            replaced = bool(replaced_modules(model))
            register()
            replace_forwards(model, attend)
            set_attention(model, REPLACED if replaced else PACKED)
            if states is not None:
                states.install()
            packed = PackedModel(model, rope_length, seen.first_position, seen.takes_embeddings)
            if prove:
                install(modules, trial)
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
        is_part = any(NAME in module._modules for module in inner.modules())
        if is_part or not isinstance(inner, transformers.PreTrainedModel):
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
