"""A right call of every public function, class and method, from which wrong ones are made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vattn
from vattn.calibration.audit import AuditRow

Call = tuple[Callable[..., Any], dict[str, Any]]
"""What is called, and the arguments by name; a first argument named `""` is positional alone."""


def config(**changes: Any) -> vattn.AttentionConfig:
    values = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "scale": 0.25, "dtype": "float32",
        "kv_cache_dtype": "float32",
    }  # fmt: skip
    return vattn.AttentionConfig(**{**values, **changes})


def layer(**changes: Any) -> vattn.Attention:
    made = vattn.Attention(**{"num_heads": 4, "head_size": 16, "scale": 0.25, "num_kv_heads": 2, **changes})
    vattn.allocate_kv_cache(made, num_blocks=8, dtype=torch.float32)
    return made


def builder(**changes: Any) -> vattn.AttentionMetadataBuilder:
    made = {"max_num_reqs": 4, "max_num_tokens": 32, "max_seq_len": 64, "block_size": 16, "num_blocks": 8}
    return vattn.AttentionMetadataBuilder(**{**made, **changes})


LENGTHS = {"query_lens": [3, 2], "seq_lens": [3, 20], "block_tables": [[1], [2, 3]]}


def step() -> vattn.AttentionMetadata:
    return builder().build(**LENGTHS)


def floats(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, max(1, torch.Size(shape).numel())).view(shape)


def cache() -> Tensor:
    return torch.zeros(vattn.kv_cache_shape(config(), 8))


def rows() -> dict[str, Tensor]:
    return {"query": floats(5, 4, 16), "key": floats(5, 2, 16), "value": floats(5, 2, 16)}


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def folder() -> Path:
    return Path(tempfile.mkdtemp())


def pool() -> vattn.BlockPool:
    return vattn.BlockPool(8)


def calibration() -> vattn.Calibration:
    seen = {"query": [2.0, 3.0], "key": [4.48], "value": [8.96], "output": [1.0, 0.5]}
    return vattn.Calibration({"a": seen}, tokens=3, inputs={"b": 1.0})


def audit() -> vattn.Audit:
    return vattn.Audit("fp8_e4m3", 1, tuple(AuditRow(name, 0.1, 0.2, 0.3, 0.1, 0.1, 1.0) for name in ("a", "b")))


def tree() -> vattn.TokenTree:
    return vattn.TokenTree.of([(0,), (1,), (0, 0)])


def memory_store() -> vattn.HostMemoryConnector:
    store = vattn.HostMemoryConnector("1MiB")
    store.attach({"x": 64}, "f" * 64)
    return store


def file_store() -> vattn.FileConnector:
    store = vattn.FileConnector(folder())
    store.attach({"x": 64}, "f" * 64)
    return store


def transfer() -> vattn.KVTransfer:
    model = layer(prefix="a")
    held = vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32)
    return vattn.KVTransfer(model, held, vattn.HostMemoryConnector("1MiB"))


def hybrid_cache() -> Any:
    model = nn.ModuleList([vattn.Attention(4, 16, 0.25, 2, prefix="0"),
                           vattn.Attention(4, 16, 0.25, 2, prefix="1", per_layer_sliding_window=16)])  # fmt: skip
    return vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32, hybrid=True)


def specs(kind: Any, **more: Any) -> dict[str, Call]:
    sizes = {"num_kv_heads": 1 if kind is vattn.MLAAttentionSpec else 2, "head_size": 16, "block_size": 16, **more}
    made, name = kind(**sizes), kind.__name__
    return {
        name: (kind, {"kv_cache_dtype": "bfloat16", "layout": "NHD", **sizes}),
        f"{name}.first_block": (made.first_block, {"num_tokens": 40}),
        f"{name}.max_blocks": (made.max_blocks, {"max_seq_len": 64, "max_new_tokens": 1, "max_encoder_len": 8}),
        f"{name}.storage_shape": (made.storage_shape, {"num_blocks": 8}),
        f"{name}.merge": (kind.merge, {"specs": [made, made]}),
    }


def configs() -> dict[str, Call]:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "scale": 0.25, "dtype": "float32"}
    latent = {"num_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 32}
    more = {
        "kv_cache_dtype": "float32", "block_size": 16, "kv_cache_layout": "NHD", "kv_scale": "none", "lse": False,
        "sliding_window": 8, "logits_soft_cap": 30.0, "alibi": "none", "sinks": False, "backend": "auto",
    }  # fmt: skip
    return {
        "AttentionConfig": (vattn.AttentionConfig, {**shape, **more}),
        "AttentionConfig.parse": (vattn.AttentionConfig.parse, {"text": config().encode()}),
        "MLAConfig": (
            vattn.MLAConfig,
            {**latent, "scale": 0.2, "dtype": "float32", "kv_cache_dtype": "float32", "lse": False},
        ),
        "RopeConfig": (vattn.RopeConfig, {"rotary_dim": 8, "style": "neox", "norm": "rms", "norm_eps": 1e-6}),
        "CacheConfig": (
            vattn.CacheConfig,
            {"block_size": 16, "cache_dtype": "auto", "sliding_window": 8, "calculate_kv_scales": False,
             "kv_cache_dtype_skip_layers": ("1",), "kv_cache_layout": "NHD", "exact_prefill": False},
        ),
        "QuantConfig": (
            vattn.QuantConfig, {"k_scale": 0.5, "v_scale": 0.5, "query_format": "none", "output_format": "none"}
        ),
        "EncoderFP8Config": (vattn.EncoderFP8Config, {"dynamic": True}),
        "Sampling": (
            vattn.Sampling,
            {"max_new_tokens": 3, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5,
             "stop_strings": ("a",), "stop_token_ids": (1,), "seed": 3},
        ),
        "PromptLookup": (vattn.PromptLookup, {"num_drafts": 4, "longest": 4, "shortest": 2}),
        "boundary_layers": (vattn.boundary_layers, {"num_layers": 6, "keep": 2}),
        "differential_lambda_init": (vattn.differential_lambda_init, {"depth": 3}),
        "explain": (vattn.explain, {"request": config(), "device": "cpu"}),
        "plan_key": (vattn.plan_key, {"config": config(), "device": "cpu"}),
        "options": (vattn.options, {"strict": False, "rope": "auto", "output_formats": ["fp8_static"]}),
        **specs(vattn.FullAttentionSpec), **specs(vattn.SlidingWindowSpec, sliding_window=8),
        **specs(vattn.ChunkedLocalAttentionSpec, attention_chunk_size=32), **specs(vattn.CrossAttentionSpec),
        **specs(vattn.SinkFullAttentionSpec, sink_len=16), **specs(vattn.TQFullAttentionSpec, tq_slot_size=66),
        **specs(vattn.MLAAttentionSpec), **specs(vattn.EncoderOnlyAttentionSpec),
    }  # fmt: skip


def caches() -> dict[str, Call]:
    held = vattn.allocate_kv_cache(layer(), num_blocks=8, dtype=torch.float32)
    reserved = pool()
    taken = reserved.allocate(3)
    storages = torch.zeros(2, 8, 16, 2, 16), torch.zeros(2, 8, 16, 2, 16)
    return {
        "kv_cache_shape": (vattn.kv_cache_shape, {"config": config(), "num_blocks": 8}),
        "allocate_kv_cache": (
            vattn.allocate_kv_cache,
            {"model": vattn.Attention(4, 16, 0.25, 2), "num_blocks": 8, "device": "cpu", "dtype": torch.float32,
             "hybrid": False, "max_seq_len": 64},
        ),
        "swap_blocks": (
            vattn.swap_blocks,
            {"source": storages[0], "destination": storages[1], "block_mapping": [(1, 2)], "geometry": config()},
        ),
        "copy_blocks": (vattn.copy_blocks, {"kv_caches": held, "block_mapping": [(1, 2)]}),
        "move_slots": (vattn.move_slots, {"layers": layer(), "source": slots(3, 4), "target": slots(5, 6)}),
        "BlockPool": (vattn.BlockPool, {"num_blocks": 8, "reserved": 1}),
        "BlockPool.allocate": (pool().allocate, {"num_blocks": 2}),
        "BlockPool.find": (pool().find, {"keys": ["a"]}),
        "BlockPool.take": (pool().take, {"keys": ["a"]}),
        "BlockPool.num_kept_of": (pool().num_kept_of, {"keys": ["a"]}),
        "BlockPool.forget": (reserved.forget, {"block_ids": [taken[0]]}),
        "BlockPool.fork": (reserved.fork, {"block_ids": [taken[0]]}),
        "BlockPool.free": (reserved.free, {"block_ids": [taken[0]]}),
        "BlockPool.publish": (reserved.publish, {"block_id": taken[1], "key": "a"}),
        "BlockPool.references": (reserved.references, {"block_id": taken[2]}),
        "BlockPool.writable": (reserved.writable, {"block_id": taken[2]}),
        "HybridBlockTable": (vattn.HybridBlockTable, {"pool": pool(), "cache": hybrid_cache()}),
        "HostMemoryConnector": (vattn.HostMemoryConnector, {"memory": "1MiB", "pin_memory": False}),
        "HostMemoryConnector.find": (memory_store().find, {"keys": ["a"]}),
        "FileConnector": (vattn.FileConnector, {"folder": folder()}),
        "FileConnector.find": (file_store().find, {"keys": ["a"]}),
        "FileConnector.path": (file_store().path, {"key": "a"}),
        "TransferRequest": (vattn.TransferRequest, {"request_id": "r", "keys": ("a",), "block_ids": (1,)}),
        "KVTransfer.find": (transfer().find, {"keys": ["a"]}),
        "KVTransfer.offload": (transfer().offload, {"request_id": "r", "keys": ["a"], "block_ids": [1]}),
        "KVTransfer.cancel": (transfer().cancel, {"request_id": "r"}),
        "block_keys": (vattn.block_keys, {"tokens": list(range(40)), "block_size": 16, "salt": "a"}),
    }  # fmt: skip


def layers() -> dict[str, Call]:
    shape = {"num_heads": 4, "head_size": 16, "scale": 0.25, "num_kv_heads": 2, "prefix": "a"}
    common = {**shape, "cache_config": vattn.CacheConfig(), "quant_config": vattn.QuantConfig(), "attn_backend": "auto"}
    vectors = {f"lambda_{name}": [0.1] * 16 for name in ("q1", "k1", "q2", "k2")}
    encoder, texts, bound = (
        vattn.MMEncoderAttention(4, 16, 0.25, 2),
        vattn.EncoderOnlyAttention(4, 16, 0.25, 2),
        layer(),
    )
    dynamic = vattn.MMEncoderAttention(4, 16, prefix="a", quant_config=vattn.EncoderFP8Config(dynamic=True))
    only = vattn.AttentionMetadataBuilder(4, 32, 64, layers=texts).build([3, 2])
    three = {"query": floats(1, 5, 64), "key": floats(1, 5, 32), "value": floats(1, 5, 32)}
    return {
        "Attention": (
            vattn.Attention,
            {**common, "alibi_slopes": [0.1] * 4, "use_alibi_sqrt": False, "logits_soft_cap": 30.0,
             "per_layer_sliding_window": 8, "attn_type": "decoder", "sinks": [0.1] * 4, "head_size_v": 16},
        ),
        "Attention.forward": (bound, {**rows(), "metadata": step()}),
        "Attention.bind_kv_cache": (layer().bind_kv_cache, {"key_cache": cache(), "dtype": torch.float32}),
        "Attention.resolve_config": (layer().resolve_config, {"dtype": torch.float32, "device": "cpu"}),
        "Attention.get_kv_cache_spec": (layer().get_kv_cache_spec, {"dtype": torch.float32}),
        "CrossAttention": (vattn.CrossAttention, {**common, "logits_soft_cap": 30.0}),
        "EncoderOnlyAttention": (vattn.EncoderOnlyAttention, {**common, "alibi_slopes": [0.1] * 4}),
        "EncoderOnlyAttention.forward": (texts, {**rows(), "metadata": only}),
        "MMEncoderAttention": (vattn.MMEncoderAttention, {**shape, "attn_backend": "auto"}),
        "MMEncoderAttention.forward": (
            encoder, {**three, "cu_seqlens": ints(0, 3, 5), "max_seqlen": 3, "cu_seqlens_k": ints(0, 3, 5)}
        ),
        "StaticSinkAttention": (
            vattn.StaticSinkAttention,
            {**shape, "sink_len": 16, "sink_key": floats(16, 2, 16), "sink_value": floats(16, 2, 16)},
        ),
        "DifferentialAttention": (vattn.DifferentialAttention, {**shape, **vectors, "lambda_init": 0.8}),
        "MLAAttention": (
            vattn.MLAAttention,
            {"num_heads": 4, "scale": 0.2, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
             "q_lora_rank": None, "kv_lora_rank": 32, "kv_b_proj": nn.Linear(32, 128, bias=False), "prefix": "a",
             "cache_config": vattn.CacheConfig(), "quant_config": vattn.QuantConfig(), "attn_backend": "auto",
             "decode_threshold": 1, "workspace_tokens": 64},
        ),
        "check_cu_seqlens": (
            vattn.check_cu_seqlens, {"cu_seqlens": ints(0, 3, 5), "num_tokens": 5, "max_seqlen": 3, "padded": False}
        ),
        "pad_cu_seqlens": (vattn.pad_cu_seqlens, {"cu_seqlens": ints(0, 3, 5), "num_sequences": 4}),
        "observe_clipping": (observed, {"model": bound}),
        "clip_rates": (vattn.clip_rates, {"model": bound}),
        "read_encoder_scales": (read_scales, {"path": folder()}),
        "save_encoder_scales": (saved, {"model": encoder, "path": folder() / "a.json", "margin": 1.5}),
        "save_encoder_scales_when_full": (
            vattn.save_encoder_scales_when_full, {"model": dynamic, "path": folder() / "a.json", "margin": 1.5}
        ),
    }  # fmt: skip


def observed(model: Any) -> None:
    with vattn.observe_clipping(model):
        pass


def read_scales(path: Any) -> Any:
    try:
        return vattn.read_encoder_scales(path)
    except vattn.errors.ScaleError:
        if isinstance(path, Path):
            return None  # An empty folder holds no scales.
        raise


def saved(model: Any, path: Any, margin: Any) -> None:
    try:
        vattn.save_encoder_scales(model, path, margin=margin)
    except vattn.errors.ConfigError:
        if not (isinstance(model, vattn.MMEncoderAttention) and isinstance(path, Path) and type(margin) is float):
            raise


def functions() -> dict[str, Call]:
    cos, out = floats(5, 4), floats(5, 4, 16)
    rope = vattn.RopeConfig(rotary_dim=8)
    return {
        "paged_attention": (
            vattn.paged_attention,
            {"query": floats(5, 4, 16), "kv_cache": cache(), "metadata": step(), "config": config()},
        ),
        "update_kv_cache": (
            vattn.update_kv_cache,
            {"key": rows()["key"], "value": rows()["value"], "kv_cache": cache(), "slot_mapping": slots(1, 2, 3, 4, 5),
             "config": config()},
        ),
        "rope_update_kv_cache": (
            vattn.rope_update_kv_cache,
            {**rows(), "cos": cos, "sin": cos, "kv_cache": cache(), "slot_mapping": slots(1, 2, 3, 4, 5), "rope": rope,
             "config": config()},
        ),
        "varlen_attention": (
            vattn.varlen_attention,
            {**rows(), "query_start_loc": ints(0, 3, 5), "config": config().replace(block_size=0),
             "kv_start_loc": ints(0, 3, 5)},
        ),
        "merge_attn_states": (
            vattn.merge_attn_states,
            {"prefix_output": out, "prefix_lse": floats(5, 4), "suffix_output": out, "suffix_lse": floats(5, 4)},
        ),
    }  # fmt: skip


def steps() -> dict[str, Call]:
    capacity = {
        "max_num_reqs": 4, "max_num_tokens": 32, "max_seq_len": 64, "block_size": 16, "num_blocks": 8, "device": "cpu",
        "decode_threshold": 1,
    }  # fmt: skip
    trees = vattn.TreeAttentionMetadataBuilder(4, 32, 64, 16, tree_choices=[(0,), (1,)], num_blocks=8)
    flash, built = vattn.FlashAttentionMetadataBuilder(4, 32, 64, 16), builder()
    decode = built.build([1, 1], [3, 20], [[1], [2, 3]])
    tensors = {
        "query_start_loc": ints(0, 3, 5), "seq_lens": ints(3, 20), "block_table": ints(1, 0, 2, 3).view(2, 2),
        "slot_mapping": slots(16, 17, 18, 50, 51),
    }  # fmt: skip
    return {
        "AttentionMetadataBuilder": (vattn.AttentionMetadataBuilder, capacity),
        "AttentionMetadataBuilder.build": (
            builder().build, {**LENGTHS, "num_reqs_padded": 3, "num_tokens_padded": 8, "causal": True}
        ),
        "AttentionMetadataBuilder.build_from_tensors": (
            builder().build_from_tensors, {**tensors, "max_query_len": 3, "max_seq_len": 20}
        ),
        "AttentionMetadataBuilder.advance": (built.advance, {"metadata": decode, "new_blocks": []}),
        "AttentionMetadataBuilder.check": (builder().check, {"metadata": step()}),
        "AttentionMetadata.check": (step().check, {"block_size": 16, "num_blocks": 8}),
        "TreeAttentionMetadataBuilder.build": (trees.build, {**LENGTHS, "trees": None}),
        "TreeAttentionMetadataBuilder.build_for_drafting": (
            trees.build_for_drafting, {"common_metadata": trees.build(**LENGTHS), "draft_index": 0}
        ),
        "FlashAttentionMetadataBuilder.build": (flash.build, {**LENGTHS, "batch_size": 2, "num_lookahead_slots": 0}),
        "token_order": (
            vattn.token_order, {"query_lens": [3, 1], "seq_lens": [3, 20], "first": "decode", "decode_threshold": 1}
        ),
        "fast_prefill": (vattn.fast_prefill, {"metadata": step(), "logits_indices": slots(2, 4)}),
        "kept_rows": (vattn.kept_rows, {"rows": floats(5, 8), "metadata": step()}),
        "forward_context": (entered, {"metadata": step()}),
        "TokenTree": (vattn.TokenTree, {"paths": ((0,), (1,))}),
        "TokenTree.of": (vattn.TokenTree.of, {"choices": [(0,), (1,)]}),
        "TokenTree.chain": (vattn.TokenTree.chain, {"length": 3}),
        "TokenTree.merge": (vattn.TokenTree.merge, {"branches": [[1, 2], [1, 3]], "max_nodes": 4}),
        "TokenTree.branch": (tree().branch, {"row": 1}),
        "TokenTree.num_nodes": (tree().num_nodes, {"depth": 1}),
        "TokenTree.accepted": (tree().accepted, {"drafts": [1, 2, 3], "chosen": [1, 3, 4, 5]}),
    }  # fmt: skip


def entered(metadata: Any) -> None:
    with vattn.forward_context(metadata):
        pass


def results() -> dict[str, Call]:
    found = calibration()
    return {
        "Calibration.save": (found.save, {"path": folder() / "a.json"}),
        "Calibration.load": (loaded, {"path": folder()}),
        "Calibration.input_scale": (found.input_scale, {"name": "b", "margin": 1.5}),
        "Calibration.quant_config": (
            found.quant_config,
            {"prefix": "a", "cache_dtype": "fp8", "per_head": False, "margin": 1.5, "query_format": "none",
             "output_format": "none"},
        ),
        "calibrate": (refused_model(vattn.calibrate), {"model": nn.Identity(), "batches": [[[1, 2]]]}),
        "audit": (refused_model(vattn.audit), {"model": nn.Identity(), "texts": [[1, 2]], "kv_cache_dtype": "fp8"}),
        "quantise_linears": (
            quantised, {"model": nn.Sequential(nn.Linear(32, 32)), "format": "fp8_per_token", "skip": ()}
        ),
        "warmup": (refused_model(vattn.warmup), {"model": nn.Identity(), "builder": builder(), "progress": False}),
        "Generator": (
            refused_model(vattn.Generator),
            {"model": nn.Identity(), "max_num_reqs": 4, "token_budget": 32, "max_seq_len": 64, "reuse_prefixes": True},
        ),
        "Embedder": (
            refused_model(vattn.Embedder),
            {"model": nn.Identity(), "token_budget": 32, "max_num_reqs": 4, "normalise": True},
        ),
        "compile": (vattn.compile, {"target": nn.Linear(2, 2), "fullgraph": True}),
        "load_flash_attn": (refused_model(vattn.load_flash_attn), {"path": folder() / "none.so"}),
        "maybe_transfer_kv_layer": (vattn.maybe_transfer_kv_layer, {"function": lambda layer_name: None}),
        "register_backend": (refused_model(vattn.register_backend), {"backend": object()}),
    }  # fmt: skip


def loaded(path: Any) -> Any:
    return None if isinstance(path, Path) else vattn.Calibration.load(path)


def quantised(model: Any, format: Any, skip: Any) -> Any:
    return vattn.quantise_linears(nn.Sequential(nn.Linear(32, 32)) if isinstance(model, nn.Sequential) else model,
                                  format, skip=skip)  # fmt: skip


def refused_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a call that is right but for a refused model, file or backend: others are checked first, or never."""

    def call(**arguments: Any) -> Any:
        return function(**arguments)

    call.refuses = True  # type: ignore[attr-defined]
    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


FAMILIES: dict[str, Callable[[], dict[str, Call]]] = {
    "configs": configs, "caches": caches, "layers": layers, "functions": functions, "steps": steps, "results": results,
}  # fmt: skip
