"""Compare `attn_implementation="vattn"` with transformers' own in `generate` and `generate_batch`, in one process.

    python -m benchmarks.models.transformers_generate [--json PATH] [--layers 4] [--hidden-size 4096] [--tiny]
        [--cells dynamic static generate_batch] [--flash-attention-3 LIBRARY]

One model with the layers of Llama 3 8B (a few of them, and a small vocabulary; with another hidden size the same heads)
generates greedily with each attention
in turn: one request and 32, with a dynamic cache and a static one that `generate` compiles, and 32 requests in
`generate_batch`. Milliseconds of a step are those that more tokens add to a call. "same" is the share of tokens that
are those of SDPA: in 16 bits two logits may be close. An attention that is not there, or fails, is a row with its
error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.harness import add_row, machine, parser_of
from benchmarks.models.flash_attention_3 import offer

NAMES = ("sdpa", "vattn", "flash_attention_3")
SHAPE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_model(layers: int, tiny: bool, device: str, hidden_size: int = 4096) -> Any:
    """Return a random Llama in bf16, or in fp32 on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    large = {**SHAPE, "hidden_size": hidden_size, "intermediate_size": hidden_size * 7 // 2}
    config = LlamaConfig(
        vocab_size=1024, num_hidden_layers=layers, max_position_embeddings=8192, dtype=dtype, pad_token_id=0,
        eos_token_id=1, **(TINY if tiny else large),
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def generate(model: Any, prompts: torch.Tensor, mask: torch.Tensor, cache: str, new_tokens: int) -> torch.Tensor:
    """Return the tokens `[B, new_tokens]` that follow prompts."""
    static = {"cache_implementation": "static"} if cache == "static" else {}
    tokens = model.generate(
        prompts, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **static
    )
    return tokens[:, prompts.shape[1] :].cpu()


def generate_batch(model: Any, prompts: torch.Tensor, new_tokens: int, name: str) -> torch.Tensor:
    """Return the tokens `[B, new_tokens]` of continuous batching; vattn's way and transformers' own."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from vattn.integrations.transformers import continuous_batching

    # Room for all requests, and a step that takes all prompts of the default size.
    options: dict[str, Any] = {"num_blocks": 256, "max_batch_tokens": 16384}
    if "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__:
        options["auto_switch_to_flash"] = False
    if model.device.type == "cpu":
        options |= {"num_blocks": 64, "max_batch_tokens": 256}
    with continuous_batching(model) if name == "vattn" else nullcontext():
        found = model.generate_batch(
            inputs=prompts.tolist(),
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens, do_sample=False, eos_token_id=model.config.vocab_size, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**options),
            progress_bar=False,
            persistent_manager=True,
        )
    by_prompt = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
    return torch.tensor([by_prompt[tuple(prompt)] for prompt in prompts.tolist()])


def seconds(call: Callable[[int], torch.Tensor], tokens: int, device: str) -> tuple[float, torch.Tensor]:
    """Return the seconds of a call that generates so many tokens, and them."""
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    found = call(tokens)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, found


def measure(call: Callable[[int], torch.Tensor], few: int, many: int, rounds: int, device: str) -> dict[str, Any]:
    """Return milliseconds of a step and of a short call, least of some rounds, and the tokens."""
    cold, tokens = seconds(call, many, device)
    seconds(call, few, device)
    times: dict[int, float] = {}
    for _, count in itertools.product(range(rounds), (few, many)):
        times[count] = min(times.get(count, float("inf")), seconds(call, count, device)[0])
    step = (times[many] - times[few]) / (many - few)
    return {"step_ms": step * 1e3, "first_ms": times[few] * 1e3, "cold_s": cold, "tokens": tokens}


def main() -> None:
    """Measure each attention in turn, cell by cell."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=4096, help="a small one leaves the host's time")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=36, help="new tokens of a long call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=140, help="begin no cell after so long")
    parser.add_argument("--cells", nargs="*", default=["dynamic", "static", "padded", "generate_batch"])
    parser.add_argument("--flash-attention-3", help="a library, where its package is not installed")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    args = parser.parse_args()
    if args.flash_attention_3:
        offer(args.flash_attention_3)
    import transformers

    import vattn.integrations.transformers  # noqa: F401  registers the name

    device, begin, few = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter(), 4
    result = machine(device)
    result["versions"]["transformers"] = transformers.__version__
    model = make_model(args.layers, args.tiny, device, args.hidden_size)
    prompts = torch.randint(2, 1024, (32, args.context), generator=torch.Generator().manual_seed(0)).to(device)
    padded = torch.ones_like(prompts)
    padded[1::2, : args.context // 3] = 0
    kinds: dict[str, list[tuple[str, str, int, bool]]] = {
        "dynamic": [("generate", "dynamic", 1, False), ("generate", "dynamic", 32, False)],
        "static": [("generate", "static", 1, False), ("generate", "static", 32, False)],
        "padded": [("generate", "static", 32, True), ("generate", "dynamic", 32, True)],
        "generate_batch": [("generate_batch", "paged", 32, False)],
    }
    cells = [cell for kind in args.cells for cell in kinds[kind]]
    shape = None
    for what, cache, batch, has_padding in cells:
        expected = None
        if shape != (cache, batch):
            torch._dynamo.reset()
            shape = cache, batch
        for name in NAMES:
            row = {"call": what, "cache": cache, "batch": batch, "padded": has_padding, "attention": name}
            if time.perf_counter() - begin > args.seconds:
                add_row(result, row | {"error": "no time left"}, args.json)
                continue
            mask = (padded if has_padding else torch.ones_like(prompts))[:batch]
            try:
                model.set_attn_implementation(name)
                if model.config._attn_implementation != name:
                    raise RuntimeError(f"transformers runs {model.config._attn_implementation}")

                def call(tokens: int, what: str = what, cache: str = cache, name: str = name) -> torch.Tensor:
                    if what == "generate":
                        return generate(model, prompts[: len(mask)], mask, cache, tokens)  # noqa: B023
                    return generate_batch(model, prompts, tokens, name)

                with torch.no_grad():
                    found = measure(call, few, args.tokens, args.rounds, device)
            except Exception as error:
                add_row(result, row | {"error": f"{type(error).__name__}: {error}"[:300]}, args.json)
                continue
            finally:
                if what == "generate_batch":
                    model.destroy_cached_continuous_batching_manager()
            tokens = found.pop("tokens")
            expected = tokens if expected is None else expected
            same = float((tokens == expected).float().mean())
            row |= {key: round(value, 3) for key, value in found.items()} | {"same": round(same, 4)}
            add_row(result, row, args.json)


if __name__ == "__main__":
    main()
