"""What `attn_implementation="vattn"` makes of transformers' masks: one step for all layers of a kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vattn.errors import MetadataError, UnsupportedRequestError
from vattn.integrations.transformers.attention_notes import MaskCall
from vattn.integrations.transformers.dense_caches import BLOCK, pack_step, view_decode

ELSEWHERE = "load this model with attn_implementation='sdpa', or another of transformers' own"

_known_windows: dict[Any, int | None] = {}
"""Windows of mask functions that were looked at, by their code and the numbers that they hold."""


def step_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> Tensor:
    """Return the step of a forward, in place of a mask; transformers' mask interface.

    Padding may precede the tokens of a row and follow them. In compiled code the host reads no padding: there rows of a
    static cache must hold `BLOCK` keys, and the device asserts that.

    Raises:
        UnsupportedRequestError: another mask than causal ones and causal windows.
        MetadataError: padding between the tokens of a row, or a mask of fewer tokens.
    """
    traced = torch.compiler.is_compiling()
    if "allow_is_bidirectional_skip" in options:
        raise _refused("a bidirectional mask")
    if use_vmap:
        raise _refused("a mask by a function of the model's own")
    if traced and q_length > 1 and not allow_is_causal_skip and attention_mask is None:
        raise UnsupportedRequestError(
            "compiled code without an attention_mask and a cache, where position_ids may pack sequences in a row",
            "rows of one sequence each",
            "pass attention_mask=torch.ones_like(input_ids)",
        )
    _check_interface(type(config).__module__)
    window = local_size if traced else window_of(mask_function, local_size)
    end: Any = q_offset + q_length - kv_offset
    start, whole_blocks = None, kv_length >= BLOCK and (window is None or window >= BLOCK)
    if attention_mask is not None and not traced:
        if isinstance(q_offset, int) and attention_mask.shape[1] < q_offset + q_length:
            raise MetadataError(
                f"an attention_mask of {attention_mask.shape[1]} tokens for rows of {q_offset + q_length}",
                "a mask of all tokens, those in the cache included",
                "append ones for new tokens to the mask of the prompt",
            )
        if not bool(attention_mask.all()):
            start, room = _read_padding(attention_mask, q_offset, q_length, kv_offset, kv_length)
            whole_blocks = whole_blocks and room
    elif attention_mask is not None:
        start = (attention_mask.to(torch.int32).argmax(1, keepdim=True) - kv_offset).clamp(min=0)
        is_static = isinstance(q_offset, Tensor)
        _assert_filled(attention_mask, q_offset, q_length, start if is_static and whole_blocks else None, kv_length)
        whole_blocks = whole_blocks and is_static
    if not traced and q_length == 1 and isinstance(end, int) and end == kv_length:
        return view_decode(batch_size, kv_length, start, window, whole_blocks, device)
    packed = pack_step(batch_size, q_length, kv_length, end, start, window, whole_blocks, device)
    if not traced and start is None and kv_length % BLOCK == 0:
        packed.__dict__["_vattn_whole"] = True
    return packed


def ends_with_blocks(packed: Tensor) -> bool:
    """Return whether blocks from the first key on end with the last one, of a step that `step_mask` returned."""
    return bool(packed.__dict__.get("_vattn_whole", False))


def _read_padding(
    mask: Tensor, q_offset: int | Tensor, q_length: int, kv_offset: int, kv_length: int
) -> tuple[Tensor | None, bool]:
    """Return the first key of each row, `None` if it is 0 everywhere, and whether whole blocks follow each."""
    host = mask[:, : int(q_offset) + q_length].int().cpu()
    first = host.argmax(1)
    if bool((_last(host) - first + 1 != host.sum(1)).logical_and(host.any(1)).any()):
        raise MetadataError(
            "an attention_mask with padding between the tokens of a row",
            "padding before the tokens of a row, or after them",
            "pad the whole row on the left, tokens that were generated before included",
        )
    start = (first - kv_offset).clamp(min=0)
    if not bool(start.any()):
        return None, True
    return start.to(mask.device)[:, None], int(start.max()) + BLOCK <= kv_length


def _assert_filled(mask: Tensor, q_offset: int | Tensor, q_length: int, start: Tensor | None, kv_length: int) -> None:
    """Assert on the device what `_read_padding` reads on the host."""
    inside = torch.arange(mask.shape[1], device=mask.device) < q_offset + q_length
    seen = (mask & inside).to(torch.int32)
    has_gaps = (_last(seen) - seen.argmax(1) + 1 != seen.sum(1)) & seen.any(1)
    torch._assert_async(~has_gaps.any(), "vattn: attention_mask has padding between the tokens of a row")
    if start is not None:
        torch._assert_async(
            start.max() + BLOCK <= kv_length, f"vattn: a row of the static cache has room for less than {BLOCK} tokens"
        )


def _last(seen: Tensor) -> Tensor:
    """Return the last token of each row `[B, S]`."""
    return seen.shape[1] - 1 - seen.flip(1).argmax(1)


def window_of(rule: Callable[..., Any] | None, local_size: int | None) -> int | None:
    """Return the causal window of a mask function, `None` for all earlier tokens.

    Raises:
        UnsupportedRequestError: it is no causal mask or causal window.
    """
    parts = tuple(_parts(rule))
    if any(isinstance(part, Tensor) for part in parts):
        raise _refused("a mask that goes by the tokens of the step, such as one of packed sequences")
    key = parts, local_size
    if key not in _known_windows:
        try:
            _known_windows[key] = MaskCall(rule, local_size).window()  # type: ignore[arg-type]
        except UnsupportedRequestError as error:
            raise UnsupportedRequestError(error.got, error.allowed, ELSEWHERE) from error
    return _known_windows[key]


def _parts(rule: Any) -> Iterator[Any]:
    """Yield the code of a function and all that it holds."""
    if isinstance(rule, (tuple, list)):
        for part in rule:
            yield from _parts(part)
    elif callable(rule):
        yield getattr(rule, "__code__", rule)
        for cell in getattr(rule, "__closure__", None) or ():
            yield from _parts(cell.cell_contents)
    else:
        yield rule


@torch.compiler.assume_constant_result
def _check_interface(module: str) -> None:
    """Refuse models without exchangeable attention: they would read a step as a mask.

    Raises:
        UnsupportedRequestError: the modeling file beside the configuration's `module` does not use the interface.
    """
    modeling = sys.modules.get(module.replace("configuration_", "modeling_")) if "configuration_" in module else None
    if modeling is not None and not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedRequestError(
            f"a model of {modeling.__name__} with attn_implementation='vattn'",
            "models that attend through transformers' attention interface",
            "enable(model) of vattn.integrations.transformers if it takes the model, or attn_implementation='eager'",
        )


def _refused(got: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{got} with attn_implementation='vattn'", "causal masks and causal windows, with padding", ELSEWHERE
    )
