"""Finds and classifies the region between a query in the model dtype and its FP8 codes: runs it, compares bits.

As in `vattn.passes.probe`, but walked backwards from the codes: the region begins at the unquantised query and, on the
side of the scale, at the node that the call's `q_scale` is computed from too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.config.attention import AttentionConfig
from vattn.passes import probe
from vattn.passes.near_miss import first_difference
from vattn.passes.probe import Sample
from vattn.passes.probe_inputs import probe_values
from vattn.passes.region import (
    FP8_DTYPES,
    LARGEST_REGION,
    Refusal,
    ancestors,
    can_run,
    dtype_of,
    is_check,
    is_size,
    same_size,
    value,
)
from vattn.passes.region_run import SATURATES, constant, run_nodes, same_bits, unsaturated_cast
from vattn.passes.region_tokens import beyond, possible_count, reach
from vattn.quantization.formats import FP8_E4M3_MAX

_MOST_SCALES = 4096
_ARITHMETICS = ("divide", "multiply")


@dataclass(frozen=True)
class QueryRegion:
    """What a query's codes are computed from.

    Attributes:
        source, codes, scale: the unquantised query, its codes as the op reads them, and the call's `q_scale`.
        nodes: what to run, in graph order.
        inputs: what they read from outside; its only root, if any, is what `scale`, and usually `codes`, are computed
            from.
    """

    source: Node
    codes: Node
    scale: Node
    nodes: tuple[Node, ...]
    inputs: probe.Inputs


def find_query_region(source: Node, codes: Node, scale: Node) -> QueryRegion:
    """Walk back from the codes to `source`, and from codes and scale to what they have in common.

    Raises:
        Refusal: the codes depend on something else than the query, the call's scale and constants.
    """
    of_codes, of_scale = _ancestors([codes], {source}), _ancestors([scale], {source})
    common = (of_codes & of_scale) - {source}
    readers = (of_codes | of_scale) - common
    roots = {node for node in common if node is scale or readers.intersection(node.users)}
    if source in _ancestors([scale], {source, *roots}):
        raise Refusal("the op's q_scale is computed from the query, which is not divided by it", codes, near=True)
    needed = _ancestors([codes, scale], {source, *roots})
    inner: list[Node] = []
    sizes: list[Node] = []
    constants: dict[Node, Tensor] = {}
    for node in codes.graph.nodes:
        if node not in needed or node is source:
            continue
        known = None if node in roots or not isinstance(value(node), Tensor) else constant(node)
        if known is not None:
            constants[node] = known
        elif is_size(node):
            sizes.append(node)
        elif node in roots or not _can_enter(node):
            if node in of_codes and node not in roots:
                raise Refusal(_not_the_scale(node, codes), codes, near=True)
            roots.add(node)
        else:
            inner.append(node)
    roots -= constants.keys()
    if len(roots) > 1:
        raise Refusal("its scale, or the op's q_scale, is made of more than one unknown value", codes, near=True)
    probe.check_sizes(inner, sizes)
    inputs = probe.Inputs(tuple(sizes), constants, roots=tuple(roots), derived=(), scales=())
    return QueryRegion(source, codes, scale, tuple(inner), inputs)


def _ancestors(ends: Iterable[Node], stops: set[Node]) -> set[Node]:
    """Return what some nodes are computed from, themselves included, up to `stops` and to what cannot be run."""
    return ancestors(ends, lambda node: node not in stops and _can_enter(node), LARGEST_REGION)


def _can_enter(node: Node) -> bool:
    return can_run(node) and not is_size(node)


def _not_the_scale(node: Node, codes: Node) -> str:
    """Return what is wrong with a node of unknown value that codes depend on."""
    val = value(node)
    shape = tuple(val.shape) if isinstance(val, Tensor) else type(val).__name__
    if isinstance(val, Tensor) and val.dim() and same_size(val.shape[0], value(codes).shape[0]):
        return f"it reads {node.name} of shape {shape}, a value for every token; the op takes one, or one per KV head"
    return f"it reads {node.name} of shape {shape}, which is not the op's q_scale"


def check_readers(region: QueryRegion, call: Node) -> None:
    """Refuse codes that other nodes read too: these would still have to be computed.

    Raises:
        Refusal: a node other than attention calls reads them.
    """
    inside = {*region.nodes, call}
    for node in region.nodes:
        if dtype_of(node) in FP8_DTYPES:
            for user in node.users:
                # Another attention call can load the query itself.
                loads = user.kwargs.get("query") is node and "config" in user.kwargs
                if user not in inside and not loads and not is_check(user):
                    reader = "the graph returns it" if user.op == "output" else f"{user.name} reads it"
                    raise Refusal(f"{reader} quantised too", user if user.op != "output" else region.codes, near=True)


def classify_query(region: QueryRegion, config: AttentionConfig) -> str:
    """Run a region on chosen queries and scales; return which arithmetic, `"divide"` or `"multiply"`, gives its codes.

    Raises:
        Refusal: neither does, or the region cannot be run.
    """
    runs = [run for known in _known_values(region, config) for run in _runs(region, config, known)]

    def codes_are(arithmetic: str, cast: Callable[[Tensor], Tensor]) -> bool:
        return all(same_bits(run.values[region.codes], cast(_scaled(region, config, run, arithmetic))) for run in runs)

    for arithmetic in _ARITHMETICS:
        if codes_are(arithmetic, lambda x: x.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(torch.float8_e4m3fn)):
            return arithmetic
    for arithmetic in _ARITHMETICS:
        if not SATURATES and codes_are(arithmetic, lambda x: unsaturated_cast(x, torch.float8_e4m3fn)):
            raise Refusal(probe.NO_CLAMP, near=True)
    per_token = _value_per_token(region, runs[0], config)
    if per_token is not None:
        raise Refusal("it has a scale for every token; the op takes one, or one per KV head", per_token, near=True)
    reason = "its codes are not those of the query divided by the op's q_scale and clamped to +-448"
    raise Refusal(reason, first_difference(region.nodes, region.source, runs), near=True)


def _scaled(region: QueryRegion, config: AttentionConfig, run: Sample, arithmetic: str) -> Tensor:
    """Return the query of a run, fp32 `[T, H, D]`, scaled as the op does."""
    query = run.rows.view(-1, config.num_heads, config.head_size).float()
    scale = run.values[region.scale].float().reshape(-1).expand(config.num_kv_heads)
    scale = scale.repeat_interleave(config.group_size)[:, None]
    return query * scale.reciprocal() if arithmetic == "multiply" else query / scale


def _value_per_token(region: QueryRegion, run: Sample, config: AttentionConfig) -> Node | None:
    """Return the first node with one value, or one per head, for every token; `None`: there is none."""
    counts = [len(run.rows) * heads for heads in (1, config.num_kv_heads, config.num_heads)]
    found = _ancestors([region.codes], {region.source}) - _ancestors([region.scale], {region.source})
    for node in region.nodes:
        made = run.values[node]
        if node in found and isinstance(made, Tensor) and made.is_floating_point() and made.numel() in counts:
            return node
    return None


def _runs(region: QueryRegion, config: AttentionConfig, known: dict[Node, Any]) -> Iterator[Sample]:
    """Yield runs of a region on all probe values, given the values of its root and constants."""
    known, sizes, tokens = dict(known), region.inputs.sizes, value(region.codes).shape[0]
    of_scale = _ancestors([region.scale], {region.source, *known})
    run_nodes([node for node in region.nodes if node in of_scale], known)
    scale = known[region.scale].float().reshape(-1)
    if scale.numel() not in (1, config.num_kv_heads):
        raise Refusal(f"its scale has {scale.numel()} values; the op takes one, or one per KV head", region.codes)
    columns = config.group_size * config.head_size
    rows = torch.cat([probe_values(columns, step) for step in scale.expand(config.num_kv_heads).tolist()], dim=1)
    rows = rows.to(value(region.source).dtype)
    count = possible_count(tokens, len(rows))
    furthest = 0 if isinstance(tokens, int) else reach((*sizes, *region.nodes), region.codes)
    if furthest >= count:
        raise beyond(furthest, region.codes)
    rows = rows.repeat(-(-count // len(rows)), 1)
    for x in rows[: len(rows) // count * count].split(count):
        env = {**known, **probe.set_sizes(sizes, region.codes, count)}
        shape = [probe.size_at(size, region.codes, count) for size in value(region.source).shape]
        env[region.source] = x.reshape(shape)
        run_nodes([node for node in region.nodes if node not in env], env)
        yield Sample(x, env)


def _known_values(region: QueryRegion, config: AttentionConfig) -> Iterator[dict[Node, Any]]:
    """Yield the constants with values of the root: the chosen scales one after another, then random different ones."""
    constants = region.inputs.constants
    if not region.inputs.roots:
        yield dict(constants)
        return
    (root,) = region.inputs.roots
    val = value(root)
    is_float = isinstance(val, Tensor) and val.is_floating_point()
    if not is_float or not isinstance(val.numel(), int) or val.numel() > _MOST_SCALES:
        raise Refusal(f"its scale comes from {root.name}, which is no tensor of a few numbers", root, near=True)
    chosen = torch.tensor(probe.exact_scales(region.nodes, region.inputs))
    trials = [chosen[(torch.arange(val.numel()) + trial) % len(chosen)] for trial in range(len(chosen))]
    trials.append(0.005 + torch.rand(val.numel(), generator=torch.Generator().manual_seed(3)))
    for scales in trials:
        yield {**constants, root: scales.to(val.dtype).reshape(tuple(val.shape))}
