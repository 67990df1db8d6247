"""`PromptLookup`: drafts for speculative decoding, looked up in a request's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

from vattn.config.arguments import read_count
from vattn.config.keywords import known_keywords
from vattn.config.other_names import PROMPT_LOOKUP
from vattn.errors import ConfigError
from vattn.generation.draft_source import DraftSource
from vattn.generation.lookup_index import LookupIndex
from vattn.generation.request import Request


@known_keywords(PROMPT_LOOKUP)
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
            read_count(name, getattr(self, name), 1, f"leave {name} out for its default")
        if self.longest < self.shortest:
            raise ConfigError(
                f"PromptLookup(longest={self.longest}, shortest={self.shortest})",
                "a longest of at least the shortest",
                "change one of them",
            )

    def plan(self, request: Request, most: int) -> list[int]:
        """Return up to `most` tokens that may follow those of a request."""
        if request.lookup_index is None:
            lengths = range(self.longest, self.shortest - 1, -1)
            request.lookup_index = LookupIndex(lengths, request.prompt)
        index = request.lookup_index
        index.extend(request.output[len(index.tokens) - len(request.prompt) :])
        return index.drafts(most)
