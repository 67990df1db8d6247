"""`Generator`: continuous batching of many requests over one paged cache."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from vattn.block_pool import BlockPool
from vattn.compilation import compile, compile_regions
from vattn.cuda_graph import CUDAGraphRunner
from vattn.errors import CacheError, ConfigError, RequestError, VattnError
from vattn.generation.launch import Launched, Launcher, needs_history, sample_inputs
from vattn.generation.request import FAILED, FINISHED, Request, Sampling
from vattn.generation.sampler import processors
from vattn.generation.scheduler import Scheduler
from vattn.generation.statistics import Progress, Statistics
from vattn.generation.text import TextStream, cut_at_stop_string, held_back
from vattn.kv_cache import KVCacheAllocation
from vattn.metadata_builder import AttentionMetadataBuilder

Prompt = str | Sequence[int]


class Generator:
    """Run many requests on one model: they join and leave a running batch, in chunks, on a paged cache.

    Args:
        model: takes `(input_ids [T], positions [T], logits_indices [B])` and returns logits `[B, vocab_size]`, such as
            what `vattn.integrations.transformers.enable` returned.
        tokenizer: with `encode(text)` and `decode(ids)`; without one, prompts are token ids.
        cache: what `vattn.allocate_kv_cache(model, ...)` returned; default `model.kv_cache`. It belongs to the newest
            generator; an older one refuses further steps.
        max_num_reqs: requests that run at once.
        token_budget: new tokens of one step; longer prompts are cut into chunks and mixed with decodes.
        max_seq_len: longest request, prompt and output; default what the cache can hold, at most 32768.
        stop_token_ids: end tokens; default those of the model's generation config, if it has one.
        max_queue: most requests that wait; `None` for any number.
        reuse_prefixes: find blocks of equal content in the cache instead of computing them.
        compile: `"layers"` compiles each kind of layer once, `"model"` the whole model, `"none"` nothing; default
            `"layers"` on CUDA and `"none"` elsewhere.
        compile_options: for `torch.compile`, such as `vattn.options()` under `"options"`.
        graph_sizes: numbers of decoding requests to capture as CUDA graphs; default a ladder up to `max_num_reqs` on
            CUDA, none elsewhere; `()` for none.

    Attributes:
        graphs: the runner of the captured sizes, `None` without.

    Raises:
        ConfigError: no cache, a cache with groups, or a value out of range.

    The same tokens come out as one by one, up to the first step whose two best logits are closer than what matrix
    products of other shapes differ by: those of the model are not ours. Not thread-safe: add, cancel and step from one
    thread.

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
        compile: str | None = None,
        compile_options: dict[str, Any] | None = None,
        graph_sizes: Sequence[int] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache = cache = _cache_of(model) if cache is None else cache
        _check_cache(cache)
        for name, value in (("max_num_reqs", max_num_reqs), ("token_budget", token_budget)):
            if value < 1:
                raise ConfigError(f"{name}={value}", f"{name} >= 1", f"raise {name}")
        usable = (cache.num_blocks - cache.reserved_blocks) * cache.block_size
        max_seq_len = min(usable, 32768) if max_seq_len is None else max_seq_len
        self.device = cache.device
        self.stop_token_ids = frozenset(_end_tokens(model) if stop_token_ids is None else stop_token_ids)
        self.scheduler = Scheduler(
            BlockPool(cache.num_blocks, reserved=cache.reserved_blocks), cache.block_size, max_num_reqs, token_budget,
            max_seq_len, max_queue, reuse_prefixes,
        )  # fmt: skip
        self.builder = AttentionMetadataBuilder(
            max_num_reqs, max(2, token_budget, max_num_reqs), max_seq_len, cache.block_size, self.device, layers=model
        )
        self._forward = _compiled(model, compile, self.device, compile_options or {})
        self.graphs = self._capture(graph_sizes)
        _OWNERS[_place(cache)] = self
        self._launcher = Launcher(self._forward, self.builder, self.graphs, self.scheduler)
        self._ahead: Launched | None = None
        self._statistics = Statistics(num_blocks=cache.num_blocks - cache.reserved_blocks)
        self._first: list[float] = []
        self._texts: dict[Request, TextStream] = {}

    def add(self, prompt: Prompt, sampling: Sampling | None = None) -> Request:
        """Queue a prompt.

        Args:
            prompt: text, for a generator with a tokenizer, or token ids.
            sampling: default greedy, 64 tokens.

        Raises:
            RequestError: empty, longer than `max_seq_len` together with its output, or a text without a tokenizer.
            OutOfBlocksError: even the empty cache could not hold it.
            QueueFullError: too many are waiting.
            MissingPackageError: settings that need transformers.
        """
        sampling = sampling or Sampling()
        if not isinstance(sampling, Sampling):
            raise ConfigError(f"sampling of type {type(sampling).__name__}", "vattn.Sampling", "vattn.Sampling(...)")
        if self.tokenizer is None and (isinstance(prompt, str) or sampling.stop_strings):
            raise RequestError(
                "a text for a generator without a tokenizer", "token ids", "give the generator tokenizer=, or pass ids"
            )
        ids = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        processors(sampling)
        ends = self.stop_token_ids if sampling.stop_token_ids is None else frozenset(sampling.stop_token_ids)
        request = Request(ids, sampling, ends)
        self.scheduler.add(request)
        if self.tokenizer is not None:
            self._texts[request] = TextStream(self.tokenizer)
        return request

    def _checked(self, prompt: Any) -> list[int]:
        """Return token ids, or refuse what is none."""
        most = getattr(self.model, "vocab_size", None)
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(
                f"a prompt of {str(prompt)[:60]!r}", "a text or a flat sequence of token ids", "encode it first"
            ) from error
        wrong = [token for token in ids if token < 0 or (most is not None and token >= most)]
        if wrong:
            allowed = "ids from 0 up" if most is None else f"ids from 0 to {most - 1}, the model's vocabulary"
            raise RequestError(f"token id {wrong[0]} in a prompt", allowed, "encode it with the model's tokenizer")
        return ids

    def cancel(self, request: Request) -> None:
        """End a request now, wherever it is, and give its blocks back; one that has ended stays as it is."""
        self.scheduler.cancel(request)
        self._texts.pop(request, None)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Progress]:
        """Compute one step; return what came of it for each request that got a token or ended.

        The step after it is on its way already when this one returns. An error in the model leaves no request half
        computed: they wait, and the next step computes them again.
        """
        if _OWNERS.get(_place(self.cache)) is not self:
            raise CacheError(
                "a step of a generator whose cache another generator has taken",
                "one generator for a cache: the newest",
                "use that one, or give each a model with a cache of its own",
            )
        begin = time.perf_counter()
        now, self._ahead = self._ahead or self._launch(None), None
        if now is None:
            return []
        try:
            # The device goes on while the host deals with this step.
            self._ahead = self._launch(now) if self._can_look_ahead(now) else None
        except BaseException:
            self._ahead = now
            raise
        tokens, usable = now.read()
        for part in now.parts:
            self.scheduler.publish(part)
        came = [
            self._accept(part.request, token, good)
            for part, token, good in zip(now.ready, tokens, usable, strict=True)
            if not part.request.done
        ]
        self._count(now, len(came), begin)
        return came

    def _can_look_ahead(self, now: Launched) -> bool:
        """Whether the next step can be launched before the tokens of this one are known on the host."""
        return not any(needs_history(part.request) for part in now.ready)

    def _launch(self, before: Launched | None) -> Launched | None:
        """Launch the next step, `None` if there is nothing to do; `before` is on its way."""
        for part in before.ready if before is not None else ():
            request = part.request
            # A request that is sure to end with that token needs no further step.
            if not request.done and len(request.output) + 1 < request.sampling.max_new_tokens:
                request.coming = 1
        parts = self.scheduler.schedule()
        if not parts:
            return None
        try:
            return self._launcher.launch(parts, before)
        except BaseException:
            for part in reversed(parts):
                self.scheduler.preempt(part.request)
            raise

    def stream(
        self, prompts: Iterable[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Iterator[Progress]:
        """Run prompts to their end, yielding what each step brought, in the order in which it came.

        Prompts that cannot be served come first, as failed requests. Stopping the iteration cancels what is left.
        """
        requests = [self._add_or_fail(prompt, one) for prompt, one in _paired(prompts, sampling)]
        return self._run_to_end(requests)

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
        """
        requests = [self._add_or_fail(prompt, one) for prompt, one in _paired(prompts, sampling)]
        bar = _bar(len(requests)) if progress else None
        for came in self._run_to_end(requests):
            if bar is not None and came.request.done:
                bar.update()
        if bar is not None:
            bar.close()
        return requests

    def statistics(self) -> Statistics:
        """Return counts and times since the generator was made, and what it holds now."""
        pool, now = self.scheduler.pool, self._statistics
        running = self.scheduler.running
        now.waiting, now.running = len(self.scheduler.waiting), len(running)
        now.used_blocks, now.preemptions = pool.num_used, self.scheduler.preemptions
        held = sum(len(request.table.blocks) for request in running if request.table is not None)
        now.wasted_tokens = held * self.cache.block_size - sum(request.cached for request in running)
        now.first_token_seconds = tuple(self._first)
        return now

    def _add_or_fail(self, prompt: Prompt, sampling: Sampling | None) -> Request:
        try:
            return self.add(prompt, sampling)
        except (VattnError, ValueError, TypeError) as error:
            own = error if isinstance(error, VattnError) else RequestError(
                f"a prompt that the tokenizer refuses: {error}", "texts or token ids", "check the prompt"
            )  # fmt: skip
            request = Request([], sampling or Sampling())
            request.end(FAILED, "error", own)
            return request

    def _run_to_end(self, requests: list[Request]) -> Iterator[Progress]:
        try:
            yield from (Progress(request, "", ()) for request in requests if request.done)
            while any(not request.done for request in requests):
                yield from self.step()
        finally:
            for request in requests:
                self.cancel(request)

    def _capture(self, sizes: Sequence[int] | None) -> CUDAGraphRunner | None:
        most = self.scheduler.max_num_reqs
        if sizes is None:
            ladder = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32), *range(320, most + 1, 64), most]
            sizes = sorted({size for size in ladder if size <= most}) if self.device.type == "cuda" else ()
        if not sizes:
            return None
        return CUDAGraphRunner(self._forward, sizes, self.builder, sample_inputs, output_rows="requests")

    def _accept(self, request: Request, token: int, usable: bool) -> Progress:
        """Give a request its next token, and end it where it ends."""
        request.coming = 0
        if not usable:
            self.scheduler.retire(request)
            self._texts.pop(request, None)
            request.end(FAILED, "error", RequestError(
                f"logits that are not finite after {request.num_tokens} tokens",
                "finite logits", "check the weights and the scales of the cache (vattn.audit)",
            ))  # fmt: skip
            return Progress(request, "", ())
        if request.first_token is None:
            request.first_token = time.monotonic()
            self._first.append(request.first_token - request.arrived)
        stopped = token in request.stop_token_ids
        if not stopped:
            request.output.append(token)
        reason = "stop token" if stopped else ""
        if not reason and self._criteria_met(request):
            reason = "stopping criterion"
        if not reason and len(request.output) >= request.sampling.max_new_tokens:
            reason = "length"
        fresh = ""
        if (text := self._texts.get(request)) is not None:
            if cut_at_stop_string(request, text.push(request.output, last=bool(reason))):
                reason = "stop string"
            # What may become a stop string is held back until it is clear.
            end = len(request.text) - (0 if reason else held_back(request))
            fresh, request.shown = request.text[request.shown : end], max(request.shown, end)
        if reason:
            self.scheduler.retire(request)
            self._texts.pop(request, None)
            request.end(FINISHED, reason)
        return Progress(request, fresh, () if stopped else (token,))

    def _criteria_met(self, request: Request) -> bool:
        criteria = request.sampling.stopping_criteria
        if not criteria:
            return False
        ids = torch.tensor([request.tokens(0, request.num_tokens)])
        return any(bool(torch.as_tensor(met(ids, None)).any()) for met in criteria)

    def _count(self, now: Launched, generated: int, begin: float) -> None:
        so_far, parts = self._statistics, now.parts
        so_far.steps += 1
        so_far.generated_tokens += generated
        so_far.prompt_tokens += sum(max(0, min(part.end, len(part.request.prompt)) - part.start) for part in parts)
        so_far.reused_tokens += sum(part.request.reused for part in parts if part.start == part.request.reused)
        so_far.seconds += time.perf_counter() - begin
        so_far.device_seconds += now.device_seconds


_OWNERS: WeakValueDictionary[int, Generator] = WeakValueDictionary()
"""Which generator writes to a cache, by where its first storage lies."""


def _place(cache: KVCacheAllocation) -> int:
    return cache.kv_caches[0].data_ptr()


def _cache_of(model: nn.Module) -> KVCacheAllocation:
    cache = getattr(model, "kv_cache", None)
    if isinstance(cache, KVCacheAllocation):
        return cache
    raise ConfigError(
        "a generator without a KV cache",
        "cache=, or a model with one in its attribute kv_cache",
        "vattn.Generator(model, cache=vattn.allocate_kv_cache(model, memory='1GiB')), or enable(model, memory='1GiB')",
    )


def _check_cache(cache: KVCacheAllocation) -> None:
    if len(cache.groups) > 1:
        raise ConfigError(
            f"a cache of {len(cache.groups)} groups", "caches without groups", "allocate it without hybrid=True"
        )


def _end_tokens(model: nn.Module) -> list[int]:
    inner = getattr(model, "model", model)
    ends = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


def _compiled(
    model: nn.Module, how: str | None, device: torch.device, options: dict[str, Any]
) -> Callable[..., Tensor]:
    how = ("layers" if device.type == "cuda" else "none") if how is None else how
    if how not in ("layers", "model", "none"):
        raise ConfigError(f"compile={how!r}", "'layers', 'model' or 'none'", "choose one of them")
    if how == "none" and options:
        raise ConfigError("compile_options without compiling", "compile='layers' or 'model'", "set compile=")
    if how == "model":
        return compile(model, **options)
    if how == "layers":
        compile_regions(model, **options)
    return model


def _paired(
    prompts: Iterable[Prompt], sampling: Sampling | Sequence[Sampling] | None
) -> list[tuple[Prompt, Sampling | None]]:
    if isinstance(prompts, str):
        raise ConfigError("one text for a list of prompts", "a list of prompts", "pass [prompt]")
    prompts = list(prompts)
    if sampling is None or isinstance(sampling, Sampling):
        return [(prompt, sampling) for prompt in prompts]
    if len(sampling) != len(prompts):
        raise ConfigError(f"{len(sampling)} samplings for {len(prompts)} prompts", "one, or one each", "check the list")
    return list(zip(prompts, sampling, strict=True))


def _bar(total: int) -> Any:
    from vattn.errors import MissingPackageError

    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingPackageError("progress=True without tqdm", "tqdm", "pip install tqdm") from error
    return tqdm(total=total, unit="request")
