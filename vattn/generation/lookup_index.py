"""`LookupIndex`: where each short sequence of a request's tokens occurred last."""

from __future__ import annotations

from collections.abc import Sequence


class LookupIndex:
    """Where in one request's tokens each sequence of a few tokens occurred last.

    Args:
        lengths: how many last tokens are looked up, the most first.
        tokens: those that the request has.

    Attributes:
        tokens: all that were given.

    Example:
        >>> from vattn.generation.lookup_index import LookupIndex
        >>> index = LookupIndex(range(4, 1, -1), [7, 1, 2, 3, 9, 1, 2])
        >>> index.drafts(3)
        [3, 9, 1]
        >>> index.extend([8])
        >>> index.drafts(3)
        []
    """

    def __init__(self, lengths: Sequence[int], tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._lengths = lengths
        self._followed: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        begin = max(0, len(self.tokens) - 1)
        self.tokens += tokens
        # A sequence that ends with the last token has no next token yet.
        for end in range(begin + 1, len(self.tokens)):
            for length in self._lengths:
                if length <= end:
                    self._followed[tuple(self.tokens[end - length : end])] = end

    def drafts(self, count: int) -> list[int]:
        """Return `count` tokens that may follow, none if the last tokens are new."""
        tokens = self.tokens
        for length in self._lengths:
            place = self._followed.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if place is not None:
                # A sequence that repeats itself continues into its own drafts.
                period = len(tokens) - place
                return [tokens[place + step % period] for step in range(count)]
        return []
