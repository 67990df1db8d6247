"""The reference against a dense formulation: a mask written pair by pair in Python, and SDPA in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.support import Batch, make_config, random_packed_batch, random_paged_batch, relative_l2
from vattn.config.attention import AttentionConfig
from vattn.config.dcp import DCPShard
from vattn.errors import ConfigError
from vattn.ops.arguments import VarlenAttentionArgs
from vattn.ops.reference import attention as reference
from vattn.ops.reference.mask import alibi_bias, positions, tree_bias, visible_mask
from vattn.quantization.codecs import encode_kv

FP32_TOLERANCE = 2e-6
"""Sums of a few dozen fp32 products against float64: about 16 roundings of 6e-8."""

QUERY_LENS, SEQ_LENS = [3, 0, 1, 9, 5, 2], [10, 0, 17, 9, 3, 0]
"""Prefill, chunked prefill, decode, nothing at all, a query longer than its keys, and one without any."""

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bidirectional": {"causality": "bidirectional"},
    "flags": {"causality": "per_request"},
    "window": {"sliding_window": 4},
    "chunk": {"sliding_window": 8, "chunk_lookback": 1},
    "cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi": "linear"},
    "alibi_sqrt": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
    "tree": {"tree_bias": True},
    "mm_full": {"mm_prefix": "full"},
    "mm_clamped": {"mm_prefix": "clamped"},
    "unequal": {"head_size": 24, "head_size_v": 8},
    "mqa": {"num_heads": 6, "num_kv_heads": 1},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
    "fp8_query": {"query_format": "fp8_e4m3", "query_scale": "head"},
    "hnd": {"kv_cache_layout": "HND"},
}


def sees(config: AttentionConfig, q: int, k: int, causal: bool, ranges: list[list[int]]) -> bool:
    """Whether the row at position q sees key k, one condition after the other."""
    window, lookback = config.sliding_window, config.chunk_lookback
    if q < 0:
        return False
    visible = k <= q or not causal
    if lookback is not None and window is not None:
        chunk = window // (lookback + 1)
        chunks_back = math.floor(q / chunk) - math.floor(k / chunk)
        visible = visible and chunks_back in range(0 if causal else -lookback, lookback + 1)
    elif window is not None:
        visible = visible and k in range(q - window + 1, q + (1 if causal else window))
    for start, end in ranges:
        inside = start < end and q in range(start, end + 1) and k in range(start, end + 1)
        if config.mm_prefix == "clamped" and window is not None:
            inside = inside and q < k + window
        visible = visible or inside
    return visible


def added(config: AttentionConfig, batch: Batch, request: int, head: int, q: int, k: int, causal: bool) -> float:
    """What ALiBi and the tree bias add to the score of the row at position q and key k."""
    args, context = batch.args, batch.seq_lens[request] - batch.query_lens[request]
    total = 0.0
    if config.alibi != "none":
        slope = args.alibi_slopes[head].item()
        if config.alibi == "sqrt":
            total -= slope * math.sqrt(q - k) if k < q else 0.0
        else:
            total += slope * (k - q) if causal else -slope * abs(k - q)
    if config.tree_bias and args.tree_id[request] in range(args.bias.shape[0]):
        row, column, size = q - context, k - context, args.bias.shape[1]
        if row in range(size) and column in range(size):
            total += args.bias[args.tree_id[request], row, column].item()
    return total


def dense(batch: Batch, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Float64 output and LSE of a batch, padding included."""
    args, heads = batch.args, config.num_heads
    out = torch.zeros(args.query.shape[0], heads, config.head_size_v, dtype=torch.float64)
    lse = torch.full((args.query.shape[0], heads), -torch.inf, dtype=torch.float64)
    first = 0
    for request, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        causal = config.causality == "causal"
        if config.causality == "per_request":
            causal = bool(args.causal_flags[request] != 0)
        ranges = args.mm_ranges[request].tolist() if config.mm_prefix != "none" else []
        mask = torch.full((heads, query_len, seq_len), -torch.inf, dtype=torch.float64)
        for row, k in itertools.product(range(query_len), range(seq_len)):
            q = seq_len - query_len + row
            if sees(config, q, k, causal, ranges):
                mask[:, row, k] = torch.tensor(
                    [added(config, batch, request, h, q, k, causal) for h in range(heads)], dtype=torch.float64
                )
        rows = slice(first, first + query_len)
        out[rows], lse[rows] = dense_request(batch, config, request, mask)
        first += query_len
    return out, lse


