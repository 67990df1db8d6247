"""Gives an attention call its unquantised query."""

from __future__ import annotations

import torch
from torch.fx import Node

from vattn.passes.graph_edits import Builder, change_call, erase_unread
from vattn.passes.query_quant.find import FoundQuery
from vattn.passes.region import AttentionNode, Refusal, same_size, value

aten = torch.ops.aten


def rewrite_query(attention: AttentionNode, found: FoundQuery) -> None:
    """Give an attention call its unquantised query."""
    hop = attention.node
    old, shape = hop.kwargs["query"], value(attention.output).shape
    assert isinstance(old, Node)
    config = found.config
    sizes = [shape[0] if isinstance(shape[0], int) else -1, config.num_heads, config.head_size]
    with Builder(hop.graph) as builder, value(old).fake_mode, hop.graph.inserting_before(hop):
        new = builder.call(aten.reshape.default, found.source, sizes)
        if not same_size(value(new).stride(-1), 1):
            raise Refusal("the query before does not lie row by row in memory, as the op takes it", found.source)
    change_call(hop, {**hop.kwargs, "query": new, "config": config.encode()})
    erase_unread([old])
