"""The lightning indexer and the fused store: reference, kernels in the interpreter, layers, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.layers.mla_support import make_mla_config
from tests.support import relative_l2, unchanged, with_cache
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape, row_view
from vattn.config.mla import MLAConfig
from vattn.config.rope import RopeConfig
from vattn.distributed import ContextParallel
from vattn.errors import (
    CacheNotBoundError,
    ConfigError,
    DtypeError,
    GradientError,
    MetadataError,
    ShapeError,
    UnsupportedRequestError,
    VattnError,
)
from vattn.layers.mla.lightning_indexer import LightningIndexer
from vattn.layers.mla.rotary import LatentRotary
from vattn.ops.reference import mla_indexer, mla_rope
from vattn.ops.reference.mla_indexer import IndexerSelectArgs, IndexerUpdateArgs
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs
from vattn.quantization.mla_formats import MLA_FORMATS, decode_rows


def integers(*shape: int, low: int = -3, high: int = 4) -> Tensor:
    """Return whole numbers, whose products and sums are exact everywhere."""
    return torch.randint(low, high, shape).float()


def make_select(heads: int = 3, columns: int = 8, listed: int = 5, seed: int = 0) -> IndexerSelectArgs:
    torch.manual_seed(seed)
    size, lengths, queries = 8, [40, 3, 0, 21], [2, 3, 0, 4]
    cache = torch.full((16, size, columns + 4), 0xFF, dtype=torch.uint8)
    table = torch.full((5, 6), 10**6, dtype=torch.int32)
    free = torch.randperm(16).tolist()
    for request, length in enumerate(lengths):
        used = -(-length // size)
        table[request, :used] = torch.tensor(free[:used], dtype=torch.int32)
        slots = [free[at // size] * size + at % size for at in range(length)]
        free = free[used:]
        key = integers(length, columns)
        key[:, 0] = 448.0  # Scales are 1, so that codes are the numbers themselves.
        update = IndexerUpdateArgs(key, cache, torch.tensor(slots).long())
        mla_indexer.mla_indexer_update(update)
    tokens = sum(queries) + 2
    query = integers(tokens, heads, columns, low=-2, high=3)
    query[:, :, 0] = 0.0
    starts = torch.tensor([0, *queries, 0]).cumsum(0).int()
    return IndexerSelectArgs(
        query.to(torch.float8_e4m3fn), integers(tokens, heads), cache, starts,
        torch.tensor([*lengths, 0], dtype=torch.int32), table, torch.full((tokens, listed), 99, dtype=torch.int32),
    )  # fmt: skip


def scores_of(args: IndexerSelectArgs, request: int, row: int) -> Tensor:
    """Return the fp64 scores of one row by the formula."""
    length = int(args.seq_lens[request]) - (int(args.query_start_loc[request + 1]) - 1 - row)
    at = torch.arange(length)
    rows = args.index_cache[args.block_table[request, at // 8].long(), at % 8]
    keys = rows[:, :-4].contiguous().view(torch.float8_e4m3fn).double()
    return ((args.query[row].double() @ keys.T).relu() * args.weights[row].double()[:, None]).sum(0)


@pytest.mark.parametrize("listed", [1, 5, 24])
def test_rows_list_the_highest_scores(listed: int) -> None:
    args = make_select(listed=listed)
    mla_indexer.mla_indexer_select(args)
    request_of = [0, 0, 1, 1, 1, 3, 3, 3, 3]
    for row, request in enumerate(request_of):
        scores = scores_of(args, request, row)
        found = args.topk_indices[row][args.topk_indices[row] >= 0].long()
        assert len(found) == min(listed, len(scores)) == len(found.unique())
        rest = torch.ones(len(scores), dtype=torch.bool)
        rest[found] = False
        if rest.any():
            assert scores[found].min() >= scores[rest].max()
            ties = torch.nonzero(scores == scores[found].min()).flatten()
            taken = ~rest[ties]
            assert taken.sum() == taken.int().cumprod(0).sum()  # of equal ones the first
        else:
            assert found.tolist() == list(range(len(scores)))
    assert (args.topk_indices[9:] == -1).all()


def test_keys_beyond_the_block_table_are_not_listed() -> None:
    whole, args = make_select(listed=60), make_select(listed=60)
    args = args._replace(block_table=args.block_table[:, :2])
    mla_indexer.mla_indexer_select(args)
    assert args.topk_indices[:2].max() == 15 and (args.topk_indices[:2] >= 0).sum(1).tolist() == [16, 16]
    mla_indexer.mla_indexer_select(whole)
    assert torch.equal(args.topk_indices[2:5], whole.topk_indices[2:5])


@pytest.mark.parametrize("bad", [-1, 16])
def test_keys_of_blocks_that_are_none_are_listed_last(bad: int) -> None:
    args = make_select(listed=8)
    args.block_table[0, :4] = bad
    mla_indexer.mla_indexer_select(args)
    # The second row sees all of the fifth block, the first one all but its last key.
    assert args.topk_indices[1].tolist() == list(range(32, 40))
    assert args.topk_indices[0, -7:].tolist() == list(range(32, 39)) and args.topk_indices[0, 0] < 32


def test_scores_by_hand() -> None:
    keys = torch.tensor([[2.0, 0, 0, 0], [0, 4, 0, 0], [-1, 0, 0, 0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.tensor([[0.5], [0.25], [3.0]]).view(torch.uint8)
    query = torch.tensor([[[1.0, 1, 0, 0], [2, -1, 0, 0]]])
    # The heads weigh 10 and 100; products below 0 count as 0.
    scores = mla_indexer.index_scores(query, torch.tensor([[10.0, 100.0]]), torch.cat((keys, scales), -1))
    assert scores.tolist() == [[0.5 * (10 * 2 + 100 * 4), 0.25 * 10 * 4, 0.0]]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("key", torch.zeros(3, 8, dtype=torch.int32)),
        ("key", torch.zeros(3, 6)),
        ("index_cache", torch.zeros(2, 8, 11, dtype=torch.uint8)),
        ("index_cache", torch.zeros(2, 8, 12)),
        ("slot_mapping", torch.zeros(4, dtype=torch.int64)),
        ("slot_mapping", torch.zeros(3)),
    ],
)
def test_wrong_tensors_of_an_update_are_named(name: str, wrong: Tensor) -> None:
    cache = torch.zeros(2, 8, 12, dtype=torch.uint8)
    args = IndexerUpdateArgs(torch.randn(3, 8), cache, torch.tensor([3, -1, 99]))
    with pytest.raises(VattnError, match="index" if wrong.shape[-1] == 6 else name):
        mla_indexer.check_indexer_update(args._replace(**{name: wrong}))
    mla_indexer.check_indexer_update(args)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query", torch.zeros(11, 3, 8)),
        ("weights", torch.zeros(11, 2)),
        ("index_cache", torch.zeros(0, 8, 12, dtype=torch.uint8)),
        ("topk_indices", torch.zeros(11, 5)),
        ("seq_lens", torch.zeros(4)),
    ],
)
def test_wrong_tensors_of_a_selection_are_named(name: str, wrong: Tensor) -> None:
    args = make_select()
    with pytest.raises(VattnError, match=name):
        mla_indexer.check_indexer_select(args._replace(**{name: wrong}))
    mla_indexer.check_indexer_select(args)


@pytest.mark.parametrize(
    ("heads", "listed", "score_bytes"),
    [(3, 1, None), (3, 5, None), (20, 9, None), (64, 9, None), (3, 24, None), (3, 60, None), (3, 5, 4 * 48 * 3)],
)
def test_kernels_choose_what_the_reference_chooses(
    heads: int, listed: int, score_bytes: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some hold few scores at a time."""
    kernels = pytest.importorskip("vattn.kernels.triton.mla.indexer")
    if score_bytes is not None:
        monkeypatch.setattr(kernels, "SCORE_BYTES", score_bytes)
    args = make_select(heads, listed=listed, seed=listed)
    given = args._replace(**{name: tensor.clone().to(device) for name, tensor in args._asdict().items()})
    mla_indexer.mla_indexer_select(args)
    kernels.mla_indexer_select(given)
    assert torch.equal(given.topk_indices.cpu().sort().values, args.topk_indices.sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_write_the_bytes_of_the_reference(dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("vattn.kernels.triton.mla.indexer")
    key = torch.randn(6, 17).to(dtype)[:, :12] * torch.logspace(-8, 3, 6)[:, None].to(dtype)
    key[4] = 0.0
    slots = torch.tensor([5, -1, 23, 24, 10**12, 0])
    caches = [torch.full((3, 8, 16), 0xAB, dtype=torch.uint8) for _ in range(2)]
    mla_indexer.mla_indexer_update(IndexerUpdateArgs(key, caches[0], slots))
    kernels.mla_indexer_update(IndexerUpdateArgs(key, caches[1], slots))
    assert torch.equal(*caches) and (caches[0][0, 1] == 0xAB).all()


def test_an_indexed_layer_equals_dense_attention_where_everything_is_listed() -> None:
    torch.manual_seed(0)
    indexer = LightningIndexer(2, 8, topk=12, max_tokens=16, block_size=8)
    indexer.allocate(num_blocks=8)
    projection, cache = nn.Linear(20, 3 * 22, bias=False), vattn.CacheConfig(block_size=8)
    sizes = (3, 0.3, 12, 6, 10, None, 20, projection, cache)
    sparse, dense = vattn.MLAAttention(*sizes, use_sparse=True, indexer=indexer), vattn.MLAAttention(*sizes)
    builder = vattn.AttentionMetadataBuilder(2, 16, 64, 8)
    for layer in (sparse, dense):
        vattn.allocate_kv_cache(layer, num_blocks=8, dtype=torch.float32)
    step = builder.build([11, 3], [11, 3], [[1, 2], [3]])
    q, kv_c, k_pe, tokens = torch.randn(14, 3, 18), torch.randn(14, 20), torch.randn(14, 6), 14
    with torch.no_grad():
        found = indexer(torch.randn(tokens, 2, 8), torch.rand(tokens, 2), torch.randn(tokens, 8), metadata=step)
        assert found[10].tolist() == [*range(11), -1]
        got = sparse(q, kv_c, k_pe, metadata=step)
        assert relative_l2(got, dense(q, kv_c, k_pe, metadata=step)) < 2e-6


def test_wrong_indexers_and_calls() -> None:
    for wrong in ({"head_size": 6}, {"topk": 0}, {"num_heads": True}):
        with pytest.raises(ConfigError):
            LightningIndexer(**{"num_heads": 2, "head_size": 8, "topk": 4, "max_tokens": 4, **wrong})
    for buffer in (torch.zeros(4, 4), [[-1] * 4] * 4):
        with pytest.raises(ShapeError):
            LightningIndexer(2, 8, 4, 4, topk_indices=buffer)
    indexer = LightningIndexer(2, 8, topk=4, max_tokens=4, block_size=8)
    step = vattn.AttentionMetadataBuilder(2, 8, 64, 8).build([3], [3], [[1]])
    given = torch.randn(3, 2, 8), torch.rand(3, 2), torch.randn(3, 8)
    with pytest.raises(CacheNotBoundError):
        indexer(*given, metadata=step)
    assert torch.equal(indexer(*given), indexer.topk_indices[:3])  # profiling
    with pytest.raises(ConfigError, match="num_blocks"):
        indexer.allocate(-1)
    indexer.allocate(4)
    indexer.topk_indices.fill_(7)
    parallel = ContextParallel(0, 2)
    sharded = vattn.AttentionMetadataBuilder(2, 8, 64, 8, context_parallel=parallel).build([3], [3], [[1]])
    other_blocks = vattn.AttentionMetadataBuilder(2, 8, 64, 16).build([3], [3], [[1]])
    wrong_calls: list[tuple[type[VattnError], tuple[Any, ...], Any]] = [
        (ShapeError, (torch.randn(5, 2, 8), *given[1:]), step),
        (ShapeError, (given[0], given[1][:, :1], given[2]), step),
        (ShapeError, tuple(t[:2] for t in given), step),
        (ShapeError, (given[0][:2], given[1][:2], given[2]), step),
        (ShapeError, (None, *given[1:]), step),
        (DtypeError, (*given[:2], torch.zeros(3, 8, dtype=torch.int32)), step),
        (DtypeError, (given[0].double(), *given[1:]), step),
        (GradientError, (given[0].clone().requires_grad_(), *given[1:]), step),
        (MetadataError, given, "step"),
        (MetadataError, given, other_blocks),
        (UnsupportedRequestError, given, sharded),
    ]
    for error, rows, metadata in wrong_calls:
        with pytest.raises(error):
            indexer(*rows, metadata=metadata)
    assert not indexer.index_cache.any() and (indexer.topk_indices == 7).all()


def rope_args(config: MLAConfig, style: str, full: bool, **changes: Any) -> tuple[MLARopeUpdateArgs, RopeConfig]:
    columns, dtype = config.qk_rope_head_dim, getattr(torch, config.dtype)
    rope = RopeConfig(columns, style, norm="rms", norm_eps=1e-5)
    cache = torch.zeros(mla_cache_shape(config, 3), dtype=mla_cache_dtype(config))
    cache.view(torch.uint8).fill_(0x3A)
    wide = torch.randn(6, config.head_size + 3).to(dtype)
    width = columns if full else columns // 2
    values: dict[str, Any] = {
        "kv_c": wide[:, : config.kv_lora_rank], "k_pe": wide[:, config.kv_lora_rank : config.head_size],
        "cos": torch.randn(9, width), "sin": torch.randn(9, width), "positions": torch.tensor([0, 8, -1, 3, 2, 5]),
        "kv_cache": cache, "slot_mapping": torch.tensor([5, -1, 23, 24, 10**12, 0]),
        "norm_weight": torch.randn(config.kv_lora_rank).to(dtype),
        "k_scale": torch.tensor([0.02]) if config.kv_scale == "tensor" else None, "rope": rope.encode(),
        "config": config.encode(), **changes,
    }  # fmt: skip
    return MLARopeUpdateArgs(**values), rope


def update_config(kv_cache_dtype: str, backend: str) -> MLAConfig:
    dtype = kv_cache_dtype if kv_cache_dtype in ("float16", "bfloat16") else "float32"
    return make_mla_config(
        kv_cache_dtype=kv_cache_dtype, dtype=dtype, kv_lora_rank=128, qk_rope_head_dim=12, backend=backend
    )


@pytest.mark.parametrize("kv_cache_dtype", list(MLA_FORMATS))
@pytest.mark.parametrize(("style", "full"), [("neox", False), ("interleaved", False), ("neox", True)])
def test_the_fused_store_equals_its_steps(kv_cache_dtype: str, style: str, full: bool) -> None:
    pytest.importorskip("triton")
    config = update_config(kv_cache_dtype, "TRITON_MLA")
    args, rope = rope_args(config, style, full)
    expected = args.kv_cache.clone()
    left = mla_rope.rotated_rows(args._replace(kv_cache=expected), rope, config)
    torch.ops.vattn.mla_kv_cache_update(*left)
    torch.ops.vattn.mla_rope_kv_cache_update(*args)
    rows = [row_view(cache, config) for cache in (args.kv_cache, expected)]
    values = [torch.cat(decode_rows(part.contiguous(), kv_cache_dtype, 128, 12, args.k_scale), -1) for part in rows]
    # One fused multiply-add more or less may move a code by a step.
    step = 0.3 if "nvfp4" in kv_cache_dtype else 0.07 if "fp8" in kv_cache_dtype else 1e-2
    assert ((values[0] - values[1]).abs() > step * values[1].abs() + 1e-3).float().mean() < 2e-3
    assert torch.equal(rows[0][0, 1], rows[1][0, 1]) and torch.equal(rows[0][1], rows[1][1])
    # The formula itself, apart from both.
    x = args.kv_c[0].double()
    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * args.norm_weight.double()  # type: ignore[union-attr]
    assert relative_l2(values[0][0, 5, :128], normed) < (0.2 if "nvfp4" in kv_cache_dtype else 0.05)


def layer_and_builder() -> tuple[vattn.MLAAttention, vattn.AttentionMetadataBuilder]:
    layer = with_cache(vattn.MLAAttention(2, 0.3, 12, 8, 10, None, 20, nn.Linear(20, 44, bias=False)), 4)
    return layer, vattn.AttentionMetadataBuilder(2, 8, 64, 16, layers=layer)


@pytest.mark.parametrize("encoded", [True, False])
def test_a_layer_stores_what_it_turns_itself(encoded: bool) -> None:
    torch.manual_seed(0)
    layer, builder = layer_and_builder()
    step = builder.build([5], [5], [[1]])
    angles = torch.arange(16.0)[:, None] * torch.rand(4)
    rope = RopeConfig(8, "interleaved", norm="rms", norm_eps=1e-6)
    rotary = LatentRotary(
        angles.cos(), angles.sin(), torch.arange(5), torch.randn(20), rope.encode() if encoded else rope
    )
    q, raw, k_pe = torch.randn(5, 2, 20), torch.randn(5, 20), torch.randn(5, 1, 8)
    run = vattn.compile(layer, fullgraph=True)
    with torch.no_grad():
        got = run(q, raw, k_pe, metadata=step, rotary=rotary)
        stored = layer.kv_cache.clone()
        normed = torch.nn.functional.rms_norm(raw, (20,), rotary.norm_weight, 1e-6)
        turned = torch.view_as_complex(k_pe[:, 0].unflatten(-1, (-1, 2))) * torch.polar(torch.ones(5, 4), angles[:5])
        expected = layer(q, normed, torch.view_as_real(turned).flatten(-2), metadata=step)
    assert relative_l2(got, expected) < 2e-6 and relative_l2(stored, layer.kv_cache) < 2e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_no_rotation_is_refused(compiled: bool) -> None:
    layer, builder = layer_and_builder()
    step = builder.build([5], [5], [[1]])
    given, table = (torch.randn(5, 2, 20), torch.randn(5, 20), torch.randn(5, 1, 8)), torch.rand(5, 4)
    good = LatentRotary(table, table, None, None, RopeConfig(8))
    wrong: list[Any] = [3, "neox", tuple(good), good._replace(rope=RopeConfig), good._replace(rope=None)]
    wrong += [good._replace(sin=None), good._replace(rope="neox")]
    run, named = (vattn.compile(layer), "rotary of type") if compiled else (layer, "ro(tary|pe)|sin")
    for rotary in wrong[:2] if compiled else wrong:
        with torch.no_grad(), unchanged(layer), pytest.raises(ConfigError, match=named):
            run(*given, metadata=step, rotary=rotary)


def test_a_table_without_a_row_for_the_longest_request_is_refused() -> None:
    layer, builder = layer_and_builder()
    given, table = (torch.randn(5, 2, 20), torch.randn(5, 20), torch.randn(5, 1, 8)), torch.rand(16, 4)
    for lens, positions, fits in ((16, None, True), (17, None, False), (17, [0, 1, 2, 3, 15], True)):
        step = builder.build([5], [lens], [[1, 2]], positions=positions)
        rotary = LatentRotary(table, table, step.positions, None, RopeConfig(8))
        with torch.no_grad():
            if fits:
                assert layer(*given, metadata=step, rotary=rotary).isfinite().all()
            else:
                with unchanged(layer), pytest.raises(ShapeError, match=r"tables of 16.*position 16.*longer tables"):
                    layer(*given, metadata=step, rotary=rotary)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_on_the_host_without_a_row_are_refused(dtype: torch.dtype) -> None:
    layer, builder = layer_and_builder()
    step = builder.build([3], [3], [[1]], num_tokens_padded=5)
    given, table = (torch.randn(5, 2, 20), torch.randn(5, 20), torch.randn(5, 1, 8)), torch.rand(16, 4)
    for places, error, match in (
        ([0, -1, 2, 0, 0], MetadataError, r"position -1 .*0 to 15"),
        ([0, -64, 2, 0, 0], MetadataError, r"position -64 "),
        ([0, 16, 2, 0, 0], ShapeError, r"16 rows.*position 16"),
        # Those of padding may be any.
        ([0, 15, 2, -3, 99], None, ""),
    ):
        rotary = LatentRotary(table, table, torch.tensor(places, dtype=dtype), None, RopeConfig(8))
        with torch.no_grad():
            if error is None:
                assert layer(*given, metadata=step, rotary=rotary).isfinite().all()
                continue
            with unchanged(layer), pytest.raises(error, match=match):
                layer(*given, metadata=step, rotary=rotary)


def bad_updates() -> dict[str, tuple[type[VattnError], dict[str, Any]]]:
    return {
        "another rotary_dim": (ConfigError, {"rope": RopeConfig(6, norm="rms").encode()}),
        "something about queries": (ConfigError, {"rope": RopeConfig(12, norm="rms", round_query=False).encode()}),
        "tables of another width": (ShapeError, {"cos": torch.zeros(9, 5)}),
        "tables of two dtypes": (DtypeError, {"sin": torch.zeros(9, 6).double()}),
        "positions of another length": (ShapeError, {"positions": torch.arange(5)}),
        "positions that are floats": (DtypeError, {"positions": torch.zeros(6)}),
        "no positions": (ShapeError, {"positions": None}),
        "a weight of another width": (ShapeError, {"norm_weight": torch.zeros(5)}),
        "a weight without a norm": (ConfigError, {"rope": RopeConfig(12).encode()}),
        "latents of another width": (ShapeError, {"kv_c": torch.zeros(6, 5)}),
    }


@pytest.mark.parametrize("name", list(bad_updates()))
def test_wrong_fused_stores_change_nothing(name: str) -> None:
    error, changes = bad_updates()[name]
    args, _ = rope_args(update_config("float32", "TORCH_MLA"), "neox", False, **changes)
    with unchanged(args), pytest.raises(error) as raised:
        torch.ops.vattn.mla_rope_kv_cache_update(*args)
    assert len(raised.value.fix.split()) > 1
