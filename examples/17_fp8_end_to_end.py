"""FP8 from end to end: weights, inputs of linear layers, queries and the cache, with quantisation fused into attention.

    python examples/17_fp8_end_to_end.py [FOLDER]

Calibrates a Hugging Face model on some text, quantises it, and compares bits per byte and greedy tokens with the model
as it was. Needs the extra `transformers`; without a folder it takes the repository's model, whose tokens are bytes.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from pathlib import Path

import torch

import vattn
from vattn.cli.checkpoints import load_model
from vattn.integrations.transformers import PackedModel, disable, enable

HERE = Path(__file__).parent / "demo_model"
PROMPTS = ["def add(a, b):\n    ", "import os\nimport ", "class Stack:\n    def __init__(self"]
MEMORY = "64MiB"


@torch.no_grad()
def bits_per_token(packed: PackedModel, ids: list[int]) -> float:
    """Return how many bits the model needs for each next token of a text, in one step."""
    device = packed.model.device
    builder = vattn.AttentionMetadataBuilder(2, len(ids), max_seq_len=len(ids), device=device, layers=packed)
    blocks = list(range(1, 1 + math.ceil(len(ids) / builder.block_size)))
    step = builder.build([len(ids)], [len(ids)], [blocks])
    text = torch.tensor(ids, device=device)
    with vattn.forward_context(step):
        logits = packed(text, step.positions)
    return torch.nn.functional.cross_entropy(logits[:-1].float(), text[1:]).item() / math.log(2)


def generate(packed: PackedModel, tokenizer: object, **how: object) -> list[list[int]]:
    """Return the greedy tokens of every prompt."""
    generator = vattn.Generator(packed, tokenizer, max_num_reqs=4, max_seq_len=256, graph_sizes=(), **how)
    return [request.output for request in generator.generate(PROMPTS, vattn.Sampling(max_new_tokens=24))]


def main(folder: Path) -> None:
    """Run it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(folder, device, None)
    text = tokenizer.encode((HERE / "heldout.txt").read_text()[:6000])
    samples, ids = [text[2000:2700], text[4000:4700]], text[:800]

    # 1. As it is, and what its layers reach: keys, values, queries, outputs, inputs of linear layers.
    packed = enable(model, memory=MEMORY)
    before, tokens = bits_per_token(packed, ids), generate(packed, tokenizer)
    found = vattn.calibrate(packed, [samples], linears=True)
    audit = vattn.audit(packed, [ids[:100]], "fp8", found, output_format="fp8_static")
    print("an FP8 cache and FP8 outputs alone would do this:", audit, sep="\n")
    disable(model)

    # 2. Quantised by what was seen. The file belongs next to the checkpoint.
    with tempfile.TemporaryDirectory() as there:
        scales = Path(there) / "vattn_scales.json"
        found.save(scales)
        report = vattn.quantise_linears(model, "fp8_static", calibration=scales)
        packed = enable(
            model, cache_config=vattn.CacheConfig(cache_dtype="fp8"), calibration=scales, query_format="fp8_e4m3",
            merge_projections=True, memory=MEMORY,
        )  # fmt: skip
    kinds = {kind: list(report.values()).count(kind) for kind in report.values()}
    print("linear layers:", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))

    # 3. Compiled layer by layer with the passes: attention itself writes what the output projection reads.
    after = bits_per_token(packed, ids)
    fast = generate(packed, tokenizer, compile="layers", compile_options={"options": vattn.options(strict=True)})
    for line in dict.fromkeys(re.sub(r" \[[^]]*\]", "", str(node)) for node in vattn.fusion_report()):
        print(line)
    same = sum(a == b for x, y in zip(tokens, fast, strict=True) for a, b in zip(x, y, strict=False))
    print(f"bits per token: {before:.4f}, in FP8 {after:.4f} ({after / before - 1:+.2%})")
    print(f"greedy tokens equal to those of the model as it was: {same} of {sum(map(len, tokens))}")
    for prompt, output in zip(PROMPTS, fast, strict=True):
        print("-" * 40, prompt + tokenizer.decode(output), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
