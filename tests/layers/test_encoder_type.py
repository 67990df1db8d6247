"""The encoder of an encoder-decoder model: its self-attention reads its rows from the step that the decoder runs in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.compile.test_graph_counts import CountingBackend
from tests.layers.encoder_support import HEADS, KV_HEADS, SIZE, dense, packed_step, random_qkv
from tests.support import relative_l2
from vattn.errors import MetadataError, ShapeError, UnsupportedRequestError

SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 0.7]), torch.tensor([0.3, -1.0, 2.0, 0.0])
LENS, NEW = [11, 9, 0, 3], [True, False, True, True]
"""Encoder states of each request, and whose encoder runs: 14 rows."""

CLOSE = 2e-5
"""Relative L2 in fp32: sums in another order. A row of another request, or a decoder's mask, gives 1e-1."""


def make_layer(**options: Any) -> vattn.EncoderOnlyAttention:
    arguments = {"num_kv_heads": KV_HEADS, "attn_type": "encoder", "prefix": "encoder.0", **options}
    return vattn.EncoderOnlyAttention(HEADS, SIZE, 0.25, **arguments)


def mixed_step(builder: vattn.AttentionMetadataBuilder | None = None, **options: Any) -> vattn.AttentionMetadata:
    """Return a step with decodes and prompts, causal flags, and some requests whose encoder runs."""
    builder = builder or vattn.AttentionMetadataBuilder(8, 64, 64, 8, max_encoder_len=16, num_blocks=32)
    tables = {"block_tables": [[1], [2, 3], [4], [5]], "cross_block_tables": [[6, 7], [8, 9], [], [10]]}
    arguments = {"encoder_lens": LENS, "new_encoder": NEW, "causal": [True, True, False, True], **tables, **options}
    return builder.build([2, 1, 5, 1], [2, 12, 5, 1], **arguments)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"per_layer_sliding_window": 3}, {"window": 3}),
    "soft cap": ({"logits_soft_cap": 0.7}, {"soft_cap": 0.7}),
    "alibi": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
    "everything": (
        {"per_layer_sliding_window": 4, "logits_soft_cap": 1.5, "alibi_slopes": SLOPES, "sinks": SINKS},
        {"window": 4, "soft_cap": 1.5, "slopes": SLOPES, "sinks": SINKS},
    ),
}


@pytest.mark.parametrize(
    ("backend", "name"), [*(("TORCH_SDPA", name) for name in OPTIONS), ("TRITON_ATTN", "everything")]
)
def test_new_states_see_each_other_both_ways(backend: str, name: str) -> None:
    options, meaning = OPTIONS[name]
    query, key, value = random_qkv(17, real=14)
    step = mixed_step(num_encoder_tokens_padded=17, num_reqs_padded=6, num_tokens_padded=12)
    assert step.encoder_start_loc.tolist() == [0, 11, 11, 11, 14, 14, 14]
    out = make_layer(attn_backend=backend, **options)(query, key, value, metadata=step)
    expected = dense(query, key, value, [11, 0, 0, 3], scale=0.25, **meaning).flatten(1)
    assert relative_l2(out, expected) < CLOSE and not out[14:].any()


class Whisper(nn.Module):
    """One encoder layer, and a decoder layer that attends to itself and to the encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_layer(per_layer_sliding_window=3, num_kv_heads=HEADS)
        self.own = vattn.Attention(HEADS, SIZE, 0.25, cache_config=vattn.CacheConfig(8), prefix="layers.0.attn")
        self.cross = vattn.CrossAttention(HEADS, SIZE, 0.25, cache_config=vattn.CacheConfig(8), prefix="layers.1.attn")

    def forward(self, tokens: Tensor, states: Tensor | None) -> Tensor:
        if states is not None:
            states = self.encoder(states, states, states)
        tokens = self.own(tokens, tokens, tokens)
        return self.cross(tokens, states, states)


def test_encoder_and_decoder_share_a_step(fresh_dynamo: None) -> None:
    """The encoder's rows come from one request more, the decoder's from all; compiled code reads no length."""
    model, backend = Whisper(), CountingBackend()
    vattn.allocate_kv_cache(model, num_blocks=32, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(8, 64, 64, layers=model, max_encoder_len=16)
    compiled = vattn.compile(model, backend=backend)
    for new in (NEW, [False, True, True, True]):
        step = mixed_step(builder, new_encoder=new, causal=True)
        tokens = torch.randn(9, HEADS * SIZE)
        lens = [n * flag for n, flag in zip(LENS, new, strict=True)]
        states = torch.randn(sum(lens), HEADS * SIZE)
        rows = states.view(-1, HEADS, SIZE)
        encoded = dense(rows, rows, rows, lens, scale=0.25, window=3).float().flatten(1)
        with vattn.forward_context(step):
            assert relative_l2(model.encoder(states, states, states), encoded) < CLOSE
            own = model.own(tokens, tokens, tokens)
            expected = model.cross(own, encoded, encoded)
            torch.testing.assert_close(model(tokens, states), expected)
            torch.testing.assert_close(compiled(tokens, states), expected)
    assert len(backend.graphs) == 1
    with vattn.forward_context(mixed_step(builder, new_encoder=None, causal=True)):
        assert compiled(tokens, None).shape == tokens.shape


def test_the_step_of_a_graph_keeps_its_offsets() -> None:
    step = mixed_step(num_encoder_tokens_padded=20)
    key = step.capture_key()
    assert dict(key.optional)["encoder_start_loc"] == (5,)
    step.encoder_start_loc = step.encoder_start_loc[:3]
    with pytest.raises(MetadataError, match="encoder_start_loc is"):
        step.check(8)


def test_refusals() -> None:
    layer, (query, key, value) = make_layer(), random_qkv(14)
    for step in (mixed_step(new_encoder=None), packed_step([14])):
        with pytest.raises(MetadataError, match=r"no encoder ran, in layer 'encoder\.0'.*new_encoder="):
            layer(query, key, value, metadata=step)
    with pytest.raises(ShapeError, match=r"query has 13 tokens.*14.*new encoder states"):
        layer(query[:13], key[:13], value[:13], metadata=mixed_step())
    with pytest.raises(UnsupportedRequestError, match="'encoder_only' or 'encoder'"):
        make_layer(attn_type="decoder")
    with pytest.raises(UnsupportedRequestError, match="EncoderOnlyAttention with attn_type='encoder'"):
        vattn.Attention(HEADS, SIZE, 0.25, attn_type="encoder")
    assert not layer(query, key, value).any(), "a profiling call"
