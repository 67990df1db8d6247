"""Check the arguments of a generator, and find what it takes by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.calibration.eval_mode import EvalMode
from vattn.config.arguments import format_bytes, integer, read_count
from vattn.config.attention import AttentionConfig
from vattn.errors import ConfigError
from vattn.generation.draft_source import DraftSource
from vattn.generation.prompts import check_stop_ids
from vattn.layers.lora import Adapters
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.hybrid_builder import GroupedMetadataBuilder
from vattn.metadata.token_tree import TokenTree
from vattn.metadata.tree_builder import TreeAttentionMetadataBuilder


def check_counts(max_num_reqs: Any, token_budget: Any, max_queue: Any, state_snapshots: Any) -> None:
    """Refuse sizes of a generator that are no counts."""
    for name, count in {"max_num_reqs": max_num_reqs, "token_budget": token_budget, "max_queue": max_queue}.items():
        if name != "max_queue" or count is not None:
            read_count(name, count, 1, f"leave {name} out for its default")
    read_count("state_snapshots", state_snapshots, 0, "pass how many states to keep for other requests")


def check_kind(name: str, value: Any, kind: type) -> None:
    """Refuse a value that is neither `None` nor of a type."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r:.60}", f"a {kind.__name__}", f"leave {name} out for its default")


