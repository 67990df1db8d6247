"""The comparison itself: what the reference gives passes, and one planted mistake of each kind does not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.conformance.cases import batch_of_row, make_cache_update
from tests.conformance.compare import Mismatch, compare, compare_cache_update, run_and_compare
from tests.conformance.fuzz import check_request, run_fuzz
from tests.conformance.requests import PAIRS, SMALL, draw_features, draw_request, simpler
from tests.conformance.rows import MIXED, Row
from tests.support import Batch, unchanged
from vattn.backends import dispatch, selector
from vattn.backends.torch_sdpa.backend import TorchSDPABackend
from vattn.config.attention import AttentionConfig
from vattn.ops.reference import attention as reference
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS


def batch_with(output: str, dtype: str = "float32") -> Batch:
    """A batch whose outputs hold what the reference writes."""
    changes = {"output_format": output, "dtype": dtype, "num_heads": 8, "lse": True}
    batch = batch_of_row(Row(changes, MIXED), "TORCH_SDPA")
    reference.attention(batch.args, batch.config)
    return batch


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("output", OUTPUT_FORMATS)
def test_the_reference_passes(output, dtype):
    batch = batch_with(output, dtype)
    compare(batch, *batch.expected())


def changed(batch: Batch, field: str, change) -> Batch:
    """The batch with one output tensor changed in place, on a copy that keeps strides."""
    tensor = getattr(batch.args, field)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    change(copy.copy_(tensor))
    return replace(batch, args=batch.args._replace(**{field: copy}))


def last_real_row(batch: Batch) -> int:
    return batch.num_tokens - 3


def flip_bit(row: int, bit: int):
    def change(codes):
        codes.view(torch.uint8)[row, 0, 3] ^= 1 << bit

    return change


def scale_row(row: int, factor: float):
    def change(tensor):
        tensor[row] = (tensor[row].float() * factor).to(tensor.dtype)

    return change


@pytest.mark.parametrize("output", OUTPUT_FORMATS)
def test_a_wrong_row_is_found(output):
    batch = batch_with(output)
    row, expected = last_real_row(batch), batch.expected()
    fmt = OUTPUT_FORMATS[output]
    if fmt.container is None:
        wrong = [("output", scale_row(row, 1.001)), ("output", scale_row(row, torch.nan))]
    else:
        # The sign; the highest bit of the mantissa.
        wrong = [("output", flip_bit(row, 7)), ("output", flip_bit(row, 6 if fmt.container is torch.uint8 else 2))]
    if fmt.block_scale_dtype is not None and not fmt.swizzled:
        wrong.append(("output_block_scale", scale_row(row, 4.0 if fmt.exponents else 1.5)))
    for field, change in wrong:
        with pytest.raises(Mismatch, match=field):
            compare(changed(batch, field, change), *expected)


@pytest.mark.parametrize("output", OUTPUT_FORMATS)
def test_padding_that_is_not_zero_is_found(output):
    batch = batch_with(output)
    row = batch.args.output.shape[0] - 1

    def change(tensor):
        tensor.view(torch.uint8)[row, 1, 2] |= 3

    with pytest.raises(Mismatch, match="output"):
        compare(changed(batch, "output", change), *batch.expected())


def test_wrong_order_of_scales_is_found():
    batch = batch_with("nvfp4_swizzled")

    def linear(tensor):
        tensor.view(torch.uint8)[:] = tensor.view(torch.uint8).flip(1)

    def dirty_padding(tensor):
        tensor.view(torch.uint8)[-1, -1] = 1

    for change in (linear, dirty_padding):
        with pytest.raises(Mismatch, match="output_block_scale"):
            compare(changed(batch, "output_block_scale", change), *batch.expected())


def test_swapped_nibbles_are_found():
    batch = batch_with("nvfp4")

    def swap(codes):
        codes[:] = (codes >> 4) | (codes << 4)

    with pytest.raises(Mismatch, match="output"):
        compare(changed(batch, "output", swap), *batch.expected())


@pytest.mark.parametrize("value", [1e-3, torch.inf, torch.nan])
def test_a_wrong_lse_is_found(value):
    batch = batch_with("none")

    def change(lse):
        lse[last_real_row(batch), 2] += value

    with pytest.raises(Mismatch, match="lse"):
        compare(changed(batch, "lse", change), *batch.expected())


def test_a_written_input_is_found():
    batch = batch_with("none")
    with pytest.raises(AssertionError, match=r"changed.*block_table"), unchanged(batch.args):
        batch.args.block_table[0, 0] += 1


class Careless(TorchSDPABackend):
    """Ignores what it should not; `mistake` says what."""

    name = "CARELESS"
    mistake = ""

    def attention(self, args, config):
        """Run without one of the config's features."""
        if self.mistake == "window":
            config = config.replace(sliding_window=None, chunk_lookback=None)
        if self.mistake == "off by one" and config.sliding_window and config.chunk_lookback is None:
            config = config.replace(sliding_window=config.sliding_window + 1)
        super().attention(args, config)
        if self.mistake == "padding":
            args.output.view(torch.uint8)[int(args.query_start_loc[-1]) :] = 7

    def kv_cache_update(self, args, config):
        """Write, maybe one token too many."""
        slots = args.slot_mapping.clamp(min=0) if self.mistake == "slot" else args.slot_mapping
        super().kv_cache_update(args._replace(slot_mapping=slots), config)

    def reasons(self, config, device):
        """Refuse everything, if that is the mistake."""
        return ["lazy"] if self.mistake == "lazy" else super().reasons(config, device)


