"""Finds RoPE before a cache update and its attention call that one op can do; changes nothing.

The key that `kv_cache_update` writes and the query of the attention call that reads that cache must be rotated in the
same way, by the same tables, possibly after an RMSNorm; the query may be quantised after it. Then rotation,
quantisation and cache write become one `vattn::rope_kv_cache_update`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.errors import ConfigError
from vattn.passes.inductor import rounds_every_operation
from vattn.passes.ops import is_view, meaning, op_name
from vattn.passes.region import LARGEST_REGION, Refusal, ancestors, can_run, is_check, is_computed_from, value
from vattn.passes.region_division import query_arithmetic
from vattn.passes.region_precision import is_low
from vattn.passes.rope_kv_cache.probe import Rotation, classify_rotation
from vattn.passes.rope_kv_cache.region import computed_from, same_computation

ROPE_CHOICES = ("auto", "always", "never")
"""Values of the option `rope`: fuse where it pays on the device, wherever it is possible, or nowhere."""

_CACHE_FIELDS = (
    "num_kv_heads head_size head_size_v dtype kv_cache_dtype block_size kv_cache_layout kv_scale backend".split()
)


def check_choice(rope: object) -> str:
    """Return the option `rope` if it is one.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(rope, str) and rope in ROPE_CHOICES:
        return rope
    raise ConfigError(f"rope={rope!r}", ", ".join(map(repr, ROPE_CHOICES)), "rope='auto' fuses where it pays")


@dataclass(frozen=True)
class FoundRope:
    """RoPE that one op can do, with the query's quantisation and the cache update.

    Attributes:
        update, attention: the two calls.
        rope, config: the op's request.
        query, key: what rotates them, by the same tables.
        dead: nodes that nothing will read any more.
    """

    update: Node
    attention: Node
    rope: RopeConfig
    config: AttentionConfig
    query: Rotation[Node]
    key: Rotation[Node]
    dead: frozenset[Node]

    def __str__(self) -> str:
        norm = "" if self.rope.norm == "none" else "RMSNorm, "
        columns = f"{self.rope.style}, {self.rope.rotary_dim} of {self.config.head_size} columns"
        between = " and" if self.query.scale is None else ", the query's quantisation and"
        return f"{norm}RoPE ({columns}){between} the cache write are one kernel"


def find_update(attention: Node) -> Node | None:
    """Return the cache update that an attention call is the first to read, `None` if there is none."""
    cache = attention.kwargs.get("key_cache")
    while isinstance(cache, Node) and is_view(cache):
        cache = cache.all_input_nodes[0]
    if not isinstance(cache, Node) or cache.target is not operator.getitem:
        return None
    update = cache.args[0]
    if not isinstance(update, Node) or not update.args or update.args[0] is not torch.ops.vattn.kv_cache_update.default:
        return None
    return update if min(_attention_readers(cache), default=attention) is attention else None


def _attention_readers(cache: Node) -> Iterable[Node]:
    for user in cache.users:
        if user.args and user.args[0] is torch.ops.vattn.attention.default:
            yield user
        elif is_view(user):
            yield from _attention_readers(user)


def find_rope(update: Node, attention: Node, choice: str) -> FoundRope | None:
    """Return how one op can rotate query and key and update the cache; `None`: there is no RoPE.

    Args:
        choice: one of `ROPE_CHOICES`.

    Raises:
        Refusal: it cannot, or it should not.
    """
    config = AttentionConfig.parse(str(attention.kwargs["config"]))
    key, query = update.kwargs["key"], attention.kwargs["query"]
    if not isinstance(key, Node) or not isinstance(query, Node):
        return None
    try:
        key_rotation, key_past = classify_rotation(key, config.num_kv_heads, config)
    except Refusal as refusal:
        if not refusal.near and not _reads_angles(key):
            return None
        odd = "" if refusal.near else "made of cosines or sines, but not as a rotation that the op has: "
        raise Refusal(f"the key: {odd}{refusal.reason}", refusal.node, near=True) from None
    try:
        query_rotation, query_past = classify_rotation(query, config.num_heads, config)
    except Refusal as refusal:
        raise Refusal(f"the query: {refusal.reason}", refusal.node, near=True) from None
    config = _one_config(update, config)
    rope = _one_rope(key_rotation, query_rotation, query)
    pairs = (key_rotation.cos, query_rotation.cos), (key_rotation.sin, query_rotation.sin)
    if not all(part == other and same_computation(a, b) for (a, part), (b, other) in pairs):
        raise Refusal("query and key are rotated by different tables", query, near=True)
    if is_computed_from(query_past, update):
        raise Refusal("the query is computed from the updated cache", update, near=True)
    dead = computed_from(query_rotation.source, query_past) | computed_from(key_rotation.source, key_past)
    _check_escapes(dead, {update, attention}, {key: "the key", query: "the query"})
    _check_roundings(dead, query, rope)
    if query_rotation.scale is not None:
        rope = _with_query(rope, query_rotation.scale, query, query_past, config)
    _ask(config, query, choice)
    return FoundRope(update, attention, rope, config, query_rotation, key_rotation, frozenset(dead))


