"""Read what `vllm_engine` and `sglang_engine` wrote.

`make DIR` makes models of random weights, `tokens DIR FILE...` compares with fp32.

A token counts as equal if transformers in fp32, given the engine's tokens before it, gives it the highest logit: an
engine that gives equal tokens alone does what transformers' greedy search does. Otherwise `gap` is how far below the
highest its logit is, on average over all tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def make(folder: Path) -> None:
    """Save a small Llama, the same with FP8 weights and static scales, and the config of an 8B."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    rest = {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": torch.bfloat16}
    large = LlamaConfig(**LLAMA_8B, **rest)
    large.architectures = ["LlamaForCausalLM"]
    large.save_pretrained(folder / "8b")
    (folder / "8b" / "ready").touch()
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    model = LlamaForCausalLM(LlamaConfig(**SMALL, **rest)).to(torch.bfloat16).eval()
    model.save_pretrained(folder / "small")
    (folder / "small" / "ready").touch()
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max().float() / 448
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors[name + "_scale"] = scale.reshape(())
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
        else:
            tensors[name] = tensor
    model.config.quantization_config = {"quant_method": "fp8", "activation_scheme": "static"}
    model.config.architectures = ["LlamaForCausalLM"]
    (folder / "fp8").mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "fp8" / "model.safetensors")
    (folder / "fp8" / "config.json").write_text(model.config.to_json_string(use_diff=False))
    (folder / "fp8" / "ready").touch()


def compare(folder: Path, files: list[str]) -> None:
    """Print agreement with fp32, and with the first file."""
    import torch
    from transformers import LlamaForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = LlamaForCausalLM.from_pretrained(folder / "small", dtype=torch.float32).cuda().eval()
    runs = [(Path(name), json.loads(Path(name).read_text())) for name in files]
    first = runs[0][1]["tokens"] if runs else []
    for path, run in runs:
        equal, gap, total = 0, 0.0, 0
        for prompt, tokens in zip(run["prompts"], run["tokens"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens[:-1]], device="cuda")).logits[0, len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
            below = logits.max(1).values - chosen
            equal, gap, total = equal + int((below == 0).sum()), gap + float(below.sum()), total + len(tokens)
        same = sum(a == b for one, two in zip(run["tokens"], first, strict=True) for a, b in zip(one, two, strict=True))
        report = {"equal": equal, "of": total, "gap": gap / total, "as_first": same, "counts": run["counts"]}
        path.with_suffix(".cmp").write_text(json.dumps(report))
        print(path.stem, report, f"start {run['start_s']:.0f} s", flush=True)


if __name__ == "__main__":
    make(Path(sys.argv[2])) if sys.argv[1] == "make" else compare(Path(sys.argv[2]), sys.argv[3:])
