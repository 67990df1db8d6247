"""Decode without Python: AOTInductor compiles a model's step, and a C++ program runs it.

    python examples/20_cpp_decode.py [LAYERS]

Exports the demo model, whose output projections take FP8 here, so that attention writes FP8 (vattn's pass fuses it);
builds `cpp_decode/decode.cpp` with g++ against the libtorch that torch ships; and compares the text that the program
generates with that of `vattn.Generator`. On a CPU, with torch 2.12 or newer; LAYERS is how many layers the model keeps.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from demo.checkpoint import build_llama, read_checkpoint
from torch import Tensor, nn

import vattn
from vattn.layers.fp8_linear import FP8Linear

HERE = Path(__file__).parent
PROMPTS = ["def add(a, b):\n    ", "import os\nimport "]
NUM_BLOCKS, NEW_TOKENS = 32, 48


class Greedy(nn.Module):
    """The model, and the most probable next token of each request."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Return int64 `[B]`; ids and positions are int64 `[T]`, `last` has the row of each request's last token."""
        return self.model(ids, positions, last).argmax(-1)


def make_model(layers: int | None) -> nn.Module:
    """Return the demo model with FP8 output projections, whose inputs stay below 4."""
    model = build_llama(*read_checkpoint(HERE / "demo_model")).eval()
    model.layers = model.layers[:layers]
    for layer in model.layers:
        attention = layer.self_attn
        attention.o_proj = FP8Linear.of(attention.o_proj, "fp8_static", torch.tensor([4.0 / 448]))
    return model


def export(model: nn.Module, package: Path) -> None:
    """Compile a step of the model into a package, which says how many layers, KV heads and columns its caches have."""
    builder = vattn.AttentionMetadataBuilder(2, 64, max_seq_len=256, layers=model)
    step = builder.build(query_lens=[3, 2], seq_lens=[3, 2], block_tables=[[1], [2]])
    ids, last = torch.zeros(5, dtype=torch.long), torch.tensor([2, 4])
    exported = vattn.export_step(Greedy(model), (ids, step.positions, last), step)
    caches = f"{len(model.layers)} {model.config.num_kv_heads} {model.config.head_size}"
    settings = {"aot_inductor.metadata": {"caches": caches}}
    with vattn.enable(strict=True), torch._inductor.config.patch(settings):
        exported.compile(package)


def build_program(program: Path) -> None:
    """Compile the C++ program."""
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    command = ["g++", "-std=c++17", "-O1", "-w", HERE / "cpp_decode" / "decode.cpp", "-o", program]
    command += [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)


def main(layers: int | None) -> None:
    """Run it."""
    model = make_model(layers)
    cache = vattn.allocate_kv_cache(model, num_blocks=NUM_BLOCKS)
    with tempfile.TemporaryDirectory() as folder:
        package, program = Path(folder, "step.pt2"), Path(folder, "decode")
        begin = time.perf_counter()
        export(model, package)
        fused = sum(node.outcome == "fused" for node in vattn.fusion_report())
        print(f"exported in {time.perf_counter() - begin:.0f} s; attention of {fused} layers writes FP8")
        build_program(program)
        command = [program, package, str(NEW_TOKENS), str(NUM_BLOCKS), *PROMPTS]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    texts = [bytes.fromhex(line) for line in lines]
    generator = vattn.Generator(model, cache=cache)
    requests = generator.generate(
        [list(b"\0" + p.encode()) for p in PROMPTS], vattn.Sampling(max_new_tokens=NEW_TOKENS)
    )
    same = [bytes(request.prompt[1:] + request.output) for request in requests] == texts
    for text in texts:
        print("-" * 40, text.decode(errors="replace"), sep="\n")
    print("-" * 40, f"the text of vattn.Generator: {same}", sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
