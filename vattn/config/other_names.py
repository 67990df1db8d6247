"""Names that other libraries give to options, and what to write here; `{value}` stands for what was passed."""

from __future__ import annotations

from collections.abc import Iterable

SAMPLING = {
    "max_tokens": "max_new_tokens={value}",
    "max_length": "max_new_tokens={value}",
    "min_new_tokens": "min_tokens={value}",
    "do_sample": "temperature=1.0",
    "do_sample=False": "temperature=0",
    "stop": 'stop_strings=["..."]',
    "eos_token_id": "stop_token_ids=[...]",
    "bad_words_ids": "bad_words={value}",
    "num_return_sequences": "n={value}",
    "logits_processor": "logits_processors=[...]",
    "stopping_criterion": "stopping_criteria=[...]",
    "guided_regex": "grammar=vattn.Grammar(regex={value})",
    "guided_json": "grammar=vattn.Grammar(json_schema={value})",
    "guided_grammar": "grammar=vattn.Grammar(ebnf={value})",
}
"""Of `vattn.Sampling`."""

_PROMPTS = ("input_ids", "inputs", "prompt_token_ids", "text_inputs")
PROMPT, PROMPTS = (dict.fromkeys(_PROMPTS, f"{right}={{value}}") for right in ("prompt", "prompts"))
"""Of functions that take a prompt, and several."""

GENERATOR = {
    "batch_size": "max_num_reqs={value}",
    "max_batch_size": "max_num_reqs={value}",
    "max_num_seqs": "max_num_reqs={value}",
    "max_running_requests": "max_num_reqs={value}",
    "max_num_batched_tokens": "token_budget={value}",
    "chunked_prefill_size": "token_budget={value}",
    "max_model_len": "max_seq_len={value}",
    "max_length": "max_seq_len={value}",
    "eos_token_id": "stop_token_ids=[...]",
    "enable_prefix_caching": "reuse_prefixes={value}",
    "cuda_graph_sizes": "graph_sizes={value}",
    "process_group": "group={value}",
    "num_blocks": "enable(model, num_blocks={value})",
    "gpu_memory_utilization": 'enable(model, memory="8GiB")',
}
"""Of `vattn.Generator`."""

LAYER = {
    "head_dim": "head_size={value}",
    "head_dim_v": "head_size_v={value}",
    "v_head_dim": "head_size_v={value}",
    "num_attention_heads": "num_heads={value}",
    "num_key_value_heads": "num_kv_heads={value}",
    "softmax_scale": "scale={value}",
    "scaling": "scale={value}",
    "softcap": "logits_soft_cap={value}",
    "sliding_window": "per_layer_sliding_window={value}",
    "window_size": "per_layer_sliding_window={value}",
    "kv_cache_dtype": "cache_config=vattn.CacheConfig(cache_dtype={value})",
    "block_size": "cache_config=vattn.CacheConfig(block_size={value})",
    "layer_name": "prefix={value}",
    "backend": "attn_backend={value}",
}
"""Of attention layers."""

ENABLE = {
    "dtype": "from_pretrained(dtype={value}) before enable",
    "torch_dtype": "from_pretrained(dtype={value}) before enable",
    "device": "model.to({value}) before enable",
    "device_map": "from_pretrained(device_map={value}) before enable",
    "kv_cache_dtype": "cache_config=vattn.CacheConfig(cache_dtype={value})",
    "cache_dtype": "cache_config=vattn.CacheConfig(cache_dtype={value})",
    "block_size": "cache_config=vattn.CacheConfig(block_size={value})",
    "attn_implementation": 'attn_backend="auto"',
    "gpu_memory_utilization": 'memory="8GiB"',
    "batch_size": "max_num_reqs={value}",
    "max_num_seqs": "max_num_reqs={value}",
    "max_model_len": "vattn.Generator(packed, max_seq_len={value})",
}
"""Of `vattn.integrations.transformers.enable`."""

ENABLE_ENCODER_DECODER = {name: right for name, right in ENABLE.items() if "max_num_reqs" not in right}
"""Of `vattn.integrations.transformers.enable_encoder_decoder`."""

ENABLE_POOLING = {
    **{name: ENABLE[name] for name in ("dtype", "torch_dtype", "device", "device_map", "attn_implementation")},
    "pooling": "vattn.Embedder(model, pooling={value})",
    "normalise": "vattn.Embedder(model, normalise={value})",
    "tokenizer": "vattn.Embedder(model, tokenizer)",
    "max_num_reqs": "vattn.Embedder(model, max_num_reqs={value})",
}
"""Of `vattn.integrations.transformers.pooling.enable_pooling`."""

EMBEDDER = {
    "pooling_mode": "pooling={value}",
    "pooling_type": "pooling={value}",
    "normalize": "normalise={value}",
    "normalize_embeddings": "normalise={value}",
    "batch_size": "max_num_reqs={value}",
    "max_num_seqs": "max_num_reqs={value}",
    "max_num_batched_tokens": "token_budget={value}",
    "device": "model.to({value}) before enable_pooling",
}
"""Of `vattn.Embedder`."""

ENCODE = {
    "batch_size": "Embedder(model, max_num_reqs={value})",
    "normalize_embeddings": "Embedder(model, normalise={value})",
    "normalise": "Embedder(model, normalise={value})",
    "pooling": "Embedder(model, pooling={value})",
    "convert_to_numpy": "encode(prompts).cpu().numpy()",
    "truncate_dim": "encode(prompts)[:, :{value}]",
}
"""Of `vattn.Embedder.encode` and `score`."""

ENABLE_ADAPTERS = {
    "max_loras": "max_adapters={value}",
    "max_lora_rank": "max_rank={value}",
    "r": "max_rank={value}",
    "rank": "max_rank={value}",
    "lora_target_modules": "target_modules={value}",
    "max_num_batched_tokens": "max_num_tokens={value}",
    "token_budget": "max_num_tokens={value}",
    "adapters": "enable_adapters(model).load(name, folder)",
    "lora_paths": "enable_adapters(model).load(name, folder)",
}
"""Of `vattn.integrations.transformers.enable_adapters`."""

WHISPER_TASK = {"return_timestamps": "timestamps={value}", "lang": "language={value}"}
"""Of `vattn.integrations.transformers.whisper.whisper_task`."""

DRAFTS = {
    "num_speculative_tokens": "num_drafts={value}",
    "speculative_num_draft_tokens": "num_drafts={value}",
    "num_assistant_tokens": "num_drafts={value}",
    "num_tokens": "num_drafts={value}",
    "prompt_lookup_num_tokens": "num_drafts={value}",
}
"""Of `vattn.DraftModel`, `vattn.EagleDraft` and `vattn.MtpDraft`."""

PROMPT_LOOKUP = {
    **DRAFTS,
    "prompt_lookup_max": "longest={value}",
    "prompt_lookup_min": "shortest={value}",
    "max_matching_ngram_size": "longest={value}",
}
"""Of `vattn.PromptLookup`."""


def of_sampling(fields: Iterable[str], where: str = "") -> dict[str, str]:
    """Return the fields of `Sampling` and their other names, for functions that take a `Sampling`.

    Example:
        >>> of_sampling(["seed"])["max_tokens"]
        'sampling=vattn.Sampling(max_new_tokens={value})'
    """
    names = {**{name: f"{name}={{value}}" for name in fields}, **SAMPLING}
    return {name: f"sampling=vattn.Sampling({right}){where}" for name, right in names.items()}
