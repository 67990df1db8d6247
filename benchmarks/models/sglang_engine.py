"""One engine of SGLang with one attention backend: tokens under pressure, or times under load, as JSON.

`python -m benchmarks.models.sglang_engine MODEL OUT key=value...`; see `DEFAULTS`. `benchmarks.models.vllm_compare`
makes the models and reads the results. SGLang must be installed; vattn's plugin is found by its entry point.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.models.vllm_engine import prompts_of_mixed_lengths, wait_for_others

DEFAULTS = {
    "backend": "vattn", "mode": "default", "dtype": "bfloat16", "kv": "auto", "task": "tokens", "page": "16",
    "wait_for": "1",
}  # fmt: skip


def engine(model: str, o: dict[str, str]) -> Any:
    import sglang

    under_load = o["task"] != "tokens"
    options: dict[str, Any] = {"disable_cuda_graph": o["mode"] == "eager"}
    if o["mode"] == "decode_graphs":
        options["disable_prefill_cuda_graph"] = True
    if under_load:
        options |= {"load_format": "dummy", "context_length": 2048, "max_running_requests": 64}
        options |= {"chunked_prefill_size": 8192, "max_total_tokens": 81920, "disable_radix_cache": True}
        options |= {"cuda_graph_bs_decode": [1, 2, 4, 8, 16, 24, 32, 48, 64], "cuda_graph_bs_prefill": [1024, 8192]}
    else:
        options |= {"context_length": 1024, "max_running_requests": 16, "chunked_prefill_size": 256}
        options |= {
            "max_total_tokens": 4160,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16],
            "schedule_conservativeness": 0.1,
        }
        options |= {"cuda_graph_bs_prefill": [16, 64, 128, 256]}
    return sglang.Engine(
        model_path=model, skip_tokenizer_init=True, dtype=o["dtype"], kv_cache_dtype=o["kv"], page_size=int(o["page"]),
        attention_backend=o["backend"], sampling_backend="pytorch", grammar_backend="none", mem_fraction_static=0.6,
        random_seed=0, log_level="info", skip_server_warmup=True, **options,
    )  # fmt: skip


def generate(llm: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], dict[str, int]]:
    """Return the greedy tokens, and the prefix tokens found and requests taken back."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    outputs = llm.generate(input_ids=prompts, sampling_params=sampling)
    counts: collections.Counter[str] = collections.Counter()
    for output in outputs:
        for name in ("cached_tokens", "num_retractions"):
            counts[name] += output["meta_info"].get(name) or 0
    return [list(output["output_ids"]) for output in outputs], dict(counts)


def measure(llm: Any) -> dict[str, Any]:
    """Return the shorter of two times of a decode step of 64 requests of 1024 tokens, and of all their prompts."""
    import torch

    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(10, 32000, (64, 1024), generator=generator).tolist()
    generate(llm, prompts, 8)
    walls: dict[int, list[float]] = {1: [], 129: []}
    for _ in range(2):
        for count, times in walls.items():
            begin = time.perf_counter()
            generate(llm, prompts, count)
            times.append(time.perf_counter() - begin)
    decodes = (min(walls[129]) - min(walls[1])) / 128
    return {"wall_s": walls, "decode_step_ms": 1e3 * decodes, "prompts_ms": 1e3 * min(walls[1])}


def main() -> None:
    model, out = sys.argv[1:3]
    o = {**DEFAULTS, **dict(argument.split("=") for argument in sys.argv[3:])}
    start = time.time()
    from importlib.metadata import version

    import torch

    while not os.path.exists(model + "/ready"):
        time.sleep(0.1)
    llm = engine(model, o)
    result: dict[str, Any] = {**o, "sglang": version("sglang"), "torch": torch.__version__}
    result |= {"start_s": time.time() - start, "gpu": torch.cuda.get_device_name()}
    if o["task"] == "tokens":
        prompts = prompts_of_mixed_lengths()
        tokens, counts = generate(llm, prompts, 32)
        result |= {"prompts": prompts, "tokens": tokens, "counts": counts}
    else:
        wait_for_others(out, int(o["wait_for"]))
        with open(Path(out).parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            result |= measure(llm)
    Path(out).write_text(json.dumps(result))
    print("RESULT", {key: value for key, value in result.items() if key not in ("tokens", "prompts")}, flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
