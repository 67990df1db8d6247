"""Latent attention over an engine's own KV memory: blocks that lie apart, nothing written between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import vattn
from tests.layers.mla_support import make_mla_config, random_mla_batch, run_mla
from tests.support import poisoned_empty
from vattn.backends import selector
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape
from vattn.config.device import DeviceInfo
from vattn.config.mla import MLAConfig
from vattn.errors import CacheError, StrideError, UnsupportedRequestError
from vattn.ops.arguments_mla import MLACacheUpdateArgs
from vattn.quantization.mla_formats import MLA_FORMATS

BLOCKS, BLOCK = 6, 8
LATENT = {"fp8_ds_mla": 128, "nvfp4_ds_mla": 64}
BACKENDS = [
    name for name in ("TORCH_MLA", "TRITON_MLA") if not selector.explain(make_mla_config(backend=name)).refusals[name]
]


def config_of(kv_cache_dtype: str, **changes: Any) -> MLAConfig:
    return make_mla_config(kv_cache_dtype=kv_cache_dtype, kv_lora_rank=LATENT.get(kv_cache_dtype, 20), **changes)


def apart(storage: Tensor, gap: int, start: int = 8) -> Tensor:
    """Return a copy of a storage in a pool of 0xFF: blocks with gaps of so many elements, from element `start` on."""
    inside = storage[0].numel()
    pool = torch.empty(start + len(storage) * (inside + gap), dtype=storage.dtype, device=storage.device)
    pool.view(torch.uint8).fill_(0xFF)
    view = pool.as_strided(storage.shape, (inside + gap, *storage.stride()[1:]), start)
    return view.copy_(storage)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_cache_dtype", list(MLA_FORMATS))
def test_results_and_writes_do_not_depend_on_gaps(kv_cache_dtype: str, backend: str) -> None:
    dtype = kv_cache_dtype if kv_cache_dtype in ("float16", "bfloat16") else "float32"
    config = config_of(kv_cache_dtype, dtype=dtype, backend=backend)
    for lens in (([1, 1, 3], [9, 40, 3]), ([20, 1, 4], [30, 17, 4])):
        args = random_mla_batch(config, *lens, padding_tokens=1)
        expected, _ = run_mla(args, config)
        for gap in (4, args.kv_cache[0].numel()):
            result, _ = run_mla(args._replace(kv_cache=apart(args.kv_cache, gap)), config)
            assert torch.equal(result, expected)
    blocks = args.kv_cache.shape[0]
    rng, k_scale = torch.Generator().manual_seed(3), args.k_scale
    rows = [torch.randn(5, width, generator=rng) for width in (config.kv_lora_rank, config.qk_rope_head_dim)]
    rows = [row.to(args.query.dtype) for row in rows]
    slots = torch.tensor([3, 8 * blocks - 1, -1, 8 * blocks, 17])
    dense = poisoned_empty(mla_cache_shape(config, blocks), mla_cache_dtype(config))
    strided = apart(dense, 4)
    for storage in (dense, strided):
        torch.ops.vattn.mla_kv_cache_update(
            *MLACacheUpdateArgs(rows[0], rows[1], storage, slots, k_scale, config.encode())
        )
    assert torch.equal(strided.contiguous().view(torch.uint8), dense.view(torch.uint8))
    memory = torch.empty(0, dtype=dense.dtype).set_(strided.untyped_storage())
    between = memory[8:].view(blocks, -1)[:, dense[0].numel() :]
    assert bool((between.reshape(-1).view(torch.uint8) == 0xFF).all())


def make_layer(prefix: str = "layer") -> Any:
    torch.manual_seed(1)
    projection = nn.Linear(20, 3 * 22, bias=False)
    cache = vattn.CacheConfig(block_size=BLOCK)
    return vattn.MLAAttention(3, 0.2, 12, 6, 10, None, 20, projection, cache, prefix=prefix)


def step_of(lens: list[int]) -> Any:
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=16, max_seq_len=24, block_size=BLOCK)
    return builder.build(lens, lens, [[3, 5], [1, 2]])


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(shape, generator=rng) for shape in ((tokens, 3, 18), (tokens, 20), (tokens, 1, 6)))  # type: ignore[return-value]


@pytest.mark.parametrize("order", ["layers first", "layers inside blocks"])
def test_layers_are_parts_of_one_tensor(order: str) -> None:
    plain, layers = make_layer(), [make_layer("a"), make_layer("b")]
    vattn.allocate_kv_cache(plain, num_blocks=BLOCKS, dtype=torch.float32)
    pool = torch.full((2, BLOCKS, BLOCK, 26) if order == "layers first" else (BLOCKS, 2, BLOCK, 26), torch.nan)
    parts = [pool[i] if order == "layers first" else pool[:, i] for i in range(2)]
    for layer, part in zip(layers, parts, strict=True):
        layer.bind_kv_cache(part, torch.float32)
        assert layer.kv_cache.data_ptr() == part.data_ptr() and layer.kv_cache.stride() == part.stride()
    step, rows = step_of([7, 9]), inputs(16)
    with torch.no_grad():
        assert torch.equal(layers[1](*rows, metadata=step), plain(*rows, metadata=step))
    assert bool(parts[0].isnan().all())
    slots = step.slot_mapping
    assert not bool(parts[1][slots // BLOCK, slots % BLOCK].isnan().any())


def test_two_layers_of_one_tensor_compile_without_copies() -> None:
    layers, pool = nn.ModuleList([make_layer("a"), make_layer("b")]), torch.zeros(BLOCKS, 2, BLOCK, 26)
    for index, layer in enumerate(layers):
        layer.bind_kv_cache(pool[:, index], torch.float32)

    def run(query: Tensor, latent: Tensor, rope: Tensor, step: Any) -> Tensor:
        return layers[0](query, latent, rope, metadata=step) + layers[1](query, latent, rope, metadata=step)

    step, rows = step_of([7, 9]), inputs(16)
    with torch.no_grad():
        expected = run(*rows, step)
        result, code = run_and_get_code(torch.compile(run, fullgraph=True), *rows, step)
    assert torch.allclose(result, expected) and "clone" not in "".join(code)


def test_memory_that_latents_cannot_lie_in_is_refused_and_changes_nothing() -> None:
    layer = make_layer()
    vattn.allocate_kv_cache(layer, num_blocks=BLOCKS, dtype=torch.float32)
    before = layer.kv_cache, layer.config
    wide = torch.zeros(BLOCKS, BLOCK, 2 * 26)
    for storage, error in (
        (wide[..., :26], StrideError),
        (wide.as_strided((BLOCKS, BLOCK, 26), (BLOCK * 26 - 1, 26, 1)), StrideError),
        (torch.zeros(BLOCKS, 26, BLOCK).transpose(1, 2), StrideError),
        (torch.zeros(BLOCKS, BLOCK, 25), CacheError),
        (torch.zeros(BLOCKS, BLOCK, 26, dtype=torch.uint8), CacheError),
    ):
        with pytest.raises(error):
            layer.bind_kv_cache(storage, torch.float32)
        assert (layer.kv_cache, layer.config) == before
    config = config_of("fp8_ds_mla")
    args = random_mla_batch(config, [1], [9])
    with pytest.raises(StrideError, match="multiples of 4 bytes"):
        run_mla(args._replace(kv_cache=apart(args.kv_cache, 2)), config)


def test_libraries_read_no_gaps() -> None:
    """FLASHMLA is not installed here; its other reasons do not matter."""
    pool = torch.empty(4, 3, 64, 576, dtype=torch.bfloat16, device="meta")
    deepseek = partial(
        make_mla_config, num_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512,
        dtype="bfloat16", block_size=64,
    )  # fmt: skip
    request = deepseek(backend="FLASHMLA")
    for storage, refused in ((pool[:, 1], True), (pool.permute(1, 0, 2, 3)[1].contiguous(), False)):
        reasons = vattn.explain(request, DeviceInfo("cuda", (9, 0)), (storage, None)).refusals["FLASHMLA"]
        assert any("gaps between the blocks" in reason for reason in reasons) == refused
    with pytest.raises(UnsupportedRequestError, match="gaps between the blocks"):
        selector.choose(request, "cpu", memory=vattn.explain(request, "cpu", (pool[:, 1], None)).memory)