def check_speculation(value: Any) -> None:
    """Refuse what is neither `None` nor a source of drafts."""
    if value is not None and not isinstance(value, DraftSource):
        raise ConfigError(
            f"speculation={value!r:.60}",
            "vattn.PromptLookup(...), vattn.DraftModel(small), EagleDraft(folder) or MtpDraft()",
            "speculation=vattn.DraftModel(enable(small)), or leave it out",
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer without `encode` and `decode`; `None` is none."""
    if tokenizer is not None and not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        raise ConfigError(
            f"tokenizer={tokenizer!r:.80}",
            "an object with encode(text) and decode(ids), such as transformers' tokenizers",
            "transformers.AutoTokenizer.from_pretrained(folder)",
        )


def find_cache(model: Any, cache: Any) -> KVCacheAllocation:
    """Return the cache of a generator: the given one, or the model's own.

    Raises:
        ConfigError: no model, no cache, or one that a generator cannot use.
    """
    if not callable(model):
        raise ConfigError(f"a model of type {type(model).__name__}", "a torch.nn.Module", "pass the model first")
    if not getattr(model, "enabled", True):
        raise ConfigError("a model that disable() took off vattn", "a model on vattn", "enable it again")
    EvalMode(model).check()
    found = getattr(model, "kv_cache", None) if cache is None else cache
    if not isinstance(found, KVCacheAllocation):
        raise _no_cache(model, cache)
    if found.num_blocks <= found.reserved_blocks:
        least = found.reserved_blocks + 1
        raise ConfigError(
            f"a cache of {found.num_blocks} blocks, of which requests cannot have the first {found.reserved_blocks}",
            f"{least} blocks or more, which take {format_bytes(least * found.bytes_per_block)}",
            "allocate more: memory= or num_blocks=, --memory on the command line",
        )
    if any(group.kind == "cross" for group in found.groups):
        raise ConfigError(
            "a cache with groups (hybrid=True) for a model with cross attention",
            "a cache without groups",
            "allocate it without hybrid=True; docs/layers.md has a loop for models of your own",
        )
    return found


def find_adapters(model: Any, group: Any, max_num_tokens: int) -> Adapters | None:
    """Return the adapters of a model, with room for steps of `max_num_tokens`; `None` without `enable_adapters`.

    No row has an adapter afterwards, so that graphs without adapters can be captured.

    Raises:
        ConfigError: adapters of a model over ranks.
    """
    adapters: Adapters | None = getattr(model, "adapters", None)
    if adapters is None:
        return None
    if group is not None:
        raise ConfigError("adapters of a model over ranks", "models on one device", "leave enable_adapters out")
    if adapters.rows.max_num_tokens < max_num_tokens:
        adapters.rows.reserve(max_num_tokens)
    adapters.rows.write((), ())
    return adapters


def keeps_states(model: Any) -> bool:
    """Return whether layers of a model keep a state for each request."""
    return any(hasattr(part, "bind_states") for part in model.modules())


def check_states(
    cache: KVCacheAllocation, max_num_reqs: int, speculation: Any, mixed_graph_sizes: Any, compile: str | None
) -> None:
    """Refuse what a model cannot do that keeps a state for each request.

    Raises:
        ConfigError: more requests than states; drafts, graphs of steps with prompts, or one compiled graph of all.
    """
    if cache.states is None:
        return
    if max_num_reqs > cache.states.num_slots:
        raise ConfigError(
            f"max_num_reqs={max_num_reqs} for a cache with the states of {cache.states.num_slots} requests",
            f"up to {cache.states.num_slots}",
            f"give the generator fewer, or enable(model, max_num_reqs={max_num_reqs}, ...)",
        )
    wrong = {
        "speculation": (speculation, "no drafts, since states cannot go back to the token before a wrong one"),
        "mixed_graph_sizes": (mixed_graph_sizes, "graph_sizes, for graphs of decodes only"),
        "compile='model'": (compile == "model", "compile='layers' or 'none': modules with states are not compiled"),
    }
    for name, (given, allowed) in wrong.items():
        if given:
            raise ConfigError(f"{name} for a model that keeps a state for each request", allowed, "leave it out")


def _no_cache(model: Any, cache: Any) -> ConfigError:
    if cache is not None:
        return ConfigError(
            f"cache of type {type(cache).__name__}", "what vattn.allocate_kv_cache returned", "leave cache out"
        )
    if callable(getattr(model, "scores", None)):
        return ConfigError(
            f"{type(model).__name__}, which gives embeddings or scores",
            "what enable(model, memory=...) returned",
            "use vattn.Embedder(model), or load a causal language model",
        )
    if hasattr(model, "generate") and hasattr(model, "config"):
        return ConfigError(
            f"{type(model).__name__}, a model of transformers that is not on vattn",
            "what enable(model, memory=...) returned",
            "from vattn.integrations.transformers import enable; Generator(enable(model, memory='1GiB'))",
        )
    return ConfigError(
        "a generator without a KV cache",
        "cache=, or a model with one in its attribute kv_cache",
        "vattn.Generator(model, cache=vattn.allocate_kv_cache(model, memory='1GiB')), or enable(model, memory='1GiB')",
    )


def _has_position_table(model: Any, trained: int) -> bool:
    """Return whether a model looks positions up in a learned table, which ends where its training did.

    OPT and BART keep two rows more than positions.
    """
    tokens = model.get_input_embeddings()
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding) and part is not tokens]
    return any(table.num_embeddings in (trained, trained + 2) for table in tables)


def longest_request(model: Any, requested: int | None, most: int) -> int:
    """Return the longest request: as requested, or what the cache can hold.

    Args:
        model: a transformers model may say how many positions it was trained for.
        requested: `None` for the default.
        most: tokens that the cache can hold for one request.
    """
    # `enable(rope_length=...)` fixes the frequencies for requests of up to this length.
    rope_length: int | None = getattr(model, "rope_length", None)
    if requested is not None:
        read_count("max_seq_len", requested, 1, "leave max_seq_len out for its default")
    if rope_length is not None:
        if requested is not None and requested > rope_length:
            raise ConfigError(
                f"max_seq_len={requested} for a model with rope_length={rope_length}",
                f"up to {rope_length}",
                "leave max_seq_len out, or call enable(model, rope_length=...) with the longest request",
            )
        most = min(most, rope_length)
    config: Any = getattr(getattr(model, "model", None), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    table: int | None = getattr(model, "max_positions", None)
    trained = table or next((length for length in map(integer, known) if length), 0)
    if requested is None:
        return min(most, trained if trained > 0 else most, 32768)
    if 0 < trained < requested and (table or _has_position_table(model.model, trained)):
        raise ConfigError(
            f"max_seq_len={requested} for a model with a table of {trained} positions",
            f"up to {trained}",
            "leave max_seq_len out",
        )
    if requested > most:
        raise ConfigError(
            f"max_seq_len={requested} for a cache that holds a request of {most} tokens",
            f"up to {most}",
            "leave max_seq_len out, or allocate more blocks",
        )
    return requested


def end_tokens(model: Any, given: Iterable[int] | None) -> frozenset[int]:
    """Return the given end tokens, or the end tokens of the model's generation config.

    Raises:
        ConfigError: no token ids, or one beyond the model's vocabulary.
    """
    vocab_size = None if given is None else getattr(model, "vocab_size", None)
    if given is None:
        inner = getattr(model, "model", model)
        given = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
        given = () if given is None else given if isinstance(given, (list, tuple)) else (int(given),)
    elif isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ConfigError(f"stop_token_ids={given!r:.80}", "token ids, or () for none", "stop_token_ids=[2]")
    ids = [read_count("stop_token_ids", token, 0, "stop_token_ids=[2]") for token in given]
    # A model's own end tokens may lie outside its vocabulary.
    check_stop_ids(ids, vocab_size, ConfigError)
    return frozenset(ids)


def reuses_prefixes(requested: bool | None, cache: KVCacheAllocation, state_snapshots: int, group: Any) -> bool:
    """Return whether cached blocks are reused: by default wherever a request can continue after them.

    Raises:
        ConfigError: reuse without snapshots of states, or snapshots that nothing would use.
    """
    if state_snapshots and (cache.states is None or requested is False or group is not None):
        why = "a model that keeps no state for a request" if cache.states is None else "reuse_prefixes=False"
        raise ConfigError(
            f"state_snapshots={state_snapshots} with {'group=' if group is not None else why}",
            "0: nothing would use them",
            "leave state_snapshots out",
        )
    if requested and cache.states is not None and not state_snapshots:
        raise ConfigError(
            "reuse_prefixes=True for a model that keeps a state for each request, without state_snapshots",
            "how many states to keep for other requests",
            "pass state_snapshots=32",
        )
    return cache.states is None or state_snapshots > 0 if requested is None else requested


def check_tree(model: Any, cache: KVCacheAllocation, group: Any) -> None:
    """Refuse trees of drafts for a model that would give other tokens than without drafts.

    Raises:
        ConfigError: it is one.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "bind_kv_cache")]
    configs = [layer.config for layer in layers]
    wrong = {
        "a model with group=": group is not None,
        "a cache with hybrid=True": bool(cache.groups),
        "a model with images or an encoder": getattr(model, "max_ranges", 0) or longest_encoder(model),
        "a model with latent attention": any(not isinstance(config, AttentionConfig) for config in configs),
        # Both count places, where drafts lie in the tree's order.
        "a model with windows or ALiBi": any(
            getattr(config, "sliding_window", None) is not None or getattr(config, "alibi", "none") != "none"
            for config in configs
        ),
    }
    for name, is_so in wrong.items():
        if is_so:
            raise ConfigError(f"a tree of drafts for {name}", "drafts without branches", "leave tree out")
    for layer in layers:
        reason = layer.why_no_trees()
        if reason is not None:
            raise ConfigError(
                f"a tree of drafts for layer {layer.prefix!r}: {reason}",
                "a backend that takes trees",
                "leave tree out, or enable(model, attn_backend='TRITON_ATTN')",
            )


