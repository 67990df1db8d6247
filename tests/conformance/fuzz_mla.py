"""Run small random requests of latent attention with every option: each is refused by name or equals the formula.

    TRITON_INTERPRET=1 python -m tests.conformance.fuzz_mla --backend TRITON_MLA --seed 5 --seconds 600
    TRITON_INTERPRET=1 python -m tests.conformance.fuzz_mla --backend TRITON_MLA --seed 5 --only 17

Sizes are odd, unused memory holds NaN, lists of positions and slots hold numbers that are none, and workspaces are as
small as they may be. `--only` repeats one request of a seed.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from tests.conformance.fuzz import failure_of
from tests.layers.mla_support import (
    check_lse,
    exact,
    half_step,
    make_mla_config,
    quantised,
    random_mla_batch,
    rounded_formula,
    run_mla,
)
from tests.support import relative_l2
from vattn.backends.mla.registry import mla_backends
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape
from vattn.config.device import DeviceInfo
from vattn.config.mla import WEIGHT_FORMATS, MLAConfig
from vattn.errors import ConfigError
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference import mla as mla_reference
from vattn.ops.reference.mla_absorb import elements_per_token
from vattn.quantization.codecs import dequantise_output
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FACTORS, OUTPUT_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS

WRONG = (-1, -2, -(2**31), 2**31 - 1, 10**9, 1 << 20)
"""Positions that no request has."""


@dataclass(frozen=True)
class MLARequest:
    """A config, the lengths of its requests, and what else a call is made of."""

    config: MLAConfig
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    made: dict[str, Any]
    room: int | None
    """Blocks that the workspace holds, `None` for none."""

    def arguments(self) -> MLAAttentionArgs:
        """Return the call's tensors."""
        args = random_mla_batch(self.config, self.query_lens, self.seq_lens, **self.made)
        if self.room is not None:
            elements = self.room * self.config.block_size * elements_per_token(self.config)
            args = args._replace(workspace=args.query.new_full((elements,), torch.nan))
        if args.topk_indices is not None:
            rng = random.Random(self.made["seed"])
            for row in args.topk_indices:
                for at in range(len(row)):
                    if row[at] < 0 and rng.random() < 0.5:
                        row[at] = rng.choice(WRONG)
        if args.output_scale is not None and self.config.output_arithmetic != "divide":
            args = args._replace(output_scale=1 / args.output_scale)
        return args


def draw(rng: random.Random, backend: str) -> MLARequest:
    """Return a random request that a config can be made of."""
    while True:
        try:
            config = draw_config(rng, backend)
        except ConfigError:
            continue
        lens = [draw_lens(rng, config) for _ in range(rng.randint(1, 4))]
        made = {
            "seed": rng.randrange(1 << 30),
            "padding_tokens": rng.choice((0, 0, 1, 5)),
            "padding_reqs": rng.choice((0, 0, 1, 2)),
            "topk": rng.choice((1, 3, 17, 64)) if config.sparse else 0,
        }
        room = rng.choice((None, None, 1, 2, 5))
        return MLARequest(config, tuple(q for q, _ in lens), tuple(s for _, s in lens), made, room)


def draw_config(rng: random.Random, backend: str) -> MLAConfig:
    """Return a random config; it may contradict itself (`ConfigError`)."""
    dtype, output = rng.choice(tuple(MODEL_DTYPES)), "none" if rng.random() < 0.5 else rng.choice(tuple(OUTPUT_FORMATS))
    cache = rng.choice((dtype, dtype, "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"))
    latent = MLA_FORMATS[cache].latent_multiple
    changes: dict[str, Any] = {
        "num_heads": rng.choice((1, 2, 3, 4, 8, 17)),
        "qk_nope_head_dim": rng.choice((1, 5, 12, 16, 33)),
        "qk_rope_head_dim": rng.choice((2, 6, 16, 20)),
        "v_head_dim": rng.choice((1, 7, 16, 32, 48, 64)),
        "kv_lora_rank": latent if latent > 1 else rng.choice((3, 16, 20, 40, 72)),
        "block_size": rng.choice((8, 16, 24, 1, 4, 528)),
        "decode_threshold": rng.choice((1, 2, 3, 8)),
    }
    exact = [name for name in OUTPUT_FORMATS[output].arithmetics if not name.startswith("approximate")]
    factor = False
    if rng.random() < 0.4:
        changes["output_arithmetic"] = arithmetic = rng.choice(exact)
        factor = arithmetic in OUTPUT_FACTORS
    if factor or (OUTPUT_FORMATS[output].has_fp32_scales and rng.random() < 0.3):
        changes["output_min_scale"] = rng.choice((0.0, 1e-3, 0.5))
        changes["output_floor"] = "maximum" if factor else "scale"
    if cache == "fp8_e4m3" and rng.random() < 0.4:
        # Every row is absorbed: what is expanded keeps its queries.
        changes.update(query_format=cache, decode_threshold=128)
    elif rng.random() < 0.15:
        world = rng.choice((2, 3))
        changes.update(context_parallel=True, context_world=world, context_rank=rng.randrange(world))
        changes.update(context_interleave=rng.choice((1, 2, 8)), lse=True)
        output = "none"
        changes.pop("output_arithmetic", None)
        changes.pop("output_min_scale", None)
    changes.setdefault("lse", rng.random() < 0.5)
    return make_mla_config(
        dtype=dtype, kv_cache_dtype=cache, output_format=output, weight_format=rng.choice(WEIGHT_FORMATS),
        sparse=rng.random() < 0.25, backend=backend, **changes,
    )  # fmt: skip


