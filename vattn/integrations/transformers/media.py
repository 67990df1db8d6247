"""Prompts with images and other media: what a processor of transformers returned, as inputs of the language model.

transformers' own code runs the vision tower, merges what it gives into the embeddings of the text, and finds positions
and masks. It does so in a copy of the model that shares all weights and has another language model: one that only takes
what it is given. Steps that run meanwhile are not affected by the copy.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vattn.errors import RequestError, VattnError
from vattn.integrations.transformers.attention_interface import NAME
from vattn.integrations.transformers.attention_notes import MaskCall
from vattn.integrations.transformers.available import ALL_MASK_ATTENTION_FUNCTIONS, CACHE_ARGUMENTS, transformers
from vattn.metadata.prompt_inputs import PromptInputs, StepEmbeddings

READING = "vattn_reading"
"""Name, in transformers' registry, of the mask function that notes which mask was requested."""

LANGUAGE = "language_model"

MOST_RANGES = 64
"""Ranges of one prompt with bidirectional attention, such as images."""

_NO_MEANING = frozenset({"use_cache", *CACHE_ARGUMENTS, "cache_position", "return_dict"})
"""Arguments of a language model that are the same in every step."""


class _LanguageModel(nn.Module):
    """Passes calls of a language model to a function, and has its attributes."""

    def __init__(self, language_model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_real"], self._call = language_model, call

    def forward(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        return self._call(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def takes_media(model: Any) -> bool:
    """Return whether a model has a language model and something else that gives it embeddings."""
    base = model.base_model
    return base is not model and isinstance(base._modules.get(LANGUAGE), nn.Module)


def placeholders(model: Any) -> dict[int, str]:
    """Return the tokens that stand for an image, a video or a recording in a prompt, and which of these."""
    names = [(f"{kind}_token_{end}", kind) for kind in ("image", "video", "audio") for end in ("id", "index")]
    found = {getattr(model.config, name, None): kind for name, kind in names} if takes_media(model) else {}
    return {token: kind for token, kind in found.items() if isinstance(token, int)}


def _with_language_model(base: Any, call: Callable[..., Any]) -> Any:
    other = copy.copy(base)
    other._modules = {**base._modules, LANGUAGE: _LanguageModel(base._modules[LANGUAGE], call)}
    return other


def run_with_added(model: Any, given: StepEmbeddings, num_tokens: int, **options: Any) -> Any:
    """Call a model that adds rows to the outputs of its first layers, as Qwen3-VL does for images."""
    assert given.added is not None
    base = model.base_model
    mask = torch.zeros(1, num_tokens, dtype=torch.bool, device=given.rows.device)
    mask[0, given.rows] = True
    more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(given.added)}
    language_model = base._modules[LANGUAGE]
    other = copy.copy(model)
    stand_in = _with_language_model(base, lambda *args, **given: language_model(*args, **{**given, **more}))
    other._modules = {name: stand_in if part is base else part for name, part in model._modules.items()}
    return other(**options)


@torch.no_grad()
def read_media(model: Any, encoded: Mapping[str, Any]) -> tuple[list[int], PromptInputs]:
    """Return the token ids of a prompt, and what it gives the language model besides them.

    Args:
        model: one of transformers on vattn.
        encoded: what its processor returned for one prompt, with `return_tensors="pt"`.

    Raises:
        RequestError: several prompts, padding, inputs that the model does not take, images that do not fit the text,
            or what vattn cannot express.
    """
    base, device = model.base_model, next(model.parameters()).device
    ids, inputs = _check(base, encoded, device)
    _check_parts(model, inputs)
    taken: dict[str, Any] = {}

    def take(*args: Any, **options: Any) -> Any:
        taken.update(options)
        rows = options["inputs_embeds"]
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=rows)

    other = _with_language_model(base, take)
    other.config = copy.deepcopy(base.config)
    other.config.get_text_config()._attn_implementation_internal = READING
    try:
        other(**inputs)
    except VattnError:
        raise
    except Exception as error:
        raise RequestError(
            f"a prompt that {type(model).__name__} refuses{_sizes(inputs)}: {type(error).__name__}: {error}",
            "what its processor returned for one prompt",
            "check images and text",
        ) from error
    count, rows = ids.shape[0], taken["inputs_embeds"][0]
    odd = {name for name, value in taken.items() if isinstance(value, Tensor)} - {
        *_NO_MEANING, "inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks",
    }  # fmt: skip
    if odd:
        raise _unsupported(f"{', '.join(sorted(odd))} of a prompt for the language model")
    positions, offset = _positions(taken.get("position_ids"), count)
    added = _added(taken.get("visual_pos_masks"), taken.get("deepstack_visual_embeds"), rows)
    vocabulary = base.get_input_embeddings().num_embeddings
    known = torch.where(ids < vocabulary, ids, 0)
    ranges = _ranges(taken.get("attention_mask"), count, model)
    # Rows that are not the embeddings of their ids, or that attend to later ones.
    own = (rows != base.get_input_embeddings()(known)).any(1)
    for start, end in ranges:
        own[start : end + 1] = True
    names = tuple(
        (start, end, _digest(start, end, rows, positions, added, ranges)) for start, end in _runs(own.tolist())
    )
    return known.tolist(), PromptInputs(rows, positions, offset, added, ranges, names)


def _check(base: Any, encoded: Mapping[str, Any], device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Return the ids `[n]`, and the inputs of the model, on its device."""
    allowed = set(inspect.signature(base.forward).parameters) - _OF_STEPS
    unknown = sorted(set(encoded) - allowed - {"attention_mask"})
    if unknown:
        raise RequestError(
            f"a prompt with {', '.join(unknown)}, which {type(base).__name__} does not take in a prompt",
            f"inputs among {', '.join(sorted(allowed & _PROCESSED))}",
            "use the model's own processor",
        )
    wrong = [name for name, value in encoded.items() if not isinstance(value, Tensor)]
    if wrong:
        raise RequestError(
            f"a prompt with {wrong[0]} of type {type(encoded[wrong[0]]).__name__}", "tensors", "return_tensors='pt'"
        )
    empty = next((name for name, value in encoded.items() if value.is_meta), None)
    if empty is not None:
        raise RequestError(
            f"a prompt with {empty} on the meta device", "tensors with values", "call the processor again"
        )
    ids: Tensor = encoded.get("input_ids", torch.empty(0))
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise RequestError(
            f"a prompt with images and input_ids of shape {list(ids.shape)}",
            "one prompt, [1, n]",
            "call the processor for each prompt",
        )
    # On a GPU the embedding layer would not raise, but end the process.
    known = range(base.get_input_embeddings().num_embeddings)
    named = {value for name, value in vars(base.config).items() if "_token_i" in name and isinstance(value, int)}
    wrong = [token for token in ids[0].tolist() if token not in known and token not in named]
    if wrong:
        raise RequestError(
            f"token id {wrong[0]} in a prompt", f"ids from 0 to {known[-1]}", "use the model's own processor"
        )
    mask = encoded.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise RequestError(
            f"an attention_mask of shape {list(mask.shape)} for input_ids of {list(ids.shape)}",
            "a number for each id",
            "pass what the processor returned",
        )
    if mask is not None and not bool(mask.all()):
        raise RequestError("a prompt with images and padding", "no padding", "call the processor for each prompt")
    dtype = next(parameter.dtype for parameter in base.parameters() if parameter.is_floating_point())
    inputs = {
        name: value.to(device, dtype if value.is_floating_point() else None)
        for name, value in encoded.items()
        if name in allowed
    }
    return inputs["input_ids"][0], inputs


def _check_parts(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse places of images or videos without these, and these without the numbers of their patches."""
    known, tokens = inspect.signature(model.base_model.forward).parameters, set(inputs["input_ids"][0].tolist())
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        token = next((token for token, named in placeholders(model).items() if named == kind and token in tokens), None)
        if token is not None and pixels in known and pixels not in inputs:
            raise RequestError(
                f"token id {token}, the place of a part of the {kind}, without {pixels}",
                f"what the processor returned for text and {kind}",
                f"pass {pixels} too, or leave the token out",
            )
        if pixels in inputs and grid in known and grid not in inputs:
            raise RequestError(
                f"{pixels} without {grid}", "both, as the processor returned them", f"pass {grid}, [{kind}s, 3], too"
            )


def _sizes(inputs: Mapping[str, Any]) -> str:
    """Return what a prompt says about sizes, for an error."""
    named = [f"{name}={value.tolist()}" for name, value in inputs.items() if name.endswith(("_grid_thw", "_sizes"))]
    pixels = [f"{name} of {list(value.shape)}" for name, value in inputs.items() if name.startswith("pixel_values")]
    return f", with {', '.join(named + pixels)}" if named else ""


_OF_STEPS = frozenset({"position_ids", "inputs_embeds"})
"""Inputs that no processor gives. Blocks of text are shared by ids, whatever these hold."""

_PROCESSED = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "pixel_values", "image_sizes"}
    | {"image_grid_thw", "video_grid_thw", "pixel_values_videos", "second_per_grid_ts"}
)


