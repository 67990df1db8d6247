"""`whisper_task`: Whisper's first tokens and logits processors for a language, a task and timestamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
