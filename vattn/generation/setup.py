"""Set up a generator: check its arguments, find its cache, compile its model, capture its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.calibration.eval_mode import EvalMode
from vattn.compilation.cuda_graph import CUDAGraphRunner
from vattn.config.arguments import integer, read_count
from vattn.errors import ConfigError, UnsupportedRequestError, VattnError
from vattn.generation.draft_source import DraftSource
from vattn.generation.model_steps import Graphs, sample_draft_inputs, sample_inputs
from vattn.generation.prompts import check_stop_ids
from vattn.layers.lora import Adapters
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.hybrid_builder import GroupedMetadataBuilder

Forward = Callable[..., Tensor]


def check_kind(name: str, value: Any, kind: type) -> None:
    """Refuse a value that is neither `None` nor of a type."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r:.60}", f"a {kind.__name__}", f"change {name}, or leave it out")


def check_speculation(value: Any) -> None:
    """Refuse what is neither `None` nor a source of drafts."""
    if value is not None and not isinstance(value, DraftSource):
        raise ConfigError(
            f"speculation={value!r:.60}",
            "vattn.PromptLookup(...) or vattn.DraftModel(small, ...)",
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
    if any(group.kind == "cross" for group in found.groups):
        raise ConfigError(
            "a cache with encoder states", "models without cross attention", "write the loop: docs/layers.md shows it"
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
        "mixed_graph_sizes": (mixed_graph_sizes, "graphs of decodes alone, by graph_sizes"),
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
        read_count("max_seq_len", requested, 1, "change max_seq_len")
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
    trained = integer(getattr(text, "max_position_embeddings", None)) or 0
    if requested is None:
        return min(most, trained if trained > 0 else most, 32768)
    if 0 < trained < requested and _has_position_table(model.model, trained):
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
    ids = [read_count("stop_token_ids", token, 0, "change stop_token_ids") for token in given]
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


def make_builder(
    model: nn.Module, cache: KVCacheAllocation, max_num_reqs: int, max_num_tokens: int, max_seq_len: int
) -> AttentionMetadataBuilder:
    """Return the builder of a cache's steps."""
    kind = GroupedMetadataBuilder if cache.groups else AttentionMetadataBuilder
    return kind(max_num_reqs, max_num_tokens, max_seq_len, cache.block_size, cache.device, layers=model)


def mixed_sizes(
    sizes: Sequence[int] | None,
    token_budget: int,
    max_num_reqs: int,
    decodes: Sequence[int],
    builder: AttentionMetadataBuilder,
) -> list[int]:
    """Return the numbers of tokens to capture for steps with prompts: those given, or a ladder on CUDA.

    Args:
        sizes: `None` for the ladder, `()` for none.
        token_budget: tokens of the largest step.
        max_num_reqs: requests that run at once.
        decodes: numbers of requests that are captured; without any, nothing is by default.
        builder: of the steps; the ladder is for layers on TRITON_ATTN, where it was measured.

    Raises:
        ConfigError: no list of ints, or more tokens than a step has.
    """
    if sizes is None:
        if builder.has_states:
            return []
        if builder.device.type != "cuda" or not decodes or builder.backends != {"TRITON_ATTN"}:
            return []
        most = min(token_budget, MIXED_LADDER[-1])
        # Padding to fewer tokens than requests would be no step that kernels were tuned for.
        return sorted(size for size in {*MIXED_LADDER, most} if max(2, max_num_reqs) <= size <= most)
    if not isinstance(sizes, (list, tuple, range)):
        raise ConfigError(f"mixed_graph_sizes={sizes!r:.80}", "a list of numbers of tokens", "mixed_graph_sizes=[256]")
    read = sorted({read_count("mixed_graph_sizes", size, 2, "change mixed_graph_sizes") for size in sizes})
    if read and read[-1] > token_budget:
        raise ConfigError(
            f"mixed_graph_sizes with {read[-1]} for steps of up to {token_budget} tokens",
            f"2 to {token_budget}",
            "raise token_budget, or leave the size out",
        )
    return read


MIXED_LADDER = (63, 127, 255, 511, 767, 1023, 1279, 1535)
"""Numbers of tokens up to which launching the layers of an 8B model took an H200's host longer than they ran.

Each fills tiles of rows but for one: a multiple of the requests would not do, see `mixed_pair`.
"""

_MOST_DRAFTS = 16
"""Most rows of a request that attention takes for drafts."""


def mixed_pair(max_num_reqs: int, tokens: int, max_seq_len: int) -> tuple[int, int]:
    """Return requests and tokens of a capture for steps with prompts.

    Attention takes a step of as many tokens for every request for one of drafts, and is slow where one request has most
    of them: there the capture has one token more.
    """
    rows, rest = divmod(tokens, max(2, max_num_reqs))
    return max_num_reqs, min(tokens + (not rest and rows <= _MOST_DRAFTS), max_num_reqs * max_seq_len)


def graph_ladder(sizes: Sequence[int] | None, most: int, device: torch.device) -> list[int]:
    """Return the numbers of requests to capture: those given, or a ladder on CUDA."""
    if sizes is None:
        # Steps of decodes read weights and caches for the most part: rows of padding cost little, captures a tenth of a
        # second each, and more where a kernel is compiled for them.
        ladder = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, most + 1, 64), most]
        return sorted({size for size in ladder if size <= most}) if device.type == "cuda" else []
    if not isinstance(sizes, (list, tuple, range)):
        raise ConfigError(f"graph_sizes={sizes!r:.80}", "a list of numbers of requests, () for none", "graph_sizes=[8]")
    return [read_count("graph_sizes", size, 1, "change graph_sizes") for size in sizes]


