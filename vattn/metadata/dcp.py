"""What builders of steps over sharded caches refuse, and what they compare with the other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.config.dcp import shard_of
from vattn.distributed.group import ContextParallel
from vattn.errors import ConfigError, MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.step import Limits, Step, most_held


def check_ranks(layer: object, config: Any, parallel: ContextParallel | None) -> str:
    """Refuse a layer over other ranks than a builder's; return its request as a string, equal on all ranks.

    Raises:
        ConfigError: the layer holds another share of the tokens, or combines otherwise.
    """
    # A config says which share, not how results are combined.
    theirs = getattr(layer, "context_parallel", parallel) if isinstance(layer, nn.Module) else parallel
    shard = None if parallel is None else parallel.dcp_shard
    if shard_of(config) != shard or theirs != parallel:
        given = shard_of(config) if shard_of(config) != shard else theirs
        raise ConfigError(
            f"a layer with {given or 'no context parallelism'}, the builder with {parallel or 'none'}",
            "the same ContextParallel for layers and builder",
            "pass context_parallel= to both, or to neither",
        )
    return config.encode() if parallel is None else config.replace(context_rank=0).encode()


def check_dcp_step(step: Step, slot_mapping: object, encoder_lens: object, shared_prefix_len: object) -> None:
    """Refuse what has no meaning over a sharded cache.

    Raises:
        MetadataError: slots, encoder states, a shared prefix, or no block tables.
    """
    given = {
        "slot_mapping": slot_mapping is not None,
        "encoder_lens": encoder_lens is not None,
        "shared_prefix_len": shared_prefix_len is not None,
        "block_tables=None": step.packed,
    }
    names = [name for name, there in given.items() if there]
    if names:
        raise MetadataError(
            f"{' and '.join(names)} with context parallelism",
            "block tables of the request's own tokens, from which every rank computes its slots",
            f"leave {names[0]} out" if names != ["block_tables=None"] else "pass block_tables",
        )


@contextlib.contextmanager
def telling_others(parallel: ContextParallel | None) -> Iterator[None]:
    """Let the other ranks know of an error inside, so that none of them waits for this one."""
    try:
        yield
    except Exception:
        if parallel is not None:
            parallel.refuse()
        raise


def builder_facts(limits: Limits, layers: Sequence[str]) -> dict[str, object]:
    """Return what the builders of all ranks must have in common."""
    sizes = dataclasses.replace(limits, dcp_shard=None if limits.dcp_shard is None else limits.dcp_shard.of_rank(0))
    return {"capacity of the builder": sizes, "layers": list(layers)}


def step_facts(step: Step, metadata: AttentionMetadata, number: int) -> dict[str, object]:
    """Return what the steps of all ranks must have in common: their whole input, and which step it is."""
    held = most_held(metadata.dcp_shard, step.seq_lens).unsqueeze(1)
    used = torch.arange(step.table.shape[1], device="cpu") * metadata.block_size < held
    optional: list[object] = [step.tree_bias, step.tree_id, step.mm_ranges, step.num_logits, step.causal]
    return {
        "number of steps": number,
        "query_lens": step.query_lens,
        "seq_lens": step.seq_lens,
        "block_tables": step.table[used],
        "positions": step.positions,
        "padded sizes": (metadata.seq_lens.shape[0], metadata.slot_mapping.shape[0]),
        "masks": [part.tolist() if isinstance(part, Tensor) else part for part in optional],
    }
