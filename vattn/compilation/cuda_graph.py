"""`CUDAGraphRunner`: capture a function for a list of batch sizes, pad steps up to one of them, and replay."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vattn.backends import selector
from vattn.backends.mla.registry import mla_backends
from vattn.cache.bindings import CacheBindings, cache_address
from vattn.cache.model_identity import ModelIdentity, renewals
from vattn.compilation.compile_ahead import can_only_compile, is_busy, only_compiling
from vattn.compilation.graph_edges import start_early
from vattn.config.arguments import integer, read_count
from vattn.errors import ConfigError, GraphContractError, UnsupportedRequestError
from vattn.metadata.attention_metadata import AttentionMetadata, CaptureKey, refuse_contradiction, step_of
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context
from vattn.metadata.inputs import Lengths, Tables, read_integers

logger = logging.getLogger("vattn")

_capturing = threading.Lock()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: a graph that dies while another is captured ends the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


MakeInputs = Callable[[AttentionMetadata], Sequence[Tensor]]


@dataclass(frozen=True)
class CaptureCost:
    """What one batch size cost.

    Attributes:
        batch_size: requests.
        num_tokens: tokens of the padded step.
        seconds: warm-up (compilation included) and capture.
        bytes: device memory that the capture took from the free memory, graph included.
    """

    batch_size: int
    num_tokens: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class CaptureReport:
    """What was captured, or why nothing was.

    Attributes:
        reason: why the function runs without graphs, `None` if it was captured.
        costs: one entry per batch size, in the order of capture.
        by_tokens: whether sizes are printed in tokens, as they were given.
    """

    reason: str | None
    costs: tuple[CaptureCost, ...]
    by_tokens: bool = False

    @property
    def seconds(self) -> float:
        """Time of all captures."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def bytes(self) -> int:
        """Memory of all captures."""
        return sum(cost.bytes for cost in self.costs)

    def __str__(self) -> str:
        numbers = [cost.num_tokens if self.by_tokens else cost.batch_size for cost in self.costs]
        sizes = f"{'token' if self.by_tokens else 'batch'} sizes {', '.join(map(str, numbers))}"
        if self.reason is not None:
            return f"no CUDA graphs: {self.reason}; {sizes} run the function directly"
        total = f"{self.seconds:.1f} s, {self.bytes / 2**20:.1f} MiB"
        return f"{len(self.costs)} CUDA graphs in one memory pool, {sizes}: {total}"


@dataclass
class _Entry:
    """One captured step: its inputs, what it returned, and the graph (`None` where there are no graphs)."""

    inputs: tuple[Tensor, ...]
    output: Any = None
    graph: torch.cuda.CUDAGraph | None = None


