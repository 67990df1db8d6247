"""Find out what attention a transformers model needs, by running it once with attention that only takes notes.

Nothing is read from the model's configuration: names of fields differ between families, what attention is called with
does not. With attention that gives all tokens the same, they must not meet anywhere else in the model, and that is
tested too.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vattn.errors import ConfigError, UnsupportedRequestError, VattnError
from vattn.integrations.transformers.attention_notes import SAME, AttentionCall, Notes, unsupported
from vattn.integrations.transformers.available import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    cache_argument,
)
from vattn.integrations.transformers.pipeline import num_own_layers
from vattn.integrations.transformers.replaced_forwards import (
    alibi_slopes,
    replace_forwards,
    replaced_modules,
    restore_forwards,
)
from vattn.integrations.transformers.shared_inputs import SharedInputs
from vattn.integrations.transformers.state_layers import StateModules, has_states
from vattn.layers.fp8_linear import exact_inputs

PROBE = "vattn_probe"
TOKENS = 3

_one_at_a_time = threading.RLock()
"""Held while `PROBE` is registered, and in `uncompiled`: both are there once for the process."""

FULL = 2**17
"""How many tokens the cache says that it holds in a run that must not be different for it."""


@dataclass
class Observation:
    """What `observe` found.

    Attributes:
        calls: how the model calls attention, by name of the module, in the order of calls.
        first_position: what the model itself passes as the position of a request's first token.
        shared: which projections it calls with one input.
        takes_embeddings: whether the embeddings of token ids give, as `inputs_embeds`, the logits of the ids.
    """

    calls: dict[str, AttentionCall]
    first_position: int
    shared: SharedInputs
    takes_embeddings: bool


@dataclass
class _Run:
    """Logits of a run, `[T, vocab_size]`, and its calls of attention."""

    logits: Tensor
    calls: dict[nn.Module, AttentionCall]

    def equals(self, other: _Run) -> bool:
        """Return whether logits and queries are the same, but for sums in another order."""
        pairs = [
            (self.logits, other.logits),
            *((call.queries, other.calls[m].queries) for m, call in self.calls.items()),
        ]
        return all(_close(a, b) for a, b in pairs if a is not None and b is not None)


def _close(expected: Tensor, given: Tensor) -> bool:
    return bool((expected.float() - given.float()).abs().max() <= 1e-2 * expected.float().abs().max())


def observe(model: Any, cache: Any, states: StateModules | None = None, pools: bool = False) -> Observation:
    """Run a model on a few tokens and return how it calls attention.

    Args:
        cache: a `PackedCache`.
        states: its modules that keep a state for each request; `None` for none.
        pools: whether it is a model without a head for tokens, which may attend both ways.

    Raises:
        UnsupportedRequestError: see `vattn.integrations.transformers.enable`.
    """
    _check_signature(model, pools)
    ids = ordinary_tokens(model, 5)
    apart = contextlib.nullcontext() if states is None else states.replaced_by(_same_for_all)
    shared = SharedInputs()
    with _taking_notes(model, pools) as notes, exact_inputs(model), apart, shared.watching(model):

        def run(ids: list[int], positions: list[int] | None, embedded: bool = False) -> _Run:
            notes.calls = {}
            logits = _run(model, cache, ids, positions, embedded)
            for call in notes.calls.values():
                call.queries = None if call.queries is None else call.queries[:, :, : len(ids)]
            return _Run(logits[: len(ids)], notes.calls)

        start, first = _first_position(model, lambda positions: run(ids[:3], positions))
        positions = [start, start + 1, start + 2]
        other = run([ids[3], ids[1], ids[4]], positions)
        moved = run(ids[:3], [start, start + 1, _far(model)])
        cache.seq_length = FULL
        cached, takes_embeddings = None, False
        if "inputs_embeds" in inspect.signature(model.forward).parameters:
            with contextlib.suppress(UnsupportedRequestError):
                cached = run(ids[:3], positions, embedded=True)
                takes_embeddings = first.equals(cached)
        if cached is None or not takes_embeddings:
            cached = run(ids[:3], positions)
        cache.seq_length = 0
        again = run([ids[0], ids[1], ids[0]], [start, start, start])
    calls = first.calls
    names = {module: name for name, module in model.named_modules()}
    for module, call in calls.items():
        call.alibi_slopes = alibi_slopes(module, model.config)
    _check_layers(model, calls, None if states is None else states.num_attending)
    _check_tokens_apart(model, first.logits, other.logits)
    places = [(first.logits, moved.logits)] + [(calls[m].queries, moved.calls[m].queries) for m in calls]
    if (
        not any(call.alibi_slopes is not None for call in calls.values())
        and all(torch.equal(a, b) for a, b in places if a is not None and b is not None)
        and not _same_everywhere(again)
    ):
        raise UnsupportedRequestError(
            f"{type(model).__name__}, in which position_ids change nothing",
            "models that take the positions of packed tokens from position_ids",
            "keep this model on transformers' own attention",
        )
    for module, call in calls.items():
        _check_positions_apart(model, call.queries, moved.calls[module].queries)
    if not first.equals(cached):
        raise UnsupportedRequestError(
            f"{type(model).__name__}, in which the number of cached tokens (get_seq_length) changes queries or logits",
            "models that take the positions of packed tokens from position_ids alone",
            "keep this model on transformers' own attention",
        )
    return Observation({names[module]: call for module, call in calls.items()}, start, shared, takes_embeddings)


def _same_for_all(module: nn.Module, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return what attention gives while notes are taken, for a module with states."""
    return torch.full_like(hidden_states, SAME)


