"""`Generator`: continuous batching of many requests over one paged cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.config.arguments import check_switches
from vattn.config.device import check_default_device
from vattn.config.keywords import known_keywords
from vattn.config.other_names import GENERATOR, of_sampling
from vattn.errors import ConfigError, MissingPackageError, VattnError
from vattn.generation.cache_blocks import CacheBlocks, longest_that_fits
from vattn.generation.capture import graph_ladder
from vattn.generation.chat import Chat, is_conversation
from vattn.generation.default_sampling import default_sampling
from vattn.generation.draft_source import DraftSource, ServedModel
from vattn.generation.model_runner import ModelRunner
from vattn.generation.pipeline import sizes_of_stage
from vattn.generation.prepare import prepare
from vattn.generation.prompts import Prompt
from vattn.generation.ranks import RankSteps
from vattn.generation.request import Progress, Request
from vattn.generation.sampling import FIELDS, Sampling, takes_prompt, takes_prompts, takes_sampling
from vattn.generation.scheduler import Scheduler
from vattn.generation.setup import (
    check_counts,
    check_kind,
    check_speculation,
    check_states,
    check_tokenizer,
    end_tokens,
    find_cache,
    longest_request,
    mixed_without_encoder,
    reuses_prefixes,
)
from vattn.generation.state_snapshots import StateSnapshots
from vattn.generation.statistics import Statistics
from vattn.generation.step_loop import StepLoop
from vattn.generation.submission import Submission, SubmissionReader, read_submissions
from vattn.kv_transfer.connector import Salt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@known_keywords({**of_sampling(FIELDS, " in add or generate"), **GENERATOR})
class Generator(StepLoop):
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
        reuse_prefixes: reuse cached blocks of equal content; default: yes, unless the model keeps a state for each
            request and `state_snapshots` is 0. After a change of the model (weights, adapters, hooks, attributes),
            blocks from before are not found; changes through `.data` are not noticed.
        state_snapshots: for models that keep a state for each request: how many states to keep for requests that begin
            alike. Each takes as much memory as the state of a request, on top of the cache.
        speculation: draft tokens and verify them together: fewer steps, the same tokens. `PromptLookup` drafts by
            prompt lookup, `DraftModel` by a smaller model, `EagleDraft` and `MtpDraft` by a head. Requests with
            penalties, bad words of several tokens or logits processors get no drafts.
        compile: `"layers"` compiles each kind of layer once, `"model"` the whole model, `"none"` nothing; default
            `"layers"` on CUDA, where they can be compiled, and `"none"` elsewhere.
        compile_options: for `torch.compile`, such as `vattn.options()` under `"options"`. Default: the passes, early
            launches on GPUs of compute capability 9.0 and newer, and the modules around the layers compiled too.
        graph_sizes: numbers of decoding requests to capture as CUDA graphs; default a ladder up to `max_num_reqs` on
            CUDA, none elsewhere; `()` for none. With `speculation`, each is captured for steps with drafts too.
        mixed_graph_sizes: numbers of tokens to capture for steps that hold prompts, each with up to `max_num_reqs`
            requests; default a ladder up to 1535 and the token budget where decodes are captured and all layers run on
            TRITON_ATTN, else none; `()` for none. A step runs padded to the next size, and without a graph beyond the
            largest. It helps where the host takes longer to launch the layers than the device to compute them.
        group: the process group of the ranks that hold parts of the model. Every rank makes a generator with the same
            arguments; rank 0 of the group takes requests and runs steps, all others call `follow`.
        group_timeout: seconds to wait here for all ranks, before they compile and capture and after it. A rank without
            a sign of life for as long, at least 5 and at most 60, has failed. Steps wait for ranks that work as long as
            the group does, see `torch.distributed.init_process_group(timeout=)`.

    Attributes:
        default_sampling: of requests without one, what the model's generation config asks for; without one greedy.
        graphs: the runner of the captured sizes, `None` without.
        draft_graphs: the runner of steps with drafts.
        mixed_graphs: the runner of steps with prompts.
        in_thread: the `AsyncGenerator` that runs the steps, `None` without.

    Raises:
        ConfigError: no model on vattn, no cache, or a value of another type or out of range.
        UnknownOptionError: an unknown keyword.
        UnsupportedRequestError: the model cannot be captured as a CUDA graph.
        RankError: ranks differ in versions, model, weights or options, or one failed or did not answer.

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
        reuse_prefixes: bool | None = None,
        state_snapshots: int = 0,
        speculation: DraftSource | None = None,
        compile: str | None = None,
        compile_options: dict[str, Any] | None = None,
        graph_sizes: Sequence[int] | None = None,
        mixed_graph_sizes: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        group_timeout: float = 300.0,
    ) -> None:
        check_default_device()
        check_counts(max_num_reqs, token_budget, max_queue, state_snapshots)
        if reuse_prefixes is not None:
            check_switches(reuse_prefixes=reuse_prefixes)
        check_speculation(speculation)
        check_kind("compile_options", compile_options, dict)
        check_tokenizer(tokenizer)
        self.cache = cache = find_cache(model, cache)
        self.device = cache.device
        self.stop_token_ids = end_tokens(model, stop_token_ids)
        self.default_sampling = default_sampling(model, tokenizer)
        check_states(cache, max_num_reqs, speculation, mixed_graph_sizes, compile)
        mixed_graph_sizes = sizes_of_stage(model, mixed_graph_sizes, compile)
        sizes = graph_ladder(graph_sizes, max_num_reqs, self.device)
        mixed_graph_sizes = mixed_without_encoder(model, mixed_graph_sizes)
        max_seq_len = longest_request(model, max_seq_len, longest_that_fits(cache, token_budget))
        reuse = reuses_prefixes(reuse_prefixes, cache, state_snapshots, group)
        snapshots = StateSnapshots(cache.states, state_snapshots) if cache.states and state_snapshots else None
        blocks = CacheBlocks(cache, max_num_reqs, max_seq_len, reuse, model, snapshots)
        limits = max_num_reqs, token_budget, max_seq_len
        served = ServedModel(model, blocks, *limits, compile, compile_options, sizes, group is not None)
        ready = prepare(served, speculation, mixed_graph_sizes, group, group_timeout)
        self.graphs, self.draft_graphs, self.mixed_graphs = ready.graphs
        self._compiled = ready.compiled
        self._reader = SubmissionReader(model, tokenizer, cache.block_size, ready.adapters, group is not None)
        scheduler = Scheduler(blocks, *limits, max_queue, ready.source)
        super().__init__(model, tokenizer, scheduler, ModelRunner(ready.steps, blocks, ready.source))
        self.in_thread: Any = None
        self._statistics.num_blocks = cache.num_blocks - cache.reserved_blocks

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError("a copy of a generator", "one generator for a cache", "make a new one with Generator(model)")

    @takes_prompt
    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        cache_salt: Salt = "",
        adapter: str | None = None,
    ) -> Request:
        """Queue a prompt, and return its request; with `Sampling(n=...)` the first of `request.choices`.

        Args:
            prompt: text, for a generator with a tokenizer; token ids, in a list or a tensor; what a tokenizer returned,
                with `input_ids`, or a processor, with images too; a `Chat`; or `PromptEmbeddings`.
            sampling: default `default_sampling`.
            cache_salt: text, bytes or an integer. Requests share cached blocks with those of the same salt alone: give
                it to keep tenants apart, and for all that makes equal ids mean something else, such as images.
            adapter: the name of a loaded adapter, for a model with `enable_adapters`; default none. Only requests with
                the same adapter share blocks.

        Raises:
            RequestError: empty, longer than `max_seq_len` together with its output, token ids outside of the
                vocabulary, a text or stop strings without a tokenizer, or an adapter that is not loaded.
            OutOfBlocksError: even the empty cache could not hold it.
            QueueFullError: too many are waiting.
            MissingPackageError: a grammar without xgrammar.
            ConfigError: the model, or a part of it, is in training mode; a salt of another type.
        """
        choices = self._read(Submission(prompt, sampling, cache_salt, adapter))
        self._queue(choices)
        return choices[0]

    def _read(self, submission: Submission) -> tuple[Request, ...]:
        """Return the requests of a submission, which are not queued yet."""
        self._check_ready()
        choices = self._reader.read(submission, self.default_sampling, self.stop_token_ids)
        for request in choices:
            self._open_text(request)
        return choices

    def _check_ready(self) -> None:
        """Refuse prompts where no step can run."""
        self._runner.steps.check()
        self._mode.check()

    @takes_prompts
    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = "",
        adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[Progress]:
        """Run prompts to their end and yield the progress of each step.

        Prompts are queued when the iteration begins. Refused ones are yielded first, as failed requests. Stopping the
        iteration cancels the rest. Several streams may run in turn: each yields the progress of its own requests.

        Raises:
            ConfigError: see `generate`.
        """
        self._check_ready()
        submissions = read_submissions(
            prompts, self.tokenizer, sampling=sampling, cache_salt=cache_salt, adapter=adapter
        )
        return self._run_to_end(submissions, [])

    @takes_prompts
    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = "",
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[Request]:
        """Run prompts to their end and return their requests, in the order of the prompts.

        Args:
            prompts: a list of prompts, see `add`, or what a tokenizer returned for several texts.
            sampling: one for all, or one each.
            cache_salt, adapter: one for all, or one each; see `add`.
            progress: show a bar (needs tqdm).

        Returns:
            Requests with `output` and `text`; those that failed have an `error`, and do not stop the others. With
            `Sampling(n=...)` each has the others of its prompt in `choices`.

        Raises:
            ConfigError: no list of prompts, one that is neither a text nor a sequence, a text without a tokenizer, a
                chat without a chat template, or neither one sampling nor one each, or salts likewise; a model, or a
                part of it, in training mode. Nothing has run then.
        """
        check_switches(progress=progress)
        self._check_ready()
        submissions = read_submissions(
            prompts, self.tokenizer, sampling=sampling, cache_salt=cache_salt, adapter=adapter
        )
        requests: list[Request] = []
        bar = _bar(len(submissions)) if progress else None
        counted: set[Request] = set()
        for one in self._run_to_end(submissions, requests):
            choices = one.request.choices
            # Choices that end in one step are each yielded after all have ended.
            if bar is not None and choices[0] not in counted and all(choice.done for choice in choices):
                counted.add(choices[0])
                bar.update()
        if bar is not None:
            bar.close()
        return requests

    @takes_sampling
    def chat(
        self,
        messages: Sequence[Any],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = "",
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
        **options: Any,
    ) -> Any:
        """Answer a conversation, or several, and return its request, or theirs.

        Args:
            messages: a conversation, or a list of conversations; see `Chat`.
            sampling, cache_salt, adapter, progress: see `generate`.
            **options: see `Chat`.

        Raises:
            ConfigError: see `generate`; no conversation.
        """
        alone = is_conversation(messages)
        several = isinstance(messages, Iterable) and not alone and not isinstance(messages, (str, bytes, Mapping))
        chats = [Chat(each, **options) for each in (messages if several else [messages])]
        done = self.generate(chats, sampling, cache_salt=cache_salt, adapter=adapter, progress=progress)
        return done[0] if alone else done

    def follow(self) -> None:
        """Run this rank's part of all steps, until rank 0 calls `close` or ends.

        Every rank of `group` but 0 calls it.

        Raises:
            ConfigError: a generator without a group, or rank 0.
            RankError: a rank failed; its text says which, and with what.
        """
        self._rank_steps("follow").follow()
        self._free_graphs()

    def close(self) -> None:
        """Let `follow` return on the other ranks; no step runs afterwards.

        Graphs are freed, on the other ranks too: a process group cannot end while one holds its collectives.

        Raises:
            ConfigError: a generator without a group.
        """
        self._rank_steps("close").end()
        self._free_graphs()

    def _free_graphs(self) -> None:
        for runner in (self.graphs, self.draft_graphs, self.mixed_graphs):
            if runner is not None:
                runner.free()

    def _rank_steps(self, name: str) -> RankSteps:
        steps = self._runner.steps
        if not isinstance(steps, RankSteps):
            raise ConfigError(f"{name}() of a generator on one device", "generators with group=", f"leave {name}() out")
        return steps

    def explain(self) -> str:
        """Return how the model runs, with a line for each reason that keeps a part of it from running faster."""
        model: Any = self.model
        own = [model.explain()] if callable(getattr(model, "explain", None)) else []
        graphs = {"decodes": self.graphs, "drafts": self.draft_graphs, "prompts": self.mixed_graphs}
        found = [f"{name}: {runner.report}" for name, runner in graphs.items() if runner is not None]
        return "\n".join([*own, *self._compiled.explain(), *(found or ["no CUDA graphs"])])

    def statistics(self) -> Statistics:
        """Return counts and times since the generator was made, and the requests and blocks that it holds."""
        now, running = self._statistics, self.scheduler.running
        now.waiting, now.running = len(self.scheduler.waiting), len(running)
        now.used_blocks, now.preemptions = self._blocks.pool.num_used, self.scheduler.preemptions
        now.wasted_tokens = self._blocks.num_wasted(running)
        now.first_token_seconds = tuple(self._first)
        return now

    def _add_or_fail(self, submission: Submission) -> Request:
        try:
            choices = self._read(submission)
            self._queue(choices)
            return choices[0]
        except VattnError as error:
            request = self._reader.refused(submission, error)
            request.holder = self.scheduler.mark
            return request

    def _run_to_end(self, submissions: Sequence[Submission], requests: list[Request]) -> Iterator[Progress]:
        """Queue prompts, append their requests to a list, and yield their progress until all have ended."""
        self._check_ready()
        self._streams += 1
        try:
            for submission in submissions:
                requests.append(self._add_or_fail(submission))
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


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingPackageError("progress=True without tqdm", "tqdm", "pip install tqdm") from error
    return tqdm(total=total, unit="request")
