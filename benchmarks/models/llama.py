"""Time a transformers model on vattn: decode steps, and many requests through the generator.

    python -m benchmarks.models.llama --json out.json --baseline 1 32

The model has the shape of Llama 3 8B and random weights. A step's floor is the bytes of weights and cache that it must
read, at the rate that reading large tensors reached in the same run; with `--fp8` those of FP8 weights, of the head in
bf16 and of the FP8 cache. The baseline is the same model under transformers' own `generate` with a static cache,
compiled; a step of it is what more tokens add to a call. `--small` tries the benchmark on a CPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

import vattn
from benchmarks.harness import machine, parser_of
from benchmarks.kernels import print_kernels
from benchmarks.models.serving import check_compiled, serve
from benchmarks.models.transformers_steps import generate_ms
from vattn.cli.bench.report import write_result
from vattn.integrations.transformers import PackedModel, disable, enable
from vattn.layers.fp8_linear import LINEAR_FORMATS

LARGE = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip


def make_model(shape: dict[str, int], layers: int | None, device: str) -> Any:
    """Return a model with random weights in bf16, made on the device."""
    import transformers

    config = transformers.LlamaConfig(**{**shape, **({"num_hidden_layers": layers} if layers else {})})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def read_rate(device: str) -> float:
    """Return bytes a second of reading large tensors, the best of a few."""
    x = torch.ones(1 << (31 if device == "cuda" else 24), dtype=torch.uint8, device=device).view(torch.int32)
    best = 0.0
    for _ in range(6):
        synchronise(device)
        begin = time.perf_counter()
        for _ in range(4):
            x.max()
        synchronise(device)
        best = max(best, 4 * x.nbytes / (time.perf_counter() - begin))
    return best


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def weight_bytes(packed: PackedModel) -> int:
    """Return the bytes of weights that a step reads: all but the embedding, of which it reads rows."""
    inner: Any = packed.model
    own = sum(p.nbytes for p in inner.parameters())
    tied = inner.config.tie_word_embeddings
    return own - (0 if tied else inner.get_input_embeddings().weight.nbytes)


def make_packed(model: Any, args: argparse.Namespace) -> PackedModel:
    """Put the model on vattn, quantised if asked to: scales from random tokens, which times do not depend on."""
    memory = "16MiB" if args.small else args.memory
    linears = {} if args.default else {"merge_projections": args.merge, "vattn_linears": args.own}
    if args.fp8 is None:
        quantised = args.kv_cache_dtype != "auto"
        return enable(
            model,
            cache_config=vattn.CacheConfig(cache_dtype=args.kv_cache_dtype),
            quant_config=vattn.QuantConfig(0.01, 0.01) if quantised else None,
            memory=memory,
            **linears,
        )
    rng = random.Random(0)
    text = [rng.randrange(model.config.vocab_size) for _ in range(128)]
    seen = vattn.calibrate(enable(model, num_blocks=16), [[text]], linears=True)
    disable(model)
    vattn.quantise_linears(model, args.fp8, calibration=seen if args.fp8 == "fp8_static" else None)
    return enable(
        model,
        cache_config=vattn.CacheConfig(cache_dtype="fp8"),
        calibration=seen,
        query_format="fp8_e4m3",
        memory=memory,
        **linears,
    )


def decode_steps(
    packed: PackedModel, batch: int, context: int, steps: int, options: dict[str, Any], profile: bool = False
) -> dict[str, Any]:
    """Time steps of the generator, and replays of its graph alone."""
    device = packed.model.device.type
    vocabulary = packed.model.config.vocab_size
    rng = random.Random(batch)
    generator = vattn.Generator(
        packed, max_num_reqs=max(2, batch), graph_sizes=[batch] if device == "cuda" else (), **options
    )
    sampling = vattn.Sampling(steps + 8, stop_token_ids=())
    for _ in range(batch):
        generator.add([rng.randrange(vocabulary) for _ in range(context)], sampling)
    while generator.scheduler.waiting or any(not request.output for request in generator.scheduler.running):
        generator.step()
    walls = []
    for _ in range(steps):
        begin = time.perf_counter()
        generator.step()
        walls.append(time.perf_counter() - begin)
    replay = float("nan")
    if generator.graphs is not None:
        (entry,) = generator.graphs._entries.values()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(20):
            entry.graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        replay = events[0].elapsed_time(events[1]) / 20
        if profile:
            print_kernels(entry.graph.replay)
    while generator.busy:
        generator.cancel(
            generator.scheduler.running[0] if generator.scheduler.running else generator.scheduler.waiting[0]
        )
    cache = batch * (context + steps // 2) * packed.kv_cache.bytes_per_block / packed.kv_cache.block_size
    return {
        "batch": batch, "context": context, "wall_ms": statistics.median(walls) * 1e3, "replay_ms": replay,
        "bytes": weight_bytes(packed) + cache,
    }  # fmt: skip


def main() -> None:
    """Run what was asked for and print it."""
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--baseline", type=int, nargs="*", default=[], help="batch sizes of transformers' own steps")
    parser.add_argument("--serve", nargs="*", default=["64", "mixed"], choices=["64", "mixed"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--compile", default=None, choices=["layers", "model", "none"])
    parser.add_argument("--memory", default="60GiB")
    parser.add_argument("--fp8", nargs="?", const="fp8_static", choices=list(LINEAR_FORMATS),
                        help="FP8 linear layers, queries and cache, with the passes")  # fmt: skip
    parser.add_argument("--default", action="store_true", help="request nothing of what follows: the defaults")
    parser.add_argument("--merge", action="store_true", help="merge projections")
    parser.add_argument("--own", action="store_true", help="run products of few rows by kernels of vattn")
    parser.add_argument("--outer", action="store_true", help="compile the last norm and the rotary embedding too")
    parser.add_argument("--max-autotune", action="store_true", help="let Inductor time its own GEMMs against cuBLAS")
    parser.add_argument("--pdl", action="store_true", help="let kernels of Inductor begin while those before them end")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a captured step")
    parser.add_argument("--small", action="store_true")
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    """Run it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if args.small else LARGE
    context, steps = (32, 6) if args.small else (1024, 40)
    begin = time.perf_counter()
    rate = read_rate(device)
    model = make_model(shape, args.layers, device)
    packed = make_packed(model, args)
    options: dict[str, Any] = {
        "max_seq_len": 8192 if not args.small else 512,
        "token_budget": 8192,
        "reuse_prefixes": False,
    }
    result: dict[str, Any] = {
        **machine(device), "shape": shape, "read_rate": rate,
        "kv_cache_dtype": "fp8" if args.fp8 else args.kv_cache_dtype, "linears": args.fp8 or "bfloat16",
        "default": args.default, "merged": args.merge, "outer": args.outer, "own_products": args.own,
        "max_autotune": args.max_autotune, "pdl": args.pdl,
        "weight_bytes": weight_bytes(packed),
        "setup_seconds": time.perf_counter() - begin, "steps": [], "serve": [], "baseline": [],
    }  # fmt: skip
    del result["rows"]

    inductor = {"max_autotune_gemm": args.max_autotune, "triton.enable_pdl": args.pdl}
    inductor = {name: True for name, wanted in inductor.items() if wanted}
    # The passes: RoPE and the cache write are one kernel.
    if not args.default and (device == "cuda" or inductor or args.fp8):
        options["compile_options"] = {"options": vattn.options(inductor)}

    def show(kind: str, row: dict[str, Any]) -> None:
        result[kind].append(row)
        print(kind, {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        if args.json:
            write_result(args.json, result)

    if args.outer:
        inner: Any = packed.model.model
        vattn.compile_regions([inner.norm, inner.rotary_emb], **options.get("compile_options", {}))
    how = args.compile or ("layers" if "compile_options" in options else None)
    compiled_once = not args.default
    for batch in args.batches:
        begin = time.perf_counter()
        row = decode_steps(packed, batch, context, steps, {**options, "compile": how}, args.profile)
        if compiled_once and how in (None, "layers"):  # the layers are compiled by now
            how = "none"
            options.pop("compile_options", None)
            if args.fp8 or device == "cuda":
                result["fusion"] = list(dict.fromkeys(str(node).partition(" [")[0] for node in vattn.fusion_report()))
                print("fusion", vattn.fusion_report().summary(), flush=True)
        row["floor_ms"] = row["bytes"] / rate * 1e3
        row["over_floor"] = row["replay_ms"] / row["floor_ms"]
        row["seconds_with_compiling"] = time.perf_counter() - begin
        show("steps", row)
    new = 4 if args.small else 128
    if "64" in args.serve:
        lengths = [1024 if not args.small else 64] * (64 if not args.small else 8)
        show("serve", serve(packed, lengths, new, None, {**options, "compile": how}, args.profile))
    if "mixed" in args.serve:
        rng = random.Random(1)
        lengths = [rng.randint(16, 4096 if not args.small else 128) for _ in range(256 if not args.small else 8)]
        show("serve", serve(packed, lengths, new, None, {**options, "compile": how}))
    if args.baseline:
        del packed, model
        torch.cuda.empty_cache() if device == "cuda" else None
        model = make_model(shape, args.layers, device)
        for batch in args.baseline:
            show("baseline", {"batch": batch, **generate_ms(model, batch, context, 24)})
    check_compiled(result["serve"])


if __name__ == "__main__":
    main()
