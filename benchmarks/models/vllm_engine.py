"""One engine of vLLM with one attention backend: tokens under pressure, load, profile and host times, as JSON.

`python -m benchmarks.models.vllm_engine MODEL OUT key=value...`; see `DEFAULTS`. `benchmarks.models.vllm_compare` reads
the results. vLLM must be installed; vattn's plugin is found by its entry point.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

DEFAULTS = {
    "backend": "CUSTOM", "mode": "default", "dtype": "bfloat16", "kv": "auto", "task": "tokens", "monitor": "warn",
    "wait_for": "1", "kv_gib": "10",
}  # fmt: skip

ATTENTION = re.compile(
    r"^(decode|decode_cluster|reduce|prefill|plan|prefill_plan|cache_update|attention|finish)_kernel|flash|varlen"
    r"|reshape_and_cache|unified_attention|reduce_segments"
)
"""Kernels of attention, its schedules and the cache update, of vattn and of vLLM's backends."""

SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64]


def prompts_of_mixed_lengths() -> list[list[int]]:
    """64 prompts of 3 to 600 tokens; a third begins with the same 200."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(10, 32000, (200,), generator=generator).tolist()
    lengths = torch.randint(3, 400, (64,), generator=generator).tolist()
    own = [torch.randint(10, 32000, (length,), generator=generator).tolist() for length in lengths]
    return [shared + tokens if index % 3 == 0 else tokens for index, tokens in enumerate(own)]


def count_calls(counts: collections.Counter[str], owner: Any, name: str, key: str, amount: Any = None) -> None:
    """Count calls of a method, or what `amount` makes of their results."""
    method = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        counts[key] += 1 if amount is None else amount(result)
        return result

    setattr(owner, name, counting)


def engine(model: str, o: dict[str, str]) -> Any:
    from vllm import LLM

    under_load = o["task"] != "tokens"
    kw: dict[str, Any] = {}
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": SIZES}
    if o["mode"] == "eager":
        kw["enforce_eager"] = True
    elif o["mode"] == "full":
        compilation |= {"mode": 0, "cudagraph_mode": "FULL"}
    elif o["mode"] == "fused":
        compilation |= {"splitting_ops": [], "cudagraph_mode": "FULL", "pass_config": {"fuse_attn_quant": True}}
    if o["mode"] != "eager":
        kw["compilation_config"] = compilation
    if o["backend"] != "auto":
        kw["attention_backend"] = o["backend"]
    if under_load:
        kw |= {"load_format": "dummy", "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
        kw |= {"kv_cache_memory_bytes": int(float(o["kv_gib"]) * (1 << 30)), "enable_prefix_caching": False}
    else:
        kw |= {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256}
        kw |= {"num_gpu_blocks_override": 260, "enable_prefix_caching": True}
        kw |= {"kv_cache_memory_bytes": 1 << 30}
    return LLM(
        model, skip_tokenizer_init=True, dtype=o["dtype"], kv_cache_dtype=o["kv"], gpu_memory_utilization=0.25, seed=0,
        disable_log_stats=True, jit_monitor_mode=o["monitor"], jit_monitor_verbose=True, block_size=16, **kw,
    )  # fmt: skip


def generate(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": tokens} for tokens in prompts]
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, sampling, use_tqdm=False)]


def attention_class(o: dict[str, str]) -> Any:
    """Return the class of the layers' attention."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum["FLASH_ATTN" if o["backend"] == "auto" else o["backend"]].get_class().get_impl_cls()


def watch(counts: collections.Counter[str], impl: Any) -> None:
    """Count calls, and those that write FP8."""
    import torch

    forward = impl.forward

    def counted(self: Any, *args: Any, **rest: Any) -> Any:
        if args[5] is not None:
            output = rest["output"] if "output" in rest else args[6]
            counts["forward"] += 1
            counts["fp8_output"] += output.dtype == torch.float8_e4m3fn
        return forward(self, *args, **rest)

    impl.forward = counted
    return impl


