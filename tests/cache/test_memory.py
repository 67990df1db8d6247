"""What `CacheMemory` says of the strides and addresses of a cache."""

from __future__ import annotations

import torch

from vattn.cache.memory import CacheMemory


def test_gaps() -> None:
    pool = torch.zeros(2, 5, 3, 16, 2, 64).bfloat16()
    assert not CacheMemory.of(pool[0, :, 1], pool[1, :, 1]).dense
    whole = pool[:, :, 1].contiguous()
    assert CacheMemory.of(whole[0], whole[1]).dense
    heads_first = whole.transpose(2, 3).contiguous().transpose(2, 3)
    assert CacheMemory.of(heads_first[0], heads_first[1]).dense
    assert not CacheMemory.of(whole[0], pool[1, :, 1]).dense
    latent = torch.zeros(5, 3, 16, 64)
    assert not CacheMemory.of(latent[:, 1]).dense and CacheMemory.of(latent[1]).dense


def test_rows_start_at_multiples_of_what_divides_every_stride_and_the_address() -> None:
    memory = torch.zeros(100000, dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    for strides, offset, alignment in (
        ((4096, 256, 128), 0, 16), ((4096, 256, 128), 4, 4), ((4096, 256, 136), 0, 8), ((4097, 256, 128), 0, 1),
        ((4096, 258, 128), 16, 2),
    ):  # fmt: skip
        view = memory.as_strided((3, 4, 2, 64), (*strides, 1), offset)
        assert CacheMemory.of(view, memory[:64].view(1, 1, 1, 64)).row_alignment == alignment
        on_meta = torch.empty(100000, dtype=torch.uint8, device="meta").as_strided(view.shape, view.stride(), offset)
        assert CacheMemory.of(on_meta).row_alignment == alignment
    assert CacheMemory.of(memory.as_strided((3, 4, 1, 64), (4096, 256, 1, 1))).row_alignment == 16
    wide = torch.zeros(3, 4, 2, 66)[..., :64]
    assert CacheMemory.of(wide, wide).row_alignment == 8