def sample_step(
    builder: AttentionMetadataBuilder, batch_size: int, num_tokens: int, step_options: Callable[[int], dict[str, Any]]
) -> AttentionMetadata:
    """Return a step of so many requests and tokens, padded to two of each, that writes nothing to a cache.

    Args:
        step_options: of `build`, for a number of requests.
    """
    real = min(batch_size, num_tokens)
    lengths = [num_tokens // real + (row < num_tokens % real) for row in range(real)]
    blocks = -(-lengths[0] // builder.block_size)
    return builder.build(
        lengths,
        lengths,
        [[0] * blocks] * real,
        slot_mapping=[-1] * num_tokens,
        num_reqs_padded=max(2, batch_size),
        num_tokens_padded=min(max(2, num_tokens), builder.max_num_tokens),
        **step_options(real),
    )


class CUDAGraphRunner:
    """Run steps of one kind (decode, usually) as CUDA graphs.

    Args:
        function: a plain or compiled function or module; called with the inputs while the step's metadata is the
            forward context. It must do the same work whatever the lengths.
        batch_sizes: numbers of requests to capture, each with `tokens_per_request` tokens per request. A single
            request of one token is captured as two, so that it needs no compiled graph of its own. A pair
            `(requests, tokens)` holds every step of up to that many of both, prompts included.
        builder: builds all steps; give it the model's `layers`.
        make_inputs: returns the function's tensor arguments for a (padded) step, of any content that the function
            accepts. Their first dimension is tokens or requests. Tensors of the metadata itself may be among them.
        tokens_per_request: more than 1 for speculative decoding.
        step_options: further arguments of `builder.build` for a number of requests, such as
            `lambda n: {"causal": [1] * n}`: presence of optional tensors is baked in.
        output_rows: `"tokens"` or `"requests"`, what the first dimension of the outputs counts; default: found by size.
        memory_of: another runner to share memory with: no output of the one may be read after a replay of the other.

    Attributes:
        report: sizes, seconds and memory, or why nothing was captured.

    Raises:
        ConfigError: no batch size, or one beyond the builder's capacity.
        UnsupportedRequestError: a backend of the layers cannot be captured.
        DeviceError: CUDA refuses to change edges of a captured graph; it is thrown away.

    Graphs hold the model of the capture: values written into its weights count, but after other changes (an adapter,
    a hook, a submodule, an attribute) `build` refuses steps that a graph would run.

    Without a CUDA device the function runs as it is, on the padded inputs; `report.reason` says so and it is logged.
    Warm-up and capture write nothing to the caches (all slots are -1) and take no KV scale.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.Attention(num_heads=2, head_size=16, scale=0.25)
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=8, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(4, 4, max_seq_len=32, layers=layer)
        >>> def inputs(step):
        ...     return [torch.zeros(step.slot_mapping.shape[0], 32) for _ in range(3)]
        >>> runner = vattn.CUDAGraphRunner(layer, [4, 2], builder, inputs)
        >>> print(runner.report)
        no CUDA graphs: device cpu; batch sizes 4, 2 run the function directly
        >>> step = runner.build(query_lens=[1, 1, 1], seq_lens=[1, 5, 9], block_tables=[[1], [2], [3]])
        >>> qkv = [torch.randn(3, 32) for _ in range(3)]
        >>> step.seq_lens.tolist(), runner(*qkv, metadata=step).shape
        ([1, 5, 9, 0], torch.Size([3, 32]))
    """

    def __init__(
        self,
        function: Callable[..., Any],
        batch_sizes: Sequence[int | tuple[int, int]],
        builder: AttentionMetadataBuilder,
        make_inputs: MakeInputs,
        *,
        tokens_per_request: int = 1,
        step_options: Callable[[int], dict[str, Any]] | None = None,
        output_rows: str | None = None,
        memory_of: CUDAGraphRunner | None = None,
    ) -> None:
        if output_rows not in (None, "tokens", "requests"):
            raise ConfigError(f"output_rows={output_rows!r}", "'tokens', 'requests' or None", "leave it out")
        if not isinstance(batch_sizes, Sequence):
            raise ConfigError(f"batch_sizes={batch_sizes!r:.60}", "a list of sizes", "batch_sizes=[8]")
        read_count("tokens_per_request", tokens_per_request, 1, "leave it out for decodes")
        self.function, self.builder = function, builder
        self._make_inputs, self._output_rows = make_inputs, output_rows
        self._step_options = step_options or (lambda batch_size: {})
        self._tokens_per_request = tokens_per_request
        self._layers = _cached_layers(function)
        self._entries: dict[CaptureKey, _Entry] = {}
        self._buffers: list[Tensor] = []
        sizes = self._read_sizes(batch_sizes)
        cuda = builder.device.type == "cuda"
        if cuda:
            self._refuse_backends()
        self._pool = torch.cuda.graph_pool_handle() if cuda and memory_of is None else None
        if memory_of is not None:
            self._pool = memory_of._pool
        if is_busy() and can_only_compile(builder):
            self._compile(*sizes[0])
        # From large to small: the later captures fit into the memory of the first.
        costs = tuple(cost for size in sizes if (cost := self._prepare(*size)) is not None)
        self._bindings = CacheBindings(self._layers, cache_address)
        model = getattr(function, "__self__", function)
        self._identity = ModelIdentity(model) if isinstance(model, nn.Module) else None
        self._renewals = renewals(model)
        by_tokens = any(isinstance(size, tuple) for size in batch_sizes)
        self.report = CaptureReport(None if cuda else f"device {builder.device.type}", costs, by_tokens)
        logger.info("%s", self.report)

    def _read_sizes(self, sizes: Sequence[int | tuple[int, int]]) -> list[tuple[int, int]]:
        """Return requests and tokens of each size, the largest first."""
        tokens = self._tokens_per_request
        pairs = {size if isinstance(size, tuple) else (size, size * tokens) for size in sizes}
        most_reqs, most_tokens, longest = (
            self.builder.max_num_reqs, self.builder.max_num_tokens, self.builder.max_seq_len
        )  # fmt: skip
        for pair in pairs or {(0, 0)}:
            counts = len(pair) == 2 and None not in map(integer, pair)
            fits = counts and 1 <= pair[0] <= most_reqs and 1 <= pair[1] <= min(most_tokens, pair[0] * longest)
            if not fits:
                raise ConfigError(
                    f"batch_sizes {sorted(sizes, key=repr)!r:.80} with {tokens} tokens per request",
                    f"one or more sizes from 1 to {min(most_reqs, most_tokens // tokens)}, the builder's capacity; or "
                    f"pairs of up to {most_reqs} requests and {most_tokens} tokens, {longest} for each request",
                    "give the builder a larger max_num_reqs and max_num_tokens",
                )
        return sorted(pairs, key=lambda pair: pair[::-1], reverse=True)

    def _refuse_backends(self) -> None:
        configs = [layer.config for layer in self._layers if layer.config is not None]
        names = self.builder.backends | {selector.choose(config, self.builder.device).name for config in configs}
        for name in sorted(names):
            can = (mla_backends().get(name) or selector.get_backend(name)).capabilities.cuda_graphs
            if can == "manual" and name in self.builder.host_planned:
                continue
            if can != "full":
                raise UnsupportedRequestError(
                    f"backend {name} cannot be captured in a CUDA graph: its capabilities say cuda_graphs={can!r}",
                    "backends with cuda_graphs='full', or 'manual' with a builder that plans for all their layers",
                    "give the builder the model's layers, choose another attn_backend, or run without CUDAGraphRunner",
                )

    def _prepare(self, batch_size: int, num_tokens: int) -> CaptureCost | None:
        """Make the static inputs of a size, warm up and capture the function; `None` if a captured size covers it."""
        start, free = time.perf_counter(), self._free_memory()
        metadata = self._sample_step(batch_size, num_tokens)
        if metadata.capture_key() in self._entries:
            return None
        with torch.inference_mode(False):
            entry = _Entry(self._static_inputs(metadata))
        metadata.mark_dynamic()
        if self._pool is not None:
            self._capture(entry, metadata)
        self._entries[metadata.capture_key()] = entry
        seconds, taken = time.perf_counter() - start, free - self._free_memory()
        cost = CaptureCost(batch_size, metadata.slot_mapping.shape[0], seconds, max(0, taken))
        if self._pool is not None:
            logger.info("captured a step of %d tokens in %.2f s", cost.num_tokens, seconds)
        return cost

    def _compile(self, batch_size: int, num_tokens: int) -> None:
        """Let Dynamo and Inductor compile the function while kernels of attention are compiled: it runs without."""
        with only_compiling():
            metadata = self._sample_step(batch_size, num_tokens)
            with torch.inference_mode(False):
                entry = _Entry(self._static_inputs(metadata))
            metadata.mark_dynamic()
            self._run(entry, metadata)

    def _sample_step(self, batch_size: int, num_tokens: int) -> AttentionMetadata:
        return sample_step(self.builder, batch_size, num_tokens, self._step_options)

    def _static_inputs(self, metadata: AttentionMetadata) -> tuple[Tensor, ...]:
        """Return buffers for a step's inputs: views of buffers of the largest size, or the builder's own tensors."""
        own = {tensor.data_ptr() for tensor in metadata.tensors().values()}
        made = self._make_inputs(metadata)
        if not isinstance(made, (tuple, list)) or not all(isinstance(sample, Tensor) for sample in made):
            raise ConfigError(f"make_inputs returned {made!r:.60}", "a tuple of tensors", "return (token_ids,)")
        samples = [sample.to(self.builder.device) for sample in made]
        if not self._buffers:
            self._buffers = [sample if sample.data_ptr() in own else sample.clone() for sample in samples]
        inputs = []
        for index, (sample, buffer) in enumerate(zip(samples, self._buffers, strict=True)):
            if sample.data_ptr() in own:
                inputs.append(sample)
                continue
            if sample.shape[1:] != buffer.shape[1:] or sample.shape[0] > buffer.shape[0]:
                raise ConfigError(
                    f"make_inputs returned {tuple(sample.shape)} for input {index}, and {tuple(buffer.shape)} before",
                    "sizes that differ only in a first dimension of tokens or requests",
                    "make every input from the shapes of the metadata it gets",
                )
            # No view of the buffer: Dynamo would guard its base.
            inputs.append(buffer[: sample.shape[0]].data.copy_(sample))
        return tuple(inputs)

    def _capture(self, entry: _Entry, metadata: AttentionMetadata) -> None:
        side = torch.cuda.Stream(self.builder.device)
        side.wait_stream(torch.cuda.current_stream(self.builder.device))
        with torch.cuda.stream(side):
            # The first size loads and allocates for the others too.
            for _ in range(1 if self._entries else 2):
                self._run(entry, metadata)
        torch.cuda.current_stream(self.builder.device).wait_stream(side)
        entry.graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Other threads may allocate and synchronize meanwhile, but not begin a capture, which empties torch's cache.
        with _capturing:
            torch.cuda.synchronize(self.builder.device)
            with (
                _without_collection(),
                torch.cuda.graph(entry.graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                entry.output = self._run(entry, metadata)
        start_early(entry.graph.raw_cuda_graph())
        entry.graph.instantiate()

    def _run(self, entry: _Entry, metadata: AttentionMetadata) -> Any:
        with forward_context(metadata), torch.no_grad():
            return self.function(*entry.inputs)

    def _free_memory(self) -> int:
        if self._pool is None:
            return 0
        torch.cuda.synchronize(self.builder.device)
        return torch.cuda.mem_get_info(self.builder.device)[0]

    def key_for(self, num_reqs: int, num_tokens: int) -> CaptureKey | None:
        """Return the smallest capture that holds a step of this many requests and tokens, `None` if none does."""
        fitting = [key for key in self._entries if key.num_reqs >= num_reqs and key.num_tokens >= num_tokens]
        return min(fitting, key=lambda key: (key.num_tokens, key.num_reqs), default=None)

    def build(
        self, query_lens: Lengths, seq_lens: Lengths, block_tables: Tables, check_model: bool = True, **options: Any
    ) -> AttentionMetadata:
        """Build a step padded to the smallest capture that holds it; arguments of `AttentionMetadataBuilder.build`.

        Args:
            check_model: whether to call `check_model`, which takes up to a millisecond for a large model. A caller that
                does so while the device runs drops the result of a step that it refuses.

        Raises:
            GraphContractError: no capture holds the step (ask `key_for` first), it contradicts the capture, or the
                model has changed since by more than the values of its weights.
            MetadataError: as `AttentionMetadataBuilder.build`.
        """
        query_lens = read_integers("query_lens", query_lens)
        num_reqs, num_tokens = query_lens.shape[0], int(query_lens.sum())
        key = self.key_for(num_reqs, num_tokens)
        if key is None:
            sizes = ", ".join(f"{key.num_reqs} requests and {key.num_tokens} tokens" for key in self._entries)
            raise GraphContractError(
                f"a step of {num_reqs} requests and {num_tokens} tokens", f"up to {sizes}", "run it without the runner"
            )
        if check_model and self._entries[key].graph is not None:
            self.check_model()
        return self.builder.build(query_lens, seq_lens, block_tables, capture_key=key, **options)

    @property
    def captured(self) -> bool:
        """Whether a step is replayed, not run by the function as on the CPU."""
        return any(entry.graph is not None for entry in self._entries.values())

    def free(self) -> None:
        """Free the graphs and their memory; no step fits any more."""
        if self._pool is not None:
            torch.cuda.synchronize(self.builder.device)
        self._entries.clear()
        self._buffers.clear()

    def check_model(self) -> None:
        """Refuse a model that has changed since its capture by more than the values of its weights.

        Raises:
            GraphContractError: it has.
        """
        if self._identity is None:
            return
        before = self._identity.changes
        if self._identity.look() > before:
            # They may move tensors.
            for renew in self._renewals:
                renew()
            self._identity.look()
        if self._identity.moves:
            raise GraphContractError(
                f"a model that has changed since its capture, in {self._identity.changed}",
                "the weights, adapters, hooks and attributes of the capture; weights may get other values in place",
                "capture it again by a new runner or generator, or run it without graphs",
            )

    def __call__(self, *inputs: Tensor, metadata: AttentionMetadata) -> Any:
        """Replay a step.

        Args:
            *inputs: the function's arguments, padded or not; padding rows become zero.
            metadata: from `build`.

        Returns:
            What the function returns, tensors sliced to the real rows. They lie in the graph's memory: the next call of
            any size overwrites them, so clone what must last.

        Raises:
            GraphContractError: metadata, inputs or caches that contradict the capture.
            MetadataError: an older step than the newest of its builder.
        """
        entry = self._entry(step_of(metadata, "CUDAGraphRunner"))
        if self._bindings.changed() is not None:
            raise GraphContractError(
                "a KV cache was bound again after the capture",
                "the caches of the capture, which the graphs write into",
                "make a new CUDAGraphRunner after allocating caches",
            )
        _copy_inputs(inputs, entry.inputs)
        if entry.graph is not None:
            entry.graph.replay()
            output = entry.output
        else:
            output = self._run(entry, metadata)
        return pytree.tree_map_only(Tensor, lambda tensor: self._real_rows(tensor, metadata), output)

    def _entry(self, metadata: AttentionMetadata) -> _Entry:
        key = metadata.capture_key()
        if key not in self._entries:
            nearest = min(
                self._entries, key=lambda entry: (len(entry.differences(key)), abs(entry.num_reqs - key.num_reqs))
            )
            refuse_contradiction(nearest, key)
        return self._entries[key]

    def _real_rows(self, tensor: Tensor, metadata: AttentionMetadata) -> Tensor:
        rows = tensor.shape[0] if tensor.dim() else -1
        real = {"tokens": metadata.num_actual_tokens, "requests": metadata.num_reqs}
        padded = {"tokens": metadata.slot_mapping.shape[0], "requests": metadata.seq_lens.shape[0]}
        kinds = [self._output_rows] if self._output_rows else [kind for kind in padded if padded[kind] == rows]
        counts = {real[kind] for kind in kinds}
        if len(counts) > 1:
            raise GraphContractError(
                f"an output of {rows} rows, with as many padded tokens as padded requests",
                "output_rows='tokens' or 'requests' when a step's real counts differ",
                "pass output_rows= to CUDAGraphRunner",
            )
        return tensor[: counts.pop()] if counts else tensor


def _copy_inputs(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if len(inputs) != len(targets):
        raise GraphContractError(f"{len(inputs)} inputs", f"{len(targets)} inputs, as captured", "pass all of them")
    for index, (source, target) in enumerate(zip(inputs, targets, strict=True)):
        rows = source.shape[0]
        if source.dtype != target.dtype or source.shape[1:] != target.shape[1:] or rows > target.shape[0]:
            raise GraphContractError(
                f"input {index} is {source.dtype} {tuple(source.shape)}",
                f"{target.dtype} {tuple(target.shape)} or fewer rows",
                "pass inputs like those of make_inputs",
            )
    for source, target in zip(inputs, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target[: source.shape[0]].copy_(source, non_blocking=True)
            target[source.shape[0] :].zero_()


def _cached_layers(function: Callable[..., Any]) -> list[Any]:
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return [module for module in modules if hasattr(module, "bind_kv_cache")]
