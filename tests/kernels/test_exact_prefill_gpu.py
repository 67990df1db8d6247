"""`exact_prefill` on a GPU: every format through the kernels, and steps of one shape replayed from a CUDA graph."""

from __future__ import annotations

import pytest
import torch

import vattn
from tests.kernels.test_exact_prefill import BLOCK, CUTS, MASKS, QUANTISED, make_inputs, make_layer, mixed, run
from tests.support import relative_l2

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fmt", QUANTISED)
def test_rows_see_their_step_as_given(fmt: str, mask: str) -> None:
    """Against a loop over rows in fp64; sums of rotated rows in another order are off by a few times 1e-6."""
    for cuts in CUTS.values():
        layer, inputs = make_layer(fmt, "TRITON_ATTN", device="cuda", **MASKS[mask]), make_inputs()
        assert relative_l2(run(layer, inputs, cuts), mixed(layer, inputs, cuts)) < 1e-5


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int4_per_token_head"])
def test_a_graph_replays_other_lengths(fmt: str) -> None:
    """One graph of two requests with four rows each; contexts change from replay to replay."""
    layer, inputs = make_layer(fmt, "TRITON_ATTN", device="cuda"), [x.cuda() for x in make_inputs(8)]
    builder = vattn.AttentionMetadataBuilder(2, 8, 64, BLOCK, "cuda", layers=layer)
    layer.kv_cache.view(torch.uint8).copy_(torch.randint(0, 60, layer.kv_cache.view(torch.uint8).shape))
    tables = [[3, 7, 1], [12, 5, 2]]
    step = builder.build([4, 4], [20, 9], tables)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(*inputs, metadata=step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*inputs, metadata=step)
        for lens in ([20, 9], [4, 17], [11, 4]):
            step = builder.build([4, 4], lens, tables)
            graph.replay()
            got = out.clone()
            assert relative_l2(got, layer(*inputs, metadata=step)) < 1e-6
