"""A Hugging Face model over several processes, one generator: rank 0 takes the prompts, the others follow.

    torchrun --nproc-per-node 2 examples/21_tensor_parallel.py [FOLDER]

Each process takes a GPU if there are enough, else all run on the CPU. Without a folder it takes the repository's model,
whose heads 2 and 4 processes can share.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import vattn
from vattn.cli.checkpoints import ByteTokenizer
from vattn.integrations.transformers import enable

PROMPTS = ["def add(a, b):\n    ", "import os\nimport ", "class Stack:\n    def __init__(self"]


def main(folder: Path | None) -> None:
    """Run one rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= world
    if on_gpu:
        torch.cuda.set_device(rank)
    # A collective that waits longer, because a rank hangs, ends this one.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))

    tokenizer = AutoTokenizer.from_pretrained(folder) if folder else ByteTokenizer()
    folder = folder or Path(__file__).parent / "demo_model"
    sharded = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharded, dtype=torch.float32).eval()
    packed = enable(model, num_blocks=64)
    generator = vattn.Generator(packed, tokenizer, max_num_reqs=4, group=dist.group.WORLD)
    if rank == 0:
        requests = generator.generate(PROMPTS, vattn.Sampling(max_new_tokens=32, stop_strings=("\n\n",)))
        for prompt, request in zip(PROMPTS, requests, strict=True):
            print("-" * 40, prompt + request.text, sep="\n")
        heads = model.get_submodule("model.layers.0.self_attn.vattn").num_heads
        print("-" * 40, f"{world} ranks, {heads} of {model.config.num_attention_heads} query heads on each", sep="\n")
        generator.close()
    else:
        generator.follow()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it by torchrun --nproc-per-node 2 examples/21_tensor_parallel.py")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
