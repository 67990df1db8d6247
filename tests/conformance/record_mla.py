"""Record what a backend of latent attention was seen to do right on a GPU; `tests.conformance.record` does the others.

    python -m tests.conformance.record_mla --backend TRITON_MLA --seconds 60 --out FOLDER

Random requests of DeepSeek's and of odd sizes. An output may be twice as wrong as the formula computed in the model
dtype, or miss it by half a step of its format on top.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import time
from pathlib import Path
from typing import Any

from tests.conformance.fuzz import fuzz_seed
from tests.conformance.record import Recorder
from tests.layers.mla_support import error_of, make_mla_config, random_mla_batch
from vattn.backends.mla.registry import mla_backends
from vattn.config.device import DeviceInfo
from vattn.config.mla import WEIGHT_FORMATS, MLAConfig
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS


def draw_config(rng: random.Random, backend: str) -> MLAConfig:
    """Return a random config within the backend's formats."""
    can = mla_backends()[backend].capabilities
    if rng.random() < 0.6 or 512 in can.latent_sizes.values:
        sizes: dict[str, Any] = {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "block_size": rng.choice((16, 32, 64, 128)),
        }
        sizes.update(qk_nope_head_dim=32, v_head_dim=32, num_heads=rng.choice((8, 16, 32)))
    else:
        sizes = {"kv_lora_rank": rng.choice((20, 64, 256)), "qk_rope_head_dim": rng.choice((6, 32)), "block_size": 8}
        sizes.update(
            qk_nope_head_dim=rng.choice((12, 64)), v_head_dim=rng.choice((16, 64)), num_heads=rng.choice((3, 4))
        )
    columns = sizes["num_heads"] * sizes["v_head_dim"]
    outputs = [name for name in can.output_formats if columns % max(1, OUTPUT_FORMATS[name].group_size) == 0]
    dtype = rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
    stored = [
        name
        for name in can.kv_cache_dtypes
        if (name == dtype or name not in MODEL_DTYPES)
        and sizes["kv_lora_rank"] % MLA_FORMATS[name].latent_multiple == 0
    ]
    cache = rng.choice(stored)
    if cache in can.query_formats and rng.random() < 0.5:
        # Every request of these is absorbed, by all backends: what is expanded keeps its queries.
        sizes.update(query_format=cache, decode_threshold=128)
    return make_mla_config(
        dtype=dtype,
        kv_cache_dtype=cache,
        output_format="none" if rng.random() < 0.6 else rng.choice(outputs),
        weight_format=rng.choice(WEIGHT_FORMATS),
        lse=rng.random() < 0.5,
        sparse=rng.random() < 0.2,
        backend=backend,
        **sizes,
    )


def record(recorder: Recorder, seconds: float) -> None:
    """Run random requests until the time is up."""
    rng, until = random.Random(f"record {fuzz_seed()} {recorder.backend}"), time.monotonic() + seconds
    backend, info = mla_backends()[recorder.backend], DeviceInfo.of(recorder.device)
    while time.monotonic() < until:
        config = draw_config(rng, recorder.backend)
        if backend.reasons(config, info):
            continue
        for _ in range(4):
            seed = rng.randrange(1 << 30)
            lens = [
                rng.choice(((1, rng.randint(1, 700)), (rng.randint(1, 9), 300), (0, 5), (40, 40), (90, 200)))
                for _ in range(5)
            ]
            query_lens, seq_lens = [q for q, _ in lens], [max(q, s) for q, s in lens]
            real, topk = sum(query_lens), 64 if config.sparse else 0
            made = {"seed": seed, "padding_tokens": 3, "topk": topk, "device": recorder.device}
            args = random_mla_batch(config, query_lens, seq_lens, **made)
            run = functools.partial(error_of, args, config, real)
            recorder.count(run, backend.parts(config), f"{lens} {made} {config.encode()}")


def main() -> None:
    """Record one backend."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.record_mla")
    parser.add_argument("--backend", default="TRITON_MLA", choices=tuple(mla_backends()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out and given.out / f"{given.backend}-0.json"
    recorder = Recorder(given.backend, given.device, mla_backends()[given.backend], out)
    with contextlib.suppress(KeyboardInterrupt):
        record(recorder, given.seconds)
    recorder.report()


if __name__ == "__main__":
    main()
