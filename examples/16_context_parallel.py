"""One KV cache over two processes: a prompt and some decodes, and the same attention with the whole cache beside it.

Each process holds every other run of 4 tokens and half of the query heads. Run it with
`python examples/16_context_parallel.py`; it starts the processes itself.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import vattn
from vattn.distributed import ContextParallel

WORLD, HEADS, KV_HEADS, SIZE, HIDDEN = 2, 8, 2, 32, 256
STEPS = ((50, 50), (1, 51), (3, 54), (1, 55))
"""New tokens, and tokens in all."""


class Block(torch.nn.Module):
    """Attention with its projections: a rank has its heads' rows of the query's and columns of the output's."""

    def __init__(self, parallel=None):
        super().__init__()
        torch.manual_seed(0)
        query, output = torch.randn(HEADS * SIZE, HIDDEN) / 16, torch.randn(HIDDEN, HEADS * SIZE) / 16
        self.key_value = torch.nn.Parameter(torch.randn(2 * KV_HEADS * SIZE, HIDDEN) / 16)
        if parallel is not None:
            query = query.chunk(parallel.world_size, 0)[parallel.rank]
            output = output.chunk(parallel.world_size, 1)[parallel.rank]
        self.query, self.output = torch.nn.Parameter(query.clone()), torch.nn.Parameter(output.clone())
        self.attention = vattn.Attention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, context_parallel=parallel)
        self.parallel = parallel

    def forward(self, hidden, metadata):
        key, value = (hidden @ self.key_value.T).chunk(2, -1)
        attended = self.attention(hidden @ self.query.T, key, value, metadata=metadata)
        result = attended @ self.output.T
        if self.parallel is not None:
            dist.all_reduce(result)
        return result


def make(block, blocks, **more):
    """Give a block a cache and a builder."""
    cache = vattn.allocate_kv_cache(block, num_blocks=blocks, dtype=torch.float32)
    return cache, vattn.AttentionMetadataBuilder(2, 64, 64, layers=block, **more)


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    parallel = ContextParallel.of(interleave=4)
    block, whole = Block(parallel), Block()
    # A block of the shared cache holds 16 tokens of each rank, so half as many blocks hold as much.
    cache, builder = make(block, 3, context_parallel=parallel)
    whole_cache, whole_builder = make(whole, 5)
    lines = [f"rank {rank}: {cache.total_bytes} bytes of cache instead of {whole_cache.total_bytes}"]
    for new, total in STEPS:
        hidden = torch.randn(new, HIDDEN, generator=torch.Generator().manual_seed(total))
        step = builder.build([new], [total], [[1, 2]])
        held = int(step.local_seq_lens[0])
        with torch.no_grad():
            got = block(hidden, step)
            wanted = whole(hidden, whole_builder.build([new], [total], [[1, 2, 3, 4]]))
        distance = (got - wanted).norm() / wanted.norm()
        lines.append(f"rank {rank}: holds {held} of {total} tokens, relative distance to one rank {distance:.1e}")
    # Steps that differ are reported on both ranks, before either waits for a result.
    try:
        builder.build([1], [56 + rank], [[1, 2]])
    except vattn.errors.RankError as error:
        lines.append(f"rank {rank}: {str(error).partition('. ')[0]}")
    Path(folder, str(rank)).write_text("\n".join(lines))
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (folder,), nprocs=WORLD)
        for rank in range(WORLD):
            print(Path(folder, str(rank)).read_text())


if __name__ == "__main__":
    main()
