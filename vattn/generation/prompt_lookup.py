"""`PromptLookup`: drafts for speculative decoding, looked up in a request's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vattn.config.arguments import read_count
from vattn.errors import ConfigError
from vattn.generation.draft_source import DraftSource

if TYPE_CHECKING:
    from vattn.generation.request import Request


@dataclass(frozen=True)
class PromptLookup(DraftSource):
    """Draft tokens by prompt lookup: what followed an earlier occurrence of the last tokens.

    Attributes:
        num_drafts: most tokens that are drafted; a step verifies them together.
        longest, shortest: how many last tokens have to occur before; the longest match counts, of equally long ones the
            latest.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> import vattn
        >>> vattn.PromptLookup(num_drafts=6).num_drafts
        6
    """

    num_drafts: int = 4
    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        for name in ("num_drafts", "shortest", "longest"):
            read_count(name, getattr(self, name), 1, f"change {name} of PromptLookup")
        if self.longest < self.shortest:
            raise ConfigError(
                f"PromptLookup(longest={self.longest}, shortest={self.shortest})",
                "a longest of at least the shortest",
                "change one of them",
            )

    def plan(self, request: Request, most: int) -> list[int]:
        """Return up to `most` tokens that may follow those of a request."""
        if request.lookup_index is None:
            request.lookup_index = LookupIndex(self, request.prompt)
        index = request.lookup_index
        index.extend(request.output[len(index.tokens) - len(request.prompt) :])
        return index.drafts(most)


class LookupIndex:
    """Where in one request's tokens each sequence of a few tokens occurred last.

    Args:
        settings: which lengths are looked up.
        tokens: those that the request has.

    Attributes:
        tokens: all that were given.

    Example:
        >>> from vattn.generation.prompt_lookup import LookupIndex, PromptLookup
        >>> index = LookupIndex(PromptLookup(), [7, 1, 2, 3, 9, 1, 2])
        >>> index.drafts(3)
        [3, 9, 1]
        >>> index.extend([8])
        >>> index.drafts(3)
        []
    """

    def __init__(self, settings: PromptLookup, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._lengths = range(settings.longest, settings.shortest - 1, -1)
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
