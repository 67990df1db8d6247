"""Choose which steps of a generator are captured as CUDA graphs, and capture them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vattn.compilation.cuda_graph import CUDAGraphRunner
from vattn.config.arguments import read_count
from vattn.errors import ConfigError, UnsupportedRequestError, VattnError
from vattn.generation.model_steps import Graphs, sample_draft_inputs, sample_inputs
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.token_tree import TokenTree

Forward = Callable[..., Tensor]


def mixed_sizes(
    sizes: Sequence[int] | None,
    token_budget: int,
    max_num_reqs: int,
    decodes: Sequence[int],
    builder: AttentionMetadataBuilder,
) -> list[int]:
    """Return the numbers of tokens to capture for steps with prompts: those given, or a ladder on CUDA.

    Args:
        sizes: `None` for the ladder, `()` for none.
        token_budget: tokens of the largest step.
        max_num_reqs: requests that run at once.
        decodes: numbers of requests that are captured; without any, nothing is by default.
        builder: of the steps; the ladder is for layers on TRITON_ATTN, where it was measured.

    Raises:
        ConfigError: no list of ints, or more tokens than a step has.
    """
    if sizes is None:
        if builder.has_states:
            return []
        if builder.device.type != "cuda" or not decodes or builder.backends != {"TRITON_ATTN"}:
            return []
        most = min(token_budget, MIXED_LADDER[-1])
        # Padding to fewer tokens than requests would be no step that kernels were tuned for.
        return sorted(size for size in {*MIXED_LADDER, most} if max(2, max_num_reqs) <= size <= most)
    if not isinstance(sizes, (list, tuple, range)):
        raise ConfigError(f"mixed_graph_sizes={sizes!r:.80}", "a list of numbers of tokens", "mixed_graph_sizes=[256]")
    read = sorted({read_count("mixed_graph_sizes", size, 2, "change mixed_graph_sizes") for size in sizes})
    if read and read[-1] > token_budget:
        raise ConfigError(
            f"mixed_graph_sizes with {read[-1]} for steps of up to {token_budget} tokens",
            f"2 to {token_budget}",
            "raise token_budget, or leave the size out",
        )
    return read


MIXED_LADDER = (63, 127, 255, 511, 767, 1023, 1279, 1535)
"""Numbers of tokens up to which launching the layers of an 8B model took an H200's host longer than they ran.

