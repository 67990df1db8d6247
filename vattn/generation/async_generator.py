"""`AsyncGenerator`: the steps of a generator in a thread of its own, for asyncio and for servers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from vattn.config.typed import typed
from vattn.errors import ConfigError, RequestError
from vattn.generation.generator import Generator
from vattn.generation.prompts import Prompt
from vattn.generation.request import Progress, Request
from vattn.generation.sampling import Sampling, takes_prompt
from vattn.generation.submission import Submission
from vattn.kv_transfer.connector import Salt

logger = logging.getLogger(__name__)


class AsyncGenerator:
    """Run a generator's steps in a thread; requests come from coroutines and from any thread.

    A step that raises ends the requests that it may have computed with an error, and the others go on.

    Args:
        generator: nothing else may run its steps from now on.

    Attributes:
        generator: the same.
        failure: what the last step raised, "" if it worked.

    Raises:
        ConfigError: something else than a generator, or one that another `AsyncGenerator` runs.

    Example:
        >>> import asyncio, transformers, vattn
        >>> from vattn.integrations.transformers import enable
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = enable(transformers.LlamaForCausalLM(config).eval(), num_blocks=8)
        >>> async def main():
        ...     with vattn.AsyncGenerator(vattn.Generator(model)) as generator:
        ...         sampling = vattn.Sampling(max_new_tokens=4, stop_token_ids=())
        ...         tokens = [len(part.tokens) async for part in generator.stream([1, 2, 3], sampling)]
        ...         both = await asyncio.gather(*(generator.generate([i], sampling) for i in (4, 5)))
        ...         return tokens, [len(request.output) for request in both]
        >>> asyncio.run(main())
        ([1, 1, 1, 1], [4, 4])
    """

    @typed
    def __init__(self, generator: Generator) -> None:
        if generator.in_thread is not None:
            raise ConfigError(
                "a second AsyncGenerator of one generator", "one at a time", "use that one, or close() it before"
            )
        generator.in_thread = self
        self.generator, self.failure = generator, ""
        self._unfinished: dict[Request, Callable[[Progress], None]] = {}
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="vattn generator", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @typed
    def submit(self, submission: Submission, watch: Callable[[Progress], None]) -> Request:
        """Queue a prompt, and have each progress of its request, and of its other choices, passed to a function.

        Args:
            submission: the prompt with its settings.
            watch: is called in the thread of the steps and must return soon. The last call of a request finds it ended;
                one that is cancelled gets no call. If it raises, that is logged and its request is cancelled.

        Raises:
            VattnError: see `Generator.add`.
            ConfigError: no `Submission`, or a `watch` that cannot be called.
            RequestError: this is closed.
        """
        # Steps go on while a tokenizer or a grammar takes its time.
        choices = self.generator._read(submission)
        with self._changed:
            if self._closed:
                raise RequestError("a prompt for an AsyncGenerator that is closed", "one that runs", "make a new one")
            self.generator._queue(choices)
            self._unfinished |= dict.fromkeys(choices, watch)
            self._changed.notify()
        return choices[0]

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests and their other choices; those that have ended stay as they are.

        Raises:
            ConfigError: no list of requests; none has ended then.
        """
        held = list(requests) if isinstance(requests, Iterable) else None
        if held is None or not all(isinstance(request, Request) for request in held):
            raise ConfigError(f"cancel({requests!r:.60})", "a list of requests", "cancel([request])")
        with self._changed:
            for request in held:
                for choice in request.choices:
                    self._unfinished.pop(choice, None)
                self.generator.cancel(request)

    def close(self) -> None:
        """End the thread after its step, and cancel what is left; once closed, this does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        if self.generator.in_thread is self:
            self.generator.in_thread = None
        self.cancel(list(self._unfinished))

    @takes_prompt
    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        cache_salt: Salt = "",
        adapter: str | None = None,
    ) -> AsyncIterator[Progress]:
        """Yield the progress of a prompt's request, and of its other choices; leaving the loop cancels them.

        Raises:
            VattnError: see `Generator.add`; it has not begun then.
        """
        return self._progress(Submission(prompt, sampling, cache_salt, adapter))

    async def _progress(self, submission: Submission) -> AsyncIterator[Progress]:
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[tuple[Progress, bool]]()

        def watch(part: Progress) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, (part, part.request.done))

        held, gone = list[Request](), threading.Event()

        def add() -> Request:
            held.append(self.submit(submission, watch))
            if gone.is_set():
                self.cancel(held)
            return held[0]

        try:
            # Tokenizers and grammars take their time, in which the loop may be left.
            left = len((await asyncio.to_thread(add)).choices)
            while left:
                part, ended = await parts.get()
                left -= ended
                yield part
        finally:
            gone.set()
            self.cancel(held)

    @takes_prompt
    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        cache_salt: Salt = "",
        adapter: str | None = None,
    ) -> Request:
        """Run a prompt to its end and return its request.

        Raises:
            VattnError: see `Generator.add`. What goes wrong later is the request's `error`.
        """
        async for part in self._progress(Submission(prompt, sampling, cache_salt, adapter)):
            request = part.request
        return request.choices[0]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.generator.busy)
                if self._closed:
                    return
            failed = None
            try:
                parts, self.failure = self.generator.step(), ""
            except Exception as error:
                logger.exception("a step failed")
                parts, failed, self.failure = [], error, f"{type(error).__name__}: {error}"
            with self._changed:
                for part in parts:
                    self._pass_on(part)
                if failed is not None:
                    self._fail_some(failed)

    def _fail_some(self, cause: Exception) -> None:
        """End the oldest requests, which are those that a failed step may have computed."""
        for request in list(self._unfinished)[: self.generator.scheduler.max_num_reqs]:
            error = RequestError("a step of the model failed", "steps that work", "send the request again")
            error.__cause__ = cause
            self.generator.fail(request, error)
            self._pass_on(Progress(request, "", ()))

    def _pass_on(self, part: Progress) -> None:
        request = part.request
        watch = self._unfinished.pop(request, None) if request.done else self._unfinished.get(request)
        if watch is None:
            return
        try:
            watch(part)
        except Exception:
            # Such as of an event loop that is closed. The other requests go on.
            logger.exception("a watch failed")
            self.cancel([request])
