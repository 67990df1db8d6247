"""`StepLoop`: steps of a model, what becomes of their tokens, and how a step that fails is undone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from vattn.cache.bindings import CacheBindings, cache_claim
from vattn.cache.copies import move_slots
from vattn.calibration.eval_mode import EvalMode
from vattn.errors import CacheError, RequestError, VattnError
from vattn.generation.batch import Batch
from vattn.generation.detokenizer import TextStream, takes
from vattn.generation.model_runner import Launched, ModelRunner
from vattn.generation.outputs import take_tokens
from vattn.generation.request import FAILED, Progress, Request
from vattn.generation.scheduler import Scheduler
from vattn.generation.statistics import Statistics
from vattn.generation.transfers import on_device


class StepLoop:
    """Run steps of a model, the next one launched while the host handles the last.

    Args:
        model: whose cache no other user may take.
        tokenizer: makes the text of outputs; `None` for none.
        scheduler: plans the steps.
        runner: launches them.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.model, self.tokenizer, self.scheduler, self._runner = model, tokenizer, scheduler, runner
        self._blocks = scheduler.blocks
        self._mode = EvalMode(model)
        layers = [layer for layer in model.modules() if hasattr(layer, "bind_kv_cache")]
        self._bindings = CacheBindings(layers, cache_claim)
        self._skips_special_tokens = takes(getattr(tokenizer, "decode", None), "skip_special_tokens")
        self._ahead: Launched | None = None
        # What launching the next step raised, and the requests that were left then.
        self._error: tuple[Exception, list[Request]] | None = None
        self._statistics, self._first = Statistics(), list[float]()
        # Reentrant: a signal handler may cancel requests too. It is held for moments, never during a step.
        self._lock, self._stepping = threading.RLock(), False
        self._cancelled, self._streams = list[Request](), 0

    def _queue(self, choices: tuple[Request, ...]) -> None:
        """Queue the requests of a prompt, all or none."""
        with self._lock:
            try:
                self.scheduler.add(*choices)
            except VattnError:
                for request in choices:
                    if request.adapter is not None:
                        request.adapter.requests.discard(request)
                raise

    def _open_text(self, request: Request) -> None:
        """Let a request's text begin anew."""
        if self.tokenizer is not None:
            sampling, skip = request.sampling, request.sampling.skip_special_tokens
            skip = True if skip is None and self._skips_special_tokens else skip
            request.stream = TextStream(self.tokenizer, sampling.stop_strings, sampling.min_tokens, skip)
            request.text = ""

    def cancel(self, request: Request) -> None:
        """End a request and free its blocks; one that has ended stays as it is. The first of several ends all choices.

        While a step runs, in a logits processor or another thread, the request ends when the step does.

        Raises:
            RequestError: no request, or one of another generator.
        """
        if not isinstance(request, Request):
            raise RequestError(f"cancel({request!r:.60})", "what add() returned", "keep it for each prompt")
        self.scheduler.check_held(request)
        with self._lock:
            for choice in (request,) if request.index else request.choices:
                if self._stepping:
                    self._cancelled.append(choice)
                else:
                    self.scheduler.cancel(choice)

    def fail(self, request: Request, error: VattnError) -> None:
        """End a request with an error and free its blocks; one that has ended stays as it is.

        Raises:
            RequestError: a request of another generator.
        """
        self.scheduler.check_held(request)
        with self._lock:
            if not request.done:
                self.scheduler.retire(request)
                request.end(FAILED, "error", error)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Progress]:
        """Compute one step; return the new tokens and text of each request that got tokens or ended.

        The next step is launched before this one returns, unless its plan depends on the new tokens. A step that
        raises is undone: its requests wait, and later steps compute them again from their tokens.

        Raises:
            CacheError: the model has another cache by now, or the cache another user.
            ConfigError: the model is in training mode, or this is another rank than 0; requests stay what they are.
            RankError: another rank failed, in this step or before.
            RequestError: another step is running.
        """
        self._runner.steps.check()
        self._mode.check_whole()
        self._check_cache()
        with self._lock:
            if self._stepping:
                raise RequestError(
                    "a step inside of another, from a logits processor, a criterion, a tokenizer or another thread",
                    "one step at a time, from one thread",
                    "add requests there, and run them by the steps that run already",
                )
            snapshot, self._stepping = self.scheduler.snapshot(), True
        try:
            progress = self._run_step()
        except BaseException:
            self._undo(snapshot)
            raise
        finally:
            with self._lock:
                self._stepping = False
                while self._cancelled:
                    self.scheduler.cancel(self._cancelled.pop())
        for one in progress if self._streams else ():
            if one.request.watcher is not None:
                one.request.watcher.append(one)
        return progress

    def _check_cache(self) -> None:
        if self._bindings.changed() is not None:
            raise CacheError(
                "a step of a generator whose cache was bound again, or taken by another generator, a calibration or an "
                "audit",
                "one generator for a cache: the newest",
                "use that one or make a new one, or give each a model with a cache of its own",
            )

    def _undo(self, snapshot: Mapping[Request, int]) -> list[Request]:
        """Undo a step: its requests have the tokens of the snapshot and wait, and the cache is empty; return them."""
        self._ahead = None
        with self._lock:
            unfinished = self.scheduler.start_over(snapshot)
        for request in unfinished:
            self._open_text(request)
            if request.stream is not None:
                for count in range(len(request.output)):
                    request.stream.push(request.output[: count + 1])
                request.text = request.stream.text
        return unfinished

    def _run_step(self) -> list[Progress]:
        begin = time.perf_counter()
        if self._error is not None:
            (error, requests), self._error = self._error, None
            if not all(request.done for request in requests):
                raise error
        now, self._ahead = self._ahead or self._launch(None), None
        if now is None:
            return []
        self._publish(now.batch)
        # The device computes the next step while the host handles this one.
        self._ahead = self._launch(now) if self._can_look_ahead(now.batch) else None
        progress = self._accept(now)
        if self.scheduler.source is not None and self.scheduler.source.launches:
            self._launch_next()
        tokens = sum(map(len, map(_TOKENS, progress)))
        device = now.device_seconds, now.draft_seconds
        self._statistics.count(now.batch, tokens, time.perf_counter() - begin, now.waited, device)
        return progress

    def _launch_next(self) -> None:
        """Launch the next step as soon as the tokens of this one are known, so that the device waits for no caller.

        One that fails is undone, and the next call raises its error, unless its requests are cancelled before: the
        tokens of this step are to be returned.
        """
        try:
            self._ahead = self._launch(None)
        except Exception as error:
            self._error = error, self._undo(self.scheduler.snapshot())

    def _can_look_ahead(self, now: Batch) -> bool:
        """Whether the next step can be launched before the tokens of this one are known on the host."""
        if now.follows or self.scheduler.source is not None:
            return now.follows
        return not any(request.needs_history for request in now.requests[: now.ready])

    def _launch(self, before: Launched | None) -> Launched | None:
        """Launch the next step while `before` still runs; return `None` if there is nothing to do."""
        batch = self.scheduler.follow(before.batch) if before is not None else None
        if batch is None:
            if before is not None:
                _expect_tokens(before.batch)
            batch = self.scheduler.schedule()
        return self._runner.launch(batch, before) if batch.requests else None

    def _accept(self, now: Launched) -> list[Progress]:
        """Wait for a step, and give its requests their tokens."""
        tokens, usable = self._runner.steps.read(now.read)
        if now.batch.prompt_logprobs and now.step_logprobs is not None:
            now.step_logprobs.store_prompts()
        if now.batch.drafts:
            return self._accept_drafts(now, tokens, usable)
        if self._ahead is not None and self._ahead.batch.follows:
            run = now.batch.run
            assert run is not None
            if run.plain() and 0 not in usable and run.stops.isdisjoint(tokens):
                deque(map(list.append, map(_OUTPUT, run.requests), tokens), maxlen=0)
                return list(map(_PROGRESS, zip(run.requests, repeat(""), zip(tokens))))
            for request in now.batch.requests:
                request.pending = True
        progress = []
        for row, (request, token) in enumerate(zip(now.batch.requests, tokens, strict=False)):
            if request.ended is not None:
                continue
            if request.pending and request.plain and usable[row] and token not in request.stop_token_ids:
                # The most frequent case, `take_tokens` in short: the request's next step runs too.
                request.output.append(token)
                request.pending = False
                progress.append(Progress(request, "", (token,)))
            else:
                progress.append(self._take(now, [row], request, [token], [usable[row]]))
        return progress

    def _accept_drafts(self, now: Launched, tokens: list[int], usable: list[int]) -> list[Progress]:
        """Give requests their right drafts, and the token after the last right one."""
        batch, progress, stop = now.batch, [], 0
        moves = list[tuple[int, int]]()
        for request, end, drafts in zip(batch.requests[: batch.ready], batch.ends, batch.drafts, strict=False):
            begin, stop = stop, stop + 1 + len(drafts)
            if request.ended is not None:
                # Cancelled meanwhile: its drafts were neither right nor wrong.
                self._statistics.drafted_tokens -= len(drafts)
                continue
            path, first = self._right(batch, drafts, tokens[begin:stop]), end - len(drafts)
            if batch.tree is not None:
                # A tree may be deeper than the request has tokens left.
                path = path[: request.limit - request.num_tokens - 1]
                batch.paths[request] = path
                moves += self._blocks.moves(request, first - 1, path)
            # Later tokens overwrite the keys and values of wrong drafts.
            request.cached = first + len(path)
            request.drafted += len(drafts)
            request.accepted += len(path)
            self._statistics.accepted_tokens += len(path)
            rows = [begin, *(begin + row for row in path)]
            taken = [*(drafts[row - 1] for row in path), tokens[rows[-1]]]
            progress.append(self._take(now, rows, request, taken, [usable[row] for row in rows]))
        if moves:
            source, target = (on_device(slots, self._blocks.cache.device) for slots in zip(*moves, strict=True))
            with torch.inference_mode():
                move_slots(self.model, source, target)
        return progress

    def _right(self, batch: Batch, drafts: list[int], chosen: list[int]) -> list[int]:
        """Return the rows of the drafts that are what the model chose, counted from the request's first row."""
        if batch.tree is not None and drafts:
            return batch.tree.accepted(drafts, chosen)
        count = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        return [*range(1, 1 + count)]

    def _take(self, now: Launched, rows: list[int], request: Request, tokens: list[int], usable: list[int]) -> Progress:
        """Give a request its tokens of a step, which are from a row on, and take it out if it ends."""
        first = request.first_token is None
        progress = take_tokens(request, tokens, usable, now.errors.get(rows[0]), now.logprobs(rows))
        if first and request.first_token is not None:
            self._first.append(request.first_token - request.arrived)
        if request.ended is not None:
            if request.state == FAILED:
                self._blocks.forget(request)
            self.scheduler.retire(request)
        return progress

    def _publish(self, batch: Batch) -> None:
        """Publish the blocks that a step fills with known tokens."""
        size, drafts = self._blocks.block_size, batch.drafts
        if batch.follows:
            assert batch.run is not None
            for row in batch.run.full(batch.offset):
                self._blocks.publish(batch.requests[row], batch.run.ends[row] + batch.offset)
            return
        ends = [end - len(draft) for end, draft in zip(batch.ends, drafts, strict=True)] if drafts else batch.ends
        for request, end in zip(batch.requests, ends, strict=True):
            if end // size > request.published:
                self._blocks.publish(request, end)


_TOKENS, _OUTPUT = attrgetter("tokens"), attrgetter("output")
_PROGRESS = partial(tuple.__new__, Progress)
"""Make a `Progress` from a tuple of its fields."""


def _expect_tokens(batch: Batch) -> None:
    """Count the tokens that a running step will choose, except a request's last one."""
    for row, request in enumerate(batch.requests[: batch.ready]):
        if not request.pending and request.ended is None and request.num_tokens + 1 < request.limit:
            request.pending, request.pending_row = True, row
            request.uncached += 1
