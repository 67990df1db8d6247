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


def of_sampling(fields: Iterable[str], where: str = "") -> dict[str, str]:
    """Return the fields of `Sampling` and their other names, for functions that take a `Sampling`.

    Example:
        >>> of_sampling(["seed"])["max_tokens"]
        'sampling=vattn.Sampling(max_new_tokens={value})'
    """
    names = {**{name: f"{name}={{value}}" for name in fields}, **SAMPLING}
    return {name: f"sampling=vattn.Sampling({right}){where}" for name, right in names.items()}
