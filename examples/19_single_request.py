"""One request at a time, as fast as the device goes: a decode step that is compiled once and never leaves the device.

The step reads its token, position and length from buffers and writes the next ones into them. On a GPU all of it, the
attention's plan too, is one CUDA graph: a token costs one launch. The host reads tokens when it wants to show them.

python examples/19_single_request.py ["a prompt"]
"""

import sys
import time
from pathlib import Path

import torch
from demo.checkpoint import build_llama, read_checkpoint
from demo.model import Llama
from torch import Tensor

import vattn

DEMO_MODEL = Path(__file__).parent / "demo_model"
BLOCK = 16


class Loop:
    """Generate for one request.

    Args:
        model: its layers are bound to memory of the loop.
        max_seq_len: longest prompt and output.
        temperature: 0 takes the likeliest token.
        compile: compile the decode step.
    """

    def __init__(self, model: Llama, max_seq_len: int = 1024, temperature: float = 0.0, compile: bool = True) -> None:
        self.model, self.max_seq_len, self.temperature = model, max_seq_len, temperature
        config, weight = model.config, model.embed_tokens.weight
        device = weight.device
        # The request has all blocks, in order: position p is in slot BLOCK + p, since block 0 is left to padding.
        blocks = 1 - -max_seq_len // BLOCK
        shape = (2, config.num_layers, blocks, BLOCK, config.num_kv_heads, config.head_size)
        self.memory = torch.zeros(shape, dtype=weight.dtype, device=device)
        for layer, keys, values in zip(model.layers, *self.memory, strict=True):
            layer.self_attn.attn.bind_kv_cache(keys, values)
        self.builder = vattn.AttentionMetadataBuilder(1, max_seq_len, max_seq_len, layers=model)
        self.table = torch.arange(1, blocks, dtype=torch.int32, device=device)[None]
        self.query_start_loc = torch.tensor([0, 1], dtype=torch.int32, device=device)
        self.token, self.position, self.slot, self.length = torch.zeros(4, 1, dtype=torch.int64, device=device)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(max_seq_len, dtype=torch.int64, device=device)
        self._decode = vattn.compile(self.decode) if compile else self.decode
        self._graph: torch.cuda.CUDAGraph | None = None

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token from logits `[1, vocab_size]`."""
        if self.temperature > 0:
            chances = (logits / self.temperature).softmax(-1)
            logits = chances / torch.empty_like(chances).exponential_()
        return logits.argmax(-1)

    def decode(self, token: Tensor, position: Tensor, slot: Tensor, length: Tensor, tokens: Tensor) -> None:
        """Compute a token, note the next one, and move all buffers on."""
        token.copy_(self.choose(self.model(token, position, self.row)))
        position.add_(1)
        slot.add_(1)
        length.add_(1)
        tokens.index_copy_(0, position, token)

    def step(self) -> None:
        """Run a decode step; device work alone."""
        step = self.builder.build_from_tensors(
            self.query_start_loc, self.length, self.table, self.slot, max_query_len=1
        )  # fmt: skip
        with vattn.forward_context(step):
            self._decode(self.token, self.position, self.slot, self.length, self.tokens)

    def capture(self) -> None:
        """Capture the step as a CUDA graph; the first runs compile it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.start(self.token, 0)
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.step()

    def start(self, token: Tensor, position: int) -> None:
        """Fill the buffers for a first step."""
        self.token.copy_(token)
        self.tokens[position : position + 1].copy_(token)
        self.position.fill_(position)
        self.slot.fill_(BLOCK + position)
        self.length.fill_(position + 1)

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Return the tokens after a prompt, up to the number wanted."""
        size = len(prompt)
        if size < 1 or count < 1 or size + count > self.max_seq_len:
            raise ValueError(f"{size} + {count} tokens; one of each and {self.max_seq_len} together are allowed")
        if self.token.is_cuda and self._graph is None:
            self.capture()
        step = self.builder.build([size], [size], [self.table[0].tolist()])
        inputs = torch.tensor(prompt, device=self.token.device)
        with vattn.forward_context(step):
            logits = self.model(inputs, step.positions, self.row + size - 1)
        self.start(self.choose(logits), size)
        for _ in range(count - 1):
            if self._graph is not None:
                self._graph.replay()
            else:
                self.step()
        return self.tokens[size : size + count].tolist()


def main() -> None:
    text = sys.argv[1] if len(sys.argv) > 1 else "class Stack:\n    def __init__(self"
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    loop = Loop(build_llama(*read_checkpoint(DEMO_MODEL), dtype=dtype, device=device))
    prompt = [0, *text.encode()]  # a token is a byte, and byte 0 begins a text
    for run in ("with compilation", "after it"):
        begin = time.perf_counter()
        output = loop.generate(prompt, 200)
        print(f"{run}: {len(output)} tokens in {time.perf_counter() - begin:.2f} s")
    print(text + bytes(output).decode(errors="replace"))


if __name__ == "__main__":
    main()
