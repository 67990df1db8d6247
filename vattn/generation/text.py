"""Text of a growing list of tokens, and where a stop string ends it."""

from __future__ import annotations

from typing import Any

from vattn.generation.request import Request

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no character yet."""


class TextStream:
    """Decode a request's tokens as they come; only whole characters are shown.

    Args:
        tokenizer: anything with `decode(ids) -> str`, such as transformers' tokenizers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._start = self._shown = 0

    def push(self, ids: list[int], last: bool = False) -> str:
        """Return the text that has become whole.

        Args:
            ids: all tokens of the output so far.
            last: nothing will follow, so what is unfinished is shown too.
        """
        # Text of a few earlier tokens is decoded again: spaces and characters depend on the neighbours.
        before = self.tokenizer.decode(ids[self._start : self._shown])
        now = self.tokenizer.decode(ids[self._start :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not last):
            return ""
        fresh = now[len(before) :]
        self._start, self._shown = self._shown, len(ids)
        self.text += fresh
        return fresh


def cut_at_stop_string(request: Request, fresh: str) -> bool:
    """Add text to a request, and cut it before the first stop string; return whether there was one."""
    longest = max(map(len, request.sampling.stop_strings), default=0)
    begin = max(0, len(request.text) - longest)
    request.text += fresh
    found = [at for stop in request.sampling.stop_strings if (at := request.text.find(stop, begin)) >= 0]
    if found:
        request.text = request.text[: min(found)]
    return bool(found)


def held_back(request: Request) -> int:
    """Return how many characters at the end of a request's text may be the beginning of a stop string."""
    text = request.text
    sizes = [n for stop in request.sampling.stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(sizes, default=0)
