"""What runs on each of two GPUs over NCCL: models over ranks beside the whole model on one, and ranks that fail."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.distributed import DistributedConfig

import vattn
from tests.distributed.context_parallel_ranks import compare, refused
from vattn.distributed import leader
from vattn.integrations.transformers import disable, enable
from vattn.integrations.transformers.swapped_linears import MergedPart, VattnPartLinear
from vattn.layers.fp8_linear import FP8Linear
from vattn.layers.weight_parts import part_of

CASES: dict[str, Callable[[int, int], None]] = {}
SLOW_CASES: dict[str, Callable[[int, int], None]] = {}

RAISES, KILLED = "a rank raises in a step", "a rank is killed in a step"

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 11] * 150, [1, 2, 3, 4, 6]]
SAMPLINGS = [
    vattn.Sampling(24, stop_token_ids=()),
    vattn.Sampling(12, temperature=0.7, seed=3, stop_token_ids=()),
    vattn.Sampling(16, stop_token_ids=()),
    vattn.Sampling(6, temperature=1.0, seed=1, n=2, stop_token_ids=()),
]
NEAR, NEAR_FP8 = 0.1, 0.5
"""Nats between two tokens that roundings may swap: logits are up to 4, with an error of 2**-8 of that in 16 bits, and
of some 5 % by FP8 codes."""


def case(name: str) -> Callable[[Any], Any]:
    def add(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def run(rank: int, world: int) -> None:
            # A case that hangs shows where, in the output of the test.
            print(f"rank {rank}: {name}", file=sys.stderr, flush=True)
            begin = time.monotonic()
            function(rank, world)
            print(f"rank {rank}: passed {name} in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)

        CASES[name] = run
        return function

    return add


def loaded(dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Return a model over all ranks, as transformers loads it, and the whole model on this rank's GPU."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, device=torch.device("cpu"), group=_hosts())
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.05,
        )  # fmt: skip
        transformers.Qwen2ForCausalLM(config).to(dtype).save_pretrained(folders[0])
    dist.barrier()
    load = transformers.AutoModelForCausalLM.from_pretrained
    shared, whole = load(folders[0], dtype=dtype, **options).eval(), load(folders[0], dtype=dtype).eval().cuda()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    return shared, whole


@functools.cache
def _hosts() -> Any:
    return dist.new_group(backend="gloo")


def make_generator(packed: Any, **options: Any) -> vattn.Generator:
    defaults: dict[str, Any] = {
        "max_num_reqs": 5, "token_budget": 256, "max_seq_len": 512, "stop_token_ids": (), "group_timeout": 60,
        "graph_sizes": [2, 5], "mixed_graph_sizes": [64], "reuse_prefixes": False,
    }  # fmt: skip
    return vattn.Generator(packed, **{**defaults, **options})


def outputs(generator: vattn.Generator) -> list[list[list[int]]]:
    """Return the tokens of every choice of every prompt."""
    done = generator.generate(PROMPTS, SAMPLINGS)
    assert all(request.error is None for request in done), [request.error for request in done]
    return [[choice.output for choice in request.choices] for request in done]


def run(rank: int, packed: Any, call: Callable[[vattn.Generator], Any] = outputs, **options: Any) -> Any:
    """Return what rank 0 generates over all ranks; the others follow."""
    generator = make_generator(packed, group=dist.group.WORLD, **options)
    if options.get("graph_sizes", True):
        assert generator.graphs is not None and generator.graphs.captured
    if rank:
        generator.follow()
        return None
    found = call(generator)
    assert generator.statistics().used_blocks == 0
    generator.close()
    assert generator.graphs is None or not generator.graphs.captured
    return found


def step_logits(packed: Any) -> Tensor:
    """Return the logits of a prefill of three requests and of a mixed step after it."""
    builder = vattn.AttentionMetadataBuilder(4, 64, 64, device="cuda", layers=packed)
    tables, found = [[1, 5], [2], [3, 4]], []
    for queries, lengths in (([5, 1, 19], [5, 1, 19]), ([1, 3, 1], [6, 4, 20])):
        step = builder.build(queries, lengths, tables)
        with torch.no_grad(), vattn.forward_context(step):
            found.append(packed(torch.arange(sum(queries), device="cuda") + 3, step.positions))
    return torch.cat(found)


def greedy(generator: vattn.Generator) -> list[Any]:
    """Return the tokens of each prompt, and of each the two likeliest with their log-probabilities."""
    done = generator.generate(PROMPTS, vattn.Sampling(16, logprobs=2, stop_token_ids=()))
    assert all(request.error is None for request in done), [request.error for request in done]
    return [(request.output, [token.top for token in request.logprobs]) for request in done]


def same_but_for_ties(got: Any, expected: Any, near: float = NEAR) -> int:
    """Compare tokens up to the first that is a near tie in both; return how many were compared."""
    compared = 0
    for (tokens, tops), (other_tokens, other_tops) in zip(got, expected, strict=True):
        for token, other, top, other_top in zip(tokens, other_tokens, tops, other_tops, strict=True):
            if token != other:
                for first, second in (top.values(), other_top.values()):
                    assert first - second < near, (token, other, top, other_top)
                break
            compared += 1
    return compared


@case("fp32: logits of a step, tokens without graphs and with them")
def exact(rank: int, world: int) -> None:
    shared, whole = loaded(torch.float32, tp_plan="auto")
    packed, alone = enable(shared, num_blocks=80), enable(whole, num_blocks=80)
    # Sums of parts, in fp32.
    compare(step_logits(packed), step_logits(alone), 1e-5)
    expected = outputs(make_generator(alone))
    for options in ({}, {"graph_sizes": (), "compile": "none"}):
        got = run(rank, packed, **options)
        assert rank or got == expected, (got, expected)


@case("bf16: merged projections and vattn's linear layers")
def fast(rank: int, world: int) -> None:
    shared, whole = loaded(torch.bfloat16, tp_plan="auto")
    packed, alone = (enable(model, num_blocks=80) for model in (shared, whole))
    for name, module in shared.named_modules():
        if part_of(module) is not None and "lm_head" not in name:
            kind = VattnPartLinear if name.endswith(("o_proj", "down_proj")) else MergedPart
            assert isinstance(module, kind), (name, module)
    compare(step_logits(packed), step_logits(alone), 2**-6)
    expected, got = greedy(make_generator(alone)), run(rank, packed, greedy)
    assert rank or same_but_for_ties(got, expected) >= 16


@case("FP8 linears")
def fp8(rank: int, world: int) -> None:
    texts = [[[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]]
    for fmt in ("fp8_static", "fp8_per_token"):
        shared, whole = loaded(torch.bfloat16, tp_plan="auto")
        plain = step_logits(enable(whole, num_blocks=8, prove=False))
        disable(whole)
        for model in (shared, whole):
            calibration = None
            if fmt == "fp8_static":
                calibration = vattn.calibrate(enable(model, num_blocks=8, prove=False), texts, linears=True)
                disable(model)
            vattn.quantise_linears(model, fmt, **({} if calibration is None else {"calibration": calibration}))
        assert any(isinstance(module, FP8Linear) and module.needs_ranks for module in shared.modules())
        packed, alone = (enable(model, num_blocks=80, prove=False) for model in (shared, whole))
        # A sum that rounds to a neighbour in bf16 may be another code of the next product: as good, not the same.
        shared_error, alone_error = (float((step_logits(each) - plain).norm()) for each in (packed, alone))
        assert shared_error < 1.3 * alone_error, (fmt, shared_error, alone_error, float(plain.norm()))
        expected, got = greedy(make_generator(alone)), run(rank, packed, greedy)
        assert rank or same_but_for_ties(got, expected, NEAR_FP8) >= 4


@case("a pipeline")
def pipeline(rank: int, world: int) -> None:
    shared, whole = loaded(torch.float32, distributed_config=DistributedConfig(pp_size=world))
    packed, alone = enable(shared, num_blocks=80, prove=False), enable(whole, num_blocks=80, prove=False)
    compare(step_logits(packed), step_logits(alone), 1e-6)
    got = run(rank, packed, mixed_graph_sizes=None, token_budget=2048)
    assert rank or got == outputs(make_generator(alone, token_budget=2048))


@case("groups end after the generator")
def groups_end(rank: int, world: int) -> None:
    """Graphs that hold collectives do not keep their group from ending once the generator is gone."""
    shared, _ = loaded(torch.float32, tp_plan="auto")
    run(rank, enable(shared, num_blocks=80, prove=False))
    disable(shared)


def fail_in_fifth_step(rank: int, fail: Callable[[], None], **options: Any) -> vattn.Generator:
    """Return a generator over all ranks, with a rank 1 that fails before it launches its fifth step."""
    shared, _ = loaded(torch.float32, tp_plan="auto")
    generator = make_generator(enable(shared, num_blocks=80, prove=False), group=dist.group.WORLD, **options)
    if rank == 1:
        steps: Any = generator._runner.steps
        compute, calls = steps.compute, []

        def count(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 5:
                fail()
            return compute(*arguments)

        steps.compute = count
    return generator


@case(RAISES)
def raises(rank: int, world: int) -> None:
    def fail() -> None:
        raise ValueError("no memory left on this rank")

    generator = fail_in_fifth_step(rank, fail)
    begin = time.monotonic()
    with refused("rank 1 of 2 failed with ValueError: no memory left on this rank"):
        generator.generate(PROMPTS, SAMPLINGS[0]) if rank == 0 else generator.follow()
    took = time.monotonic() - begin
    print(f"rank {rank} ended after {took:.1f} s", file=sys.stderr, flush=True)
    assert took < 20
    if rank == 0:
        assert generator.statistics().used_blocks == 0


@case(KILLED)
def killed(rank: int, world: int) -> None:
    generator = fail_in_fifth_step(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
    # So long after its last sign of life; group_timeout is long enough to compile in.
    leader._SILENT = 6.0
    begin = time.monotonic()
    with refused("rank 1 of 2 ended"):
        generator.generate(PROMPTS, SAMPLINGS[0]) if rank == 0 else generator.follow()
    print(f"rank {rank} ended after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    assert time.monotonic() - begin < 25 and generator.statistics().used_blocks == 0