def kernel_times(profile: Any) -> tuple[dict[str, list[float]], float]:
    """Return microseconds and launches of every kernel by name, and how long any of attention or cache update ran.

    Kernels may start while those before them run, so their times do not add up.
    """
    import torch

    times: dict[str, list[float]] = {}
    spans = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = times.setdefault(event.name[:90], [0.0, 0])
            entry[0] += event.device_time
            entry[1] += 1
            if ATTENTION.search(event.name):
                spans.append((event.time_range.start, event.time_range.end))
    total = end = 0.0
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return times, total


def host_times(impl: Any, llm: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Return the median microseconds that `forward` and `do_kv_cache_update` take on the host, decodes alone."""
    taken: dict[str, list[float]] = {"forward": [], "do_kv_cache_update": []}
    for name, times in taken.items():
        method = getattr(impl, name)

        def timed(*args: Any, _method: Any = method, _times: list[float] = times, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = _method(*args, **kwargs)
            _times.append(time.perf_counter() - start)
            return result

        setattr(impl, name, timed)
    generate(llm, prompts, 40)
    return {name: 1e6 * sorted(times)[len(times) // 2] for name, times in taken.items()}


def wait_for_others(out: str, count: int) -> None:
    """Wait until as many engines have started."""
    folder = Path(out).parent / "ready"
    folder.mkdir(exist_ok=True)
    (folder / Path(out).name).touch()
    end = time.time() + 240
    while len(list(folder.iterdir())) < count and time.time() < end:
        time.sleep(0.2)


def main() -> None:
    model, out = sys.argv[1:3]
    o = {**DEFAULTS, **dict(argument.split("=") for argument in sys.argv[3:])}
    start = time.time()
    import torch
    import triton
    import vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    counts: collections.Counter[str] = collections.Counter()
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: counts.update({f"compiled {event['fn'].name}": 1})
    impl = attention_class(o)
    if o["task"] == "tokens":
        watch(counts, impl)
    while not os.path.exists(model + "/ready"):
        time.sleep(0.1)
    imported = time.time()
    llm = engine(model, o)
    started = time.time()
    result: dict[str, Any] = {**o, "vllm": vllm.__version__, "torch": torch.__version__, "import_s": imported - start}
    result["start_s"], result["gpu"] = started - imported, torch.cuda.get_device_name()
    result["start_counts"] = dict(counts)
    counts.clear()
    if o["task"] == "tokens":
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        count_calls(counts, Scheduler, "_preempt_request", "preemptions")
        count_calls(counts, KVCacheManager, "get_computed_blocks", "prefix_tokens", lambda result: result[1])
        prompts = prompts_of_mixed_lengths()
        result["prompts"] = prompts
        result["tokens"] = generate(llm, prompts, 32)
    else:
        generator = torch.Generator().manual_seed(2)
        prompts = torch.randint(10, 32000, (64, 1024), generator=generator).tolist()
        generate(llm, prompts[:4], 4)
        wait_for_others(out, int(o["wait_for"]))
        with open(Path(out).parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            measure(llm, impl, prompts, counts, o, result)
        if "profile" in result:
            result["kernels"], result["attention_us"] = kernel_times(result.pop("profile"))
            result["attention_us_a_step"] = result["attention_us"] / result["profiled_steps"]
    result["counts"] = dict(counts)
    Path(out).write_text(json.dumps(result))
    print(
        "RESULT",
        {key: value for key, value in result.items() if key not in ("tokens", "prompts", "kernels")},
        flush=True,
    )


def measure(
    llm: Any, impl: Any, prompts: list[list[int]], counts: Any, o: dict[str, str], result: dict[str, Any]
) -> None:
    import torch

    if o["task"] == "host":
        result["host_us"] = host_times(impl, llm, prompts)
        return
    generate(llm, prompts, 8)
    count_calls(counts, llm.llm_engine, "step", "steps")
    walls = []
    for _ in range(2):
        counts["steps"] = 0
        torch.cuda.synchronize()
        begin = time.perf_counter()
        generate(llm, prompts, 128)
        walls.append(time.perf_counter() - begin)
    result |= {"wall_s": walls, "steps": counts["steps"], "steps_per_s": counts["steps"] / min(walls)}
    counts["steps"] = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(llm, prompts, 128)
        torch.cuda.synchronize()
    result |= {"profiled_steps": counts["steps"], "profile": profile}


if __name__ == "__main__":
    main()
