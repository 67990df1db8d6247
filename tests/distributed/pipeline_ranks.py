"""What runs on every rank of `test_pipeline`: cases by name, each of which raises where it fails."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import vattn
from tests.distributed.context_parallel_ranks import compare, refused
from tests.distributed.tensor_parallel_ranks import (
    PROMPTS,
    SAMPLINGS,
    make_generator,
    make_whole,
    outputs,
    run_sharded,
    step_logits,
)
from vattn.errors import ConfigError
from vattn.generation import pipeline
from vattn.integrations.transformers import disable, enable

CASES: dict[str, Callable[[int, int], None]] = {}
SLOW_CASES: dict[str, Callable[[int, int], None]] = {}
LAYERS = 5
"""As many on each of 2 or 4 ranks, and one more on the last."""


def case(name: str) -> Callable[[Any], Any]:
    def add(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
        CASES[name] = function
        return function

    return add


def make_stage(kind: str = "llama") -> Any:
    """Return one rank's stage of a model of random weights."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        make_whole(kind, layers=LAYERS).save_pretrained(folders[0])
    dist.barrier()
    config = DistributedConfig(pp_size=dist.get_world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], distributed_config=config, dtype=torch.float32
    ).eval()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    return model


def whole(kind: str = "llama", **options: Any) -> Any:
    return enable(make_whole(kind, layers=LAYERS), num_blocks=40, prove=False, **options)


@case("a pipeline gives the logits and tokens of one rank")
def equal(rank: int, world: int) -> None:
    model = make_stage("qwen2")
    loaded = model.forward
    packed = enable(model, num_blocks=40)
    # Which ranks have one layer more differs between releases of transformers.
    counts: list[Any] = [None] * world
    dist.all_gather_object(counts, len(packed.kv_cache.kv_caches))
    assert sum(counts) == LAYERS and min(counts) >= LAYERS // world
    compare(step_logits(packed), step_logits(whole("qwen2")), 1e-6)
    for microbatch, speculation in ((512, None), (4, None), (4, vattn.PromptLookup(shortest=1))):
        pipeline.MICROBATCH = microbatch
        packed.allocate(num_blocks=40)
        got = run_sharded(rank, packed, speculation=speculation)
        assert got == (None if rank else outputs(make_generator(whole("qwen2"), speculation=speculation)))
    pipeline.MICROBATCH = 512
    disable(model)
    assert model.forward is loaded


@case("stages that are compiled, calibrated and quantised")
def fp8(rank: int, world: int) -> None:
    texts = [[[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]]
    model, alone = make_stage(), make_whole(layers=LAYERS)
    packed, want = enable(model, num_blocks=8, prove=False), enable(alone, num_blocks=8, prove=False)
    found, expected = (vattn.calibrate(each, texts, linears=True) for each in (packed, want))
    assert found.layers == expected.layers
    disable(model)
    disable(alone)
    assert found.inputs == {name: top for name, top in expected.inputs.items() if name in found.inputs}
    for each in (model, alone):
        vattn.quantise_linears(each, "fp8_static", calibration=found)
    packed = enable(model, num_blocks=40, merge_projections=True, prove=False)
    want = enable(alone, num_blocks=40, prove=False)
    compiled = {"compile": "layers", "compile_options": {"backend": "aot_eager"}}
    assert run_sharded(rank, packed, **compiled) == (None if rank else outputs(make_generator(want)))


@case("what a pipeline refuses")
def refusals(rank: int, world: int) -> None:
    packed = enable(make_stage(), num_blocks=40, prove=False)
    alone = dist.new_group([rank], use_local_synchronization=True)
    for options, says in (
        ({}, "without their group"),
        ({"group": alone}, f"stage {rank} of {world} of a pipeline on rank 0 of a group of 1"),
        ({"group": dist.group.WORLD, "compile": "model"}, "compile='model' for a model in a pipeline"),
        ({"group": dist.group.WORLD, "mixed_graph_sizes": [8]}, "mixed_graph_sizes for a model in a pipeline"),
    ):
        with refused(says, ConfigError):
            make_generator(packed, **options)
    with refused("max_num_reqs="):
        make_generator(packed, group=dist.group.WORLD, max_num_reqs=4 + rank)


@case("a rank is killed")
def rank_killed(rank: int, world: int) -> None:
    """Run by itself: the second stage leaves in a step, without a word."""
    packed = enable(make_stage(), num_blocks=40, prove=False)
    generator = make_generator(packed, group=dist.group.WORLD)
    if rank == 1:
        packed.model.model.layers[-1].register_forward_pre_hook(lambda *_: os._exit(1))
        generator.follow()
    with refused("rank 1 of 2 ended in a step"):
        generator.generate(PROMPTS, SAMPLINGS[0])
    assert generator.statistics().used_blocks == 0
