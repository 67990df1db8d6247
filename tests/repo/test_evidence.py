"""What the benchmark of evidence makes of Nsight Compute's table, and of shapes where there is none."""

from __future__ import annotations

import pytest

from vattn.cli.bench.cell import Cell
from vattn.cli.bench.shapes import LayerShape, Work

TABLE = """==PROF== Profiling "decode_kernel"
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","decode_kernel","dram__bytes_read.sum","Mbyte","134.50"
"0","decode_kernel","gpu__time_duration.sum","nsecond","36,012"
"0","decode_kernel","some other counter","","7"
"1","reduce_kernel","gpu__time_duration.sum","us","1.5"
"""


def test_counters_in_bytes_and_nanoseconds() -> None:
    from benchmarks.attention import evidence

    assert evidence.parse_counters(TABLE) == {
        "decode_kernel": {"bytes_read": 134.5e6, "ns": 36012.0},
        "reduce_kernel": {"ns": 1500.0},
    }
    assert evidence.parse_counters("==ERROR== no permission to read the counters") == {}


def test_shares_of_ceilings_are_counted_from_shapes() -> None:
    from benchmarks.attention import evidence

    cell = Cell(LayerShape("tiny", 4, 2, 16), Work("decode", ((1, 40),)), "bf16", 16, 0, "cpu")
    # Keys and values of 40 tokens and 2 heads, queries and outputs of 4 heads: two bytes each.
    assert cell.bytes == 2 * 40 * 2 * 16 * 2 + 2 * 4 * 16 * 2
    found = evidence.counted(cell, 1e-3, 5e-4, {"hbm_tb_s": 4.0, "bf16_tflops": "failed: none here"})
    assert found["tb_s"] == pytest.approx(cell.bytes / 1e3, abs=1e-3)
    assert found["tb_s_of_ceiling"] == pytest.approx(found["tb_s"] / 4.0, abs=1e-4)
    assert found["of_streaming"] == 0.5 and "tflops_of_ceiling" not in found
