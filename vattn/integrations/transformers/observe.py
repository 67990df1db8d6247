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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vattn.errors import ConfigError, UnsupportedRequestError, VattnError
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

SAME = 2.0**-6
"""What attention gives every token while notes are taken."""

_CONSTANTS = {"scaling": None, "sliding_window": None, "softcap": None}
"""Arguments of attention that become arguments of our layer."""

_NO_MEANING = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "dropout",
        "position_embeddings",
        "past_key_values",
        "past_key_value",
    }
)
"""Arguments that attention is passed and has no use for; dropout is 0 in eval mode."""


@dataclass
class MaskCall:
    """The mask that a model requested: its rule, and its window."""

    rule: Callable[..., Any]
    local_size: int | None
    ndim = 0

    def to(self, dtype: torch.dtype) -> MaskCall:
        """Return itself: some models convert their mask."""
        return self

    def __getitem__(self, index: Any) -> MaskCall:
        raise _unsupported("attention that reads or changes its mask itself, as sparse attention does")

    def window(self) -> int | None:
        """Return the causal window, `None` for all earlier tokens.

        Raises:
            UnsupportedRequestError: another rule than these.
        """
        size = self.local_size
        near = 40 if size is None else 2 * size + 3
        rows = torch.tensor([0, 1, 2, 7, near // 2 - 1, near // 2, near // 2 + 1, near])
        zero, q, k = torch.tensor(0), rows[:, None], rows[None, :]
        try:
            seen = torch.as_tensor(self.rule(zero, zero, q, k))
        except IndexError as error:
            raise UnsupportedRequestError(
                "a mask that reads the tokens of the step",
                "causal masks and causal windows",
                "run the text model alone",
            ) from error
        expected = k <= q
        if size is not None:
            expected &= k > q - size
        if not torch.equal(seen.bool().broadcast_to(expected.shape), expected):
            raise UnsupportedRequestError(
                f"a mask by {getattr(self.rule, '__qualname__', self.rule)}",
                "causal masks and causal windows",
                "keep this model on transformers' own attention",
            )
        return size

    def shows_later_tokens(self) -> bool:
        """Return whether the first token sees the second one."""
        zero, one = torch.tensor(0), torch.tensor(1)
        try:
            return bool(torch.as_tensor(self.rule(zero, zero, zero, one)).any())
        except IndexError:
            return False

    def window_both_ways(self) -> int | None:
        """Return W of a mask by which tokens i and j see each other if `|i - j| < W`, `None` for all tokens.

        Raises:
            UnsupportedRequestError: another rule than these.
        """
        near = 40 if self.local_size is None else 2 * self.local_size + 3
        zero, places = torch.tensor(0), torch.arange(near)
        seen = torch.as_tensor(self.rule(zero, zero, zero, places)).bool().broadcast_to(places.shape)
        window = None if bool(seen.all()) else int(seen.int().argmin())
        rows = torch.tensor([0, 1, 2, 7, near // 2 - 1, near // 2, near - 1])
        found = torch.as_tensor(self.rule(zero, zero, rows[:, None], places)).bool()
        expected = (rows[:, None] - places).abs() < (near if window is None else window)
        if not torch.equal(found.broadcast_to(expected.shape), expected):
            raise UnsupportedRequestError(
                f"a mask by {getattr(self.rule, '__qualname__', self.rule)}",
                "all tokens of a text, causal masks, and windows of either",
                "keep this model on transformers' own attention",
            )
        return window


@dataclass
class AttentionCall:
    """How a model calls one attention module.

    Attributes:
        module: the attention module.
        num_heads, num_kv_heads, head_size, head_size_v, scale: as in `vattn.Attention`.
        window, soft_cap, sinks, alibi_slopes: `None` for none.
        causal: whether tokens see earlier ones alone.
        queries: the queries of the run, `[1, heads, T, head_size]`.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    causal: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    queries: Tensor | None = None

    def expected_options(self) -> dict[str, Any]:
        """Return the arguments that each later call must repeat."""
        return {name: self.options[name] for name in _CONSTANTS if name in self.options}


@dataclass
class Observation:
    """What `observe` found.

    Attributes:
        calls: how the model calls attention, by name of the module, in the order of calls.
        first_position: what the model itself passes as the position of a request's first token.
        shared: which projections it calls with one input.
        takes_embeddings: whether `inputs_embeds` that are those of token ids give what the ids give.
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
            return _Run(_run(model, cache, ids, positions, embedded), notes.calls)

        start, first = _first_position(model, lambda positions: run(ids[:3], positions))
        positions = [start, start + 1, start + 2]
        other = run([ids[3], ids[1], ids[4]], positions)
        moved = run(ids[:3], [start, start + 1, _far(model)])
        cache.seq_length = FULL
        takes_embeddings = "inputs_embeds" in inspect.signature(model.forward).parameters
        cached = run(ids[:3], positions, takes_embeddings)
        if takes_embeddings and not first.equals(cached):
            takes_embeddings, cached = False, run(ids[:3], positions)
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


class _Notes:
    """The attention calls and masks of one run."""

    def __init__(self, replaced: bool, pools: bool) -> None:
        self.calls: dict[nn.Module, AttentionCall] = {}
        self.replaced, self.pools = replaced, pools

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Note a call and return the same for all tokens, `[1, T, heads, head_size_v]`.

        Not zeros: quantisers without a floor divide a row by its largest value.
        """
        name = type(module).__name__
        if module in self.calls:
            raise _unsupported(f"{name} attends twice in a step")
        if not isinstance(attention_mask, MaskCall):
            raise _unsupported(f"{name} got a mask of its own ({type(attention_mask).__name__})")
        if key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
            raise _unsupported(f"{name} attends to {key.shape[2]} keys from {query.shape[2]} tokens")
        causal = not (self.pools and attention_mask.shows_later_tokens())
        window = attention_mask.window() if causal else attention_mask.window_both_ways()
        # Windows of both ways count otherwise in each family; the mask has the last word.
        if causal and options.get("sliding_window") not in (None, window):
            raise _unsupported(
                f"{name} has sliding_window={options['sliding_window']} under a mask with "
                f"{'no window' if window is None else f'a window of {window}'}"
            )
        sinks, scale = options.get("s_aux"), options.get("scaling")
        known = {*_CONSTANTS, *_NO_MEANING, "s_aux", "is_causal"}
        odd = {k: v for k, v in options.items() if k not in known and v is not None and not isinstance(v, (bool, str))}
        if odd or (causal and options.get("is_causal") is False):
            raise _unsupported(f"{name} passes {', '.join(odd) or 'is_causal=False'} to attention")
        self.calls[module] = AttentionCall(
            module,
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            query.shape[3] ** -0.5 if scale is None else float(scale),
            window,
            options.get("softcap"),
            sinks,
            causal=causal,
            options=options,
            queries=query.detach().clone(),
        )
        return query.new_full((1, query.shape[2], query.shape[1], value.shape[3]), SAME), None

    def mask(
        self,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> MaskCall:
        """Note which mask was requested; modules with a replaced forward use none of the model's own."""
        if attention_mask is not None and not self.replaced:
            raise _unsupported("a padding mask that the model makes itself")
        return MaskCall(mask_function, local_size)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run code as it is written, also what is compiled; other threads' code too, for torch has one stance for all."""
    with _one_at_a_time, torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _taking_notes(model: Any, pools: bool) -> Iterator[_Notes]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    notes, before = _Notes(bool(replaced_modules(model)), pools), model.config._attn_implementation
    with _one_at_a_time:
        ALL_ATTENTION_FUNCTIONS.register(PROBE, notes.attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, notes.mask)
        try:
            replace_forwards(model, notes.attention)
            set_attention(model, PROBE)
            yield notes
        finally:
            restore_forwards(model)
            set_attention(model, before)
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(PROBE, None)
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(PROBE, None)


def set_attention(model: Any, name: str) -> None:
    """Switch a model to the attention and mask functions of a name, also where transformers would not."""
    if replaced_modules(model):
        model.config._attn_implementation = name
    else:
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise _unsupported(f"{type(model).__name__} has no exchangeable attention")


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
        with torch.no_grad():
            inputs = {"inputs_embeds": model.get_input_embeddings()(tokens)}
    if "position_ids" in taken and positions is not None:
        inputs["position_ids"] = torch.tensor([positions], device=device)
    if "logits_to_keep" in taken:
        # As a number, it makes Gemma 4 slice its masks.
        inputs["logits_to_keep"] = torch.arange(len(ids), device=device)
    inputs |= {name: value for name, value in (("past_key_values", cache), ("use_cache", False)) if name in taken}
    try:
        # Layers that were compiled while the model was on vattn before must run our notes as they are written.
        with torch.no_grad(), uncompiled():
            return token_rows(model(**inputs)).float()
    except VattnError:
        raise
    except Exception as error:
        # Layers that keep a state of another kind ask the cache for it.
        raise _unsupported(f"{type(model).__name__} fails on packed tokens: {type(error).__name__}: {error}") from error


def token_rows(out: Any) -> Tensor:
    """Return what a model gives for the tokens of one row: logits `[T, vocab_size]`, or hidden states `[T, H]`."""
    rows: Tensor = (out.logits if "logits" in out else out.last_hidden_state)[0]
    return rows


def _check_signature(model: Any, pools: bool = False) -> None:
    taken = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "logits_to_keep")[: 1 if pools else 2] if name not in taken]
    if missing and not replaced_modules(model):
        raise _unsupported(f"{type(model).__name__}.forward takes no {' and no '.join(missing)}")


def _check_layers(model: Any, calls: dict[nn.Module, AttentionCall], num_attending: int | None) -> None:
    expected = num_own_layers(model) if num_attending is None else num_attending
    if len(calls) != expected:
        raise _unsupported(f"{len(calls)} of {expected} layers of {type(model).__name__} call attention")


def _check_tokens_apart(model: Any, first: Tensor, other: Tensor) -> None:
    """Refuse a model in which the middle token's logits depend on its neighbours outside of attention."""
    difference = float((first[1] - other[1]).abs().max())
    # Products of other rows may be summed in another order where experts take different numbers of tokens.
    if not difference <= 1e-2 * float(first[1].abs().max()):
        for name, module in model.named_modules():
            if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
                raise _unsupported(
                    f"{type(module).__name__} {name!r} of torch.ao quantises all tokens of a step by one scale, "
                    "so that tokens change each other"
                )
        raise _unsupported(
            "tokens meet outside of attention (a convolution, a recurrence, or a scale over all tokens of a step)"
        )


def _check_positions_apart(model: Any, near: Tensor | None, far: Tensor | None) -> None:
    """Refuse a model in which the first tokens' queries depend on how far the last one is, which moved alone."""
    if near is None or far is None:
        return
    first, other = near[:, :, : TOKENS - 1].float(), far[:, :, : TOKENS - 1].float()
    if not float((first - other).abs().max()) <= 1e-2 * float(first.abs().max()):
        raise _unsupported(
            f"{type(model).__name__}, in which the position of one token changes how others are turned (RoPE by length)"
        )


def _unsupported(got: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        got,
        "models whose tokens meet in causal attention, full or in a window, and nowhere else",
        "keep this model on transformers' own attention",
    )