def _note_mask(
    mask_function: Callable[..., Any], local_size: int | None = None, attention_mask: Any = None, **options: Any
) -> MaskCall:
    return MaskCall(mask_function, local_size)


ALL_MASK_ATTENTION_FUNCTIONS.register(READING, _note_mask)


def _positions(given: Tensor | None, count: int) -> tuple[Tensor | None, int]:
    """Return positions `[K, n]` and the offset of later ones; `None` and 0 for the places of the tokens."""
    if given is None:
        return None, 0
    found = given.reshape(-1, count)
    if bool((found == torch.arange(count, device=found.device)).all()):
        return None, 0
    if given.ndim != 3:
        raise _unsupported("positions of a prompt that do not count from 0")
    return found, int(found.max()) + 1 - count


def _added(mask: Tensor | None, given: Any, rows: Tensor) -> Tensor | None:
    if given is None or not len(given):
        return None
    assert mask is not None
    added = rows.new_zeros(len(given), *rows.shape)
    for layer, values in zip(added, given, strict=True):
        layer[mask[0]] = values.to(layer.dtype)
    return added


def _ranges(given: Any, count: int, model: Any) -> tuple[tuple[int, int], ...]:
    """Return the ranges of tokens that see each other both ways.

    Raises:
        RequestError: a mask that is not made of these and the layers' own, too many or too long ranges, or layers
            without them.
    """
    masks = list(given.values()) if isinstance(given, dict) else [given]
    calls = [mask for mask in masks if isinstance(mask, MaskCall)]
    layers: list[Any] = [layer for name, layer in model.named_modules() if name.rpartition(".")[2] == NAME]
    windows = {window for layer in layers if (window := layer.config.sliding_window) is not None}
    found = {_ranges_of(call, count, windows) for call in calls} or {()}
    if len(found) > 1:
        raise _unsupported("images that see each other both ways in some layers alone")
    ranges = found.pop()
    if len(ranges) > MOST_RANGES:
        raise _unsupported(f"{len(ranges)} images that see each other both ways, of up to {MOST_RANGES},")
    longest = max((end - start + 1 for start, end in ranges), default=0)
    if longest > min(windows, default=longest):
        raise _unsupported(f"{longest} tokens that see each other both ways in a window of {min(windows)}")
    for layer in layers if ranges else ():
        reason = layer.why_no_ranges()
        if reason is not None:
            raise _unsupported(f"images that see each other both ways: {reason}")
    return ranges


