"""Time decode steps of a Llama 3 8B shape with adapters beside the same model without, in one process.

    python -m benchmarks.models.adapters [--json PATH] [--layers 8] [--batch 32] [--adapters 8] [--rank 16] [--tiny]

Weights are random, in bf16. "none enabled" is a model without `enable_adapters`, "none used" one whose requests use
none. Before anything is timed, the kernels are compared with the reference in fp32. Fewer layers than 32 give the same
ratio of steps but for the head, which adapters leave alone.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import vattn
from benchmarks.harness import add_row, machine, parser_of
from vattn.backends.lora import add_lora
from vattn.integrations.transformers import disable, enable, enable_adapters
from vattn.layers.lora import AdapterRows
from vattn.ops.lora_arguments import LoRAArgs
from vattn.ops.reference import lora as reference

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_model(layers: int, tiny: bool, device: str) -> Any:
    """Return a random model in bf16, or in fp32 on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = LlamaConfig(vocab_size=1024, num_hidden_layers=layers, dtype=dtype, **(TINY if tiny else SHAPE))
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)


def check(device: str, batch: int, adapters: int, rank: int) -> float:
    """Return the relative distance of the op from the reference on fp32 copies, with a request of a prompt too."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sizes, width, counts = [512, 128, 96], 1024, [1] * batch + [77]
    rows = AdapterRows(adapters, 512, torch.device(device))
    rows.write([index % (adapters + 1) - 1 for index in range(batch + 1)], counts)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, device=device).to(dtype)

    a, b = randn(adapters, 3 * rank, width) / width**0.5, randn(adapters, sum(sizes), rank)
    scales = torch.rand(adapters, 3, device=device) + 0.5
    output = randn(sum(counts), sum(sizes)).zero_()
    args = LoRAArgs(randn(sum(counts), width), output, a, b, scales, rows.rows, rows.tiles, sizes)
    floats = args._replace(**{name: getattr(args, name).float() for name in ("input", "output", "lora_a", "lora_b")})
    add_lora(args)
    reference.add_lora(floats)
    return float((args.output.float() - floats.output).norm() / floats.output.norm())


def fill(adapters: Any, count: int) -> list[str]:
    """Give a model random adapters for all layers, and return their names."""
    for number in range(count):

        def store(slot: int) -> None:
            for product in {id(each): each for each, _ in adapters.products.values()}.values():
                product.a[slot].normal_(std=0.02)
                product.b[slot].normal_(std=0.02)
                product.scales[slot] = 1.0

        adapters._add(f"{number}", store)
    return list(adapters.loaded)


def step_ms(generator: vattn.Generator, batch: int, names: list[str | None], steps: int) -> float:
    """Return milliseconds of a decode step, the least of three runs."""
    prompts = [[(7 * row + column) % 1000 for column in range(64)] for row in range(batch)]
    best = float("inf")
    for _ in range(3):
        for row, prompt in enumerate(prompts):
            generator.add(prompt, vattn.Sampling(2 * steps, stop_token_ids=()), adapter=names[row % len(names)])
        for _ in range(8):
            generator.step()
        if generator.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            generator.step()
        best = min(best, (time.perf_counter() - begin) / steps)
        while generator.busy:
            generator.step()
    return best * 1e3


def main() -> None:
    """Measure the model alone, then with adapters."""
    parser = parser_of(__doc__)
    for name, default in {"layers": 8, "batch": 32, "adapters": 8, "rank": 16, "steps": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that it works")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = machine(device)
    error = check(device, options.batch, options.adapters, options.rank)
    assert error < 2e-2, f"the kernels differ from the reference by {error}"
    model = make_model(options.layers, options.tiny, device)
    base = 0.0
    for kind in ("none enabled", "none used", f"{options.adapters} adapters"):
        packed = enable(model, num_blocks=options.batch * 16 + 8, merge_projections=True, prove=False)
        names: list[str | None] = [None]
        if kind != "none enabled":
            adapters = enable_adapters(packed, max_adapters=options.adapters, max_rank=options.rank)
            loaded = fill(adapters, options.adapters)
            names = [*loaded] if kind != "none used" else names
        sizes, limits = [options.batch], {"max_num_reqs": options.batch, "max_seq_len": 256}
        generator = vattn.Generator(packed, graph_sizes=sizes, mixed_graph_sizes=(), **limits)
        now = step_ms(generator, options.batch, names, options.steps)
        base = base or now
        add_row(report, {"kind": kind, "step_ms": now, "ratio": now / base, "error": error}, options.json)
        del generator, packed
        disable(model)


if __name__ == "__main__":
    main()
