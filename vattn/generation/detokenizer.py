"""Text of a growing list of tokens, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no character yet."""


class TextStream:
    """Decode a request's tokens as they come; only whole characters are shown.

    Args:
        tokenizer: anything with `decode(ids) -> str`, such as transformers' tokenizers.
        stop_strings: the first one that appears ends the text; it is removed.
        min_tokens: stop strings are looked for in the text after this many tokens.

    Attributes:
        text: so far, with what is held back because a stop string may begin there.
        found: the stop string that has appeared, "" if none has.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.tokenizer, self.stop_strings, self._min_tokens = tokenizer, stop_strings, min_tokens
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
        # Text of a few earlier tokens is decoded again: spaces and characters depend on the neighbours.
        before = self.tokenizer.decode(ids[self._start : self._decoded])
        now = self.tokenizer.decode(ids[self._start :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not last):
            return ""
        self._start, self._decoded = self._decoded, len(ids)
        return str(now[len(before) :])

    def _held_back(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        text = self.text[self._searched :]
        sizes = [n for stop in self.stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(sizes, default=0)
