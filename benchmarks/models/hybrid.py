"""Compare a hybrid model on vattn with transformers' `generate`, in one process.

    python -m benchmarks.models.hybrid [--json PATH] [--layers 8] [--batch 32] [--context 512] [--tiny]

The model has the proportions of Qwen3-Next (three layers of gated delta rule to one of attention, experts, heads of
256) with fewer layers and experts, in bf16 with random weights. Both sides run transformers' own state layers, with
the kernels that are installed. Milliseconds of a step are those that more tokens add to a call. "same" is the share of
tokens that equal transformers' tokens: in 16 bits two logits may be close.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import vattn
from benchmarks.harness import add_row, machine, parser_of
from vattn.integrations.transformers import disable, enable

SHAPE = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 64, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def make_model(layers: int, tiny: bool, device: str) -> Any:
    """Return a random Qwen3-Next in bf16, or in fp32 on a CPU."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = Qwen3NextConfig(
        vocab_size=1024, num_hidden_layers=layers, dtype=dtype, pad_token_id=0, eos_token_id=1,
        **(TINY if tiny else SHAPE),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3NextForCausalLM(config).eval().requires_grad_(False).to(dtype)


def measure(call: Callable[[int], list[list[int]]], few: int, many: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds of a step and of a short call, the least of some rounds, and the tokens."""
    tokens = call(many)
    call(few)
    times = {few: float("inf"), many: float("inf")}
    for _ in range(rounds):
        for count in times:
            begin = time.perf_counter()
            call(count)
            times[count] = min(times[count], time.perf_counter() - begin)
    step = (times[many] - times[few]) / (many - few)
    return {"step_ms": step * 1e3, "first_ms": times[few] * 1e3, "tokens": tokens}


def main() -> None:
    """Measure transformers, then vattn."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=36, help="new tokens of a long call")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    args = parser.parse_args()
    device, few = "cuda" if torch.cuda.is_available() else "cpu", 4
    result = machine(device)
    model = make_model(args.layers, args.tiny, device)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 1024, (max(args.batch), args.context), generator=generator)

    def generate(batch: int, count: int) -> list[list[int]]:
        ids = prompts[:batch].to(device)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return found[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    theirs = {batch: measure(partial(generate, batch), few, args.tokens, args.rounds) for batch in args.batch}
    packed = enable(model)
    packed.allocate(memory="8GiB" if device == "cuda" else "64MiB", max_num_reqs=max(args.batch))
    runner = vattn.Generator(packed, max_num_reqs=max(args.batch), stop_token_ids=(), token_budget=4096)

    def run(batch: int, count: int) -> list[list[int]]:
        sampling = vattn.Sampling(max_new_tokens=count)
        return [one.output for one in runner.generate(prompts[:batch].tolist(), sampling)]

    for batch in args.batch:
        ours = measure(partial(run, batch), few, args.tokens, args.rounds)
        pairs = list(zip(ours.pop("tokens"), theirs[batch].pop("tokens"), strict=True))
        same = sum(a == b for mine, other in pairs for a, b in zip(mine, other, strict=True)) / (batch * args.tokens)
        faster = theirs[batch]["step_ms"] / ours["step_ms"]
        add_row(
            result,
            {"batch": batch, "vattn": ours, "transformers": theirs[batch], "times": faster, "same": same},
            args.json,
        )
    disable(model)


if __name__ == "__main__":
    main()
