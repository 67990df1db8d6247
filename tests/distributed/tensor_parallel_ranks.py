"""What runs on every rank of `test_tensor_parallel`: cases by name, each of which raises where it fails."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vattn
from tests.distributed.context_parallel_ranks import compare, refused
from vattn.distributed import leader
from vattn.errors import ConfigError, ShapeError, UnsupportedRequestError
from vattn.generation import prepare as generator_module
from vattn.integrations.transformers import disable, enable, load_fp8_linears
from vattn.integrations.transformers.swapped_linears import MergedPart, VattnPartLinear
from vattn.layers.fp8_linear import FP8Linear
from vattn.layers.weight_parts import part_of

CASES: dict[str, Callable[[int, int], None]] = {}
SLOW_CASES: dict[str, Callable[[int, int], None]] = {}
"""Cases that compile by Inductor."""

LAST = "a rank that fails in a step ends the others"

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 11] * 20, [1, 2, 3, 4, 6]]
SAMPLINGS = [
    vattn.Sampling(20, stop_token_ids=()),
    vattn.Sampling(12, temperature=0.7, seed=3, stop_token_ids=()),
    vattn.Sampling(9, logprobs=2, stop_token_ids=()),
    vattn.Sampling(6, temperature=1.0, seed=1, n=2, stop_token_ids=()),
]


def case(name: str) -> Callable[[Any], Any]:
    def add(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
        CASES[name] = function
        return function

    return add


def make_whole(kind: str = "llama", kv_heads: int = 4, heads: int = 8, layers: int = 2) -> Any:
    """Return a model of random weights, the same on every rank."""
    torch.manual_seed(0)
    shared = {
        "vocab_size": 128, "hidden_size": 8 * heads, "intermediate_size": 96, "head_dim": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 256,
    }  # fmt: skip
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared)).eval()
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shared)).eval()


def make_sharded(kind: str = "llama", kv_heads: int = 4, heads: int = 8) -> Any:
    """Return the same model, sharded by transformers."""
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else ""
    folders = [folder]
    # Only rank 0 writes a folder.
    dist.broadcast_object_list(folders)
    make_whole(kind, kv_heads, heads).save_pretrained(folders[0])
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0], tp_plan="auto", dtype=torch.float32).eval()
    dist.barrier()
    if folder:
        shutil.rmtree(folder)
    return model


def step_logits(packed: Any) -> Tensor:
    """Return the logits of a prefill of three requests and of a mixed step after it."""
    builder = vattn.AttentionMetadataBuilder(4, 64, 64, layers=packed)
    tables, found = [[1, 5], [2], [3, 4]], []
    for queries, lengths in (([5, 1, 19], [5, 1, 19]), ([1, 3, 1], [6, 4, 20])):
        step = builder.build(queries, lengths, tables)
        with torch.no_grad(), vattn.forward_context(step):
            found.append(packed(torch.arange(sum(queries)) + 3, step.positions))
    return torch.cat(found)


def make_generator(model: Any, **options: Any) -> vattn.Generator:
    defaults: dict[str, Any] = {
        "max_num_reqs": 4,
        "token_budget": 32,
        "stop_token_ids": (),
        "max_seq_len": 64,
        "group_timeout": 60,
    }
    return vattn.Generator(model, **{**defaults, **options})


def outputs(generator: vattn.Generator) -> list[Any]:
    """Return the tokens of every choice of every prompt, and log-probabilities in short."""
    done = generator.generate(PROMPTS, SAMPLINGS)
    assert all(request.error is None for request in done), [request.error for request in done]
    found: list[Any] = [[choice.output for choice in request.choices] for request in done]
    return [*found, [round(token.logprob, 3) for token in done[2].logprobs]]


@functools.cache
def expected(kind: str = "llama", kv_heads: int = 4, speculation: bool = False) -> list[Any]:
    lookup = vattn.PromptLookup(shortest=1) if speculation else None
    return outputs(make_generator(enable(make_whole(kind, kv_heads), num_blocks=40), speculation=lookup))


def run_sharded(rank: int, model: Any, **options: Any) -> list[Any] | None:
    """Return what rank 0 generates; the others follow."""
    generator = make_generator(model, group=dist.group.WORLD, **options)
    if rank:
        generator.follow()
        return None
    found = outputs(generator)
    generator.close()
    return found


@case("logits of a step are those of one rank")
def logits_equal(rank: int, world: int) -> None:
    for kind in ("llama", "qwen2"):
        for options in ({}, {"merge_projections": True, "vattn_linears": True}):
            model = make_sharded(kind)
            packed = enable(model, num_blocks=8, **options)
            parts = [module for module in model.modules() if part_of(module) is not None]
            assert len(parts) == 15 and not any("forward" in module.__dict__ for module in parts)
            if options:
                assert all(isinstance(module, (MergedPart, VattnPartLinear)) for module in parts)
            got = step_logits(packed)
            compare(got, step_logits(enable(make_whole(kind), num_blocks=8)), 1e-5)
            layer = model.get_submodule("model.layers.0.self_attn.vattn")
            assert (layer.num_heads, layer.num_kv_heads) == (8 // world, 4 // world), (
                layer.num_heads,
                layer.num_kv_heads,
            )
            with refused("one rank's part", ConfigError):
                model.state_dict()
            disable(model)
            whole = make_whole(kind).state_dict()
            for name, value in model.state_dict().items():
                value = value.full_tensor() if isinstance(value, DTensor) else value
                assert torch.equal(value, whole[name]), name
            assert not any(part_of(module) for module in model.modules())


FP8_FORMATS = ("fp8_static", "fp8_dynamic", "fp8_per_token", "fp8_group128")


def make_wide(sharded: bool, kv_heads: int = 4) -> Any:
    """Return a model in which each of two ranks has whole blocks of 128 features."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    return shard(model, 2) if sharded else model