def _same_everywhere(run: _Run) -> bool:
    """Return whether the first and the last token of a run, which are equal, are equal for the model: no positions."""
    queries = [call.queries for call in run.calls.values()]
    rows = [run.logits, *(each[0].transpose(0, 1).float() for each in queries if each is not None)]
    return all(_close(each[0], each[-1]) for each in rows)


def _first_position(model: Any, run: Callable[[list[int] | None], _Run]) -> tuple[int, _Run]:
    """Return the position that a model gives the first token when it is passed none, and the run with it.

    RoBERTa and its relatives count from the id of padding on.

    Raises:
        ConfigError: its logits are not finite.
        UnsupportedRequestError: neither 0 nor the first after the id of padding gives the model's own result.
    """
    own = run(None)
    if not bool(own.logits.isfinite().all()):
        raise ConfigError(
            "a model whose logits are not finite for a few tokens",
            "finite weights",
            "check the checkpoint and its dtype",
        )
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    for start in (0, padding + 1 if isinstance(padding, int) else 0):
        first = run([start, start + 1, start + 2])
        if own.equals(first):
            return start, first
    raise UnsupportedRequestError(
        f"{type(model).__name__}, which numbers the positions of tokens in a way of its own",
        "positions that count from 0, or from the id of padding plus 1",
        "keep this model on transformers' own attention",
    )


def ordinary_tokens(model: Any, count: int) -> list[int]:
    """Return ids from all over the vocabulary, the same in every call, without those that a configuration names."""
    configs = (model.config, model.config.get_text_config())
    named = [value for config in configs for name, value in vars(config).items() if "_token_i" in name]
    special = {each for value in named for each in (value if isinstance(value, (list, tuple)) else [value])}
    size = getattr(configs[1], "vocab_size", None) or model.get_input_embeddings().num_embeddings
    drawn = random.Random(0).sample(range(size), min(size, count + len(special)))
    found = [token for token in drawn if token not in special] or drawn
    return [found[i % len(found)] for i in range(count)]


