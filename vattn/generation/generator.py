"""`Generator`: continuous batching of many requests over one paged cache."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

from torch import nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.cache.bindings import CacheBindings, cache_claim, take_cache
from vattn.calibration.eval_mode import EvalMode
from vattn.config.arguments import check_switches, read_count
from vattn.errors import CacheError, ConfigError, MissingPackageError, RequestError, VattnError
from vattn.generation.cache_blocks import CacheBlocks, longest_that_fits
from vattn.generation.chat import Chat, is_conversation
from vattn.generation.default_sampling import default_sampling
from vattn.generation.detokenizer import TextStream, takes
from vattn.generation.grammar import GrammarCompiler
from vattn.generation.model_runner import Launched, ModelRunner
from vattn.generation.outputs import take_tokens
from vattn.generation.prompt_lookup import PromptLookup
from vattn.generation.prompts import Prompt, Submission, check_sampling, read_bad_words, read_prompt, read_prompts
from vattn.generation.request import FAILED, Progress, Request
from vattn.generation.sampling import Sampling
from vattn.generation.scheduler import Batch, Scheduler
from vattn.generation.setup import (
    capture,
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
from vattn.kv_transfer.connector import Salt, salt_digest


class Generator:
    """Run many requests on one model: they join and leave a running batch, in chunks, on a paged cache.

    Args:
        model: takes `(input_ids [T], positions [T], logits_indices [N])` and returns logits `[N, vocab_size]`, such as
            what `vattn.integrations.transformers.enable` returned.
        tokenizer: with `encode(text)` and `decode(ids)`; without one, prompts are token ids.
        cache: what `vattn.allocate_kv_cache(model, ...)` returned, with groups (`hybrid=True`) or without; default
            `model.kv_cache`. It belongs to the newest generator: an older one refuses further steps, and so does this
            one after `vattn.calibrate` or `vattn.audit` of the model.
        max_num_reqs: requests that run at once.
        token_budget: new tokens of one step; longer prompts are split into chunks and mixed with decodes.
        max_seq_len: longest request, prompt and output; default what the cache can hold, at most 32768 and what the
            model was trained for.
        stop_token_ids: end tokens; default: from the model's generation config, if it has one.
        max_queue: most requests that wait; `None` for any number.
        reuse_prefixes: reuse cached blocks of equal content. After a change of the model (weights, adapters, hooks,
            attributes), blocks from before are not found; changes through `.data` are not noticed.
        speculation: draft tokens by prompt lookup and verify them together: fewer steps, the same tokens. Requests with
            penalties, bad words of several tokens or logits processors get no drafts.
        compile: `"layers"` compiles each kind of layer once, `"model"` the whole model, `"none"` nothing; default
            `"layers"` on CUDA and `"none"` elsewhere.
        compile_options: for `torch.compile`, such as `vattn.options()` under `"options"`.
        graph_sizes: numbers of decoding requests to capture as CUDA graphs; default a ladder up to `max_num_reqs` on
            CUDA, none elsewhere; `()` for none. With `speculation`, each is captured for steps with drafts too.
        mixed_graph_sizes: numbers of tokens to capture for steps that hold prompts, each with up to `max_num_reqs`
            requests; default a ladder up to 1535 and the token budget where decodes are captured and all layers run on
            TRITON_ATTN, else none; `()` for none. A step runs padded to the next size, and without a graph beyond the
            largest. It helps where the host takes longer to launch the layers than the device to compute them.

    Attributes:
        default_sampling: of requests without one, what the model's generation config asks for; without one greedy.
        graphs: the runner of the captured sizes, `None` without.
        draft_graphs: the runner of steps with drafts.
        mixed_graphs: the runner of steps with prompts.

    Raises:
        ConfigError: no model on vattn, no cache, or a value of another type or out of range.
        UnknownOptionError: an unknown keyword.
        UnsupportedRequestError: the model cannot be captured as a CUDA graph.

    Each request gets the tokens of a run by itself, up to the first step in which the two best logits are closer than
    the rounding of matrix products of other shapes. Any thread may add and cancel; one thread at a time runs a step.

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
        counts = {"max_num_reqs": max_num_reqs, "token_budget": token_budget, "max_queue": max_queue}
        for name, count in counts.items():
            if name != "max_queue" or count is not None:
                read_count(name, count, 1, f"change {name}")
        check_switches(reuse_prefixes=reuse_prefixes)
        check_kind("speculation", speculation, PromptLookup)
        check_kind("compile_options", compile_options, dict)
        check_tokenizer(tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.cache = cache = find_cache(model, cache)
        self._mode = EvalMode(model)
        self.device = cache.device
        self.stop_token_ids = end_tokens(model, stop_token_ids)
        self.default_sampling = default_sampling(model, tokenizer)
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
        take_cache(cache.kv_caches[0])
        layers = [layer for layer in model.modules() if hasattr(layer, "bind_kv_cache")]
        self._bindings = CacheBindings(layers, cache_claim)
        self._runner = ModelRunner(forward, builder, graphs, self._blocks)
        self._skips_special_tokens = takes(getattr(tokenizer, "decode", None), "skip_special_tokens")
        self._grammar_compiler: GrammarCompiler | None = None
        self._ahead: Launched | None = None
        self._statistics = Statistics(num_blocks=cache.num_blocks - cache.reserved_blocks)
        self._first: list[float] = []
        # Reentrant: a signal handler may cancel requests too. It is held for moments, never during a step.
        self._lock, self._stepping = threading.RLock(), False
        self._cancelled, self._streams = list[Request](), 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError("a copy of a generator", "one generator for a cache", "make a new one with Generator(model)")

    def add(self, prompt: Prompt, sampling: Sampling | None = None, *, cache_salt: Salt = "") -> Request:
        """Queue a prompt, and return its request; with `Sampling(n=...)` the first of `request.choices`.

        Args:
            prompt: text, for a generator with a tokenizer; token ids, in a list or a tensor; what a tokenizer returned,
                with `input_ids`; or a `Chat`.
            sampling: default `default_sampling`.
            cache_salt: text, bytes or an integer. Requests share cached blocks with those of the same salt alone: give
                it to keep tenants apart, and for all that makes equal ids mean something else, such as images.

        Raises:
            RequestError: empty, longer than `max_seq_len` together with its output, token ids outside of the
                vocabulary, or a text or stop strings without a tokenizer.
            OutOfBlocksError: even the empty cache could not hold it.
            QueueFullError: too many are waiting.
            MissingPackageError: a grammar without xgrammar.
            ConfigError: the model, or a part of it, is in training mode; a salt of another type.
        """
        self._mode.check()
        salt_digest(self._blocks.block_size, cache_salt, "cache_salt")
        vocab_size = getattr(self.model, "vocab_size", None)
        sampling = self.default_sampling if sampling is None else sampling
        check_sampling(sampling, self.tokenizer, vocab_size)
        ids = read_prompt(prompt, self.tokenizer, vocab_size)
        ends = self.stop_token_ids if sampling.stop_token_ids is None else frozenset(sampling.stop_token_ids)
        words = read_bad_words(sampling, self.tokenizer, vocab_size)
        choices = tuple(Request(ids, sampling, ends, cache_salt, words, index) for index in range(sampling.candidates))
        for request in choices:
            request.choices = choices
            if sampling.grammar is not None:
                request.matcher = self._grammars().matcher(sampling.grammar, ends)
            self._open_text(request)
        with self._lock:
            self.scheduler.add(*choices)
        return choices[0]

    def _grammars(self) -> GrammarCompiler:
        """Return what compiles grammars for the tokenizer, made by the first request that has one."""
        if self._grammar_compiler is None:
            vocab_size = getattr(self.model, "vocab_size", None)
            self._grammar_compiler = GrammarCompiler(self.tokenizer, vocab_size, self.stop_token_ids)
        return self._grammar_compiler

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
            ConfigError: the model is in training mode; requests stay what they are.
            RequestError: another step is running.
        """
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

    def _undo(self, snapshot: Mapping[Request, int]) -> None:
        """Undo a step: its requests have the tokens of the snapshot and wait, and the cache is empty."""
        self._ahead = None
        with self._lock:
            unfinished = self.scheduler.start_over(snapshot)
        for request in unfinished:
            self._open_text(request)
            if request.stream is not None:
                for count in range(len(request.output)):
                    request.stream.push(request.output[: count + 1])
                request.text = request.stream.text

    def _run_step(self) -> list[Progress]:
        begin = time.perf_counter()
        now, self._ahead = self._ahead or self._launch(None), None
        if now is None:
            return []
        self._publish(now.batch)
        # The device computes the next step while the host handles this one.
        self._ahead = self._launch(now) if self._can_look_ahead(now.batch) else None
        progress = self._accept(now)
        tokens = sum(map(len, map(_TOKENS, progress)))
        self._statistics.count(now.batch, tokens, time.perf_counter() - begin, now.waited, now.device_seconds)
        return progress

    def _can_look_ahead(self, now: Batch) -> bool:
        """Whether the next step can be launched before the tokens of this one are known on the host."""
        if now.follows or self.scheduler.lookup is not None:
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
        tokens, usable = now.read()
        if now.batch.scored and now.measured is not None:
            now.measured.note_prompts()
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
                progress.append(self._take(now, row, request, [token], [usable[row]]))
        return progress

    def _accept_drafts(self, now: Launched, tokens: list[int], usable: list[int]) -> list[Progress]:
        """Give requests their right drafts, and the token after the last right one."""
        batch, progress, stop = now.batch, [], 0
        for request, end, drafts in zip(batch.requests[: batch.ready], batch.ends, batch.drafts, strict=False):
            begin, stop = stop, stop + 1 + len(drafts)
            if request.ended is not None:
                continue
            right = next((i for i, draft in enumerate(drafts) if draft != tokens[begin + i]), len(drafts))
            # Later tokens overwrite the keys and values of wrong drafts.
            request.cached = end - len(drafts) + right
            request.drafted += len(drafts)
            request.accepted += right
            self._statistics.accepted_tokens += right
            chosen = slice(begin, begin + 1 + right)
            progress.append(self._take(now, begin, request, tokens[chosen], usable[chosen]))
        return progress

    def _take(self, now: Launched, row: int, request: Request, tokens: list[int], usable: list[int]) -> Progress:
        """Give a request its tokens of a step, which are from a row on, and take it out if it ends."""
        first = request.first_token is None
        progress = take_tokens(request, tokens, usable, now.errors.get(row), now.logprobs(row, len(tokens)))
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

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = "",
    ) -> Iterator[Progress]:
        """Run prompts to their end and yield the progress of each step.

        Prompts are queued when the iteration begins. Refused ones are yielded first, as failed requests. Stopping the
        iteration cancels the rest. Several streams may run in turn: each yields the progress of its own requests.

        Raises:
            ConfigError: see `generate`.
        """
        self._mode.check()
        submissions = read_prompts(prompts, sampling, cache_salt, self.tokenizer)

        def run() -> Iterator[Progress]:
            yield from self._run_to_end(submissions, [])

        return run()

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = "",
        progress: bool = False,
    ) -> list[Request]:
        """Run prompts to their end and return their requests, in the order of the prompts.

        Args:
            prompts: a list of prompts, see `add`, or what a tokenizer returned for several texts.
            sampling: one for all, or one each.
            cache_salt: one for all, or one each; see `add`.
            progress: show a bar (needs tqdm).

        Returns:
            Requests with `output` and `text`; those that failed have an `error`, and do not stop the others. With
            `Sampling(n=...)` each has the others of its prompt in `choices`.

        Raises:
            ConfigError: no list of prompts, one that is neither a text nor a sequence, a text without a tokenizer, or
                neither one sampling nor one each, or salts likewise; a model, or a part of it, in training mode.
                Nothing has run then.
        """
        check_switches(progress=progress)
        self._mode.check()
        submissions = read_prompts(prompts, sampling, cache_salt, self.tokenizer)
        requests: list[Request] = []
        bar = _bar(len(submissions)) if progress else None
        for one in self._run_to_end(submissions, requests):
            if bar is not None and all(choice.done for choice in one.request.choices):
                bar.update()
        if bar is not None:
            bar.close()
        return requests

    def chat(
        self,
        messages: Sequence[Any],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = "",
        progress: bool = False,
        **options: Any,
    ) -> Any:
        """Answer a conversation, or several, and return its request, or theirs.

        Args:
            messages: a conversation, or a list of conversations; see `Chat`.
            sampling, cache_salt, progress: see `generate`.
            **options: see `Chat`.

        Raises:
            ConfigError: see `generate`; no conversation.
        """
        alone = is_conversation(messages)
        chats = [Chat(each, **options) for each in ([messages] if alone else messages)]
        done = self.generate(chats, sampling, cache_salt=cache_salt, progress=progress)
        return done[0] if alone else done

    def statistics(self) -> Statistics:
        """Return counts and times since the generator was made, and the requests and blocks that it holds."""
        now, running = self._statistics, self.scheduler.running
        now.waiting, now.running = len(self.scheduler.waiting), len(running)
        now.used_blocks, now.preemptions = self._blocks.pool.num_used, self.scheduler.preemptions
        now.wasted_tokens = self._blocks.num_wasted(running)
        now.first_token_seconds = tuple(self._first)
        return now

    def _add_or_fail(self, prompt: Prompt, sampling: Sampling | None, cache_salt: Salt) -> Request:
        try:
            return self.add(prompt, sampling, cache_salt=cache_salt)
        except VattnError as error:
            request = Request(self._readable(prompt), sampling if isinstance(sampling, Sampling) else Sampling())
            request.holder = self.scheduler.mark
            request.end(FAILED, "error", error)
            return request

    def _readable(self, prompt: Prompt) -> list[int]:
        """Return the ids of a refused prompt, `[]` if it has none."""
        try:
            return read_prompt(prompt, self.tokenizer, None)
        except VattnError:
            return []

    def _run_to_end(self, submissions: Sequence[Submission], requests: list[Request]) -> Iterator[Progress]:
        """Queue prompts, append their requests to a list, and yield their progress until all have ended."""
        self._mode.check()
        self._streams += 1
        try:
            for submission in submissions:
                requests.append(self._add_or_fail(*submission))
            queue = deque(Progress(request, "", ()) for request in requests if request.done)
            choices = [choice for request in requests for choice in request.choices]
            for choice in choices:
                choice.watcher = queue
            while queue or any(not choice.done for choice in choices):
                if queue:
                    yield queue.popleft()
                else:
                    self.step()
        finally:
            self._streams -= 1
            for request in requests:
                for choice in request.choices:
                    choice.watcher = None
                self.cancel(request)


_TOKENS, _OUTPUT = attrgetter("tokens"), attrgetter("output")
_PROGRESS = partial(tuple.__new__, Progress)
"""Make a `Progress` from a tuple of its fields."""


def _expect_tokens(batch: Batch) -> None:
    """Count the tokens that a running step will choose, except a request's last one."""
    for place, request in enumerate(batch.requests[: batch.ready]):
        if not request.pending and request.ended is None and request.num_tokens + 1 < request.limit:
            request.pending, request.pending_row = True, place
            request.uncached += 1


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingPackageError("progress=True without tqdm", "tqdm", "pip install tqdm") from error
    return tqdm(total=total, unit="request")
