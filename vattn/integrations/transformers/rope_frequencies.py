"""RoPE frequencies that depend on the longest position of a step: fixed to one length, or refused.

transformers recomputes the frequencies of `longrope` and `dynamic` in every call, for all of its tokens. In a step of
packed tokens a long request would change the rotation of its neighbours' keys, and the keys of a chunk would keep
the rotation of the time when their request was short.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vattn.config.arguments import read_count
from vattn.errors import ConfigError, UnsupportedRequestError

FIXED = "default"
"""What the kind of a module's frequencies is called while they are fixed: one that is not recomputed."""


def fix_frequencies(model: Any, length: int | None) -> list[tuple[nn.Module, Any]]:
    """Fix the frequencies of a model to a sequence of `length` tokens; return what `restore` puts back.

    Raises:
        UnsupportedRequestError: no length for a model that needs one.
        ConfigError: a length for a model with fixed frequencies, or one that is no positive int.
    """
    if length is not None:
        length = read_count("rope_length", length, 1, "give the longest request in tokens")
    found = [(module, kinds) for module in model.modules() if (kinds := _changing(module))]
    if found and length is None:
        raise _refused(*found[0])
    if length is not None and not found:
        raise ConfigError(
            f"rope_length={length} for {type(model).__name__}, with frequencies that are the same for every length",
            "models with RoPE of the types longrope and dynamic",
            "leave rope_length out",
        )
    before = [(module, module.rope_type) for module, _ in found]
    try:
        for module, kinds in found:
            # The first call takes back what longer sequences have made of it.
            _recompute(module, kinds, 0)
            _recompute(module, kinds, (length or 1) - 1)
            module.rope_type = {**module.rope_type, **dict.fromkeys(kinds, FIXED)} if None not in kinds else FIXED
    except BaseException:
        restore_frequencies(before)
        raise
    return before


def restore_frequencies(before: list[tuple[Any, Any]]) -> None:
    """Let frequencies go by the lengths again."""
    for module, kind in before:
        module.rope_type = kind
        _recompute(module, _changing(module), 0)


def _changing(module: Any) -> dict[str | None, str]:
    """Return the kinds of a module's frequencies that go by lengths, by type of layer where it has several."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return {
        layer: kind
        for layer, kind in kinds.items()
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)
    }


def _recompute(module: Any, kinds: dict[str | None, str], position: int) -> None:
    """Have a module compute its frequencies for a step up to a position."""
    device = next(module.buffers()).device
    for layer in kinds:
        options = {} if layer is None else {"layer_type": layer}
        module(torch.zeros(1, device=device), torch.tensor([[position]], device=device), **options)


def _refused(module: Any, kinds: dict[str | None, str]) -> UnsupportedRequestError:
    layer, kind = next(iter(kinds.items()))
    parameters = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
    limit = parameters["original_max_position_embeddings"] if kind == "longrope" else module.original_max_seq_len
    return UnsupportedRequestError(
        f"{type(module).__name__}, which turns the keys of a whole step by other frequencies when one of its requests "
        f"is longer than {limit} tokens (rope_type={kind!r})",
        "frequencies of one length for all requests",
        f"enable(model, rope_length={limit}), or --rope-length {limit} of a command, for requests of up to {limit} "
        "tokens, with the model's own results; with a larger one, all of them get the frequencies for that length",
    )
