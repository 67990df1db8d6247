"""Steps of a draft model: the tokens of the target's step, and then the drafts, all in one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.cache.bindings import CacheBindings, cache_claim, take_cache
from vattn.compilation.cuda_graph import CUDAGraphRunner
from vattn.errors import CacheError, ConfigError
from vattn.generation.batch import Batch
from vattn.generation.capture import GraphSizes, capture, capture_runner, mixed_sizes
from vattn.generation.compiled_model import CompiledModel
from vattn.generation.draft_source import UNKNOWN, DraftSource, ServedModel
from vattn.generation.model_steps import MIXED, ModelSteps, Ran, StepInputs, model_inputs
from vattn.generation.request import Request
from vattn.generation.setup import make_builder
from vattn.generation.transfers import on_device
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import current_step, forward_context
from vattn.metadata.token_tree import TokenTree


class DraftChain(nn.Module):
    """Run a step of the draft model, and then one step for each further draft, without the host.

    Args:
        forward: the draft model, compiled or not.
        num_drafts: tokens that it drafts.
        builder: of the further steps; not the one of the first step.
        states: `[M, hidden_size]`, hidden states that the first step begins with; `None` for a model that reads none.
        widths: how many of the likeliest tokens are drafts after each step, of which the next step takes the first;
            default one.
    """

    def __init__(
        self,
        forward: nn.Module,
        num_drafts: int,
        builder: AttentionMetadataBuilder,
        states: Tensor | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._widths = widths or [1] * num_drafts
        self.forward_step, self.num_drafts, self._builder, self._states = forward, num_drafts, builder, states
        self._d2t: Tensor | None = getattr(forward, "d2t", None)
        count = builder.max_num_reqs + 1
        self._starts = torch.arange(count, dtype=torch.int32, device=builder.device)
        self._rows = torch.arange(count, device=builder.device)
        self._offsets = torch.arange(num_drafts - 1, device=builder.device)

    def first(self, ids: Tensor, positions: Tensor, rows: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the first step; return int64 `[N, width]` drafts, and hidden states for a model that reads them.

        Args:
            sources: int64 `[T]`, a row of `states` for each token; nothing for a model that reads none.
        """
        found = [] if self._states is None else [self._states.index_select(0, each) for each in sources]
        return self._choose(self.forward_step(ids, positions, rows, *found), 0)

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor, ends: Tensor, *sources: Tensor) -> Tensor:
        """Return int64 `[N, sum(widths)]` drafts, N the padded number of requests.

        Args:
            ids, positions: int64 `[T]` of the first step.
            rows: int64 `[N]`, each request's last token of it.
            ends: int64 `[N]`: drafts are computed at positions before these, so that their keys and values are stored;
                0 for requests without drafts.
            sources: see `first`.
        """
        step = current_step()
        assert step is not None
        draft, *states = self.first(ids, positions, rows, sources)
        drafts = [draft]
        count, size, table = rows.shape[0], self._builder.block_size, step.block_table
        # Not inference tensors: those would compile each layer once more.
        with torch.inference_mode(False):
            starts, numbers = self._starts[: count + 1].data, self._rows[:count].data
            places = step.seq_lens.long() + self._offsets[:, None].data
            # For all further drafts at once, a row each: many small launches take as long as a layer.
            inside = places < ends
            places = torch.where(inside, places, 0)
            slots = table.gather(1, (places // size).T).T.contiguous() * size + places % size
            slots = torch.where(inside, slots, -1)
            lengths, slots, places = (_aligned(each) for each in ((places + 1).int(), slots, places))
        for index in range(self.num_drafts - 1):
            with torch.inference_mode(False):
                place, ids = places[index, :count].data, draft[:, 0].contiguous()
                following = self._builder.build_from_tensors(
                    starts,
                    lengths[index, :count].data,
                    table,
                    slots[index, :count].data,
                    positions=place,
                    max_query_len=1,
                    copy=False,
                )
            with forward_context(following):
                found = self.forward_step(ids, place, numbers, *states)
                draft, *states = self._choose(found, index + 1)
            drafts.append(draft)
        return torch.cat(drafts, dim=1)

    def _choose(self, found: Tensor | tuple[Tensor, ...], index: int) -> tuple[Tensor, ...]:
        """Return the likeliest tokens, not as an inference tensor, and what comes with the logits."""
        logits, *states = (found,) if isinstance(found, Tensor) else found
        with torch.inference_mode(False):
            width = self._widths[index]
            tokens = logits.argmax(-1, keepdim=True) if width == 1 else logits.topk(width).indices
            return tokens if self._d2t is None else tokens + self._d2t[tokens], *states


class DraftSteps(DraftSource):
    """Draft for one generator by a model with a cache of its own.

    In each step the draft model computes the target's tokens too, in blocks of the same ids. So a block that is found
    by its content, or freed, is so in both caches.

    Args:
        model: the draft model.
        cache: its own.
        num_drafts: most tokens that are drafted for a request.
        served: what it drafts for.
        states: see `DraftChain`.
        tree: how drafts branch; `None`: not at all.
    """

    beside_prompts, launches = False, True

    def __init__(
        self,
        model: nn.Module,
        cache: KVCacheAllocation,
        num_drafts: int,
        served: ServedModel,
        states: Tensor | None = None,
        tree: TokenTree | None = None,
    ) -> None:
        widths = [] if tree is None else [tree.depths.count(depth) for depth in range(1, tree.depth + 1)]
        self.tree, self._depth = tree, len(widths) or num_drafts
        self.model, self.num_drafts, self._blocks = model, num_drafts, served.blocks
        self._group = _whole_group(served.blocks.cache)
        most, longest = served.max_num_reqs, served.max_seq_len
        tokens = self._tokens_per_request()
        builder = make_builder(model, cache, most, served.token_budget + max(tokens) * most + 1, longest)
        if builder.host_planned:
            raise ConfigError(
                f"a draft model on {min(builder.host_planned)}, which plans each step on the host",
                "a backend that plans on the device",
                "enable(small, attn_backend='TRITON_ATTN')",
            )
        self._builder, self._device = builder, builder.device
        forward = CompiledModel(model, served.compile, builder.device, served.compile_options).forward
        self._steps = self._prompt_steps(forward, served)
        following = make_builder(model, cache, most, max(2, most), longest)
        self._chain = DraftChain(forward, self._depth, following, states, widths)  # type: ignore[arg-type]
        self._runners = [
            capture_runner(
                self._chain,
                served.graph_sizes,
                builder,
                self._sample_inputs,
                tokens_per_request=count,
                output_rows="requests",
            )
            for count in (tokens if served.graph_sizes else ())
        ]
        take_cache(cache.kv_caches[0])
        layers = [layer for layer in model.modules() if hasattr(layer, "bind_kv_cache")]
        self._bindings = CacheBindings(layers, cache_claim)
        # Of the last step with a tree: what its drafts were, and from where on each request has them in the cache.
        self._before: tuple[Batch, dict[Request, int]] | None = None

    def _tokens_per_request(self) -> tuple[int, ...]:
        """Return for how many tokens of each request the chain is captured.

        One, or two where a request has the last draft of the step before, which the target's step had.
        """
        return 1, 2

    def _prompt_steps(self, forward: Any, served: ServedModel) -> ModelSteps | None:
        """Return what runs steps without drafts."""
        most = served.max_num_reqs
        mixed = mixed_sizes(None, served.token_budget, most, served.graph_sizes, self._builder)
        graphs = capture(forward, self._builder, GraphSizes(mixed=mixed, max_num_reqs=most))
        return ModelSteps(forward, self._builder, graphs)

    def _sample_inputs(self, metadata: AttentionMetadata) -> list[Tensor]:
        """Return inputs for the capture of the chain; no draft is stored."""
        requests = metadata.seq_lens.shape[0]
        ends = torch.zeros(requests, dtype=torch.int64, device=metadata.seq_lens.device)
        return [*model_inputs([0] * metadata.slot_mapping.shape[0], metadata), ends]

    def plan(self, request: Request, most: int) -> list[int]:
        """Return placeholders: the device knows the drafts."""
        return [UNKNOWN] * most

    def check_cache(self) -> None:
        """Refuse to draft with a cache that another generator has by now.

        Raises:
            CacheError: another one has it.
        """
        if self._bindings.changed() is not None:
            raise CacheError(
                "drafts by a model whose cache was allocated again, or taken by another generator",
                "one generator for a draft model: the newest",
                "use that one or make a new one",
            )

    @torch.inference_mode()
    def launch(self, batch: Batch, begin: torch.cuda.Event | None) -> Ran | None:
        """Compute a step's known tokens, and then its drafts."""
        self.check_cache()
        drafts = batch.drafts or [[] for _ in batch.requests]
        known = [end - len(each) for end, each in zip(batch.ends, drafts, strict=True)]
        counts, ids = list[int](), list[int]()
        self._forget_branches()
        for request, start, end in zip(batch.requests, batch.starts, known, strict=True):
            first = min(request.drafted_until, start)
            counts.append(end - first)
            ids += request.tokens(first, end)
        step = StepInputs(counts, known, ids, tables=self._tables_of(batch))
        runner, found = self._runner(counts), None
        if batch.drafts or runner is not None:
            found = self._draft(step, [*map(len, drafts)], runner, begin)
        else:
            assert self._steps is not None
            step.graphs = MIXED
            self._steps.run(step, None, begin)
        for request, end, each in zip(batch.requests, known, drafts, strict=True):
            request.drafted_until = end + max(0, min(len(each), self._depth) - 1)
        if self.tree is not None:
            self._before = batch, dict(zip(batch.requests, known, strict=True))
        return found

    def _forget_branches(self) -> None:
        """Let requests compute again from the first accepted draft that was not the likeliest one: its place in the
        cache has the likeliest one's key.
        """
        if self._before is None or self.tree is None:
            return
        batch, known = self._before
        for request, path in batch.paths.items():
            likeliest = sum(not any(self.tree.paths[row - 1]) for row in path)
            request.drafted_until = min(request.drafted_until, known[request] + likeliest)
        self._before = None

    def _tables_of(self, batch: Batch) -> Tensor:
        """Return the block table of each request of the target's step."""
        tables = self._blocks.rows(batch.requests, max(batch.ends))
        if self._group is not None:
            tables = tables[self._group]
        assert isinstance(tables, Tensor)
        return tables

    def _runner(self, counts: Sequence[int]) -> CUDAGraphRunner | None:
        """Return the graphs that hold a step of decodes."""
        most = max(counts)
        runner = self._runners[most - 1] if most <= len(self._runners) else None
        return runner if runner is not None and runner.key_for(len(counts), sum(counts)) is not None else None

    def _draft(
        self,
        step: StepInputs,
        lengths: Sequence[int],
        runner: CUDAGraphRunner | None,
        begin: torch.cuda.Event | None,
        sources: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> Ran | None:
        """Run the chain, and return the drafts that were planned.

        Args:
            step: its first step.
            lengths: how many drafts each request gets.
            runner: the graphs that hold the step; `None`: none.
            begin: recorded before the first kernel.
            sources: for each token its row of the chain's states; `None` for a model that reads none.
            order: the requests in the order in which their drafts are returned; `None` for that of the step.
        """
        last = [end - 1 for end in accumulate(step.counts)]
        steps = [min(length, self._depth) for length in lengths]
        until = [end + length - 1 if length > 1 else 0 for end, length in zip(step.ends, steps, strict=True)]
        # Two requests and tokens at least, as the metadata has.
        known = (step.ids, last, until) if sources is None else (step.ids, last, until, sources)
        lists = [[*each, *([0] * (2 - len(each)))] for each in known]
        ids, rows, *more = on_device([*chain(*lists)], self._device).split([*map(len, lists)])
        if runner is not None:
            # The runner of a step with drafts looks at the model later.
            metadata = runner.build(step.counts, step.ends, step.tables, check_model=not any(lengths))
            if begin is not None:
                begin.record()
            found = runner(*model_inputs(ids, metadata, rows), *more, metadata=metadata)
        else:
            metadata = self._builder.build(step.counts, step.ends, step.tables, num_tokens_padded=ids.shape[0])
            inputs = [*model_inputs(ids, metadata, rows), *more]
            with torch.inference_mode(False):
                inputs = [tensor.clone() if tensor.is_inference() else tensor for tensor in inputs]
            if begin is not None:
                begin.record()
            with forward_context(metadata):
                if sources is not None and not any(lengths):
                    self._chain.first(inputs[0], inputs[1], inputs[2], inputs[4:])
                    return None
                found = self._chain(*inputs)
        if not any(lengths):
            return None
        flat = found[: len(lengths)].reshape(-1)
        order = range(len(lengths)) if order is None else order
        places = [row * self.num_drafts + index for row in order for index in range(lengths[row])]
        if places == list(range(flat.shape[0])):
            return Ran(flat.clone(), metadata, runner)
        return Ran(flat.index_select(0, on_device(places, self._device)), metadata, runner)


def _aligned(rows: Tensor) -> Tensor:
    """Return a matrix with room after its rows, so that each begins at 16 bytes."""
    return nn.functional.pad(rows, (0, -rows.shape[1] % (16 // rows.itemsize)))


def _whole_group(cache: KVCacheAllocation) -> int | None:
    """Return the group of layers that keep all tokens, in the cache of the target; `None` without groups."""
    if not cache.groups:
        return None
    for index, group in enumerate(cache.groups):
        if not group.spec.first_block(1 << 30):
            return index
    raise ConfigError(
        "drafts of a model for a target with hybrid=True in which no layer keeps all tokens",
        "a cache without groups, or with full attention in one",
        "allocate the target's cache without hybrid=True",
    )
