"""A format that is registered is picked up everywhere, without another line: shown with the one of the example."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vattn import register_kv_format
from vattn.errors import ConfigError
from vattn.quantization.formats import KV_FORMATS, KVFormat, PackedPart

ROOT = Path(__file__).parents[2]

PICKED_UP = """
import random, runpy, torch
runpy.run_path("examples/12_a_kv_format_of_your_own.py")
import vattn
from tools.support_table import support_table
from vattn.quantization.formats import KV_FORMATS
from tests.conformance import cases, compare, requests, rows

found = 0
made = rows._packed_formats()
for index, (name, row) in enumerate(made.items()):
    for backend in ("TORCH_SDPA", "TRITON_ATTN"):
        if name.startswith("two_bits") and (backend == "TORCH_SDPA" or index % 12 == 0):
            found += compare.run_and_compare(cases.batch_of_row(row, backend, seed=index))
print("rows that equal the reference:", found)
config = vattn.AttentionConfig(6, 3, 64, 32, 1.0, "bfloat16", "two_bits", 8, "HND", backend="TRITON_ATTN")
print("stored bit for bit:", compare.compare_cache_update(cases.make_cache_update(config), config))
rng = random.Random(1)
drawn = {requests.draw_request(rng, "TORCH_SDPA").config.kv_cache_dtype for _ in range(300)}
print("drawn by the fuzz:", "two_bits" in drawn)
print("in the support table:", "KV cache `two_bits` | yes | interpreter" in support_table())
"""


def test_a_new_format_is_picked_up() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PICKED_UP], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.partition("rows that equal the reference: ")[2].split()[0]) > 12
    assert "stored bit for bit: True" in result.stdout
    assert "drawn by the fuzz: True" in result.stdout and "in the support table: True" in result.stdout


def test_what_cannot_be_registered() -> None:
    known = dict(KV_FORMATS)
    part = PackedPart("uniform", 4)
    wrong = (
        (KV_FORMATS["nvfp4"], {}, "exists already"),
        (dataclasses.replace(KV_FORMATS["float16"], name="plain"), {}, "packed"),
        (_with(PackedPart("no_codec", 4)), {}, "no_codec"),
        (_with(part), {"uniform": object()}, "taken"),
    )
    for fmt, codecs, why in wrong:
        with pytest.raises(ConfigError, match=why):
            register_kv_format(fmt, codecs)
    assert known == KV_FORMATS


def _with(part: PackedPart) -> KVFormat:
    stored = KV_FORMATS["nvfp4"]
    return KVFormat("new", stored.storage_dtype, stored.value_dtype, key=part, value=part)
