"""Context parallelism on GPUs: every rank's part on one of them, and NCCL with captured graphs on two."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import vattn
from tests.distributed.context_parallel_support import combined_parts, ranks
from tests.layers.mla_support import deepseek, exact, random_mla_batch
from tests.support import capture, make_config, random_paged_batch, relative_l2
from vattn.distributed import ContextParallel
from vattn.ops.reference import attention as reference

pytestmark = pytest.mark.gpu

ROUNDED = 2**-7
"""One step of bf16: softmax weights are rounded before they meet values, and results once more."""
NCCL_SECONDS = 85.0
"""What the test on two GPUs may take, compiling kernels included."""
LENGTHS = [1, 2, 63, 64, 65, 300, 1000, 17]
DECODE, SEVERAL, PROMPTS = [1] * 8, [1, 2, 4, 1, 3, 2, 4, 0], [1, 2, 63, 20, 1, 200, 130, 17]


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window-alibi": {"sliding_window": 100, "alibi": "linear"},
    "bidirectional": {"causality": "bidirectional", "logits_soft_cap": 5.0},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"},
    "packed": {"kv_cache_dtype": "int8_per_token_head"},
}


@pytest.mark.parametrize("queries", [DECODE, SEVERAL, PROMPTS], ids=["decode", "several", "prompts"])
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 16)])
def test_parts_of_attention(queries: list[int], mask: str, world: int, interleave: int) -> None:
    """General kernel by true positions, and Hopper's decode over rows as requests, against the fp32 reference."""
    config = make_config(
        num_heads=16, num_kv_heads=4, head_size=128, dtype="bfloat16", block_size=16, lse=True, **MASKS[mask]
    )
    full = random_paged_batch(config, queries, LENGTHS, num_padding_tokens=sum(queries) % 2)
    expected, expected_lse = reference.paged_attention(full.args, config)
    got, got_lse = combined_parts(
        full.args, config, ranks(world, interleave), reference.paged_attention, "TRITON_ATTN", (ROUNDED, 1e-3), "cuda"
    )
    assert relative_l2(got, expected) < ROUNDED and relative_l2(got_lse, expected_lse) < 1e-3


@pytest.mark.parametrize("queries", [DECODE, SEVERAL, PROMPTS], ids=["decode", "several", "prompts"])
@pytest.mark.parametrize(("latent", "sparse"), [(512, False), (512, True), (40, False)])
def test_parts_of_latent_attention(queries: list[int], latent: int, sparse: bool) -> None:
    config = deepseek(qk_nope_head_dim=32, v_head_dim=32, kv_lora_rank=latent, lse=True, sparse=sparse)
    full = random_mla_batch(config, queries, LENGTHS, topk=48)
    expected, _ = exact(full, config)
    got, _ = combined_parts(full, config, ranks(2, 16), exact, "TRITON_MLA", (2 * ROUNDED, 1e-2), "cuda")
    assert relative_l2(got, expected) < 2 * ROUNDED