Each fills tiles of rows but for one: a multiple of the requests would not do, see `mixed_pair`.
"""

_MOST_DRAFTS = 16
"""Most rows of a request that attention takes for drafts."""


def mixed_pair(max_num_reqs: int, tokens: int, max_seq_len: int) -> tuple[int, int]:
    """Return requests and tokens of a capture for steps with prompts.

    Attention takes a step of as many tokens for every request for one of drafts, and is slow where one request has most
    of them: there the capture has one token more.
    """
    rows, rest = divmod(tokens, max(2, max_num_reqs))
    return max_num_reqs, min(tokens + (not rest and rows <= _MOST_DRAFTS), max_num_reqs * max_seq_len)


def graph_ladder(sizes: Sequence[int] | None, most: int, device: torch.device) -> list[int]:
    """Return the numbers of requests to capture: those given, or a ladder on CUDA."""
    if sizes is None:
        # Steps of decodes read weights and caches for the most part: rows of padding cost little, captures a tenth of a
        # second each, and more where a kernel is compiled for them.
        ladder = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, most + 1, 64), most]
        return sorted({size for size in ladder if size <= most}) if device.type == "cuda" else []
    if not isinstance(sizes, (list, tuple, range)):
        raise ConfigError(f"graph_sizes={sizes!r:.80}", "a list of numbers of requests, () for none", "graph_sizes=[8]")
    return [read_count("graph_sizes", size, 1, "change graph_sizes") for size in sizes]


@dataclass(frozen=True)
class GraphSizes:
    """What to capture.

    Attributes:
        decodes: numbers of requests of steps with one token each.
        num_drafts: drafts of a request, for graphs of steps with drafts too.
        mixed: numbers of tokens of steps with prompts.
        max_num_reqs: requests of such a step.
        with_states: whether the model keeps a state for each request.
        with_encoder: whether the model has cross attention.
        tree: how drafts branch; `None`: not at all.
    """

    decodes: Sequence[int] = ()
    num_drafts: int = 0
    mixed: Sequence[int] = ()
    max_num_reqs: int = 1
    with_states: bool = False
    with_encoder: bool = False
    tree: TokenTree | None = None

    @property
    def step_options(self) -> Callable[[int], dict[str, Any]] | None:
        """What steps of some number of requests are built with besides, to capture them; `None` for nothing."""
        if self.with_encoder:
            return lambda num_reqs: {"encoder_lens": [0] * num_reqs, "cross_block_tables": [[]] * num_reqs}
        return (lambda num_reqs: {"state_slots": [0] * num_reqs}) if self.with_states else None


def capture(
    forward: Forward, builder: AttentionMetadataBuilder, sizes: GraphSizes, memory_of: Graphs | None = None
) -> Graphs:
    """Return graphs for steps of some numbers of requests, and for steps with prompts of some numbers of tokens.

    All use one pool of memory, that of `memory_of` if it is given: the logits of a step are read before the next
    one begins.

    Raises:
        UnsupportedRequestError: a backend, or something else in the model, cannot be captured.
    """
    graphs = Graphs()
    wanted: list[tuple[str, list[Any], Any, dict[str, Any]]] = []
    shared: dict[str, Any] = {"step_options": sizes.step_options}
    if sizes.mixed:
        # The largest of all first: the others fit into their memory.
        pairs = [mixed_pair(sizes.max_num_reqs, tokens, builder.max_seq_len) for tokens in sizes.mixed]
        wanted.append(("mixed", pairs, sample_inputs, {"output_rows": "requests"}))
    if sizes.decodes:
        wanted.append(("plain", list(sizes.decodes), sample_inputs, {"output_rows": "requests"}))
    if sizes.decodes and sizes.num_drafts:
        rows: dict[str, Any] = {"output_rows": "tokens", "tokens_per_request": 1 + sizes.num_drafts}
        if sizes.tree is not None:
            rows["step_options"] = lambda num_reqs: {"trees": [sizes.tree] * num_reqs}
        wanted.append(("drafts", list(sizes.decodes), sample_draft_inputs, rows))
    first: CUDAGraphRunner | None = next(filter(None, memory_of or ()), None)
    for name, numbers, inputs, options in wanted:
        runner = capture_runner(forward, numbers, builder, inputs, memory_of=first, **{**shared, **options})
        first = first or runner
        graphs = graphs._replace(**{name: runner})
    return graphs


def steps_ahead(sizes: GraphSizes, token_budget: int, max_seq_len: int) -> list[tuple[int, int]]:
    """Return requests and tokens of the steps that `capture` captures, and of prompts beyond.

    Kernels go by how many tokens a request has on average.
    """
    found = [mixed_pair(sizes.max_num_reqs, tokens, max_seq_len) for tokens in sizes.mixed]
    found += [(size, size * rows) for size in sizes.decodes for rows in {1, 1 + sizes.num_drafts}]
    longest = max(sizes.mixed, default=0)
    if sizes.decodes and token_budget > longest:
        requests = {1 << power for power in range(sizes.max_num_reqs.bit_length())} | {sizes.max_num_reqs}
        for count, tokens in itertools.product(sorted(requests), {longest + 1, token_budget}):
            if count <= tokens <= count * max_seq_len:
                found.append((count, tokens))
    return found


def capture_runner(forward: Forward, *arguments: Any, **options: Any) -> CUDAGraphRunner:
    """Return the graphs of a function; arguments of `CUDAGraphRunner`.

    Raises:
        UnsupportedRequestError: a backend, or something else in the model, cannot be captured.
    """
    try:
        # As steps are launched: in another mode each layer would be compiled once more for those without a graph.
        with torch.inference_mode():
            return CUDAGraphRunner(forward, *arguments, **options)
    except RuntimeError as error:
        if isinstance(error, VattnError) or "captur" not in str(error):
            raise
        raise UnsupportedRequestError(
            f"a model that cannot be captured as a CUDA graph: {str(error).splitlines()[0]}",
            "models whose steps neither wait for the device nor copy from the host",
            "graph_sizes=() without mixed_graph_sizes runs it without graphs; experts of a transformers model can be "
            "captured in bfloat16, or after model.set_experts_implementation('batched_mm')",
        ) from error