def _reads_angles(key: Node) -> bool:
    """Return whether a key depends on cosines or sines after its projection, through batched products too."""
    past = ancestors([key], lambda node: can_run(node) or op_name(node.target) == "bmm", LARGEST_REGION)
    return "angle" in map(meaning, past)


def _one_config(update: Node, config: AttentionConfig) -> AttentionConfig:
    """Return the attention call's config, without its output, if the update agrees with it."""
    if str(update.target) != "auto_functionalized_v2":
        raise Refusal("the graph was made with enable_auto_functionalized_v2=False", update, near=True)
    written = AttentionConfig.parse(str(update.kwargs["config"]))
    differing = [name for name in _CACHE_FIELDS if getattr(written, name) != getattr(config, name)]
    if differing:
        raise Refusal(f"cache update and attention differ in {', '.join(differing)}", update, near=True)
    if config.query_format != "none" and config.query_load != "plain":
        raise Refusal("the attention call quantises the query as it loads it", update, near=True)
    return config.with_plain_output()


def _one_rope(key: Rotation[Node], query: Rotation[Node], end: Node) -> RopeConfig:
    """Return the rotation of both query and key; without a weight both ways to apply one are the same."""
    ropes = [
        replace(rotation.rope, query_arithmetic="divide", norm="rms")
        if rotation.weight is None and rotation.rope.norm != "none"
        else replace(rotation.rope, query_arithmetic="divide")
        for rotation in (key, query)
    ]
    if ropes[0] != ropes[1]:
        what = [
            name
            for name in ("style", "rotary_dim", "norm", "norm_eps")
            if getattr(ropes[0], name) != getattr(ropes[1], name)
        ]
        raise Refusal(f"query and key differ in {' and '.join(what)}", end, near=True)
    return replace(query.rope, norm=ropes[1].norm)


def _with_query(rope: RopeConfig, scale: Node, query: Node, past: list[Node], config: AttentionConfig) -> RopeConfig:
    """Return the rotation with the arithmetic that generated code would have for the query's quantisation."""
    val = value(scale)
    if config.query_format == "none":
        raise Refusal("the query is FP8 but the attention call has no query format", query, near=True)
    if val.dtype != torch.float32:
        raise Refusal(f"the query's scale is {val.dtype}", query, near=True)
    if val.numel() != 1 and config.query_scale != "head":
        raise Refusal(f"the query has {val.numel()} scales, the attention call one", query, near=True)
    arithmetic = query_arithmetic(rope.query_arithmetic, past, False, query)
    return replace(rope, query_arithmetic=arithmetic)


def _check_escapes(dead: set[Node], readers: set[Node], ends: dict[Node, str]) -> None:
    for node in dead:
        for user in node.users:
            if user in dead or user in readers or is_check(user):
                continue
            what = ends.get(node, f"{node.name}, on the way to the rotated query and key,")
            reader = "the graph's output" if user.op == "output" else user.name
            raise Refusal(f"{what} is also read by {reader}", user, near=True)


def _check_roundings(dead: set[Node], end: Node, rope: RopeConfig) -> None:
    """Refuse regions that generated code rounds inside; the op rounds only its results.

    Generated code keeps fp32 within a kernel, whatever dtype the user's code names. But on a CPU, concatenation goes
    through memory, which after a norm rounds values that were not rounded before.
    """
    if rounds_every_operation():
        raise Refusal("with emulate_precision_casts generated code rounds after every operation", end, near=True)
    if value(end).device.type != "cpu" or rope.norm == "none":
        return
    for node in dead:
        if op_name(node.target) == "cat" and is_low(node) and any(map(is_low, node.all_input_nodes)):
            what = f"normalised values are concatenated in {value(node).dtype}, in which generated code stores them"
            raise Refusal(f"{what}: convert to float32 before the rotation", node, near=True)


def _ask(config: AttentionConfig, query: Node, choice: str) -> None:
    """Refuse where no backend has the op, or where it does not pay."""
    device = value(query).device
    chosen = selector.explain(config, device).chosen
    if chosen is None or not selector.get_backend(chosen).capabilities.rope_update:
        raise Refusal(f"backend {chosen or config.backend} has no such op", query, near=True)
    if choice == "auto" and device.type != "cuda":
        raise Refusal("left to Inductor, whose generated kernels do it on a CPU (rope='always' fuses)", query)