def shard(model: Any, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name, _ in layer.named_modules() if name.endswith(columns)}
        plan |= {name: RowwiseParallel() for name, _ in layer.named_modules() if name.endswith(rows)}
        parallelize_module(layer, mesh, plan)
    return model


def relative_error(model: Any, whole: Any) -> float:
    """Return the relative error of the logits of a step."""
    want = step_logits(whole)
    return float((step_logits(model) - want).norm() / want.norm())


@case("FP8 linears of parts have the codes and scales of whole weights")
def fp8_parts(rank: int, world: int) -> None:
    texts = [[[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]]
    want, found = (
        vattn.calibrate(enable(make_wide(sharded), num_blocks=8, prove=False), texts, linears=True)
        for sharded in (False, True)
    )
    assert found.tokens == want.tokens and found.layers.keys() == want.layers.keys()
    for name, kinds in want.layers.items():
        for kind, tops in kinds.items():
            torch.testing.assert_close(torch.tensor(found.layers[name][kind]), torch.tensor(tops), rtol=1e-4, atol=0)
    assert found.inputs.keys() == want.inputs.keys()
    for fmt in FP8_FORMATS:
        given = {"calibration": want} if fmt == "fp8_static" else {}
        whole, sharded = make_wide(False), make_wide(True)
        left = vattn.quantise_linears(whole, fmt, **given)
        assert vattn.quantise_linears(sharded, fmt, **given) == left
        for name, linear in whole.named_modules():
            if isinstance(linear, FP8Linear):
                part = sharded.get_submodule(name)
                assert part.needs_ranks == (name.endswith(("o_proj", "down_proj"))), name
                assert torch.equal(part.weight.float(), part.part.of(linear.weight.float())), name
                if part.input_scale is not None:
                    assert torch.equal(part.input_scale, linear.input_scale)
        own_linears = None if fmt == "fp8_group128" else True  # Blocks have no kernel of their own.
        packed = enable(sharded, num_blocks=8, merge_projections=True, vattn_linears=own_linears, prove=False)
        error = relative_error(packed, enable(whole, num_blocks=8, prove=False))
        # Scales of rows of inputs are a rank's own where it has some of the columns: another rounding to e4m3.
        own = fmt in ("fp8_dynamic", "fp8_per_token")
        assert error < (0.05 if own else 2e-3), (fmt, error)
        packed.allocate(num_blocks=40)
        if fmt == "fp8_static":
            disable(whole)
            alone = outputs(make_generator(enable(whole, num_blocks=40, prove=False)))
            assert run_sharded(rank, packed) in (None, alone if rank == 0 else None)


@case("FP8 checkpoints and scales per head over ranks")
def fp8_checkpoints(rank: int, world: int) -> None:
    texts = [[[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]]
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    for fmt in ("fp8_per_token", "fp8_group128"):
        whole = make_wide(False, kv_heads=2)
        vattn.quantise_linears(whole, fmt)
        if rank == 0:
            whole.save_pretrained(folders[0])
        dist.barrier()
        sharded = make_wide(True, kv_heads=2)
        if fmt == "fp8_group128":
            with refused("has 64 of 128 features, in blocks of 128", ShapeError):
                load_fp8_linears(sharded, folders[0])
            assert isinstance(sharded.model.layers[0].mlp.up_proj.weight, DTensor)
            continue
        load_fp8_linears(sharded, folders[0])
        for name, linear in whole.named_modules():
            if isinstance(linear, FP8Linear):
                part = sharded.get_submodule(name)
                assert torch.equal(part.weight.float(), part.part.of(linear.weight.float())), name
        with refused("one rank's part", ConfigError):
            sharded.save_pretrained(folders[0])
        packed = [enable(model, num_blocks=8, prove=False) for model in (sharded, whole)]
        assert relative_error(*packed) < 0.05
        dist.barrier()
    cache = vattn.CacheConfig(cache_dtype="fp8")
    for kv_heads in (1, 4):
        whole = make_wide(False, kv_heads)
        calibration = vattn.calibrate(enable(whole, num_blocks=8, prove=False), texts)
        disable(whole)
        packed = [
            enable(model, num_blocks=8, cache_config=cache, calibration=calibration, scales_per_head=True, prove=False)
            for model in (make_wide(True, kv_heads), whole)
        ]
        # The same codes and scales: rounding in fp32, and a code that it moves now and then.
        assert relative_error(*packed) < 1e-4
    if rank == 0:
        shutil.rmtree(folders[0])


@case("fewer KV heads than ranks are replicated")
def few_kv_heads(rank: int, world: int) -> None:
    for kv_heads in {1, world // 2}:
        model = make_sharded("qwen2", kv_heads)
        before = {name: parameter for name, parameter in model.named_parameters() if "k_proj" in name}
        packed = enable(model, num_blocks=8)
        whole = enable(make_whole("qwen2", kv_heads), num_blocks=8)
        compare(step_logits(packed), step_logits(whole), 1e-5)
        packed.allocate(num_blocks=40)
        assert run_sharded(rank, packed) in (None, expected("qwen2", kv_heads) if rank == 0 else None)
        disable(model)
        assert all(model.get_parameter(name) is parameter for name, parameter in before.items())


@case("heads that ranks cannot share are refused")
def uneven_heads(rank: int, world: int) -> None:
    model = make_sharded(kv_heads=3, heads=9)
    with refused(f"9 query and 3 KV heads of 'model.layers.0.self_attn' over {world} ranks", UnsupportedRequestError):
        enable(model, num_blocks=8)
    assert "_vattn_before" not in model.__dict__


@case("a model that its user sharded")
def sharded_by_hand(rank: int, world: int) -> None:
    packed = enable(shard(make_whole(), world), num_blocks=40)
    assert run_sharded(rank, packed) in (None, expected() if rank == 0 else None)


@case("a generator gives the tokens of one rank")
def generator_equal(rank: int, world: int) -> None:
    packed = enable(make_sharded(), num_blocks=40)
    for speculation in (False, True):
        lookup = vattn.PromptLookup(shortest=1) if speculation else None
        got = run_sharded(rank, packed, speculation=lookup)
        assert got == (None if rank else expected(speculation=speculation)), got


@case("streams and cancelled requests")
def streams(rank: int, world: int) -> None:
    generator = make_generator(enable(make_sharded(), num_blocks=40), group=dist.group.WORLD)
    if rank:
        generator.follow()
        return
    tokens: list[int] = []
    for progress in generator.stream([PROMPTS[0]], SAMPLINGS[0]):
        tokens += progress.tokens
    assert tokens == expected()[0][0]
    cancelled = generator.add(PROMPTS[1], SAMPLINGS[0])
    other = generator.add(PROMPTS[0], SAMPLINGS[0])
    for _ in range(3):
        generator.step()
    generator.cancel(cancelled)
    while generator.busy:
        generator.step()
    assert other.output == expected()[0][0] and cancelled.state == "cancelled"
    assert generator.statistics().used_blocks == 0
    generator.close()


@case("ranks that differ")
def ranks_differ(rank: int, world: int) -> None:
    packed = enable(make_sharded(), num_blocks=40)
    with refused("max_num_reqs=5 on rank 1, max_num_reqs=4 on rank 0"):
        make_generator(packed, group=dist.group.WORLD, max_num_reqs=4 + (rank == 1))
    if rank == 1:
        with torch.no_grad():
            packed.model.model.norm.weight.mul_(2)
    with refused("weights that every rank holds="):
        make_generator(packed, group=dist.group.WORLD)
    whole = enable(make_whole(), num_blocks=40)
    with refused("LlamaForCausalLM, sharded"):
        make_generator(whole if rank == 1 else packed, group=dist.group.WORLD)
    if rank != 1:
        with refused("got no answer of all others"):
            make_generator(packed, group=dist.group.WORLD, group_timeout=0.5)
    dist.barrier()


@case("a rank that cannot capture its graphs")
def capture_fails(rank: int, world: int) -> None:
    packed = enable(make_sharded(), num_blocks=40)
    begin = time.monotonic()

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left on this rank")

    whole = generator_module.capture
    generator_module.capture = fail if rank == 1 else whole
    with refused(f"rank 1 of {world} failed with OutOfMemoryError: no memory left on this rank"):
        make_generator(packed, group=dist.group.WORLD)
    generator_module.capture = whole if rank != 1 else lambda *options: time.sleep(3) or whole(*options)
    with refused(f"rank 1 of {world} is not ready 1 s after rank 0"):
        make_generator(packed, group=dist.group.WORLD, group_timeout=1)
    generator_module.capture = whole
    assert time.monotonic() - begin < 40
    # The group is as it was.
    dist.barrier()
    with refused("capture of no model", ConfigError):
        refuse_capture(packed)


def refuse_capture(packed: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise ConfigError("capture of no model", "a model", "pass one")

    whole, generator_module.capture = generator_module.capture, refuse
    try:
        make_generator(packed, group=dist.group.WORLD)
    finally:
        generator_module.capture = whole


@case("calls on the wrong rank")
def wrong_rank(rank: int, world: int) -> None:
    packed = enable(make_sharded(), num_blocks=40)
    with refused("without their group", ConfigError):
        make_generator(packed)
    with refused("group of type str", ConfigError):
        make_generator(packed, group="all")
    generator = make_generator(packed, group=dist.group.WORLD)
    if rank:
        for call in (lambda: generator.add([1]), generator.step, lambda: generator.generate([[1]])):
            with refused(f"on rank {rank} of {world}", ConfigError):
                call()
        generator.follow()
        return
    with refused("follow() on rank 0", ConfigError):
        generator.follow()
    generator.close()
    with refused("after close()", ConfigError):
        generator.add([1])
    alone = make_generator(enable(make_whole(), num_blocks=40))
    with refused("of a generator on one device", ConfigError):
        alone.follow()


@case("a rank that fails and lives on, while the other waits as for NCCL")
def rank_fails_beside_a_collective(rank: int, world: int) -> None:
    """Rank 0 waits until its group is aborted, and must not take the tokens that it has then."""
    packed = enable(make_sharded(), num_blocks=40)
    generator = make_generator(packed, group=dist.group.WORLD)
    calls, aborted = [], threading.Event()
    abort, grace = dist.ProcessGroup.abort, leader._GRACE

    def fail_or_wait(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2 and rank == 1:
            raise ValueError("no memory left on this rank")
        if len(calls) == 2:
            assert aborted.wait(60)

    dist.ProcessGroup.abort, leader._GRACE = lambda _: aborted.set(), 1.0  # type: ignore[method-assign]
    packed.model.register_forward_hook(fail_or_wait)
    try:
        with refused("rank 1 of 2 failed with ValueError: no memory left on this rank"):
            if rank == 1:
                generator.follow()
            request = generator.add(PROMPTS[0], SAMPLINGS[0])
            while not request.done:
                generator.step()
        if rank == 0:
            # The second step was launched before the first was read.
            assert aborted.is_set() and not request.output and generator.statistics().used_blocks == 0
    finally:
        dist.ProcessGroup.abort, leader._GRACE = abort, grace  # type: ignore[method-assign]
    dist.barrier()


@case(LAST)
def rank_fails(rank: int, world: int) -> None:
    """Rank 1's second step fails, in the middle of the model: it says so, and so does rank 0."""
    packed = enable(make_sharded(), num_blocks=40)
    generator = make_generator(packed, group=dist.group.WORLD)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            # Others wait for it in a sum by now; what closes its connections ends that.
            raise ValueError("no memory left on this rank")

    if rank == 1:
        packed.model.model.layers[1].register_forward_pre_hook(fail)
    begin = time.monotonic()
    with refused("rank 1 of 2 failed with ValueError: no memory left on this rank" if rank else "rank"):
        generator.generate(PROMPTS, SAMPLINGS[0]) if rank == 0 else generator.follow()
    assert time.monotonic() - begin < 100


@case("a rank is killed")
def rank_killed(rank: int, world: int) -> None:
    """Run by itself: rank 1 leaves in a step, without a word."""
    packed = enable(make_sharded(), num_blocks=40)
    generator = make_generator(packed, group=dist.group.WORLD)
    if rank == 1:
        packed.model.model.layers[1].register_forward_pre_hook(lambda *_: os._exit(1))
        generator.follow()
    with refused("rank 1 of 2 ended in a step"):
        generator.generate(PROMPTS, SAMPLINGS[0])
    assert generator.statistics().used_blocks == 0
    with refused("rank 1 of 2 ended in a step"):
        generator.step()