def _far(model: Any) -> int:
    """Return the last position that a model was made for, as far as it says so."""
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return trained - 1 if isinstance(trained, int) and trained > 5 else 5


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run code as it is written, also what is compiled; other threads' code too, for torch has one stance for all."""
    with _one_at_a_time, torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def probe_functions(attention: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Inside the block transformers knows two functions by the name `PROBE`; one thread at a time."""
    with _one_at_a_time:
        ALL_ATTENTION_FUNCTIONS.register(PROBE, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, mask)
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(PROBE, None)
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(PROBE, None)


@contextmanager
def _taking_notes(model: Any, pools: bool) -> Iterator[Notes]:
    notes, before = Notes(bool(replaced_modules(model)), pools), model.config._attn_implementation
    with probe_functions(notes.attention, notes.mask):
        try:
            replace_forwards(model, notes.attention)
            set_attention(model, PROBE)
            yield notes
        finally:
            restore_forwards(model)
            set_attention(model, before)


def set_attention(model: Any, name: str) -> None:
    """Switch a model to the attention and mask functions of a name, also where transformers would not."""
    if replaced_modules(model):
        model.config._attn_implementation = name
    else:
        # The encoders of images keep their own attention.
        text, config = model.config.get_text_config(), model.config
        parts = [key for key in config.sub_configs if getattr(config, key, None) is text]
        model.set_attn_implementation({"": name, **dict.fromkeys(parts, name)} if parts else name)
    if model.config._attn_implementation != name:
        raise unsupported(f"{type(model).__name__} has no exchangeable attention")


def find_states(model: Any) -> StateModules | None:
    """Return the modules of a model that keep a state for each request; `None` for most models.

    Raises:
        UnsupportedRequestError: see `vattn.integrations.transformers.enable`.
    """
    if not has_states(model):
        return None
    _check_signature(model)
    ids = ordinary_tokens(model, TOKENS)
    return StateModules(model, lambda cache: _run(model, cache, ids, None))


def _run(model: Any, cache: Any, ids: list[int], positions: list[int] | None, embedded: bool = False) -> Tensor:
    device, taken = next(model.parameters()).device, inspect.signature(model.forward).parameters
    tokens = torch.tensor([ids], device=device)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if embedded:
        # A row that no token has comes last: some models look tokens up by their embeddings, and fail.
        with torch.no_grad():
            rows = model.get_input_embeddings()(tokens)
        inputs = {"inputs_embeds": torch.cat([rows, rows[:, :1] / 3 + 0.1], 1)}
        positions = None if positions is None else [*positions, positions[-1] + 1]
        ids = [*ids, 0]
    if "position_ids" in taken and positions is not None:
        inputs["position_ids"] = torch.tensor([positions], device=device)
    if "logits_to_keep" in taken:
        # As a number, it makes Gemma 4 slice its masks.
        inputs["logits_to_keep"] = torch.arange(len(ids), device=device)
    given = {cache_argument(model.forward): cache, "use_cache": False}
    inputs |= {name: value for name, value in given.items() if name in taken}
    try:
        # Layers that were compiled while the model was on vattn before must run our notes as they are written.
        with torch.no_grad(), uncompiled():
            return token_rows(model(**inputs)).float()
    except VattnError:
        raise
    except Exception as error:
        # Layers that keep a state of another kind ask the cache for it.
        raise unsupported(f"{type(model).__name__} fails on packed tokens: {type(error).__name__}: {error}") from error


def token_rows(out: Any) -> Tensor:
    """Return what a model gives for the tokens of one row: logits `[T, vocab_size]`, or hidden states `[T, H]`."""
    rows: Tensor = (out.logits if "logits" in out else out.last_hidden_state)[0]
    return rows


def _check_signature(model: Any, pools: bool = False) -> None:
    taken = inspect.signature(model.forward).parameters
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedRequestError(
            f"{type(model).__name__}, an encoder-decoder model",
            "decoders, and encoders alone",
            "call enable_encoder_decoder of vattn.integrations.transformers.encoder_decoder",
        )
    missing = [name for name in ("position_ids", "logits_to_keep")[: 1 if pools else 2] if name not in taken]
    if missing and not replaced_modules(model):
        raise unsupported(f"{type(model).__name__}.forward takes no {' and no '.join(missing)}")


def _check_layers(model: Any, calls: dict[nn.Module, AttentionCall], num_attending: int | None) -> None:
    expected = num_own_layers(model) if num_attending is None else num_attending
    if len(calls) != expected:
        raise unsupported(f"{len(calls)} of {expected} layers of {type(model).__name__} call attention")


def _check_tokens_apart(model: Any, first: Tensor, other: Tensor) -> None:
    """Refuse a model in which the middle token's logits depend on its neighbours outside of attention."""
    difference = float((first[1] - other[1]).abs().max())
    # Products of other rows may be summed in another order where experts take different numbers of tokens.
    if not difference <= 1e-2 * float(first[1].abs().max()):
        for name, module in model.named_modules():
            if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
                raise unsupported(
                    f"{type(module).__name__} {name!r} of torch.ao quantises all tokens of a step by one scale, "
                    "so that tokens change each other"
                )
        raise unsupported(
            "tokens meet outside of attention (a convolution, a recurrence, or a scale over all tokens of a step)"
        )


def _check_positions_apart(model: Any, near: Tensor | None, far: Tensor | None) -> None:
    """Refuse a model in which the first tokens' queries depend on how far the last one is, which moved alone."""
    if near is None or far is None:
        return
    first, other = near[:, :, : TOKENS - 1].float(), far[:, :, : TOKENS - 1].float()
    if not float((first - other).abs().max()) <= 1e-2 * float(first.abs().max()):
        raise unsupported(
            f"{type(model).__name__}, in which the position of one token changes how others are turned (RoPE by length)"
        )