def make_builder(
    model: nn.Module,
    cache: KVCacheAllocation,
    max_num_reqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    tree: TokenTree | None = None,
) -> AttentionMetadataBuilder:
    """Return the builder of a cache's steps, which may hold trees as large as `tree`."""
    kind = GroupedMetadataBuilder if cache.groups else AttentionMetadataBuilder
    sizes = max_num_reqs, max_num_tokens, max_seq_len, cache.block_size, cache.device
    if tree is not None:
        nodes = tree.size - 1
        return TreeAttentionMetadataBuilder(*sizes, layers=model, max_tree_nodes=nodes, max_trees=1, decode_threshold=1)
    return kind(
        *sizes, layers=model, max_mm_ranges=getattr(model, "max_ranges", 0), max_encoder_len=longest_encoder(model)
    )


def mixed_without_encoder(model: Any, sizes: Any) -> Any:
    """Return the sizes of graphs of steps with prompts: none for a model with cross attention.

    Raises:
        ConfigError: sizes for such a model.
    """
    if not longest_encoder(model):
        return sizes
    if sizes:
        raise ConfigError(
            f"mixed_graph_sizes={sizes!r:.60} for an encoder-decoder model",
            "graph_sizes, for graphs of decodes only",
            "leave mixed_graph_sizes out",
        )
    return ()


def longest_encoder(model: Any) -> int:
    """Return the most encoder states of a prompt, 0 for models without cross attention."""
    found: int = getattr(model, "max_encoder_len", 0)
    return found


def check_vocabulary(model: Any, draft: Any) -> None:
    """Refuse a draft model with another vocabulary than the target's, and models that do not say how large theirs is.

    Raises:
        ConfigError: either.
    """
    sizes = [integer(getattr(one, "vocab_size", None)) for one in (model, draft)]
    if None in sizes:
        name = "target" if sizes[0] is None else "draft model"
        raise ConfigError(
            f"a {name} without vocab_size", "models with the size of their vocabulary", "set its attribute vocab_size"
        )
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"a draft model with {sizes[1]} token ids for a target with {sizes[0]}",
            "two models of one tokenizer and vocabulary",
            "take a smaller model of the same family",
        )
