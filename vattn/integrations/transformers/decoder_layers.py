"""The attention of a decoder beside an encoder: found by running it once, and run by layers of vattn."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vattn.config.attention import CacheConfig
from vattn.errors import UnsupportedRequestError, VattnError
from vattn.integrations.transformers.attention_interface import NAME, ModelAttention, attend, no_step
from vattn.integrations.transformers.attention_notes import NO_MEANING, SAME, MaskCall
from vattn.integrations.transformers.available import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    transformers,
)
from vattn.integrations.transformers.checks import model_dtype
from vattn.integrations.transformers.decoder_positions import PositionTable, find_positions
from vattn.integrations.transformers.observe import PROBE, probe_functions, uncompiled
from vattn.layers import CrossAttention
from vattn.metadata import forward_context as context

DECODER = "vattn_decoder"
"""Name of the attention of a decoder's modules in transformers' registry."""

STATES, TOKENS = 7, 12
"""Encoder states and tokens of the runs that show how a decoder attends."""


class ModelCrossAttention(CrossAttention):
    """`CrossAttention` of one module of a transformers model."""

    head_size_v: int


def register_decoder() -> None:
    """Make the attention and masks of decoders known to transformers by their name."""
    ALL_ATTENTION_FUNCTIONS.register(DECODER, attend_decoder)
    ALL_MASK_ATTENTION_FUNCTIONS.register(DECODER, no_decoder_mask)


def attend_decoder(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Run the layer of a decoder's module; transformers' attention interface."""
    layer: Any = module._modules.get(NAME)
    if not isinstance(layer, ModelCrossAttention):
        return attend(module, query, key, value, attention_mask, **options)
    step = context.current_step()
    if step is None:
        raise no_step()
    rows = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
    new = step.cross_slot_mapping is not None  # type: ignore[union-attr]
    out = layer(rows[0], rows[1] if new else None, rows[2] if new else None)
    return out.view(1, rows[0].shape[0], -1, layer.head_size_v), None


def no_decoder_mask(**options: Any) -> None:
    """Return no mask, since the layers know theirs; decoders make a padding mask of ones themselves."""
    if context.current_step() is None:
        raise no_step()


