"""Make what runs the steps of a generator: meet the other ranks, compile the model, capture graphs, start drafts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vattn.cache.bindings import take_cache
from vattn.compilation.compile_ahead import compiling_ahead
from vattn.compilation.warmup import compile_steps
from vattn.generation.adapter_steps import AdapterSteps
from vattn.generation.capture import GraphSizes, capture, mixed_sizes, steps_ahead
from vattn.generation.compiled_model import CompiledModel
from vattn.generation.draft_source import DraftSource, ServedModel
from vattn.generation.model_steps import Graphs, ModelSteps
from vattn.generation.pipeline import part_of_pipeline, steps_of_ranks
from vattn.generation.ranks import join_ranks
from vattn.generation.setup import check_tree, find_adapters, longest_encoder, make_builder
from vattn.layers.lora import Adapters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Prepared:
    """What runs the steps of a generator.

    Attributes:
        steps: of the model, or of this rank's part of it.
        compiled: the model.
        graphs: those that are captured.
        source: drafts tokens; `None` for none.
        adapters: of the model; `None` for none.
    """

    steps: ModelSteps
    compiled: CompiledModel
    graphs: Graphs
    source: DraftSource | None
    adapters: Adapters | None


def prepare(
    served: ServedModel,
    speculation: DraftSource | None,
    mixed_graph_sizes: Any,
    group: ProcessGroup | None,
    group_timeout: float,
) -> Prepared:
    """Make what runs the steps of a generator, and take its cache; for the arguments see `Generator`."""
    model, cache, max_num_reqs = served.model, served.blocks.cache, served.max_num_reqs
    num_drafts = speculation.num_drafts if speculation is not None else 0
    capacity = max(2, served.token_budget + 1, max_num_reqs * (1 + num_drafts))
    tree = None if speculation is None else speculation.tree
    if tree is not None:
        check_tree(model, cache, group)
    builder = make_builder(model, cache, max_num_reqs, capacity, served.max_seq_len, tree)
    options = {
        "num_blocks": cache.num_blocks,
        "block_size": cache.block_size,
        "groups of the cache": len(cache.groups),
        "max_num_reqs": max_num_reqs,
        "token_budget": served.token_budget,
        "max_seq_len": served.max_seq_len,
        "drafts of speculation": num_drafts,
        "graph_sizes": served.graph_sizes,
        "mixed_graph_sizes": mixed_graph_sizes,
        "compile": served.compile,
    }
    leader = join_ranks(model, group, group_timeout, options)
    with nullcontext() if leader is None else leader.together():
        mixed = mixed_sizes(mixed_graph_sizes, served.token_budget, max_num_reqs, served.graph_sizes, builder)
        compiled = CompiledModel(model, served.compile, cache.device, served.compile_options)
        forward = part_of_pipeline(compiled.forward, model, capacity)
        if speculation is not None:
            forward = speculation.watch(served, forward, capacity)
        # Replaces what the generator before reads: after all that may refuse this one.
        adapters = find_adapters(model, group, capacity)
        kinds = cache.states is not None, longest_encoder(model) > 0
        sizes = GraphSizes(served.graph_sizes, num_drafts, mixed, max_num_reqs, *kinds, tree)
        with compiling_ahead(cache.device):
            steps_to_come = steps_ahead(sizes, served.token_budget, served.max_seq_len)
            compile_steps(model, builder, steps_to_come, sizes.step_options)
            graphs = capture(forward, builder, sizes)
    source = None if speculation is None else speculation.start(replace(served, forward=forward))
    if adapters is not None:
        steps: ModelSteps = AdapterSteps.capture(forward, builder, graphs, sizes, adapters.rows)
    elif leader is not None:
        steps = steps_of_ranks(model)(forward, builder, graphs, leader)
    else:
        steps = ModelSteps(forward, builder, graphs)
    take_cache(cache.kv_caches[0])
    return Prepared(steps, compiled, graphs, source, adapters)
