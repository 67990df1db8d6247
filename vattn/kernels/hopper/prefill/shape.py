"""What the Hopper prefill kernel is specialised for: one constant of the kernel, which its partitions share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Constants of a launch; `launch.shape_of` makes them. Triton's compile hooks write them as JSON.

    Attributes:
        HEADS, KV_HEADS, SIZE: of the layer; heads have SIZE columns.
        D: columns of a head in shared memory, zeros behind SIZE.
        USED: columns of queries and keys that are multiplied, SIZE and what fills up an instruction.
        KV_GROUP: KV heads with row tiles that run together.
        PACK: rows of a token in one tile: 1, or as many as its KV head has query heads, or more. If it does not divide
            64, warpgroups load their queries themselves.
        KEYS: tokens of a key tile.
        BLOCK_SIZE: of the cache.
        BOX: tokens of a box, which is part of one block and of one key tile.
        MAP: how tensor maps hold the cache, `launch.map_of`.
        WINDOW: 0 for none.
        SOFT_CAP: whether scores are capped.
        STAGES, RAW_STAGES: tiles of keys and values under way, as they are multiplied and as they are loaded.
        CACHE: what the products are made of: "plain", the model dtype on both sides; "native", FP8 on both sides,
            weights included; "widened", an FP8 cache widened to fp16.
        GROUPS: consumer warpgroups.
        CONVERTERS: warps that convert an FP8 cache.
        PANEL_TOKENS: tokens of a panel of transposed values.
        LONG_PING_PONG: whether a warpgroup has the matrix units for its second product and the next first one, not for
            the first alone.
        HELD: columns of the queries that consumers keep in registers.
        HALVES: whether values of the first half of a tile are multiplied while weights of the second are computed.
        QUERY_SCALE, KV_SCALE: 0 none, 1 one value, 2 one a head.
        MODEL: dtype of the model, by name.
        LATE: when the producer takes the next row tile from the counter: at the last key tile of this one, so that the
            longest that are left go to the first free CTA; or else at its beginning.
        SPLIT: whether items of the schedule are parts of row tiles, of some of their keys each.
        PART: key tiles of the first parts whose results are merged in order, for results that do not depend on the
            batch (`parts`); 0 where they may.
        OUTPUT: how a row is quantised that has no scales of its own.
        OUTPUT_GROUPS: `group_constants`, of no groups where another kernel computes scales.
    """

    HEADS: int
    KV_HEADS: int
    KV_GROUP: int
    D: int
    SIZE: int
    USED: int
    PACK: int
    KEYS: int
    BLOCK_SIZE: int
    BOX: int
    MAP: str
    WINDOW: int
    SOFT_CAP: bool
    STAGES: int
    RAW_STAGES: int
    CACHE: str
    GROUPS: int
    CONVERTERS: int
    PANEL_TOKENS: int
    LONG_PING_PONG: bool
    HELD: int
    HALVES: bool
    QUERY_SCALE: int
    KV_SCALE: int
    MODEL: str
    LATE: bool
    SPLIT: bool
    PART: int
    OUTPUT: str
    OUTPUT_GROUPS: tuple[Any, ...]
