"""`Statistics`: counts and times of a generator's steps."""

from __future__ import annotations

from dataclasses import dataclass

from vattn.generation.batch import Batch


@dataclass
class Statistics:
    """What a generator has done and holds now.

    Attributes:
        steps: computed steps.
        prompt_tokens, generated_tokens: of all requests; prompt tokens computed again after preemption count again.
        reused_tokens: prompt tokens that were found in the cache.
        drafted_tokens, accepted_tokens: drafts that were verified, and those that were right.
        drafted_steps: how often a request had drafts in a step.
        preemptions: how often a request had to give its blocks back.
        waiting, running: requests now.
        used_blocks, num_blocks: blocks that requests hold now, and all that there are for them.
        wasted_tokens: entries in the blocks of the running requests that no query reads: after the last token, and in a
            cache with groups before the windows.
        seconds: wall time of all steps.
        device_seconds: from the first to the last kernel of each step, added up; 0 without a GPU. In the rest of
            `seconds` the device waited for the host.
        draft_seconds: the part of `device_seconds` in which a draft model computed.
        host_seconds: the part of `seconds` in which the host worked; in the rest it waited for the device.
        first_token_seconds: from arrival to the first token, of every request that has one.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_steps: int = 0
    preemptions: int = 0
    waiting: int = 0
    running: int = 0
    used_blocks: int = 0
    num_blocks: int = 0
    wasted_tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    draft_seconds: float = 0.0
    host_seconds: float = 0.0
    first_token_seconds: tuple[float, ...] = ()

    def count(self, batch: Batch, tokens: int, seconds: float, waited: float, device: tuple[float, float]) -> None:
        """Add one step: its batch, generated tokens, wall time, time waiting, and device time, whole and for drafts."""
        self.steps += 1
        self.generated_tokens += tokens
        for drafts in batch.drafts:
            self.drafted_tokens += len(drafts)
            self.drafted_steps += bool(drafts)
        for request, start, end in zip(batch.requests, batch.starts, batch.ends, strict=False):
            if start < len(request.prompt):
                self.prompt_tokens += min(end, len(request.prompt)) - start
                self.reused_tokens += request.reused if start == request.reused else 0
        self.seconds += seconds
        self.host_seconds += seconds - waited
        self.device_seconds += device[0]
        self.draft_seconds += device[1]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by wall time."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the verified drafts that were right."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def accepted_per_step(self) -> float:
        """Mean number of right drafts of a request, over the steps in which it had drafts; each saves it a step."""
        return self.accepted_tokens / self.drafted_steps if self.drafted_steps else 0.0
