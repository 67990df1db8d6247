"""`Batch`: what one step computes; `DecodeRun`: consecutive steps of decodes over the same requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vattn.generation.cache_blocks import CacheBlocks
from vattn.generation.request import Request
from vattn.metadata.token_tree import TokenTree


@dataclass
class Batch:
    """New tokens of the requests of one step; those that get a token come first.

    Attributes:
        requests: the others have more of their prompt to compute.
        starts, ends: positions `starts[i]` to `ends[i] - 1` of request i are computed.
        ready: how many requests get a token.
        drafts: the drafts of each of the ready requests; empty in a step without drafts.
        tree: how the drafts of a request branch; `None`: not at all.
        paths: in a step with a tree, the rows of the right drafts of each request, once they are known.
        prompt_logprobs: requests with tokens of their prompts that get log-probabilities, the position of the first of
            these tokens, and how many there are.
        run: the run of decode steps that this step belongs to; `None` where the next one has to be planned.
        offset: its number in the run, from 0. A step with an offset takes its tokens from the step before, see
            `Scheduler.follow`; its `starts` and `ends` are empty, since each is one more.
        new_blocks: of such a step, the blocks that begin with its tokens, for each group.
    """

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    ready: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    tree: TokenTree | None = None
    paths: dict[Request, list[int]] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Request, int, int]] = field(default_factory=list)
    run: DecodeRun | None = None
    offset: int = 0
    new_blocks: list[list[int]] = field(default_factory=list)

    @property
    def follows(self) -> bool:
        """Whether it takes its tokens from the step before."""
        return self.offset > 0

    def unready_before_ready(self) -> bool:
        """Whether a request that gets no token comes before one that gets one: its step ends before tokens that see
        each other both ways.
        """
        if all(request.inputs is None for request in self.requests):
            return False
        waits = [self._waits(row) for row in range(len(self.requests))]
        return waits != sorted(waits)

    def _waits(self, row: int) -> bool:
        """Whether a request gets no token."""
        drafts = len(self.drafts[row]) if self.drafts else 0
        return self.ends[row] - drafts != self.requests[row].num_tokens

    def put_ready_first(self) -> None:
        """Move requests without a new token to the end."""
        order = sorted(range(len(self.requests)), key=self._waits)
        for name in ("requests", "starts", "ends", *(("drafts",) if self.drafts else ())):
            setattr(self, name, [getattr(self, name)[row] for row in order])

    def positions(self) -> list[int]:
        """Return the positions of the tokens that the ready requests get."""
        if self.run is not None:
            return [end + self.offset for end in self.run.ends]
        return self.ends[: self.ready]


class DecodeRun:
    """A run of consecutive decode steps over the same requests.

    The offset of a step in the run tells which requests need a block, and which have a full last block: no step looks
    at all requests.

    Args:
        requests: all that run.
        ends: of the first step.
        changes: the scheduler's count of changes when that step was planned.
        block_size: of the cache.

    Attributes:
        left: steps in which no request reaches its limit.
        stops: tokens that end one of the requests.
        sampled: rows of the requests that are not greedy.
        with_logprobs: rows of the requests that get log-probabilities.
        settings: what the sampler keeps of the requests from step to step.
    """

    def __init__(self, requests: list[Request], ends: list[int], changes: int, block_size: int) -> None:
        self.requests, self.ends, self.changes = requests, ends, changes
        self.left = min(request.limit - end for request, end in zip(requests, ends, strict=True)) - 1
        self.stops = frozenset().union(*{request.stop_token_ids for request in requests})
        self.sampled = [row for row, request in enumerate(requests) if not request.greedy]
        self.with_logprobs = [row for row, request in enumerate(requests) if request.logprobs is not None]
        self.settings: Any = None
        self._plain = False
        self._full: list[list[int]] = [[] for _ in range(block_size)]
        self._due: dict[int, list[int]] = {}
        for row, (request, end) in enumerate(zip(requests, ends, strict=True)):
            self._full[-end % block_size].append(row)
            self._due.setdefault(request.room - end, []).append(row)

    def plain(self) -> bool:
        """Return whether a token that ends no request changes nothing but its output."""
        self._plain = self._plain or all(request.plain for request in self.requests)
        return self._plain

    def full(self, offset: int) -> list[int]:
        """Return the rows of the requests that have a full last block after a step."""
        return self._full[offset % len(self._full)]

    def grow(self, blocks: CacheBlocks, offset: int) -> list[list[int]]:
        """Take blocks for a step, and return those that begin with its tokens, for each group.

        Raises:
            OutOfBlocksError: too few are left; some requests may have got theirs.
        """
        for row in self._due.pop(offset - 1, ()):
            request = self.requests[row]
            blocks.grow(request, 1)
            self._due.setdefault(request.room - self.ends[row], []).append(row)
        begun = self.full(offset - 1)
        return blocks.begun([self.requests[row] for row in begun], [self.ends[row] + offset for row in begun])
