"""Time from the start of a process to the first token: with an empty compile cache, then with that of the first run.

    python -m benchmarks.compile.cold_start --json out.json

The model has the shape of Llama 3 8B and random weights, made on the device, unless `--model` names a local checkpoint.
Each run is a process of its own; both of a pair have one folder for what Inductor and Triton compile. The bytecode of
Python, which an installation usually has, is kept from pair to pair: the first run of all has neither that nor, on a
machine that has just started, any file in memory. The clock starts before Python does; the first use counts from the
loaded model on. `--small` tries the benchmark on a CPU.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEFORE = ("python", "import vattn", "import transformers", "model")
"""Phases before the first use."""


def watch_compilers() -> dict[str, dict[str, float]]:
    """Return seconds of each kernel that Triton compiles in this process, by name, as they come."""
    kernels: dict[str, float] = {}
    try:
        from triton import knobs
    except ImportError:
        return {"kernels": kernels}

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        name = f"{src.name}{' from disk' if cache_hit else ''}"
        kernels[name] = kernels.get(name, 0.0) + times.total / 1e6

    knobs.compilation.listener = note
    return {"kernels": kernels}


def compiler_seconds() -> dict[str, float]:
    """Return seconds of the phases of torch.compile, which lie in each other."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: sum(each) for name, each in compilation_time_metrics.items()}


def first_token(args: argparse.Namespace) -> None:
    """Serve one prompt and print how long each phase took, as JSON; in a process of its own."""
    seconds: dict[str, float] = {}
    last = args.since

    def phase(name: str) -> None:
        nonlocal last
        now = time.time()
        seconds[name], last = now - last, now

    phase("python")
    import torch

    import vattn

    phase("import vattn")
    compiled = watch_compilers()
    from benchmarks.models import llama
    from vattn.integrations.transformers import enable

    phase("import transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model is not None:
        from vattn.cli.checkpoints import load_model

        model, _ = load_model(args.model, device, None)
    else:
        model = llama.make_model(llama.SMALL if args.small else llama.LARGE, args.layers, device)
    phase("model")
    packed = enable(model, memory="16MiB" if args.small else args.memory)
    phase("enable")
    generator = vattn.Generator(
        packed, max_seq_len=512 if args.small else 8192, max_num_reqs=args.requests, compile=args.compile
    )
    phase("generator: compiled and captured")
    request = generator.add([1] * (64 if args.small else 1024), vattn.Sampling(8, stop_token_ids=()))
    while not request.output:
        generator.step()
    phase("first token")
    total = time.time() - args.since
    first_use = sum(each for name, each in seconds.items() if name not in BEFORE)
    before = dict(compiled["kernels"])
    while not request.done:
        generator.step()
    lengths = [16, 33, 500] if args.small else [16, 33, 500, 1400, 1600, 2048, 3900]
    generator.generate([[1] * length for length in lengths], vattn.Sampling(8, stop_token_ids=()))
    compiled["kernels after the first token"] = {
        name: each - before.get(name, 0.0) for name, each in compiled["kernels"].items() if each != before.get(name)
    }
    print(generator.explain(), file=sys.stderr)
    runners = [runner for runner in (generator.mixed_graphs, generator.graphs) if runner is not None]
    graphs = {
        f"{cost.batch_size} x {cost.num_tokens}": cost.seconds for runner in runners for cost in runner.report.costs
    }
    taken = sum(runner.report.bytes for runner in runners)
    compiled["phases of torch.compile"] = compiler_seconds()
    told = {
        "seconds": total,
        "first_use": first_use,
        "phases": seconds,
        "graphs": graphs,
        "graph_bytes": taken,
        "compiled": compiled,
    }
    print(json.dumps(told))


def profiled(args: argparse.Namespace) -> None:
    """Serve one prompt under cProfile, which takes time itself, and write where the time went."""
    profile = cProfile.Profile()
    profile.runcall(first_token, args)
    with args.profile.open("a") as file:
        for order in ("cumulative", "tottime"):
            pstats.Stats(profile, stream=file).sort_stats(order).print_stats(90)


def run(folder: str, bytecode: str) -> dict[str, Any]:
    """Start a process that serves one prompt, and return what it printed."""
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton",
        "PYTHONPYCACHEPREFIX": bytecode, "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    module = "benchmarks.compile.cold_start"
    command = [sys.executable, "-m", module, *sys.argv[1:], "--since", str(time.time())]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Run pairs of an empty and a warm cache, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--memory", default="20GiB")
    parser.add_argument("--requests", type=int, default=64, help="which decides how many graphs are captured")
    parser.add_argument("--compile", choices=["layers", "model", "none"])
    parser.add_argument("--profile", type=Path, help="file to write a profile of both runs to")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeat", type=int, default=2, help="pairs of runs, each with compile caches of its own")
    parser.add_argument("--folder", type=Path, help="for the caches, kept")
    parser.add_argument("--only", choices=["empty", "warm"], help="of each pair; whether it is so, the folder decides")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.since is not None:
        first_token(args) if args.profile is None else profiled(args)
        return
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as kept:
        for number in range(args.repeat):
            runs.append({})
            folder = str(args.folder) if args.folder is not None else f"{kept}/{number}"
            bytecode = f"{args.folder or kept}/python"
            for cache in ("empty", "warm") if args.only is None else (args.only,):
                runs[-1][cache] = row = run(folder, bytecode)
                show(cache, row)
                if args.json:
                    args.json.write_text(json.dumps(runs, indent=1))
    for cache in ("empty", "warm"):
        times = [f"{each[cache]['seconds']:.1f}" for each in runs if cache in each]
        print(f"compile cache {cache}: {', '.join(times) or 'not run'} s")


def show(cache: str, row: dict[str, Any]) -> None:
    """Print one run."""
    print(
        f"compile cache {cache}: {row['seconds']:.1f} s to the first token, {row['first_use']:.1f} of first use",
        flush=True,
    )
    for name, seconds in row["phases"].items():
        print(f"  {seconds:7.2f} s {name}", flush=True)
    if row["graphs"]:
        each = ", ".join(f"{size}: {seconds:.2f}" for size, seconds in row["graphs"].items())
        print(f"  graphs of requests x tokens {each} s, {row['graph_bytes'] / 2**20:.0f} MiB", flush=True)
    for name, found in row["compiled"].items():
        longest = sorted(found.items(), key=lambda item: -item[1])[:30]
        print(f"  {name}: {', '.join(f'{kernel} {each:.2f}' for kernel, each in longest)} s", flush=True)


if __name__ == "__main__":
    main()