@pytest.fixture
def careless(monkeypatch):
    """A registered backend to plant mistakes in."""
    selector.backend_names()
    backend = Careless()
    monkeypatch.setitem(selector._BACKENDS, backend.name, backend)
    selector._decide.cache_clear()
    yield backend
    selector._decide.cache_clear()
    dispatch._resolve.cache_clear()


@pytest.mark.parametrize("mistake", ["window", "off by one", "padding", "slot"])
def test_the_fuzz_finds_a_careless_backend(careless, mistake):
    careless.mistake = mistake
    with pytest.raises(AssertionError, match=r"python -m tests\.conformance\.fuzz --device cpu"):
        run_fuzz("CARELESS", "cpu", 300, attempts=10)


def test_the_fuzz_counts_refusals(careless):
    careless.mistake = "lazy"
    selector._decide.cache_clear()
    counts = run_fuzz("CARELESS", "cpu", 20)
    assert counts["requests"] == 20
    assert counts["accepted"] == 0


def test_refused_rows_must_name_every_reason(careless, monkeypatch):
    batch = batch_of_row(Row({"head_size": 12, "block_size": 24}, MIXED), "CARELESS")
    assert not run_and_compare(batch)
    monkeypatch.setattr("tests.conformance.compare.refusal", lambda *_: ["a reason that the error lacks"])
    with pytest.raises(Mismatch, match="does not name"):
        run_and_compare(batch)


def test_a_wrong_cache_is_found(careless):
    config = AttentionConfig(2, 2, 16, 16, 1.0, "float32", "float32", 8, backend="CARELESS")
    assert compare_cache_update(make_cache_update(config), config)
    careless.mistake = "slot"
    with pytest.raises(Mismatch, match="stored keys"):
        compare_cache_update(make_cache_update(config), config)


def test_drawn_features_never_contradict_each_other():
    rng = random.Random(0)
    for pair in PAIRS:
        assert set(pair) <= draw_features(rng, pair)


def test_simpler_requests_are_all_runnable(careless):
    rng = random.Random(3)
    for _ in range(6):
        request = draw_request(rng, "CARELESS", ("sinks", "lse"), SMALL)
        for candidate in simpler(request):
            assert candidate != request
            check_request(candidate, "cpu")