def capture(
    forward: Forward,
    builder: AttentionMetadataBuilder,
    sizes: Sequence[int],
    num_drafts: int,
    mixed: Sequence[int] = (),
    max_num_reqs: int = 1,
    with_states: bool = False,
    memory_of: Graphs | None = None,
) -> Graphs:
    """Return graphs for steps of some numbers of requests, and for steps with prompts of some numbers of tokens.

    All use one pool of memory, that of `memory_of` if it is given: the logits of a step are read before the next
    one begins.

    Raises:
        UnsupportedRequestError: a backend, or something else in the model, cannot be captured.
    """
    graphs = Graphs()
    wanted: list[tuple[str, list[Any], Any, dict[str, Any]]] = []
    shared: dict[str, Any] = {"step_options": lambda count: {"state_slots": [0] * count}} if with_states else {}
    if mixed:
        # The largest of all first: the others fit into their memory.
        pairs = [mixed_pair(max_num_reqs, tokens, builder.max_seq_len) for tokens in mixed]
        wanted.append(("mixed", pairs, sample_inputs, {"output_rows": "requests"}))
    if sizes:
        wanted.append(("plain", list(sizes), sample_inputs, {"output_rows": "requests"}))
    if sizes and num_drafts:
        rows = {"output_rows": "tokens", "tokens_per_request": 1 + num_drafts}
        wanted.append(("drafts", list(sizes), sample_draft_inputs, rows))
    first: CUDAGraphRunner | None = next(filter(None, memory_of or ()), None)
    for name, numbers, inputs, options in wanted:
        runner = capture_runner(forward, numbers, builder, inputs, memory_of=first, **options, **shared)
        first = first or runner
        graphs = graphs._replace(**{name: runner})
    return graphs


def capture_runner(forward: Forward, *arguments: Any, **options: Any) -> CUDAGraphRunner:
    """Return the graphs of a function; arguments of `CUDAGraphRunner`.

    Raises:
        UnsupportedRequestError: a backend, or something else in the model, cannot be captured.
    """
    try:
        # As steps are launched: in another mode each layer would be compiled once more for those without a graph.
        with torch.inference_mode():
            return CUDAGraphRunner(forward, *arguments, **options)
    except RuntimeError as error:
        if isinstance(error, VattnError) or "captur" not in str(error):
            raise
        raise UnsupportedRequestError(
            f"a model that cannot be captured as a CUDA graph: {str(error).splitlines()[0]}",
            "models whose steps neither wait for the device nor copy from the host",
            "graph_sizes=() without mixed_graph_sizes runs it without graphs; experts of a transformers model can be "
            "captured in bfloat16, or after model.set_experts_implementation('batched_mm')",
        ) from error


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
