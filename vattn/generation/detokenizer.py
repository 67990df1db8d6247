"""Text of a growing list of tokens, and where a stop string ends it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no character yet."""


def takes(method: Any, option: str) -> bool:
    """Return whether a tokenizer's method has an option."""
    try:
        options = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
    return option in options or any(one.kind is one.VAR_KEYWORD for one in options.values())


class TextStream:
    """Decode a request's tokens as they come; only whole characters are shown.

    What is shown in the end is what `tokenizer.decode` returns for all tokens, up to the stop string.

    Args:
        tokenizer: anything with `decode(ids) -> str`, such as transformers' tokenizers. Those of the tokenizers library
            decode by its own `DecodeStream`, which takes a twentieth of the time.
        stop_strings: the first one that appears ends the text; it is removed.
        min_tokens: stop strings are looked for in the text after this many tokens.
        skip_special_tokens: what `decode` gets under this name; `None`: nothing.

    Attributes:
        text: so far, with what is held back because a stop string may begin there.
        found: the stop string that has appeared, "" if none has.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool | None = None,
    ) -> None:
        self.tokenizer, self.stop_strings, self._min_tokens = tokenizer, stop_strings, min_tokens
        self._options = {} if skip_special_tokens is None else {"skip_special_tokens": skip_special_tokens}
        self._library = _decode_stream(tokenizer, bool(skip_special_tokens))
        # Tokens that it got, and characters that came of them.
        self._fed, self._whole, self._compared = 0, 0, False
        self.text, self.found = "", ""
        # Tokens that are decoded again, tokens with known text, and characters that were shown.
        self._start = self._decoded = self._shown = 0
        # Where stop strings may begin.
        self._searched = 0

    def push(self, ids: list[int], last: bool = False) -> str:
        """Return the text that can be shown now.

        Args:
            ids: all tokens of the output so far.
            last: nothing will follow, so what is unfinished is shown too.
        """
        begin = max(self._searched, len(self.text) - max(map(len, self.stop_strings), default=0))
        self.text += self._decode(ids, last)
        if len(ids) <= self._min_tokens:
            begin = self._searched = len(self.text)
        found = [(at, stop) for stop in self.stop_strings if (at := self.text.find(stop, begin)) >= 0]
        if found:
            at, self.found = min(found)
            self.text = self.text[:at]
        end = len(self.text) - (0 if last or self.found else self._held_back())
        fresh, self._shown = self.text[self._shown : end], max(self._shown, end)
        return fresh

    def _decode(self, ids: list[int], last: bool) -> str:
        """Return the characters that have become whole."""
        if self._library is not None:
            stream, inner = self._library
            fed, self._fed = self._fed, len(ids)
            try:
                fresh = "".join(stream.step(inner, token) or "" for token in ids[fed:])
            except Exception:
                # Some decoders change earlier text; all of it is compared from now on.
                self._library, self._compared = None, True
            else:
                self._whole += len(fresh)
                if not last:
                    return fresh
                # With what is no character yet.
                return fresh + self.tokenizer.decode(ids, **self._options)[self._whole :]
        if self._compared:
            whole = self.tokenizer.decode(ids, **self._options)
            fresh = "" if whole.endswith(UNFINISHED) and not last else whole[self._whole :]
            self._whole += len(fresh)
            return str(fresh)
        # Text of a few earlier tokens is decoded again: spaces and characters depend on the neighbours.
        before = self.tokenizer.decode(ids[self._start : self._decoded], **self._options)
        now = self.tokenizer.decode(ids[self._start :], **self._options)
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not last):
            return ""
        self._start, self._decoded = self._decoded, len(ids)
        return str(now[len(before) :])

    def _held_back(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        text = self.text[self._searched :]
        sizes = [n for stop in self.stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(sizes, default=0)


def _decode_stream(tokenizer: Any, skip_special_tokens: bool) -> tuple[Any, Any] | None:
    """Return a stream of the tokenizers library and its tokenizer, `None` where `tokenizer.decode` does more."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return None
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream
    from transformers import PreTrainedTokenizerFast

    plain = isinstance(inner, Tokenizer) and isinstance(tokenizer, PreTrainedTokenizerFast)
    own = type(tokenizer).decode is not PreTrainedTokenizerFast.decode or (
        type(tokenizer)._decode is not PreTrainedTokenizerFast._decode
    )
    cleaned = getattr(tokenizer, "clean_up_tokenization_spaces", False) and type(inner.model).__name__ != "BPE"
    return (DecodeStream(skip_special_tokens=skip_special_tokens), inner) if plain and not own and not cleaned else None