def _ranges_of(call: MaskCall, count: int, windows: set[int]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of one mask."""
    device = _device_of(call.rule)
    zeros, here = torch.tensor(0, device=device), torch.arange(count, device=device)
    later = torch.as_tensor(call.rule(zeros, zeros, here[:-1], here[1:])).bool().broadcast_to(count - 1).tolist()
    ranges = tuple(_runs(later))
    edges = {0, count - 1, *(place for start, end in ranges for place in (start, (start + end) // 2, end))}
    rows = torch.tensor(sorted({min(max(0, edge + step), count - 1) for edge in edges for step in (-1, 0, 1)}))
    seen = torch.as_tensor(call.rule(zeros, zeros, rows.to(device)[:, None], here)).bool().cpu()
    places, rows = here.cpu(), rows[:, None]
    expected = places <= rows
    for start, end in ranges:
        expected |= (rows >= start) & (rows <= end) & (places >= start) & (places <= end)
    in_windows = [expected, *(expected & (places > rows - window) for window in windows)]
    if not any(torch.equal(seen.broadcast_to(expected.shape), each) for each in in_windows):
        raise _unsupported("a mask that is not causal outside of ranges")
    return ranges


def _device_of(rule: Any) -> torch.device:
    """Return the device of the tensors that a mask function holds."""
    stack = [rule]
    while stack:
        part = stack.pop()
        if isinstance(part, Tensor):
            return part.device
        stack += part if isinstance(part, (tuple, list)) else ()
        stack += [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
    return torch.device("cpu")


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Return `(start, end)` of each run of true flags, the end excluded."""
    found, start = list[tuple[int, int]](), None
    for place, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            found.append((start, place))
            start = None
    return found


def _digest(
    start: int,
    end: int,
    rows: Tensor,
    positions: Tensor | None,
    added: Tensor | None,
    ranges: tuple[tuple[int, int], ...],
) -> bytes:
    """Return a name for the content of some rows, and for which of them see each other both ways."""
    parts = [rows[start:end], *([] if positions is None else [positions[:, start:end]])]
    parts += [] if added is None else [added[:, start:end]]
    inside = [(first - start, last - start) for first, last in ranges if start <= first < end]
    found = hashlib.sha256(repr(inside).encode())
    for part in parts:
        found.update(f"{tuple(part.shape)}{part.dtype}".encode())
        found.update(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.digest()


def _unsupported(got: str) -> RequestError:
    return RequestError(got, "what vattn's layers can express", "run this prompt by transformers' own generate()")