def nccl_rank(rank: int, folder: str) -> None:
    """Run on one of two GPUs: layers over both against one with the whole cache, eager and as replayed graphs."""
    done, begin = list[str](), time.monotonic()

    def tell(what: str) -> None:
        done.append(what)
        # Where a rank hangs, in the output of the test.
        print(f"rank {rank}: {what} at {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(done))

    try:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
        tell("begun")
        for combine in ("reduce_scatter", "all_to_all"):
            for kind in (latent, decoder):
                kind(rank, combine)
                tell(f"{kind.__name__} {combine}")
        tell("passed")
        os._exit(0)  # Taking a group down that captured graphs still hold is not what is tested.
    except Exception:
        tell(traceback.format_exc())
        os._exit(1)


def check_layers(sharded_layer: nn.Module, whole: nn.Module, parallel: ContextParallel, make_inputs: Any) -> None:
    """Compare two layers over steps, and a captured decode with other lengths than it was captured with."""
    builders = []
    for layer, more in ((sharded_layer, {"context_parallel": parallel}), (whole, {})):
        vattn.allocate_kv_cache(layer, num_blocks=40, dtype=torch.bfloat16, device="cuda")
        builders.append(
            vattn.AttentionMetadataBuilder(2, 256, 1024, block_size=64, device="cuda", layers=layer, **more)
        )
    tables = [list(range(1, 17)), list(range(17, 33))]
    for queries, lengths in (([130, 70], [130, 70]), ([1, 1], [131, 71]), ([3, 2], [134, 73])):
        local, full = make_inputs(sum(queries), sum(lengths))
        steps = [builder.build(queries, lengths, tables) for builder in builders]
        with torch.no_grad():
            got, expected = sharded_layer(*local, metadata=steps[0]), whole(*full, metadata=steps[1])
        own = expected.view(len(expected), 2, -1)[:, parallel.rank]
        assert relative_l2(got, own) < 2 * ROUNDED
    local, full = make_inputs(2, 1)
    step = builders[0].build([1, 1], [135, 74], tables)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                sharded_layer(*local, metadata=step)
        graph, output = capture(lambda: sharded_layer(*local, metadata=step))
        for position in range(135, 140):
            fresh_local, fresh_full = make_inputs(2, position)
            for old, new in zip(local, fresh_local, strict=True):
                old.copy_(new)
            lengths = [position, position - 61]
            builders[0].build([1, 1], lengths, tables)
            graph.replay()
            expected = whole(*fresh_full, metadata=builders[1].build([1, 1], lengths, tables))
            own = expected.view(2, 2, -1)[:, parallel.rank]
            assert relative_l2(output, own) < 2 * ROUNDED


def decoder(rank: int, combine: str) -> None:
    parallel = ContextParallel.of(interleave=16, combine=combine)
    config = vattn.CacheConfig(block_size=64)
    layers = [vattn.Attention(16, 128, 128**-0.5, 4, cache_config=config, context_parallel=p) for p in (parallel, None)]

    def make_inputs(tokens: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        rng = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(tokens, heads, 128, generator=rng).bfloat16().cuda() for heads in (16, 4, 4))
        return [query[:, 8 * rank : 8 * rank + 8].contiguous(), key, value], [query, key, value]

    check_layers(layers[0].cuda(), layers[1].cuda(), parallel, make_inputs)


def latent(rank: int, combine: str) -> None:
    parallel = ContextParallel.of(interleave=64, combine=combine)
    config, sizes = vattn.CacheConfig(block_size=64), (32, 64, 32, None, 512)
    torch.manual_seed(0)
    projection = nn.Linear(512, 16 * 64, bias=False).cuda().bfloat16()
    shared = projection
    if combine == "all_to_all":
        # Of this rank's heads alone: gathered when the cache is bound.
        shared = nn.Linear(512, 8 * 64, bias=False).cuda().bfloat16()
        shared.weight.data.copy_(projection.weight.chunk(2)[rank])
    layers = [
        vattn.MLAAttention(16, 96**-0.5, *sizes, proj, cache_config=config, context_parallel=p)
        for proj, p in ((shared, parallel), (projection, None))
    ]

    def make_inputs(tokens: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        rng = torch.Generator().manual_seed(seed)
        shapes = (tokens, 16, 96), (tokens, 512), (tokens, 1, 64)
        query, kv_c, k_pe = (torch.randn(shape, generator=rng).bfloat16().cuda() for shape in shapes)
        return [query[:, 8 * rank : 8 * rank + 8].contiguous(), kv_c, k_pe], [query, kv_c, k_pe]

    check_layers(layers[0].cuda(), layers[1].cuda(), parallel, make_inputs)


def test_two_gpus_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        pytest.skip("needs two GPUs and NCCL")
    # A rank whose partner failed would wait for NCCL's own timeout.
    ranks = multiprocessing.start_processes(nccl_rank, (str(tmp_path),), nprocs=2, join=False, start_method="spawn")
    until = time.monotonic() + NCCL_SECONDS
    while time.monotonic() < until and any(process.exitcode is None for process in ranks.processes):
        if any(process.exitcode for process in ranks.processes):
            break
        time.sleep(0.2)
    for process in ranks.processes:
        process.kill()
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    told = [json.loads(file.read_text()) if file.exists() else ["nothing"] for file in files]
    assert [lines[-1] for lines in told] == ["passed"] * 2, "\n".join(f"rank {i}: {t}" for i, t in enumerate(told))
