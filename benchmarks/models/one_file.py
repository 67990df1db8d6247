"""Time the engine of one file and the loop for one request (examples 4 and 19) beside what else runs the same model.

    python -m benchmarks.models.one_file

The demo model in fp32 on one core of a CPU; everything gives the same greedy tokens, which is checked. Times are CPU
seconds of this process, so that other programs count little; compiling is not in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import vattn
from benchmarks.harness import add_row, load_example, machine, parser_of, table
from vattn.cli.checkpoints import DEMO_MODEL
from vattn.integrations.transformers import enable

REQUESTS, NEW = 16, 48


def seconds(run: Callable[[], list[list[int]]], expected: list[list[int]], repeats: int) -> float:
    """Return the CPU seconds of the fastest of some runs, after one that compiles."""
    times = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        found = run()
        times.append(time.process_time() - begin)
        if found != expected:
            raise SystemExit(f"other tokens: {found} instead of {expected}")
    return min(times[1:])


def main() -> None:
    """Print both tables as Markdown."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    engine, loop = load_example("04_engine.py"), load_example("19_single_request.py")
    text = (DEMO_MODEL / "heldout.txt").read_text()
    prompts = [[0, *text[600 * i : 600 * i + 20 + 12 * i].encode()] for i in range(REQUESTS)]
    plain = transformers.LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()

    def make() -> Any:
        return engine.build_llama(*engine.read_checkpoint(DEMO_MODEL))

    def alone(some: list[list[int]]) -> list[list[int]]:
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return [plain.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in some]

    def one_file(model: Any, **options: Any) -> Callable[[], list[list[int]]]:
        # A new engine for each run: nothing is found of the run before.
        def run() -> list[list[int]]:
            requests = [engine.Request(ids, NEW) for ids in prompts]
            list(engine.Engine(model, **options).generate(requests))
            return [request.output for request in requests]

        return run

    def generator(model: Any) -> Callable[[], list[list[int]]]:
        sampling = vattn.Sampling(NEW, stop_token_ids=())

        def run() -> list[list[int]]:
            made = vattn.Generator(model, max_num_reqs=REQUESTS, token_budget=256, reuse_prefixes=False)
            return [request.output for request in made.generate(prompts, sampling)]

        return run

    one, expected = prompts[4:5], alone(prompts)
    single = {kind: loop.Loop(make(), compile=kind) for kind in (False, True)}
    runs = {
        f"{REQUESTS} requests": {
            "transformers' `generate`, one by one": lambda: alone(prompts),
            "`04_engine.py`, one request at a time": one_file(make(), max_running=1),
            "`04_engine.py`": one_file(make()),
            "`vattn.Generator`": generator(enable(plain_copy(plain), memory="32MiB")),
        },
        "one request": {
            "transformers' `generate`": lambda: alone(one),
            "`19_single_request.py`, not compiled": lambda: [single[False].generate(one[0], NEW)],
            "`19_single_request.py`": lambda: [single[True].generate(one[0], NEW)],
        },
    }
    result = machine("cpu")
    for group, members in runs.items():
        wanted = expected if len(members) == 4 else expected[4:5]
        for name, run in members.items():
            took = seconds(run, wanted, args.repeats)
            row = {"group": group, "name": name, "seconds": took, "tokens_per_second": NEW * len(wanted) / took}
            add_row(result, row, args.json)
    rows = [
        [row["group"], row["name"], f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.0f}"]
        for row in result["rows"]
    ]
    print(table(["what", "by", "CPU seconds", "tokens a second"], rows))


def plain_copy(plain: Any) -> Any:
    """Return the same model once more, since `enable` changes what it gets."""
    copy = transformers.LlamaForCausalLM(plain.config).eval()
    copy.load_state_dict(plain.state_dict())
    return copy.to(plain.dtype)


if __name__ == "__main__":
    main()