@dataclass
class DecoderCalls:
    """How a decoder runs.

    Attributes:
        modules: its attention modules by name, in the order of their calls.
        arguments: of the layer of each, and the `scaling` that it was called with.
        crossing: the names of those that attend to the encoder's states.
        table: where its positions are, if it takes no `position_ids`.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    arguments: dict[str, tuple[dict[str, Any], Any]] = field(default_factory=dict)
    crossing: set[str] = field(default_factory=set)
    table: PositionTable | None = None

    def layers(self, cache: CacheConfig | None, backend: str | None, invariant: bool) -> dict[str, nn.Module]:
        """Return a layer for each attention module."""
        layers: dict[str, nn.Module] = {}
        for name, (sizes, scale) in self.arguments.items():
            given: dict[str, Any] = {
                **sizes, "cache_config": cache, "prefix": name, "attn_backend": backend, "batch_invariant": invariant
            }  # fmt: skip
            if name in self.crossing:
                layers[name] = ModelCrossAttention(**given)
            else:
                own = layers[name] = ModelAttention(**given)
                own._expected = {"scaling": scale}
        return layers


def watch_decoder(model: Any, vocab_size: int) -> DecoderCalls:
    """Run a decoder on a few tokens and return how it attends, and where its positions come from.

    Raises:
        UnsupportedRequestError: it attends or counts in a way that vattn cannot express.
    """
    decoder, seen = model.get_decoder(), DecoderCalls()
    taken = inspect.signature(decoder.forward).parameters
    if "encoder_hidden_states" not in taken:
        raise unsupported_decoder(f"{type(decoder).__name__}.forward takes no encoder_hidden_states")
    if not hasattr(sys.modules[type(decoder).__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise unsupported_decoder(f"{type(decoder).__name__}, whose attention transformers does not let exchange")
    takes_positions = "position_ids" in taken and "decoder_position_ids" in inspect.signature(model.forward).parameters
    padding = getattr(model.config, "pad_token_id", None)
    padding = padding if isinstance(padding, int) and 0 <= padding < vocab_size else None
    ids = _different_ids(vocab_size, padding)
    with _noting(model, seen) as run:
        run(ids[:TOKENS])
        if not takes_positions:
            seen.table = find_positions(decoder, run, ids, padding)
    if not seen.crossing:
        raise unsupported_decoder(f"{type(decoder).__name__}, which calls no cross attention that can be exchanged")
    if not takes_positions and seen.table is None:
        raise unsupported_decoder(
            f"{type(decoder).__name__}, which takes no position_ids and looks positions up in no table"
        )
    return seen


def _different_ids(vocab_size: int, padding: int | None) -> list[int]:
    ids = [token for token in range(min(vocab_size, 2 * TOKENS + 1)) if token != padding][: 2 * TOKENS]
    if len(ids) < 2 * TOKENS:
        raise unsupported_decoder(f"a vocabulary of {vocab_size} tokens")
    return ids


@contextmanager
def _noting(model: Any, seen: DecoderCalls) -> Iterator[Callable[[Sequence[int]], None]]:
    """Yield what runs the decoder on ids, with attention that takes notes and gives all tokens the same."""
    names = {module: name for name, module in model.named_modules()}

    def note(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        name, kind, scale = names[module], type(module).__name__, options.get("scaling")
        added = [each for each, given in options.items() if isinstance(given, Tensor) and given.ndim > 2]
        if added:
            raise unsupported_decoder(
                f"{kind}, which adds {', '.join(added)} to its scores, a number for each head and distance as in T5"
            )
        crosses = key.shape[2] == STATES
        odd = [each for each, given in options.items() if isinstance(given, Tensor) and each not in NO_MEANING]
        if odd or (not crosses and not isinstance(attention_mask, MaskCall)) or name in seen.modules:
            why = "twice in a step" if name in seen.modules else f"with {', '.join(odd) or 'a mask of its own'}"
            raise unsupported_decoder(f"{kind} attends {why}")
        sizes = {
            "num_heads": query.shape[1],
            "num_kv_heads": key.shape[1],
            "head_size": query.shape[3],
            "head_size_v": value.shape[3],
            "scale": query.shape[3] ** -0.5 if scale is None else float(scale),
            "logits_soft_cap": options.get("softcap"),
        }
        if not crosses:
            sizes["per_layer_sliding_window"] = attention_mask.window()
        seen.modules[name], seen.arguments[name] = module, (sizes, scale)
        if crosses:
            seen.crossing.add(name)
        return query.new_full((1, query.shape[2], query.shape[1], value.shape[3]), SAME), None

    def mask(
        mask_function: Any, local_size: int | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> MaskCall:
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise unsupported_decoder("a decoder that makes a mask of its tokens itself")
        return MaskCall(mask_function, local_size)

    decoder, device = model.get_decoder(), model.device
    states = torch.zeros(1, STATES, states_width(model), dtype=model_dtype(model), device=device)

    def run(ids: Sequence[int]) -> None:
        seen.modules, seen.arguments = {}, {}
        tokens = torch.tensor([list(ids)], device=device)
        try:
            with torch.no_grad(), uncompiled():
                decoder(input_ids=tokens, encoder_hidden_states=states, use_cache=False)
        except VattnError:
            raise
        except Exception as error:
            raise unsupported_decoder(
                f"{type(decoder).__name__} fails on packed tokens: {type(error).__name__}: {error}"
            ) from error

    with probe_functions(note, mask):
        undo = set_decoder_attention(model, PROBE)
        try:
            yield run
        finally:
            for each in undo:
                each()


def set_decoder_attention(model: Any, name: str) -> list[Callable[[], None]]:
    """Switch the decoder of a model to the functions of a name, and return what takes it back.

    The encoder has its own configuration.
    """
    found = [model.config, *(module.__dict__.get("config") for module in model.get_decoder().modules())]
    configs: dict[int, Any] = {id(config): config for config in found if config is not None}
    undo: list[Callable[[], None]] = []
    for config in configs.values():
        before = config._attn_implementation_internal
        undo.append(lambda config=config, before=before: setattr(config, "_attn_implementation_internal", before))  # type: ignore[misc]
        config._attn_implementation_internal = name
    return undo


def states_width(model: Any) -> int:
    """Return the columns of the encoder's states."""
    return int(model.get_encoder().config.hidden_size)


def encoder_outputs(states: Tensor) -> Any:
    """Return encoder states `[S, H]` as an encoder returns them for one prompt without padding."""
    outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states[None])
    # Some encoders return a mask of their states too, and their decoders read it.
    outputs.attention_mask = None
    return outputs


def unsupported_decoder(got: str) -> UnsupportedRequestError:
    """Return the error of a decoder that vattn cannot express."""
    return UnsupportedRequestError(
        got,
        "decoders with position_ids or a table of positions, causal attention, and cross attention, without a bias",
        "keep this model on transformers' own attention",
    )
