"""Steps of a draft model: the tokens of the target's step, and then the drafts, all in one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

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


class DraftChain(nn.Module):
    """Run a step of the draft model, and then one step for each further draft, without the host.

    Args:
        forward: the draft model, compiled or not.
        num_drafts: tokens that it drafts.
        builder: of the further steps; not the one of the first step.
    """

    def __init__(self, forward: nn.Module, num_drafts: int, builder: AttentionMetadataBuilder) -> None:
        super().__init__()
        self.forward_step, self.num_drafts, self._builder = forward, num_drafts, builder
        count = builder.max_num_reqs + 1
        self._starts = torch.arange(count, dtype=torch.int32, device=builder.device)
        self._rows = torch.arange(count, device=builder.device)
        self._offsets = torch.arange(num_drafts - 1, device=builder.device)

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        """Return int64 `[N, num_drafts]` drafts, N the padded number of requests.

        Args:
            ids, positions: int64 `[T]` of the first step.
            rows: int64 `[N]`, each request's last token of it.
            ends: int64 `[N]`: drafts are computed at positions before these, so that their keys and values are stored;
                0 for requests without drafts.
        """
        step = current_step()
        assert step is not None
        drafts = [self._choose(self.forward_step(ids, positions, rows))]
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
                place = places[index, :count].data
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
                drafts.append(self._choose(self.forward_step(drafts[-1], place, numbers)))
        return torch.stack(drafts, dim=1)

    def _choose(self, logits: Tensor) -> Tensor:
        """Return the likeliest tokens, not as an inference tensor."""
        with torch.inference_mode(False):
            return logits.argmax(dim=-1)


class DraftSteps(DraftSource):
    """Draft for one generator by a model with a cache of its own.

    In each step the draft model computes the target's tokens too, in blocks of the same ids. So a block that is found
    by its content, or freed, is so in both caches.

    Args:
        model: the draft model.
        cache: its own.
        num_drafts: most tokens that are drafted for a request.
        served: what it drafts for.
    """

    beside_prompts, launches = False, True

    def __init__(self, model: nn.Module, cache: KVCacheAllocation, num_drafts: int, served: ServedModel) -> None:
        self.model, self.num_drafts, self._blocks = model, num_drafts, served.blocks
        self._group = _whole_group(served.blocks.cache)
        most, longest = served.max_num_reqs, served.max_seq_len
        # A request may have one token more than in the target's step: the last draft of the step before.
        builder = make_builder(model, cache, most, served.token_budget + 2 * most + 1, longest)
        if builder.host_planned:
            raise ConfigError(
                f"a draft model on {min(builder.host_planned)}, which plans each step on the host",
                "a backend that plans on the device",
                "enable(small, attn_backend='TRITON_ATTN')",
            )
        self._builder, self._device = builder, builder.device
        forward = CompiledModel(model, served.compile, builder.device, served.compile_options).forward
        mixed = mixed_sizes(None, served.token_budget, most, served.graph_sizes, builder)
        self._steps = ModelSteps(
            forward, builder, capture(forward, builder, GraphSizes(mixed=mixed, max_num_reqs=most))
        )
        following = make_builder(model, cache, most, max(2, most), longest)
        self._chain = DraftChain(forward, num_drafts, following)  # type: ignore[arg-type]
        # One token each, or two where a request has the last draft of the step before.
        self._runners = [
            capture_runner(
                self._chain,
                served.graph_sizes,
                builder,
                _sample_inputs,
                tokens_per_request=count,
                output_rows="requests",
            )
            for count in ((1, 2) if served.graph_sizes else ())
        ]
        take_cache(cache.kv_caches[0])
        layers = [layer for layer in model.modules() if hasattr(layer, "bind_kv_cache")]
        self._bindings = CacheBindings(layers, cache_claim)

    def plan(self, request: Request, most: int) -> list[int]:
        """Return placeholders: the device knows the drafts."""
        return [UNKNOWN] * most

    @torch.inference_mode()
    def launch(self, batch: Batch, begin: torch.cuda.Event | None) -> Ran | None:
        """Compute a step's known tokens, and then its drafts."""
        if self._bindings.changed() is not None:
            raise CacheError(
                "drafts by a model whose cache was allocated again, or taken by another generator",
                "one generator for a draft model: the newest",
                "use that one or make a new one",
            )
        drafts = batch.drafts or [[] for _ in batch.requests]
        known = [end - len(each) for end, each in zip(batch.ends, drafts, strict=True)]
        counts, ids = list[int](), list[int]()
        for request, start, end in zip(batch.requests, batch.starts, known, strict=True):
            first = min(request.drafted_until, start)
            counts.append(end - first)
            ids += request.tokens(first, end)
        tables = self._blocks.rows(batch.requests, max(batch.ends))
        step = StepInputs(counts, known, ids, tables=tables if self._group is None else tables[self._group])
        runner, found = self._runner(counts), None
        if batch.drafts or runner is not None:
            found = self._draft(step, drafts, runner, begin)
        else:
            step.graphs = MIXED
            self._steps.run(step, None, begin)
        for request, end, each in zip(batch.requests, known, drafts, strict=True):
            request.drafted_until = end + max(0, len(each) - 1)
        return found

    def _runner(self, counts: Sequence[int]) -> CUDAGraphRunner | None:
        """Return the graphs that hold a step of decodes."""
        most = max(counts)
        runner = self._runners[most - 1] if most <= len(self._runners) else None
        return runner if runner is not None and runner.key_for(len(counts), sum(counts)) is not None else None

    def _draft(
        self,
        step: StepInputs,
        drafts: Sequence[Sequence[int]],
        runner: CUDAGraphRunner | None,
        begin: torch.cuda.Event | None,
    ) -> Ran | None:
        """Run the chain, and return the drafts that were planned."""
        lengths = [len(each) for each in drafts]
        last = [end - 1 for end in accumulate(step.counts)]
        until = [end + length - 1 if length > 1 else 0 for end, length in zip(step.ends, lengths, strict=True)]
        # Two requests and tokens at least, as the metadata has.
        lists = [[*each, *([0] * (2 - len(each)))] for each in (step.ids, last, until)]
        ids, rows, ends = on_device([*chain(*lists)], self._device).split([*map(len, lists)])
        if runner is not None:
            # The runner of a step with drafts looks at the model later.
            metadata = runner.build(step.counts, step.ends, step.tables, check_model=not any(lengths))
            if begin is not None:
                begin.record()
            found = runner(*model_inputs(ids, metadata, rows), ends, metadata=metadata)
        else:
            metadata = self._builder.build(step.counts, step.ends, step.tables, num_tokens_padded=ids.shape[0])
            inputs = [*model_inputs(ids, metadata, rows), ends]
            with torch.inference_mode(False):
                inputs = [tensor.clone() if tensor.is_inference() else tensor for tensor in inputs]
            if begin is not None:
                begin.record()
            with forward_context(metadata):
                found = self._chain(*inputs)
        if not any(lengths):
            return None
        flat = found[: len(lengths)].reshape(-1)
        if min(lengths) == self.num_drafts:
            return Ran(flat.clone(), metadata, runner)
        places = [row * self.num_drafts + index for row, length in enumerate(lengths) for index in range(length)]
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
        "a DraftModel for a target with hybrid=True in which no layer keeps all tokens",
        "a cache without groups, or with full attention in one",
        "allocate the target's cache without hybrid=True",
    )


def _sample_inputs(metadata: AttentionMetadata) -> list[Tensor]:
    """Return inputs for the capture of the chain; no draft is stored."""
    requests = metadata.seq_lens.shape[0]
    ends = torch.zeros(requests, dtype=torch.int64, device=metadata.seq_lens.device)
    return [*model_inputs([0] * metadata.slot_mapping.shape[0], metadata), ends]
