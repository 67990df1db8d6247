"""Keep a long prefix outside of the KV cache: offload it, evict it, load it again, and continue with the same bits.

Questions about one long text arrive one after the other, and between them the cache is needed for something else. The
text's blocks are kept in host memory, or in files that outlive the process, and loaded while the next step computes.
"""

import tempfile
import time
from pathlib import Path

import torch
from demo.checkpoint import build_llama, read_checkpoint
from torch import Tensor

import vattn
from vattn.cache.block_pool import BlockTable
from vattn.generation import model_inputs

FOLDER = Path(__file__).parent / "demo_model"
TEXT = "".join(f"def step_{number}(self):\n    return self.state[{number}]\n\n" for number in range(12))
QUESTIONS = ("def step_12(self", "def test_step_3(self", "class State")


class Reader:
    """The demo's model, its cache, and a connector."""

    def __init__(self, connector: vattn.KVConnector) -> None:
        self.model = build_llama(*read_checkpoint(FOLDER))
        self.cache = vattn.allocate_kv_cache(self.model, num_blocks=48)
        self.pool = vattn.BlockPool(self.cache.num_blocks)
        self.builder = vattn.AttentionMetadataBuilder(2, 1024, 1024, layers=self.model)
        self.transfer = vattn.KVTransfer(self.model, self.cache, connector, namespace="demo")

    @torch.no_grad()
    def run(self, tokens: list[int], table: BlockTable, **transfers: list[vattn.TransferRequest]) -> Tensor:
        """Compute the last tokens of a request and return the logits after them."""
        step = self.builder.build([len(tokens)], [table.num_tokens], [table.blocks])
        with self.transfer.step(**transfers) as transferred, vattn.forward_context(step):
            logits: Tensor = self.model(*model_inputs(tokens, step))
        for error in transferred.failed.values():
            raise error
        return logits[0]

    def answer(self, question: str) -> tuple[Tensor, str]:
        """Return the logits after the text and a question, and where the text came from."""
        text, size = [0, *TEXT.encode()], self.cache.block_size
        keys = tuple(vattn.block_keys(text, size))
        prefix, rest = text[: len(keys) * size], text[len(keys) * size :] + list(question.encode())
        table = BlockTable(self.pool, size)
        table.append(len(prefix))
        transfer = vattn.TransferRequest(question, keys, tuple(table.blocks))
        loads, source = [transfer], "loaded"
        if self.transfer.find(keys) < len(keys):
            self.run(prefix, table, saves=[transfer])
            loads, source = [], "computed and saved"
        table.append(len(rest))
        logits = self.run(rest, table, loads=loads)
        table.free()
        # Another request takes the whole cache and overwrites the text.
        for storage in self.cache.kv_caches:
            storage.fill_(float("nan"))
        return logits, f"{len(keys)} blocks {source}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers: dict[str, list[Tensor]] = {question: [] for question in QUESTIONS}
        for name in ("host memory", "files", "files, read by a second reader"):
            kept = vattn.HostMemoryConnector("64MiB") if name == "host memory" else vattn.FileConnector(folder)
            reader = Reader(kept)
            for question in QUESTIONS:
                start = time.perf_counter()
                logits, what = reader.answer(question)
                seconds = time.perf_counter() - start
                answers[question].append(logits)
                failed = reader.transfer.wait_for_saves()
                assert not failed, failed
                print(f"{name}: {what} for {question!r} in {seconds * 1e3:.0f} ms")
            assert reader.pool.num_used == 0
            reader.transfer.detach()
    for question, logits in answers.items():
        equal = all(torch.equal(other, logits[0]) for other in logits)
        print(f"after {question!r} comes {chr(int(logits[0].argmax()))!r}; equal bits every time: {equal}")
        assert equal


if __name__ == "__main__":
    main()
