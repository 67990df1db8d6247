"""Arguments: integers of any kind are counts; what is something else is refused with one of our errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import vattn
from tests.support import relative_l2
from vattn.backends.differential_flash_attn import DifferentialFlashAttentionBackend
from vattn.backends.flash_attn.backend import FlashAttentionBackend
from vattn.errors import ConfigError, MetadataError, ScaleError, UnknownOptionError, VattnError

NO_COUNTS = ["4", 4.0, True, torch.tensor(4), -1]


@pytest.mark.parametrize("wrong", NO_COUNTS)
@pytest.mark.parametrize(
    "name",
    [
        "max_num_reqs", "max_num_tokens", "max_seq_len", "block_size", "num_blocks", "decode_threshold",
        "max_mm_ranges", "max_trees", "max_tree_size", "max_encoder_len", "max_encoder_tokens",
    ],
)  # fmt: skip
def test_capacities(name: str, wrong: Any) -> None:
    sizes = {"max_num_reqs": 4, "max_num_tokens": 8, "max_seq_len": 64}
    with pytest.raises(ConfigError, match=name):
        vattn.AttentionMetadataBuilder(**{**sizes, name: wrong})
    if name in (*sizes, "block_size", "max_trees"):
        kind = vattn.TreeAttentionMetadataBuilder if name == "max_trees" else vattn.FlashAttentionMetadataBuilder
        with pytest.raises(ConfigError, match=name):
            kind(**{**sizes, name: wrong})


def test_integers_of_numpy_are_counts() -> None:
    four = numpy.int32(4)
    builder = vattn.AttentionMetadataBuilder(four, numpy.int64(8), numpy.uint8(64), numpy.int16(16))
    step = builder.build([1], [3], [[1]], num_reqs_padded=four, num_tokens_padded=four)
    assert step.seq_lens.tolist() == [3, 0, 0, 0]
    flash = vattn.FlashAttentionMetadataBuilder(four, 8, 64)
    assert flash.build([1], [3], [[1]], batch_size=four, num_lookahead_slots=numpy.int64(2)).lookahead == 2


def flash_step() -> vattn.FlashAttentionMetadata:
    return vattn.FlashAttentionMetadataBuilder(4, 8, 64).build([1, 1], [3, 4], [[1], [2]], num_lookahead_slots=1)


INPUT = vattn.DecodeInput(torch.zeros(2).long(), torch.zeros(2).long())
SAMPLED = torch.tensor([1, 2])
TREE = vattn.TokenTree(((0,), (1,)))

CALLS: dict[str, Callable[[Any], object]] = {
    "requests": lambda wrong: vattn.AttentionMetadataBuilder(4, 8, 64).build([1], [3], [[1]], num_reqs_padded=wrong),
    "tokens": lambda wrong: vattn.AttentionMetadataBuilder(4, 8, 64).build([1], [3], [[1]], num_tokens_padded=wrong),
    "batch": lambda wrong: vattn.FlashAttentionMetadataBuilder(4, 8, 64).build([1], [3], [[1]], batch_size=wrong),
    "lookahead": lambda wrong: vattn.FlashAttentionMetadataBuilder(4, 8, 64).build(
        [1], [3], [[1]], num_lookahead_slots=wrong
    ),
    "block size": lambda wrong: flash_step().advance_step(INPUT, SAMPLED, wrong, 2, 2),
    "seqs": lambda wrong: flash_step().advance_step(INPUT, SAMPLED, 16, wrong, 2),
    "queries": lambda wrong: flash_step().advance_step(INPUT, SAMPLED, 16, 2, wrong),
}


@pytest.mark.parametrize("wrong", NO_COUNTS)
@pytest.mark.parametrize("name", CALLS)
def test_counts_of_steps(name: str, wrong: Any) -> None:
    with pytest.raises(MetadataError):
        CALLS[name](wrong)


def builder(**options: Any) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(
        4, 8, 64, max_encoder_len=32, **{"max_mm_ranges": 1, "max_trees": 1, **options}
    )


def build(**step: Any) -> vattn.AttentionMetadata:
    return builder(max_tree_size=4).build([1], [3], [[1]], **step)


def encoder_step(**step: Any) -> vattn.AttentionMetadata:
    return build(**{"encoder_lens": [3], "cross_block_tables": [[1]], **step})


def transfer(**changes: Any) -> None:
    layer = vattn.Attention(2, 16, 0.25)
    cache = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    values = {"model": layer, "allocation": cache, "connector": vattn.HostMemoryConnector("1MiB"), **changes}
    loads = values.pop("loads", ())
    made = vattn.KVTransfer(**values)
    try:
        with made.step(loads=loads):
            pass
    finally:
        made.detach()


PLAIN = vattn.AttentionConfig(2, 1, 16, 16, 0.25, "float32", "float32")
ROWS = torch.randn(1, 5, 64)
TEXT = torch.randn(5, 64)


def attend(step: Any, config: Any = PLAIN) -> vattn.AttentionOutput:
    cache = torch.zeros(vattn.kv_cache_shape(PLAIN, num_blocks=4))
    return vattn.paged_attention(torch.randn(2, 2, 16), cache, step, config)


FP8 = vattn.CacheConfig(cache_dtype="fp8")


def keys(k_scale: Any) -> vattn.QuantConfig:
    return vattn.QuantConfig(k_scale=k_scale, v_scale="unit")


def latents(rope: int) -> object:
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": rope, "v_head_dim": 16, "kv_lora_rank": 128}
    packed = vattn.CacheConfig(cache_dtype="fp8_ds_mla")
    return vattn.MLAAttention(
        2, 0.25, **sizes, q_lora_rank=None, kv_b_proj=nn.Linear(128, 64, bias=False), cache_config=packed
    )


NO_SUCH_THINGS: dict[str, Callable[[], object]] = {
    "a config of a call": lambda: attend(build(), None),
    "a config of an update": lambda: vattn.update_kv_cache(ROWS, ROWS, ROWS, ROWS, None),
    "slots of an update": lambda: vattn.update_kv_cache(ROWS, ROWS, ROWS, [1, 2], PLAIN),
    "a scale of an update": lambda: vattn.update_kv_cache(ROWS, ROWS, ROWS, ROWS, PLAIN, k_scale=1.0),
    "a query": lambda: vattn.paged_attention(numpy.ones((2, 2, 16)), ROWS, build(), PLAIN),
    "sinks of a call": lambda: vattn.paged_attention(ROWS, ROWS, build(), PLAIN, sinks=[0.0, 0.0]),
    "a part to merge": lambda: vattn.merge_attn_states(ROWS, ROWS, ROWS, None),
    "a mapping on meta": lambda: vattn.copy_blocks([ROWS[None, None]], torch.ones(1, 2, dtype=torch.int64).to("meta")),
    "offsets in floats": lambda: vattn.check_cu_seqlens(torch.tensor([0.0, 3.0]), 3),
    "offsets on meta": lambda: vattn.check_cu_seqlens(torch.ones(2, dtype=torch.int32, device="meta"), 3),
    "a rotation": lambda: vattn.rope_update_kv_cache(*[ROWS] * 7, None, PLAIN),
    "metadata of a call": lambda: attend(flash_step()),
    "an answer that the config does not give": lambda: attend(build(causal=False)),
    "a step without encoders": lambda: attend(
        build(), PLAIN.replace(attn_type="encoder_decoder", causality="bidirectional")
    ),
    "a shape": lambda: FlashAttentionBackend.get_kv_cache_shape(4, 16.0, 2, 64),
    "blocks of a shape": lambda: FlashAttentionBackend.get_kv_cache_shape("4", 16, 2, 64),
    "heads of a shape": lambda: FlashAttentionBackend.get_kv_cache_shape(4, 16, 0, 64),
    "pairs of heads": lambda: DifferentialFlashAttentionBackend.get_kv_cache_shape(4, 16, "2", 64),
    "a cache of pairs": lambda: DifferentialFlashAttentionBackend.kv_cache_view(None),
    "a storage": lambda: FlashAttentionBackend.swap_blocks(None, None, None),
    "storages": lambda: FlashAttentionBackend.copy_blocks(None, [(0, 1)]),
    "a device": lambda: builder(device="gpu"),
    "layers": lambda: builder(layers=5),
    "layers with groups": lambda: vattn.GroupedMetadataBuilder(4, 8, 64),
    "flags of a step": lambda: build(causal="yes"),
    "no flags": lambda: build(causal=None),
    "a tree's bias": lambda: build(tree_bias=[[1]], tree_id=[0]),
    "ranges": lambda: build(mm_ranges=5),
    "ranges of floats": lambda: build(mm_ranges=[[(0.5, 1)]]),
    "flags of encoders": lambda: encoder_step(new_encoder="a"),
    "a flag of an encoder": lambda: encoder_step(new_encoder=[None]),
    "tables of encoders": lambda: encoder_step(cross_block_tables=5),
    "kept rows": lambda: vattn.fast_prefill(None, None),
    "a pool": lambda: vattn.BlockPool("8"),
    "blocks": lambda: vattn.BlockPool(8).allocate("2"),
    "a hybrid table": lambda: vattn.HybridBlockTable(None, None),
    "images": lambda: vattn.MMEncoderAttention(4, 16)(None, ROWS, ROWS),
    "images of numpy": lambda: vattn.MMEncoderAttention(4, 16)(ROWS.numpy(), ROWS, ROWS),
    "metadata of a text": lambda: vattn.EncoderOnlyAttention(4, 16, 0.25)(TEXT, TEXT, TEXT, metadata=5),
    "an output shape": lambda: vattn.EncoderOnlyAttention(4, 16, 0.25)(TEXT, TEXT, TEXT, 5),
    "offsets": lambda: vattn.check_cu_seqlens([0, 5], 5, 5),
    "offsets to pad": lambda: vattn.pad_cu_seqlens([0, 5], 5),
    "a count of images": lambda: vattn.pad_cu_seqlens(torch.tensor([0, 5]).int(), 5.0),
    "a model with scales": lambda: vattn.save_encoder_scales(None, "scales.json"),
    "tokens of a key": lambda: vattn.block_keys([1.5] * 20, 16),
    "a text as tokens": lambda: vattn.block_keys("ab" * 20, 16),
    "a size of blocks": lambda: vattn.block_keys([1] * 20, 16.0),
    "a parent": lambda: vattn.block_keys([1] * 20, 16, parent="no hash"),
    "keys": lambda: vattn.TransferRequest("a", None, None),
    "keys that are numbers": lambda: vattn.TransferRequest("a", (1,), (1,)),
    "block ids": lambda: vattn.TransferRequest("a", ("x",), (1.5,)),
    "a model to transfer": lambda: transfer(model=None),
    "an allocation": lambda: transfer(allocation=None),
    "a timeout": lambda: transfer(timeout=True),
    "loads": lambda: transfer(loads=[5]),
    "a folder": lambda: vattn.FileConnector(None),
    "a capture key": lambda: vattn.AttentionMetadataBuilder(4, 8, 64).build([1], [3], [[1]], capture_key=5),
    "block tables": lambda: vattn.FlashAttentionMetadataBuilder(4, 8, 64).build([3], [3], [1]),
    "sampled tokens": lambda: flash_step().advance_step(INPUT, [1, 2], 16, 2, 2),
    "a model's input": lambda: flash_step().advance_step(None, SAMPLED, 16, 2, 2),
    "lengths below 0": lambda: vattn.token_order([1, 3], [-9, 3], first="decode"),
    "new tokens below 0": lambda: vattn.token_order([-1, 3], [9, 3], first="decode"),
    "lengths shorter than queries": lambda: vattn.token_order([5], [3], first="decode"),
    "no slope": lambda: vattn.Attention(2, 16, 0.25, alibi_slopes=[0.5, math.nan]),
    "a slope without end": lambda: vattn.EncoderOnlyAttention(2, 16, 0.25, alibi_slopes=torch.tensor([0.5, math.inf])),
    "flags as slopes": lambda: vattn.Attention(2, 16, 0.25, alibi_slopes=[True, False]),
    "no sink": lambda: vattn.Attention(2, 16, 0.25, sinks=torch.tensor([0.5, math.nan])),
    "a sink that takes all": lambda: vattn.EncoderOnlyAttention(2, 16, 0.25, sinks=[0.5, math.inf]),
    "flags as sinks": lambda: vattn.Attention(2, 16, 0.25, sinks=torch.ones(2, dtype=torch.bool)),
    "no vector": lambda: vattn.DifferentialAttention(
        2, 16, 0.25, **{f"lambda_{name}": [math.nan] * 16 for name in ("q1", "k1", "q2", "k2")}, lambda_init=0.5
    ),
    "a flag as a scale": lambda: vattn.Attention(2, 16, 0.25, cache_config=FP8, quant_config=keys(torch.tensor(True))),
    "flags as scales": lambda: vattn.Attention(2, 16, 0.25, cache_config=FP8, quant_config=keys(numpy.ones(2, bool))),
    "a flag as an output scale": lambda: vattn.Attention(
        2, 16, 0.25, quant_config=vattn.QuantConfig(output_format="fp8_static", output_scale=torch.tensor(True))
    ),
    "a schedule on a CPU": lambda: torch.ops.vattn.plan(
        torch.tensor([0, 1]), torch.tensor([3]), torch.zeros(8).int(), PLAIN.replace(block_size=16).encode()
    ),
    "odd rows of latents": lambda: latents(7),
    "metadata of a draft": lambda: vattn.TreeAttentionMetadataBuilder(4, 8, 64).build_for_drafting(None, 0),
    "branches": lambda: vattn.TokenTree.merge(None),
    "a branch": lambda: vattn.TokenTree.merge([1, 2]),
    "a text as a branch": lambda: vattn.TokenTree.merge(["abc"]),
    "drafts": lambda: TREE.accepted(None, None),
    "lengths": lambda: vattn.token_order([1], [2, 3], first="prefill"),
    "lengths of text": lambda: vattn.token_order("a", [2], first="prefill"),
    "a path": lambda: vattn.load_flash_attn(None),
    "a backend": lambda: vattn.register_backend(None),
    "a class of backends": lambda: vattn.register_backend(dict),
    "a request": lambda: vattn.explain("vattn1 num_heads=2", "cpu"),
}


@pytest.mark.parametrize("name", NO_SUCH_THINGS)
def test_what_is_something_else_is_refused(name: str) -> None:
    with pytest.raises(VattnError) as caught:
        NO_SUCH_THINGS[name]()
    assert caught.value.got
    assert caught.value.allowed


def test_sinks_that_are_no_numbers_yet() -> None:
    """Parameters get their values later; a sink of -inf adds nothing."""
    vattn.Attention(2, 16, 0.25, sinks=nn.Parameter(torch.tensor([0.5, math.nan])))
    with FakeTensorMode():
        vattn.Attention(2, 16, 0.25, sinks=[0.5, 0.5], alibi_slopes=[0.5, 0.5])
    rows, results = torch.randn(5, 2, 16), []
    for sinks in (None, [-math.inf, 5.0]):
        layer = vattn.Attention(2, 16, 0.25, sinks=sinks)
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        step = builder(layers=layer).build([3, 2], [3, 2], [[1], [2]], num_reqs_padded=3, num_tokens_padded=6)
        results.append(layer(*[torch.cat((rows, rows[:1]))] * 3, metadata=step).view(6, 2, 16))
    torch.testing.assert_close(results[0][:, 0], results[1][:, 0])
    assert relative_l2(results[1][:5, 1], results[0][:5, 1]) > 0.1


def test_cross_attention_by_hand_reads_the_encoders_side() -> None:
    """As the layer does, on the same cache."""
    layer = vattn.CrossAttention(2, 16, 0.25, 1)
    cache = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32).kv_caches[0]
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(0)))
    step = builder().build([2], [9], [[1]], encoder_lens=[20], cross_block_tables=[[3, 2]])
    query = torch.randn(2, 2, 16)
    by_hand = vattn.paged_attention(query, cache, step, layer.config).output
    assert torch.equal(by_hand.flatten(1), layer(query, None, None, metadata=step))


def test_attention_by_hand_sees_the_ranges_of_its_step() -> None:
    """Queries of zeros average the values that they see: tokens 1 and 2 see each other."""
    config = vattn.AttentionConfig(2, 1, 16, 16, 0.25, "float32", "float32", mm_prefix="full")
    step = builder(max_mm_ranges=1).build([4], [4], [[1]], mm_ranges=[[(1, 2)]])
    cache, rows = torch.zeros(vattn.kv_cache_shape(config, num_blocks=3)), torch.randn(4, 1, 16)
    vattn.update_kv_cache(rows, rows, cache, step.slot_mapping, config)
    seen = vattn.paged_attention(torch.zeros(4, 2, 16), cache, step, config).output
    wanted = torch.stack([rows[:count].mean(0) for count in (1, 3, 3, 4)]).expand(-1, 2, -1)
    torch.testing.assert_close(seen, wanted)  # fp32, sums of four values


def test_steps_of_groups_pass_their_options_on() -> None:
    model = nn.ModuleList(
        vattn.Attention(2, 16, 0.25, prefix=str(index), per_layer_sliding_window=window)
        for index, window in enumerate((None, 16))
    )
    vattn.allocate_kv_cache(model, num_blocks=16, dtype=torch.float32, hybrid=True, max_seq_len=64)
    grouped = vattn.GroupedMetadataBuilder(4, 8, 64, layers=model)
    tables = [[[1]], [[2]]]
    assert grouped.build([1], [1], tables, num_reqs_padded=4).seq_lens.shape == (4,)
    with pytest.raises(TypeError, match="num_reqs_paded"):
        grouped.build([1], [1], tables, num_reqs_paded=4)


def test_a_layer_without_a_prefix_is_called_so() -> None:
    layer = vattn.Attention(2, 16, 0.25, cache_config=vattn.CacheConfig(block_size=8))
    step = builder(block_size=8).build([1], [1], [[0]])
    with pytest.raises(VattnError, match=r"layer \(no prefix given\) has no KV cache"):
        layer(*(step.seq_lens.new_zeros(2, 32).float() for _ in range(3)), metadata=step)


REFUSED_AT_ONCE: dict[str, tuple[Callable[[], object], type[VattnError], str]] = {
    "no callable": (lambda: vattn.compile(3), ConfigError, "compile with int"),
    "no path": (lambda: vattn.read_encoder_scales(None), ScaleError, "scale file None"),
    "mode and options": (
        lambda: vattn.compile(abs, mode="max-autotune", options=vattn.options()),
        ConfigError,
        r"options=vattn.options\(mode='max-autotune'\)",
    ),
    "an option of ours for Inductor": (
        lambda: vattn.compile(abs, options={"vattn.strikt": True}),
        UnknownOptionError,
        "backend=vattn.backend",
    ),
    "regions": (
        lambda: vattn.compile_regions([nn.Identity()], mode="default", options={}),
        ConfigError,
        "one of the two",
    ),
    "no mode": (lambda: vattn.compile(abs, mode="fast"), ConfigError, "mode='fast'. Allowed: default, "),
    "no option of Inductor": (
        lambda: vattn.compile(abs, options=vattn.options({"triton.nope": True})),
        UnknownOptionError,
        "option 'triton.nope'. Allowed: Inductor's",
    ),
    "shortest over longest": (lambda: vattn.PromptLookup(longest=2, shortest=9), ConfigError, "longest=2, shortest=9"),
    "no format": (lambda: vattn.register_kv_format(3), ConfigError, "a KV format of type int"),
    "clips of no model": (lambda: vattn.observe_clipping(3).__enter__(), ConfigError, r"observe_clipping\(model=3"),
    "rates of no model": (lambda: vattn.clip_rates(3), ConfigError, r"clip_rates\(model=3"),
}


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED_AT_ONCE.values(), ids=REFUSED_AT_ONCE.keys())
def test_what_is_no_model_option_or_format_is_refused_at_once(
    call: Callable[[], object], kind: type[VattnError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        call()
