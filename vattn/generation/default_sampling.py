"""The sampling that a model's own generation config asks for."""

from __future__ import annotations

import math
import warnings
from typing import Any

from vattn.errors import ConfigError
from vattn.generation.sampling import Sampling

_ALWAYS = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words",
    "stop_strings": "stop_strings",
    "forced_eos_token_id": "forced_eos_token_id",
}
_WHERE_SAMPLED = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_NOT_TAKEN: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (),
    "encoder_repetition_penalty": (1,), "guidance_scale": (1,), "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (), "begin_suppress_tokens": (), "watermarking_config": (),
    "constraints": (), "force_words_ids": (), "dola_layers": (), "num_return_sequences": (1,), "min_length": (0,),
}  # fmt: skip
"""Options that change the tokens and are not taken, each with the values that change nothing."""


def default_sampling(model: Any, tokenizer: Any = None) -> Sampling:
    """Return the sampling of a model's generation config, greedy without one.

    Options that are not set there have the defaults of `Sampling`. Those that a generator does not have are named in a
    warning. Temperature, `top_k`, `top_p` and `min_p` count with `do_sample` alone, as in transformers.

    Raises:
        ConfigError: values that no sampling has.
    """
    config = getattr(getattr(model, "model", model), "generation_config", None)
    sampled = bool(getattr(config, "do_sample", None))
    names = _ALWAYS | (_WHERE_SAMPLED if sampled else {})
    given = {ours: value for theirs, ours in names.items() if (value := getattr(config, theirs, None)) is not None}
    if sampled:
        given.setdefault("temperature", 1.0)
    if "min_tokens" in given:
        given.setdefault("max_new_tokens", max(Sampling.max_new_tokens, given["min_tokens"]))
    biases = dict.fromkeys(getattr(config, "suppress_tokens", None) or (), -math.inf)
    single, longer = _sequences(getattr(config, "sequence_bias", None))
    if biases or single:
        given["logit_bias"] = single | biases
    taken = getattr(model, "taken_options", ())
    left = [n for n, off in _NOT_TAKEN.items() if n not in taken and getattr(config, n, None) not in (None, *off)]
    left += ["sequence_bias of several tokens"] if longer else []
    forced = given.get("forced_eos_token_id")
    if isinstance(forced, (list, tuple)):
        (given["forced_eos_token_id"],) = forced if len(forced) == 1 else (None,)
        left += ["several forced_eos_token_id"] if len(forced) > 1 else []
    if isinstance(given.get("stop_strings"), str):
        given["stop_strings"] = (given["stop_strings"],)
    if tokenizer is None and given.pop("stop_strings", None):
        left.append("stop_strings without a tokenizer")
    if left:
        warnings.warn(
            f"The generation config of the model asks for {', '.join(left)}. A generator takes no such options. Pass "
            "Sampling(logits_processors=...) for what transformers' processors do.",
            stacklevel=4,  # the caller of Generator: a wrapper checks its keywords
        )
    try:
        return Sampling(**given)
    except ConfigError as error:
        raise ConfigError(
            f"a generation config with {error.got}", error.allowed, "correct model.generation_config"
        ) from error


def _sequences(bias: Any) -> tuple[dict[int, float], bool]:
    """Return the biases of single tokens, and whether there are longer sequences."""
    pairs = list(bias.items()) if isinstance(bias, dict) else bias or []
    return {ids[0]: value for ids, value in pairs if len(ids) == 1}, any(len(ids) > 1 for ids, _ in pairs)
