"""`whisper_task`: Whisper's first tokens and logits processors for a language, a task and timestamps; `transcribe`:
recordings of any length by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from vattn.config.keywords import known_keywords
from vattn.config.other_names import WHISPER_TASK
from vattn.config.typed import typed
from vattn.errors import ConfigError
from vattn.integrations.transformers.available import transformers


@dataclass(frozen=True)
class WhisperTask:
    """How Whisper transcribes or translates.

    Attributes:
        decoder_input_ids: of the prompt, beside the recording's `input_features`.
        logits_processors: of the prompt's `vattn.Sampling`; they fit only these `decoder_input_ids`.
    """

    decoder_input_ids: list[int]
    logits_processors: tuple[Any, ...]


@known_keywords(WHISPER_TASK)
@typed
def whisper_task(
    model: Any, language: str | None = None, task: str = "transcribe", *, timestamps: bool = False
) -> WhisperTask:
    """Return what transformers' `generate` would give a Whisper model for the same arguments.

    Args:
        model: what `enable_encoder_decoder` returned, or the model itself; its generation config knows the tokens.
        language: the code of the recording's language, such as `"en"`; `None` for an English-only model.
        task: `"transcribe"`, or `"translate"` to English.
        timestamps: whether tokens of times surround each segment, by Whisper's rules: in pairs, never going back, the
            first up to `max_initial_timestamp_index`, and whenever they are together likelier than any other token.

    Raises:
        ConfigError: a generation config without the tokens, or a language or task that it does not know.
    """
    inner = getattr(model, "wrapped", model)
    config = getattr(inner, "generation_config", None)
    needed = ["no_timestamps_token_id"]
    if getattr(config, "is_multilingual", True):
        needed += ["lang_to_id", "task_to_id"]
    missing = [name for name in needed if getattr(config, name, None) is None]
    if config is None or missing:
        raise ConfigError(
            f"whisper_task() of {type(inner).__name__}, with no {missing[0]} in its generation config",
            "a Whisper model with the generation config of its checkpoint",
            "load it with from_pretrained, or pass decoder_input_ids of your own",
        )
    ids = [config.decoder_start_token_id]
    if getattr(config, "is_multilingual", True):
        ids.append(_token("language", language, f"<|{language}|>", config.lang_to_id))
        ids.append(_token("task", task, task, config.task_to_id))
    elif language is not None or task != "transcribe":
        raise ConfigError(
            f"language={language!r}, task={task!r} for an English-only Whisper model",
            "language=None and task='transcribe'",
            "leave both out",
        )
    if not timestamps:
        ids.append(config.no_timestamps_token_id)
    begin, device = len(ids), inner.device
    processors: list[Any] = []
    if config.begin_suppress_tokens is not None:
        tokens = config.begin_suppress_tokens
        processors.append(transformers.SuppressTokensAtBeginLogitsProcessor(tokens, begin, device=device))
    if config.suppress_tokens is not None:
        processors.append(transformers.SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    if timestamps:
        processors.append(transformers.WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    return WhisperTask(ids, tuple(processors))


TOKEN_SECONDS, FRAME_SECONDS = 0.02, 0.01
"""What a token of a time counts, and what a frame of the features is long."""


@dataclass(frozen=True)
class Segment:
    """A part of a recording.

    Attributes:
        start, end: seconds from the recording's beginning.
        tokens: of the part, times included.
    """

    start: float
    end: float
    tokens: list[int]


def transcribe(
    generator: Any, recordings: Sequence[Tensor], task: WhisperTask, sampling: Any = None
) -> list[list[Segment]]:
    """Transcribe recordings of any length, in windows of 30 seconds of which each begins where the one before ended.

    Windows of all recordings run together. Their segments are those of transformers' `generate` at a temperature of 0,
    which this does not raise where a text repeats itself or is unlikely, and without the text before a window.

    Args:
        generator: a `vattn.Generator` of what `enable_encoder_decoder` returned for a Whisper model.
        recordings: features `[1, mels, frames]` each, as the processor returns them with `truncation=False`.
        task: what `whisper_task(..., timestamps=True)` returned.
        sampling: a `vattn.Sampling` without logits processors; default the generator's, with as many new tokens as the
            decoder has positions.

    Raises:
        ConfigError: a task without timestamps, a model that is not Whisper, or features of another shape.
        RequestError: a window that a generator refuses.
    """
    model = getattr(generator.model, "wrapped", None)
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "whisper":
        raise ConfigError(
            f"transcribe() with a generator of {type(model or generator.model).__name__}",
            "one of a Whisper model",
            "Generator(enable_encoder_decoder(model))",
        )
    assert model is not None and config is not None
    first = model.generation_config.no_timestamps_token_id + 1
    if first - 1 in task.decoder_input_ids:
        raise ConfigError("a task without timestamps", "timestamps=True", "whisper_task(..., timestamps=True)")
    for given in recordings:
        if not isinstance(given, Tensor) or given.dim() != 3 or given.shape[:2] != (1, config.num_mel_bins):
            shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ConfigError(
                f"a recording of {shape}", f"features [1, {config.num_mel_bins}, frames]", "pass input_features of each"
            )
    if sampling is None:
        room = config.max_target_positions - len(task.decoder_input_ids)
        sampling = dataclasses.replace(generator.default_sampling, max_new_tokens=room)
    sampling = dataclasses.replace(sampling, logits_processors=task.logits_processors)
    stride = model.get_encoder().conv1.stride[0] * model.get_encoder().conv2.stride[0]
    frames = stride * config.max_source_positions
    found, starts = [list[Segment]() for _ in recordings], [0] * len(recordings)
    while rest := [row for row, each in enumerate(recordings) if starts[row] < each.shape[2]]:
        windows = []
        for row in rest:
            window = recordings[row][:, :, starts[row] : starts[row] + frames]
            padded = pad(window, (0, frames - window.shape[2]))
            windows.append({"input_features": padded, "decoder_input_ids": task.decoder_input_ids})
        for row, request in zip(rest, generator.generate(windows, sampling), strict=True):
            length = min(frames, recordings[row].shape[2] - starts[row])
            begin = starts[row] * TOKEN_SECONDS / stride
            segments, passed = _segments(request.result().output, first, begin, length, stride)
            found[row] += segments
            # Rules of the user's own may end a window where it begins.
            starts[row] += passed or length
    return found


def _segments(tokens: list[int], first: int, begin: float, length: int, stride: int) -> tuple[list[Segment], int]:
    """Return the segments of a window, and how many of its frames they cover.

    Args:
        tokens: of the window, without the end token.
        first: the token of time 0.
        begin: of the window, in seconds.
        length: frames of the window.
        stride: frames of a time.
    """
    times = [token >= first for token in tokens]
    ends = [index + 1 for index in range(len(times) - 1) if times[index] and times[index + 1]]
    if not ends:
        last = length * FRAME_SECONDS // TOKEN_SECONDS
        stamps = [token for token in tokens if token >= first]
        if stamps and stamps[-1] != first:
            last = stamps[-1] - first
        return [Segment(begin, begin + last * TOKEN_SECONDS, tokens)], length
    # A single time at the end: nothing is said after it. Two: the rest is for the next window.
    is_over = times[-2:] == [False, True]
    ends = [*ends, len(tokens)] if is_over else [*ends[:-1], ends[-1] + 1]
    found, start = list[Segment](), 0
    for end in ends:
        part = tokens[start:end]
        last = part[-1 if is_over or end != ends[-1] else -2]
        span = [begin + (token - first) * TOKEN_SECONDS for token in (part[0], last)]
        found.append(Segment(span[0], span[1], part))
        start = end
    return found, length if is_over else (tokens[start - 2] - first) * stride


def _token(name: str, given: str | None, key: str, known: dict[str, int]) -> int:
    """Return the token of a language or a task."""
    token = known.get(key, known.get(given or ""))
    if token is None:
        first = ", ".join(repr(each.strip("<|>")) for each in sorted(known)[:4])
        fix = f"pass one of the {len(known)} in model.generation_config"
        if given is None:
            fix = "pass it, or find it by one token of allowed_token_ids=lang_to_id.values() after the start token"
        raise ConfigError(f"{name}={given!r} for a Whisper model", f"such as {first}", fix)
    return token
