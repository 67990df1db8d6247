"""`Generator`: continuous batching of many requests over one paged cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

from torch import nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.cache.cache_owner import owns_cache, take_cache
from vattn.calibration.eval_mode import EvalMode
from vattn.config.arguments import known_keywords
from vattn.errors import CacheError, ConfigError, MissingPackageError, RequestError, VattnError
from vattn.generation.cache_blocks import CacheBlocks, longest_that_fits
from vattn.generation.detokenizer import TextStream
from vattn.generation.model_runner import Launched, Launcher
from vattn.generation.outputs import take_tokens
from vattn.generation.prompt_lookup import PromptLookup
from vattn.generation.prompts import Prompt, check_sampling, pair, read_prompt
from vattn.generation.request import FAILED, Progress, Request
from vattn.generation.sampler import processors
from vattn.generation.sampling import Sampling
from vattn.generation.scheduler import Batch, Scheduler
from vattn.generation.setup import (
    capture,
    check_count,
    check_kind,
    check_tokenizer,
    compiled,
    end_tokens,
    find_cache,
    graph_ladder,
    longest_request,
    make_builder,
    mixed_sizes,
)
from vattn.generation.statistics import Statistics
from vattn.generation.turn import Turn


class Generator:
    """Run many requests on one model: they join and leave a running batch, in chunks, on a paged cache.

    Args:
        model: takes `(input_ids [T], positions [T], logits_indices [N])` and returns logits `[N, vocab_size]`, such as
            what `vattn.integrations.transformers.enable` returned.
        tokenizer: with `encode(text)` and `decode(ids)`; without one, prompts are token ids.
        cache: what `vattn.allocate_kv_cache(model, ...)` returned, with groups (`hybrid=True`) or without; default
            `model.kv_cache`. It belongs to the newest generator; an older one refuses further steps, as it does behind
            `vattn.calibrate` or `vattn.audit` of the model.
        max_num_reqs: requests that run at once.
        token_budget: new tokens of one step; longer prompts are cut into chunks and mixed with decodes.
        max_seq_len: longest request, prompt and output; default what the cache can hold, at most 32768 and what the
            model was trained for.
        stop_token_ids: end tokens; default those of the model's generation config, if it has one.
        max_queue: most requests that wait; `None` for any number.
        reuse_prefixes: find blocks of equal content in the cache instead of computing them; those of other weights are
            found no more once a request comes while none runs (what is written through `.data` is not noticed).
        speculation: guess tokens and verify them together: fewer steps, the same tokens. Requests with
            a repetition penalty or logits processors of their own get no guesses.
        compile: `"layers"` compiles each kind of layer once, `"model"` the whole model, `"none"` nothing; default
            `"layers"` on CUDA and `"none"` elsewhere.
        compile_options: for `torch.compile`, such as `vattn.options()` under `"options"`.
        graph_sizes: numbers of decoding requests to capture as CUDA graphs; default a ladder up to `max_num_reqs` on
            CUDA, none elsewhere; `()` for none. With `speculation`, each is captured for steps with guesses too.
        mixed_graph_sizes: numbers of tokens to capture for steps that hold prompts, each with up to `max_num_reqs`
            requests; default a ladder up to 1535 and the token budget where decodes are captured and all layers run on
            TRITON_ATTN, else none; `()` for none. A step runs padded to the next size, and without a graph beyond the
            largest. It pays where launching the layers takes the host longer than the device computes.

    Attributes:
        graphs: the runner of the captured sizes, `None` without.
        draft_graphs: that of steps with guesses.
        mixed_graphs: that of steps with prompts.

    Raises:
        ConfigError: no model on vattn, no cache, or a value of another type or out of range.
        UnknownOptionError: a keyword that is none of these.
        UnsupportedRequestError: the model cannot be captured as a CUDA graph.

    The same tokens come out as one by one, up to the first step whose two best logits are closer than what matrix
    products of other shapes differ by: those of the model are not ours. Not thread-safe: add and step from one thread;
    a step inside of another is refused.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers import enable
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = enable(transformers.LlamaForCausalLM(config).eval(), num_blocks=8)
        >>> generator = vattn.Generator(model, max_num_reqs=4)
        >>> done = generator.generate([[1, 2, 3], [4, 5]], vattn.Sampling(max_new_tokens=5, stop_token_ids=()))
        >>> [len(request.output) for request in done]
        [5, 5]
    """

    @known_keywords
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        cache: KVCacheAllocation | None = None,
        max_num_reqs: int = 64,
        token_budget: int = 2048,
        max_seq_len: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
        max_queue: int | None = None,
        reuse_prefixes: bool = True,
        speculation: PromptLookup | None = None,
        compile: str | None = None,
        compile_options: dict[str, Any] | None = None,
        graph_sizes: Sequence[int] | None = None,
        mixed_graph_sizes: Sequence[int] | None = None,
    ) -> None:
        check_count("max_num_reqs", max_num_reqs)
        check_count("token_budget", token_budget)
        if max_queue is not None:
            check_count("max_queue", max_queue)
        if not isinstance(reuse_prefixes, bool):
            raise ConfigError(f"reuse_prefixes={reuse_prefixes!r:.60}", "True or False", "change reuse_prefixes")
        check_kind("speculation", speculation, PromptLookup)
        check_kind("compile_options", compile_options, dict)
        check_tokenizer(tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.cache = cache = find_cache(model, cache)
        self._mode = EvalMode(model)
        self.device = cache.device
        self.stop_token_ids = end_tokens(model, stop_token_ids)
        sizes = graph_ladder(graph_sizes, max_num_reqs, self.device)
        num_drafts = speculation.num_drafts if speculation is not None else 0
        max_seq_len = longest_request(model, max_seq_len, longest_that_fits(cache, token_budget))
        self._blocks = CacheBlocks(cache, max_num_reqs, max_seq_len, reuse_prefixes, model)
        self.scheduler = Scheduler(self._blocks, max_num_reqs, token_budget, max_seq_len, max_queue, speculation)
        capacity = max(2, token_budget + 1, max_num_reqs * (1 + num_drafts))
        builder = make_builder(model, cache, max_num_reqs, capacity, max_seq_len)
        mixed = mixed_sizes(mixed_graph_sizes, token_budget, max_num_reqs, sizes, builder)
        forward = compiled(model, compile, self.device, compile_options or {})
        graphs = capture(forward, builder, sizes, num_drafts, mixed, max_num_reqs)
        self.graphs, self.draft_graphs, self.mixed_graphs = graphs
        take_cache(cache.kv_caches[0], self)
        layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "bind_kv_cache")]
        self._layers = [(layer, layer.kv_cache.data_ptr()) for layer in layers[:1]]
        self._launcher = Launcher(forward, builder, graphs, self._blocks)
        self._ahead: Launched | None = None
        self._statistics = Statistics(num_blocks=cache.num_blocks - cache.reserved_blocks)
        self._first: list[float] = []
        self._turn = Turn(self, _HOLDING, self.scheduler, tokenizer)
        self._cancelled, self._streams = deque[Request](), 0
        # Whether a step has left nothing half done, and whether one that could not be launched was undone.
        self._whole = self._undone = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError("a copy of a generator", "one generator for a cache", "make a new one with Generator(model)")

    @known_keywords
    def add(self, prompt: Prompt, sampling: Sampling | None = None) -> Request:
        """Queue a prompt.

        Args:
            prompt: text, for a generator with a tokenizer, or token ids.
            sampling: default greedy, 64 tokens.

        Raises:
            RequestError: empty, longer than `max_seq_len` together with its output, token ids outside of the
                vocabulary, or a text or stop strings without a tokenizer.
            OutOfBlocksError: even the empty cache could not hold it.
            QueueFullError: too many are waiting.
            MissingPackageError: settings that need transformers.
            ConfigError: the model, or a part of it, is in training mode.
        """
        self._mode.check()
        vocab_size = getattr(self.model, "vocab_size", None)
        sampling = check_sampling(sampling, self.tokenizer, vocab_size)
        ids = read_prompt(prompt, self.tokenizer, vocab_size)
        processors(sampling)
        ends = self.stop_token_ids if sampling.stop_token_ids is None else frozenset(sampling.stop_token_ids)
        request = Request(ids, sampling, ends)
        if self.tokenizer is not None:
            request.stream = TextStream(self.tokenizer, sampling.stop_strings)
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, wherever it is, and give its blocks back; one that has ended stays as it is.

        While a step runs, in a logits processor or another thread, the request ends when the step does.

        Raises:
            RequestError: no request, or one of another generator.
        """
        if not isinstance(request, Request):
            raise RequestError(f"cancel({request!r:.60})", "what add() returned", "keep it for each prompt")
        self.scheduler.check_held(request)
        self._cancelled.append(request)
        if self._take_turn():
            self._end_step(True)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Progress]:
        """Compute one step; return what came of it for each request that got tokens or ended.

        The step after it is on its way already when this one returns, unless tokens have to be known to plan it. An
        error in the model leaves no request half computed: they wait, and the next step computes them again. So do they
        behind Ctrl-C or any other interruption, if need be with nothing left in the cache.

        Raises:
            CacheError: the model has another cache by now, or the cache another user.
            ConfigError: the model is in training mode; requests stay what they are.
            RequestError: a step inside of another.
        """
        self._mode.check_whole()
        if any(layer.kv_cache is None or layer.kv_cache.data_ptr() != place for layer, place in self._layers):
            raise CacheError(
                "a step of a generator whose model has another cache now",
                "the cache that the generator was made for",
                "make a new generator after allocating a cache",
            )
        if not owns_cache(self.cache.kv_caches[0], self):
            raise CacheError(
                "a step of a generator whose cache another generator, a calibration or an audit has taken",
                "one generator for a cache: the newest",
                "use that one or make a new one, or give each a model with a cache of its own",
            )
        if not self._take_turn(brief=False):
            raise RequestError(
                "a step inside of another, from a logits processor, a criterion, a tokenizer or another thread",
                "one step at a time, from one thread",
                "add requests there, and run them by the steps that run already",
            )
        self._whole = self._undone = False
        try:
            came = self._run_step()
        finally:
            self._end_step(self._whole)
        for one in came if self._streams else ():
            if one.request.watcher is not None:
                one.request.watcher.append(one)
        return came

    def _take_turn(self, brief: bool = True) -> bool:
        """Let this thread change requests; behind an interruption they wait as they did before that step."""
        if not self._turn.take(brief):
            return False
        if self._turn.started_over:
            self._ahead, self._turn.started_over = None, False
        return True

    def _end_step(self, whole: bool) -> None:
        """End the requests that were cancelled meanwhile, and let the next step begin."""
        ended = False
        try:
            while whole and self._cancelled:
                self.scheduler.cancel(self._cancelled[0])
                self._cancelled.popleft()
            ended = whole
        finally:
            self._turn.give(ended)

    def _run_step(self) -> list[Progress]:
        begin = time.perf_counter()
        now, self._ahead = self._ahead or self._next(None), None
        if now is None:
            self._whole = True
            return []
        self._publish(now.batch)
        # The device goes on while the host deals with this step.
        self._ahead = self._next(now) if self._can_look_ahead(now.batch) else None
        came = self._accept(now)
        self._count(now, came, begin)
        self._whole = True
        return came

    def _next(self, before: Launched | None) -> Launched | None:
        """Launch the next step; where that fails and is undone, the step before is still on its way."""
        try:
            return self._launch(before)
        except BaseException:
            self._ahead = before
            self._whole = self._undone
            raise

    def _can_look_ahead(self, now: Batch) -> bool:
        """Whether the next step can be launched before the tokens of this one are known on the host."""
        if now.follows or self.scheduler.lookup is not None:
            return now.follows
        sampled = [request for request in now.requests[: now.ready] if not request.greedy]
        return not any(request.sampling.needs_history for request in sampled)

    def _launch(self, before: Launched | None) -> Launched | None:
        """Launch the next step, `None` if there is nothing to do; `before` is on its way."""
        batch = self.scheduler.follow(before.batch) if before is not None else None
        if batch is None:
            self._await_tokens(before)
            batch = self.scheduler.schedule()
        if not batch.requests:
            return None
        try:
            return self._launcher.launch(batch, before)
        except BaseException:
            if batch.follows:
                self._await_tokens(before)
            for request in reversed(batch.requests):
                self.scheduler.preempt(request)
            self._undone = True
            raise

    def _await_tokens(self, before: Launched | None) -> None:
        """Count the tokens that a step on its way will bring."""
        for place, request in enumerate(before.batch.requests[: before.batch.ready] if before is not None else ()):
            # A request that is sure to end with that token needs no further step.
            if not request.coming and request.ended is None and request.num_tokens + 1 < request.limit:
                request.coming, request.place = True, place
                request.behind += 1

    def _accept(self, now: Launched) -> list[Progress]:
        """Wait for a step, and give its requests their tokens."""
        tokens, usable = now.read()
        if now.batch.drafts:
            return self._accept_drafts(now, tokens, usable)
        if self._ahead is not None and self._ahead.batch.follows:
            run = now.batch.run
            assert run is not None
            if run.plain() and 0 not in usable and run.stops.isdisjoint(tokens):
                deque(map(list.append, map(_OUTPUT, run.requests), tokens), maxlen=0)
                return list(map(_PROGRESS, zip(run.requests, repeat(""), zip(tokens))))
            for request in now.batch.requests:
                request.coming = True
        came = []
        for place, (request, token) in enumerate(zip(now.batch.requests, tokens, strict=False)):
            if request.ended is not None:
                continue
            if request.coming and request.plain and usable[place] and token not in request.stop_token_ids:
                # The most frequent case, and `take_tokens` in short: its next step is on its way too.
                request.output.append(token)
                request.coming = False
                came.append(Progress(request, "", (token,)))
            else:
                came.append(self._take(request, [token], [usable[place]], now.errors.get(place)))
        return came

    def _accept_drafts(self, now: Launched, tokens: list[int], usable: list[int]) -> list[Progress]:
        """Give requests the tokens that follow right guesses, and the one that follows the last right guess."""
        batch, came, stop = now.batch, [], 0
        for request, end, drafts in zip(batch.requests[: batch.ready], batch.ends, batch.drafts, strict=False):
            begin, stop = stop, stop + 1 + len(drafts)
            if request.ended is not None:
                continue
            right = next((i for i, draft in enumerate(drafts) if draft != tokens[begin + i]), len(drafts))
            # Keys and values of wrong guesses are written over.
            request.cached = end - len(drafts) + right
            request.drafted += len(drafts)
            request.accepted += right
            self._statistics.accepted_tokens += right
            chosen = slice(begin, begin + 1 + right)
            came.append(self._take(request, tokens[chosen], usable[chosen], now.errors.get(begin)))
        return came

    def _take(self, request: Request, tokens: list[int], usable: list[int], error: VattnError | None) -> Progress:
        """Give a request its tokens, and take it out if it ends."""
        first = request.first_token is None
        progress = take_tokens(request, tokens, usable, error)
        if first and request.first_token is not None:
            self._first.append(request.first_token - request.arrived)
        if request.ended is not None:
            if request.state == FAILED:
                self._blocks.forget(request)
            self.scheduler.retire(request)
        return progress

    def _publish(self, batch: Batch) -> None:
        """Make the blocks that a step fills with known tokens known by their content."""
        size, drafts = self._blocks.block_size, batch.drafts
        if batch.follows:
            assert batch.run is not None
            for place in batch.run.full(batch.behind):
                self._blocks.publish(batch.requests[place], batch.run.ends[place] + batch.behind)
            return
        ends = [end - len(guesses) for end, guesses in zip(batch.ends, drafts, strict=True)] if drafts else batch.ends
        for request, end in zip(batch.requests, ends, strict=True):
            if end // size > request.published:
                self._blocks.publish(request, end)

    @known_keywords
    def stream(
        self, prompts: Iterable[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Iterator[Progress]:
        """Run prompts to their end, yielding what each step brought for them, in the order in which it came.

        Prompts are queued when the iteration begins. Those that cannot be served come first, as failed requests.
        Stopping the iteration cancels what is left. Streams may take turns: whoever runs a step, each gets its own.

        Raises:
            ConfigError: see `generate`.
        """
        self._mode.check()
        pairs = pair(prompts, sampling, self.tokenizer)

        def run() -> Iterator[Progress]:
            yield from self._run_to_end(pairs, [])

        return run()

    @known_keywords
    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool = False,
    ) -> list[Request]:
        """Run prompts to their end and return their requests, in the order of the prompts.

        Args:
            prompts: texts or lists of token ids.
            sampling: one for all, or one each.
            progress: show a bar (needs tqdm).

        Returns:
            Requests with `output` and `text`; those that failed have an `error`, and do not stop the others.

        Raises:
            ConfigError: no list of prompts, one that is neither a text nor a sequence, a text without a tokenizer, or
                as many samplings as neither one nor the prompts; a model, or a part of it, in training mode. Nothing
                has run then.
        """
        if not isinstance(progress, bool):
            raise ConfigError(f"progress={progress!r:.60}", "True or False", "progress=True shows a bar")
        self._mode.check()
        pairs = pair(prompts, sampling, self.tokenizer)
        requests: list[Request] = []
        bar = _bar(len(pairs)) if progress else None
        for came in self._run_to_end(pairs, requests):
            if bar is not None and came.request.done:
                bar.update()
        if bar is not None:
            bar.close()
        return requests

    def statistics(self) -> Statistics:
        """Return counts and times since the generator was made, and what it holds now."""
        if self._turn.torn and self._take_turn():
            self._end_step(True)
        now, running = self._statistics, self.scheduler.running
        now.waiting, now.running = len(self.scheduler.waiting), len(running)
        now.used_blocks, now.preemptions = self._blocks.pool.num_used, self.scheduler.preemptions
        now.wasted_tokens = self._blocks.num_wasted(running)
        now.first_token_seconds = tuple(self._first)
        return now

    def _add_or_fail(self, prompt: Prompt, sampling: Sampling | None) -> Request:
        try:
            return self.add(prompt, sampling)
        except VattnError as error:
            request = Request(self._readable(prompt), sampling if isinstance(sampling, Sampling) else Sampling())
            request.holder = self.scheduler.mark
            request.end(FAILED, "error", error)
            return request

    def _readable(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt that was refused; none where it has none."""
        try:
            return read_prompt(prompt, self.tokenizer, None)
        except VattnError:
            return []

    def _run_to_end(
        self, pairs: Sequence[tuple[Prompt, Sampling | None]], requests: list[Request]
    ) -> Iterator[Progress]:
        """Queue prompts, add their requests to a list, and run them to their end; steps of others may do so too."""
        self._mode.check()
        self._streams += 1
        try:
            for prompt, sampling in pairs:
                requests.append(self._add_or_fail(prompt, sampling))
            came = deque(Progress(request, "", ()) for request in requests if request.done)
            for request in requests:
                request.watcher = came
            while came or any(not request.done for request in requests):
                if came:
                    yield came.popleft()
                else:
                    self.step()
        finally:
            self._streams -= 1
            # All at once: another interruption ends none of them later than the next step.
            self._cancelled.extend(request for request in requests if not request.done)
            for request in requests:
                request.watcher = None
            if self._take_turn():
                self._end_step(True)

    def _count(self, now: Launched, came: Sequence[Progress], begin: float) -> None:
        so_far, batch = self._statistics, now.batch
        so_far.steps += 1
        so_far.generated_tokens += sum(map(len, map(_TOKENS, came)))
        for drafts in batch.drafts:
            so_far.drafted_tokens += len(drafts)
            so_far.drafted_steps += bool(drafts)
        for request, start, end in zip(batch.requests, batch.starts, batch.ends, strict=False):
            if start < len(request.prompt):
                so_far.prompt_tokens += min(end, len(request.prompt)) - start
                so_far.reused_tokens += request.reused if start == request.reused else 0
        taken = time.perf_counter() - begin
        so_far.seconds += taken
        so_far.host_seconds += taken - now.waited
        so_far.device_seconds += now.device_seconds


_HOLDING = (Generator.step.__code__, Generator._end_step.__code__)
"""Methods that run while a generator has its turn."""

_TOKENS, _OUTPUT = attrgetter("tokens"), attrgetter("output")
_PROGRESS = partial(tuple.__new__, Progress)
"""`Progress` of a tuple of its fields."""


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingPackageError("progress=True without tqdm", "tqdm", "pip install tqdm") from error
    return tqdm(total=total, unit="request")