def draw_lens(rng: random.Random, config: MLAConfig) -> tuple[int, int]:
    """Return query and sequence length of one request; sequences shorter than their queries are among them."""
    longest = min(config.decode_threshold, 8)
    query = rng.choice((0, 1, 1, 1, 2, rng.randint(1, longest + 1), rng.randint(2, 40)))
    return query, rng.choice((query, query + rng.randint(0, 60), query + rng.randint(0, 9), rng.randint(0, query)))


def check(request: MLARequest) -> bool:
    """Run a request and compare; return whether its backend accepted."""
    config = request.config
    if mla_backends()[config.backend].reasons(config, DeviceInfo.of("cpu")):
        return False
    check_update(request)
    args = request.arguments()
    got, lse = run_mla(args, config)
    expected, expected_lse = exact(args, config)
    rounded = relative_l2(rounded_formula(args, config), expected) if config.dcp_shard is None else 0.0
    # One value of a few may be unlucky: a step of the dtype at most.
    limit = max(2 * rounded, 3e-6, 2 * torch.finfo(MODEL_DTYPES[config.dtype]).eps)
    if config.query_format != "none":
        limit += 2.0**-6  # a query on the border of two codes may become either
    limit += half_step(config)
    empty = expected.new_zeros(()).expand_as(expected) == 1
    if config.output_format != "none":
        known = quantised(expected.to(MODEL_DTYPES[config.dtype]), args, config)
        expected = dequantise_output(known.output, config.output_format, known.output_block_scale, known.output_scale)
        # A floor of 0 leaves 0 / 0 in rows without values.
        empty = expected.isnan()
        if not torch.equal(got.isnan(), empty):
            raise AssertionError("output: NaN in other places")
    found = relative_l2(got[~empty], expected[~empty])
    if not found <= limit:
        raise AssertionError(f"output: relative L2 error {found:.2e}, allowed {limit:.2e}")
    real = sum(request.query_lens)
    if got[real:].nan_to_num().any():
        raise AssertionError("output: a padding row is not zero")
    if lse is not None:
        check_lse(lse, expected_lse, config, 6e-2)
    return True


def check_update(request: MLARequest) -> None:
    """Write some rows to a cache and compare every byte."""
    config, rng = request.config, torch.Generator().manual_seed(request.made["seed"])
    num_blocks = max(3, -(-12 // config.block_size))
    cache = torch.zeros(mla_cache_shape(config, num_blocks), dtype=mla_cache_dtype(config))
    cache.view(torch.uint8).fill_(0xAB)
    expected, dtype = cache.clone(), MODEL_DTYPES[config.dtype]
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    wide = (torch.randn(9, latent + rope + 3, generator=rng) * torch.logspace(-4, 2, 9)[:, None]).to(dtype)
    slots = torch.randperm(num_blocks * config.block_size, generator=rng)[:9]
    slots[2], slots[4], slots[6] = -1, num_blocks * config.block_size, 2**40
    scale = torch.tensor([0.02]) if config.kv_scale == "tensor" else None
    args = MLACacheUpdateArgs(wide[:, :latent], wide[:, latent : latent + rope], cache, slots, scale, config.encode())
    torch.ops.vattn.mla_kv_cache_update(*args)
    mla_reference.mla_kv_cache_update(args._replace(kv_cache=expected), config)
    if not torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)):
        raise AssertionError("cache: other bytes than the reference's")


def main() -> None:
    """Run random requests until the time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.fuzz_mla")
    parser.add_argument("--backend", default="TRITON_MLA", choices=tuple(mla_backends()))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    rng, until = random.Random(f"{given.seed} {given.backend}"), time.monotonic() + given.seconds
    example = accepted = wrong = 0
    while given.only is not None or time.monotonic() < until:
        request = draw(rng, given.backend)
        if given.only is None or example == given.only:
            seen: list[bool] = []
            problem = failure_of(lambda: seen.append(check(request)))  # noqa: B023
            accepted += problem is not None or seen[0]
            if problem:
                wrong += 1
                print(f"--only {example}: {problem[:400]} {request}", flush=True)
            if given.only is not None:
                break
        example += 1
        if example % 100 == 0:
            print(f"{example} requests, {accepted} accepted, {wrong} wrong", flush=True)
    print(f"{given.backend}, seed {given.seed}: {example} requests, {accepted} accepted, {wrong} wrong")


if __name__ == "__main__":
    main()