def dense_request(batch: Batch, config: AttentionConfig, request: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One request under an additive mask `[H, q, s]`. A sink is a key of zeros with a bias of its own."""
    query = batch.queries[request].double().transpose(0, 1)
    key, value = (
        part[request].double().transpose(0, 1).repeat_interleave(config.group_size, 0)
        for part in (batch.keys, batch.values)
    )
    sinks = batch.args.sinks.double() if config.sinks else torch.full((config.num_heads,), -torch.inf).double()
    mask = torch.cat([mask, sinks.view(-1, 1, 1).expand(-1, mask.shape[1], 1)], dim=-1)
    key, value = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (key, value))
    scores = config.scale * query @ key.transpose(1, 2)
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * torch.tanh(scores / config.logits_soft_cap)
        out = torch.softmax(scores + mask, dim=-1) @ value
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=config.scale)
    lse = torch.logsumexp(scores + mask, dim=-1)
    return torch.where(lse.isinf().unsqueeze(-1), 0.0, out).transpose(0, 1), lse.t()


def combine(*names: str) -> AttentionConfig | None:
    """A config with several features, `None` if they contradict each other."""
    changes: dict[str, Any] = {}
    for name in names:
        if any(changes.get(field, value) != value for field, value in FEATURES[name].items()):
            return None
        changes.update(FEATURES[name])
    try:
        return make_config(**{"block_size": 8, "num_heads": 4, "lse": True, **changes})
    except ConfigError:
        return None


def assert_matches_dense(config: AttentionConfig, query_lens: list[int], seq_lens: list[int], seed: int = 0) -> None:
    batch = random_paged_batch(config, query_lens, seq_lens, seed=seed, num_padding_tokens=2, num_padding_reqs=1)
    out, lse = batch.expected()
    expected_out, expected_lse = dense(batch, config)
    assert relative_l2(out, expected_out) < FP32_TOLERANCE
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    assert relative_l2(lse, expected_lse) < FP32_TOLERANCE


PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if combine(*pair) is not None]
"""Those with `plain` are single features."""


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_each_pair_of_features_matches_the_dense_formulation(pair: tuple[str, str]) -> None:
    config = combine(*pair)
    assert config is not None
    assert_matches_dense(config, QUERY_LENS, SEQ_LENS, seed=1)


def test_most_pairs_of_features_are_possible() -> None:
    assert len(PAIRS) >= 121, len(PAIRS)


@given(
    names=st.sets(st.sampled_from(list(FEATURES)), min_size=3),
    lengths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 20)), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_random_combinations_match_the_dense_formulation(
    names: set[str], lengths: list[tuple[int, int]], seed: int
) -> None:
    chosen: list[str] = []
    for name in sorted(names):
        if combine(*chosen, name) is not None:
            chosen.append(name)
    config = combine(*chosen)
    assert config is not None
    assert_matches_dense(config, [q for q, _ in lengths], [s for _, s in lengths], seed)


def pack(batch: Batch) -> Batch:
    """The same requests with keys and values packed instead of paged."""
    config, paged = batch.config.replace(block_size=0, kv_cache_layout="NHD"), batch.args._asdict()
    fields = {name: paged[name] for name in VarlenAttentionArgs._fields if name in paged}
    starts = torch.tensor([0, *batch.args.seq_lens.tolist()]).cumsum(0).int()
    parts = {
        name: torch.cat([encode_kv(part, config.kv_cache_dtype, scale) for part in parts])
        for name, parts, scale in (("key", batch.keys, batch.args.k_scale), ("value", batch.values, batch.args.v_scale))
    }
    fields.update(parts, kv_start_loc=starts, config=config.encode())
    return Batch(
        VarlenAttentionArgs(**fields), config, batch.query_lens, batch.seq_lens, batch.keys, batch.values, batch.queries
    )


@pytest.mark.parametrize("name", list(FEATURES))
def test_packed_keys_give_what_paged_keys_give(name: str) -> None:
    config = combine(name)
    assert config is not None
    batch = random_paged_batch(config, QUERY_LENS, SEQ_LENS, num_padding_tokens=2, num_padding_reqs=1)
    for got, expected in zip(pack(batch).expected(), batch.expected(), strict=True):
        assert torch.equal(got, expected)


def drawn(visible: Tensor) -> list[str]:
    return ["".join("x" if entry else "." for entry in row) for row in visible.tolist()]


def mask_of(query_len: int, seq_len: int, *, ranges: list[list[int]] | None = None, **changes: Any) -> list[str]:
    mm_ranges = None if ranges is None else torch.tensor(ranges)
    return drawn(visible_mask(make_config(**changes), query_len, seq_len, mm_ranges=mm_ranges))


def test_masks_drawn_by_hand() -> None:
    assert mask_of(3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert mask_of(2, 4, causality="bidirectional") == ["xxxx", "xxxx"]
    assert mask_of(3, 5, sliding_window=2) == [".xx..", "..xx.", "...xx"]
    assert mask_of(3, 5, sliding_window=1) == ["..x..", "...x.", "....x"]
    assert mask_of(5, 5, sliding_window=2, causality="bidirectional") == ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]
    assert mask_of(4, 2) == ["..", "..", "x.", "xx"]
    assert mask_of(4, 2, causality="bidirectional") == ["..", "..", "xx", "xx"]
    assert mask_of(6, 6, sliding_window=4, chunk_lookback=1) == [
        "x.....",
        "xx....",
        "xxx...",
        "xxxx..",
        "..xxx.",
        "..xxxx",
    ]
    assert mask_of(6, 6, sliding_window=2, chunk_lookback=0, causality="bidirectional") == [
        "xx....",
        "xx....",
        "..xx..",
        "..xx..",
        "....xx",
        "....xx",
    ]


def test_cross_attention_sees_every_key_from_every_row() -> None:
    """Also from rows that would lie before the first key, if they had a position."""
    config = make_config(attn_type="encoder_decoder", causality="bidirectional")
    for query_len, seq_len in ((5, 2), (2, 5), (3, 0), (1, 1)):
        assert visible_mask(config, query_len, seq_len).tolist() == [[True] * seq_len] * query_len


def test_multimodal_ranges_drawn_by_hand() -> None:
    assert mask_of(5, 5, mm_prefix="full", ranges=[[1, 3]]) == ["x....", "xxxx.", "xxxx.", "xxxx.", "xxxxx"]
    # The range goes beyond the window to the left and right; clamped, to the right alone.
    assert mask_of(5, 5, mm_prefix="full", ranges=[[0, 3]], sliding_window=2) == [
        "xxxx.",
        "xxxx.",
        "xxxx.",
        "xxxx.",
        "...xx",
    ]
    assert mask_of(5, 5, mm_prefix="clamped", ranges=[[0, 3]], sliding_window=2) == [
        "xxxx.",
        "xxxx.",
        ".xxx.",
        "..xx.",
        "...xx",
    ]
    # Ranges do not see each other, end at the sequence, and start >= end is unused.
    ranges = [[0, 1], [2, 9], [3, 3], [4, 0]]
    assert mask_of(4, 4, mm_prefix="full", ranges=ranges, sliding_window=1) == ["xx..", "xx..", "..xx", "..xx"]


def test_chunked_local_attention_of_the_worked_example() -> None:
    config = make_config(sliding_window=4, chunk_lookback=0)
    rows_of_chunk, keys_of_chunk = [], []
    for query_len, seq_len in zip([4, 10, 5], [6, 17, 9], strict=True):
        visible = visible_mask(config, query_len, seq_len)
        chunks = (torch.arange(seq_len - query_len, seq_len) // 4).tolist()
        for chunk in sorted(set(chunks)):
            rows = torch.tensor([c == chunk for c in chunks])
            rows_of_chunk.append(int(rows.sum()))
            keys_of_chunk.append(int(visible[rows].any(0).sum()))
    assert rows_of_chunk == [2, 2, 1, 4, 4, 1, 4, 1]
    assert keys_of_chunk == [4, 2, 4, 4, 4, 1, 4, 1]


def tree(bias: torch.Tensor, tree_id: int, query_len: int, seq_len: int) -> torch.Tensor:
    return tree_bias(bias, tree_id, *positions(query_len, seq_len), seq_len - query_len)


def test_a_tree_hides_other_branches_and_leaves_the_context_alone() -> None:
    rows = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1010001"]
    bias = torch.tensor([[0.0 if entry == "1" else -math.inf for entry in row] for row in rows]).unsqueeze(0)
    config = make_config(tree_bias=True)
    shown = visible_mask(config, 7, 10) & (tree(bias, 0, 7, 10) == 0)
    assert drawn(shown) == ["xxx" + row.replace("1", "x").replace("0", ".") for row in rows]
    # A row after the tree is plain causal; a shorter query uses the tree's first rows; -1 and 2 name no tree.
    assert torch.equal(tree(bias, 0, 8, 10)[7], torch.zeros(10))
    assert torch.equal(tree(bias, 0, 2, 10)[:, 8:], bias[0, :2, :2])
    for tree_id in (-1, 1, 2**31 - 1):
        assert torch.equal(tree(bias, tree_id, 7, 10), torch.zeros(7, 10))
    # Four rows over two keys: the first two rows lie before the sequence.
    assert torch.equal(tree(bias, 0, 4, 2), bias[0, :4, 2:4])


def one_row(scores: list[float], values: list[float], **changes: Any) -> tuple[float, float]:
    """Output and LSE of one row of one head with the given scores."""
    sinks = changes.pop("sink", None)
    config = make_config(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, sinks=sinks is not None, **changes)
    key, value = torch.tensor(scores).view(-1, 1, 1), torch.tensor(values).view(-1, 1, 1)
    out, lse = reference.attend(
        torch.ones(1, 1, 1),
        key,
        value,
        torch.ones(1, len(scores), dtype=torch.bool),
        config,
        sinks=None if sinks is None else torch.tensor([sinks]),
    )
    return out.item(), lse.item()


def test_softmax_sink_and_soft_cap_by_hand() -> None:
    assert one_row([0.0, 0.0], [1.0, 3.0]) == pytest.approx((2.0, math.log(2)))
    assert one_row([0.0], [4.0], sink=0.0) == pytest.approx((2.0, math.log(2)))
    assert one_row([0.0, math.log(3)], [4.0, 8.0], sink=math.log(4)) == pytest.approx((28 / 8, math.log(8)))
    assert one_row([], [], sink=0.25) == pytest.approx((0.0, 0.25))
    assert one_row([], []) == (0.0, -math.inf)
    capped = 2.0 * math.tanh(50.0)
    assert one_row([100.0, 0.0], [1.0, 0.0], logits_soft_cap=2.0) == pytest.approx(
        (1 / (1 + math.exp(-capped)), capped + math.log1p(math.exp(-capped)))
    )
    assert one_row([300.0, 0.0], [5.0, 0.0]) == pytest.approx((5.0, 300.0))


def test_alibi_by_hand() -> None:
    slopes = torch.tensor([1.0, 0.5])
    causal = alibi_bias(make_config(alibi="linear"), slopes, *positions(2, 3), causal=True)
    assert causal[0].tolist() == [[-1, 0, 1], [-2, -1, 0]]
    assert causal[1].tolist() == [[-0.5, 0, 0.5], [-1, -0.5, 0]]
    both_ways = alibi_bias(make_config(alibi="linear"), slopes, *positions(2, 3), causal=False)
    assert both_ways[0].tolist() == [[-1, 0, -1], [-2, -1, 0]]
    root = alibi_bias(make_config(alibi="sqrt"), slopes, *positions(2, 6), causal=True)[1]
    expected = [[-0.5 * math.sqrt(q - k) if k < q else 0.0 for k in range(6)] for q in (4, 5)]
    torch.testing.assert_close(root, torch.tensor(expected))


@pytest.mark.parametrize(
    "name", ["plain", "window", "chunk", "mm_full", "bidirectional", "fp8", "unequal", "fp8_query"]
)
@pytest.mark.usefixtures("poisoned_allocations")
def test_garbage_never_reaches_a_result(name: str) -> None:
    config = combine(name)
    assert config is not None
    make = {"num_padding_tokens": 3, "num_padding_reqs": 2}
    clean = random_paged_batch(config, QUERY_LENS, [70, 0, 33, 9, 3, 0], poison=False, **make)  # type: ignore[arg-type]
    dirty = random_paged_batch(config, QUERY_LENS, [70, 0, 33, 9, 3, 0], poison=True, **make)  # type: ignore[arg-type]
    for got, expected in zip(dirty.expected(), clean.expected(), strict=True):
        assert torch.equal(got, expected)
    assert dirty.expected()[0][dirty.num_tokens :].eq(0).all()
    assert dirty.expected()[1][dirty.num_tokens :].eq(-torch.inf).all()


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, None])
def test_keys_of_blocks_out_of_range_are_not_seen(bad: int | None) -> None:
    config = make_config(block_size=8, lse=True)
    batch = random_paged_batch(config, [3], [20])
    bad = batch.args.key_cache.shape[0] if bad is None else bad
    batch.args.block_table[0, 1] = bad
    out, lse = batch.expected()
    positions = torch.tensor([*range(8), *range(16, 20)])
    visible = visible_mask(config, 3, 20)[:, positions]
    key, value = batch.keys[0][positions], batch.values[0][positions]
    expected_out, expected_lse = reference.attend(batch.queries[0], key, value, visible, config)
    assert relative_l2(out, expected_out) < FP32_TOLERANCE
    assert relative_l2(lse, expected_lse) < FP32_TOLERANCE


def test_keys_beyond_the_block_table_are_not_seen() -> None:
    config = make_config(block_size=8)
    batch = random_paged_batch(config, [3], [20], table_width=2)
    visible = visible_mask(config, 3, 20)[:, :16]
    expected, _ = reference.attend(batch.queries[0], batch.keys[0][:16], batch.values[0][:16], visible, config)
    assert relative_l2(batch.expected()[0], expected) < FP32_TOLERANCE


def test_a_rank_holds_no_more_keys_than_its_share_and_what_it_says() -> None:
    lengths, held = torch.tensor([9, 9, 9, -4]), torch.tensor([-5, 3, 99, 2])
    shard = DCPShard(rank=0, world_size=2, interleave=2)
    assert reference.held_lengths(shard, lengths, held) == [0, 3, 5, 0]
    assert reference.held_lengths(None, lengths, held) == [9, 9, 9, 0]


def test_varlen_rows_outside_the_offsets_are_neither_read_nor_left_unwritten() -> None:
    config = make_config(block_size=0, lse=True)
    batch = random_packed_batch(config, [2, 3], [4, 3], num_padding_tokens=2, num_padding_reqs=1)
    reference.varlen_attention(batch.args, config)
    assert not batch.args.output.isnan().any()
    assert batch.args.output[5:].eq(0).all() and batch.args.lse[5:].eq(-torch.inf).all()


def test_quantised_output_is_the_quantised_rounded_result() -> None:
    from vattn.quantization.codecs import quant_fp8_group

    config = make_config(dtype="bfloat16", output_format="fp8_group64_col", lse=True)
    batch = random_paged_batch(config, QUERY_LENS, SEQ_LENS, num_padding_tokens=2)
    reference.attention(batch.args, config)
    out, lse = batch.expected()
    codes, scales = quant_fp8_group(out.to(torch.bfloat16).flatten(1), 64, False, True)
    assert torch.equal(batch.args.output.view(torch.uint8).flatten(1), codes.view(torch.uint8))
    assert torch.equal(batch.args.output_block_scale, scales)
    assert torch.equal(batch.args.lse, lse)


def test_inputs_need_no_contiguous_rows() -> None:
    config = make_config()
    batch = random_paged_batch(config, QUERY_LENS, SEQ_LENS)
    wide = torch.full((batch.args.query.shape[0], 9, 16), torch.nan)
    wide[:, 2:6] = batch.args.query
    out, _ = reference.paged_attention(batch.args._replace(query=wide[:, 2:6]), config)
    assert torch.equal(out, batch.expected()[0])
