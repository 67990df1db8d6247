"""KV formats over many head sizes, to the byte: samples of `tests.conformance.format_sizes`, which has them all."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

from tests.conformance.format_sizes import (
    FORMATS,
    SIZES,
    cases,
    check_attention,
    check_bytes,
    check_case,
    config_of,
    drawn,
    is_accepted,
)
from tests.conformance.fuzz import fuzz_seed
from vattn.kernels.triton.cache.packed_rows import TRITON_CODECS, TritonCodec
from vattn.quantization.formats import KV_FORMATS

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


@pytest.mark.parametrize("name", FORMATS)
def test_a_size_below_its_tile(name: str) -> None:
    index = FORMATS.index(name)
    pairs = [(8, 16), (24, 8), (40, 56), (48, 16)]
    config = next(c for pair in pairs if is_accepted(c := config_of(name, *pair, index)))
    check_bytes(config, index)
    if index % 3 == 0:
        check_attention(config, index)


@pytest.mark.parametrize("name", FORMATS)
def test_the_cases_reach_every_size_that_is_allowed(name: str) -> None:
    fmt, found = KV_FORMATS[name], cases(name)
    assert {c.head_size_v for c in found} == {size for size in SIZES if not fmt.head_size_problems(0, size)}
    assert {c.head_size for c in found} == {size for size in SIZES if not fmt.head_size_problems(size, 0)}
    layouts = {(c.kv_cache_layout, c.block_size, c.dtype) for c in found}
    assert layouts > {("NHD", 8, "float16"), ("HND", 256, "float32")}
    # Others are refused by name.
    for size in (4, 20, 100, 516, 520):
        assert not is_accepted(config_of(name, size, size, 0))


def test_wrong_bytes_and_wrong_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config, int8, fp8 = config_of("int8_per_token_head", 24, 8, 0), TRITON_CODECS["int8"], TRITON_CODECS["fp8"]
    for wrong, told in (
        (TritonCodec(int8.load, fp8.store), "stored differ"),
        (TritonCodec(fp8.load, int8.store), "keys"),
    ):
        monkeypatch.setitem(TRITON_CODECS, "int8", wrong)
        with pytest.raises(AssertionError, match=told):
            check_bytes(config, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_of_all_sizes(name: str) -> None:
    for index, config in drawn(name, 25, fuzz_seed()):
        check_case(config, index)
