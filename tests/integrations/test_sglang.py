"""vattn inside SGLang's interface on a CPU, over SGLang's own pools, layers and batches.

Real: the installed package's backend base class, registry, pools, layers, batches and server arguments. Not run: its
scheduler, model runner and CUDA graphs, which need a model and a GPU. Each result is compared with dense attention in
fp64 over what was given, and plain ones with SGLang's own `torch_native` backend too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integrations.sglang_engine import (
    HEADS,
    KV_HEADS,
    SCALE,
    SIZE,
    ForwardBatch,
    ForwardContext,
    ForwardMode,
    RadixAttention,
    Scheduler,
    TorchNativeAttnBackend,
    forward_context,
    make_layer,
    make_pool,
    make_runner,
    make_swa_pool,
)
from tests.support import relative_l2
from vattn.backends import dispatch, selector
from vattn.integrations.sglang import create_backend

STEPS = (
    ({0: 20, 1: 37}, ForwardMode.EXTEND),
    ({2: 5, 0: 13}, ForwardMode.EXTEND),
    ({1: 1, 2: 16, 0: 1}, ForwardMode.MIXED),
    ({2: 1, 0: 1, 1: 1}, ForwardMode.DECODE),
    ({0: 1}, ForwardMode.DECODE),
)
"""New tokens of the requests of each step: prompts, chunks of them, chunks beside decodes, decodes, one of them."""


class Dense:
    """Dense attention in fp64 over all keys and values that each request got."""

    def __init__(self, value_size: int = SIZE) -> None:
        self.value_size, self.seen = value_size, dict[int, tuple[Tensor, Tensor]]()

    def step(
        self, new: dict[int, int], query: Tensor, key: Tensor, value: Tensor, layer: RadixAttention, sinks: Any
    ) -> Tensor:
        """Return the output rows of one step, after its keys and values."""
        rows, start = [], 0
        for request, count in new.items():
            part = slice(start, start := start + count)
            empty = torch.empty(0, KV_HEADS, SIZE), torch.empty(0, KV_HEADS, self.value_size)
            seen = self.seen.get(request, empty)
            keys, values = torch.cat([seen[0], key[part]]), torch.cat([seen[1], value[part]])
            self.seen[request] = keys, values
            rows.append(self._attend(query[part], keys, values, layer, sinks))
        return torch.cat(rows).flatten(1)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, layer: RadixAttention, sinks: Any) -> Tensor:
        keys, values = (t.double().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for t in (keys, values))
        scores = query.double().transpose(0, 1) @ keys.mT * SCALE
        if layer.logit_cap:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        length, count = keys.shape[1], query.shape[0]
        places, ends = torch.arange(length), torch.arange(length - count, length)[:, None]
        hidden = places > ends
        if layer.sliding_window_size >= 0:  # tokens to the left of a row
            hidden |= places < ends - layer.sliding_window_size
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], -1)
            values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
        return (scores.softmax(-1) @ values).transpose(0, 1)


def rows(new: dict[int, int], rng: torch.Generator, dtype: torch.dtype, value_size: int = SIZE) -> tuple[Tensor, ...]:
    """Return query, key and value of a step as slices of one projection, as models have them."""
    widths = HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * value_size
    return torch.randn(sum(new.values()), sum(widths), generator=rng).to(dtype).split(widths, -1)


def run(
    pool: Any, layers: list[RadixAttention], dtype: torch.dtype = torch.float32, value_size: int = SIZE, **kwargs: Any
) -> tuple[Any, list[float]]:
    """Run all steps through each layer as models do; return the backend and the errors against fp64."""
    runner = make_runner(pool, *layers, dtype=dtype)
    backend, scheduler, rng = create_backend(runner), Scheduler(runner), torch.Generator().manual_seed(1)
    dense, errors = [Dense(value_size) for _ in layers], []
    for new, mode in STEPS:
        batch = scheduler.batch(new, mode)
        backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=backend)):
            for layer, expected in zip(layers, dense, strict=True):
                query, key, value = rows(new, rng, dtype, value_size)
                given = query.view(-1, HEADS, SIZE), key.view(-1, KV_HEADS, SIZE), value.view(-1, KV_HEADS, value_size)
                stored = [_stored(tensor, scale, pool) for tensor, scale in zip(given[1:], _scales(layer), strict=True)]
                wanted = expected.step(new, given[0], *stored, layer, kwargs.get("sinks"))
                output = layer(query, key, value, batch, **kwargs)
                assert output.dtype == dtype and output.shape == (query.shape[0], HEADS * value_size)
                errors.append(relative_l2(output, wanted))
    return backend, errors


def _scales(layer: RadixAttention) -> list[float]:
    return [1.0 if scale is None else float(scale) for scale in (layer.k_scale, layer.v_scale)]


def _stored(tensor: Tensor, scale: float, pool: Any) -> Tensor:
    if pool.dtype.itemsize > 1:
        return tensor
    limit = torch.finfo(pool.dtype).max
    return (tensor.float() / scale).clamp(-limit, limit).to(pool.dtype).float() * scale


LAYERS = {
    "plain": {},
    "window": {"sliding_window_size": 7},
    "soft cap": {"logit_cap": 5.0},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_prompts_chunks_and_decodes_are_right(page_size: int, options: dict[str, Any]) -> None:
    _, errors = run(make_pool(page_size), [make_layer(0, **options), make_layer(1)])
    assert max(errors) < 1e-5


@pytest.fixture
def triton_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have layers on the CPU run the general Triton kernel, in Triton's interpreter."""
    with monkeypatch.context() as patch:
        patch.setitem(selector.PRIORITY, "cpu", ("TRITON_ATTN",))
        selector.forget_decisions()
        yield
    selector.forget_decisions()


@pytest.mark.usefixtures("triton_first")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_kernel_of_gpus_is_right_in_this_memory(dtype: torch.dtype) -> None:
    layers = [make_layer(0), make_layer(1, sliding_window_size=7)]
    assert max(run(make_pool(dtype=dtype), layers, torch.bfloat16)[1]) < 1e-2


def test_layers_of_one_kind_share_one_schedule_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_type = type(selector.get_backend("TORCH_SDPA"))
    monkeypatch.setattr(backend_type, "plan_shape", lambda *args: (4,))
    monkeypatch.setattr(backend_type, "plan", lambda self, args, config: args.schedule.add_(1))
    runner = make_runner(make_pool(), *(layers := [make_layer(0), make_layer(1)]))
    backend, scheduler, given = create_backend(runner), Scheduler(runner), []

    def attend(*args: Any) -> None:
        given.append([tensor.data_ptr() for tensor in args[-3]])

    monkeypatch.setattr(dispatch, "attention", attend)
    batch = scheduler.batch({0: 6, 1: 2}, ForwardMode.EXTEND)
    backend.init_forward_metadata(batch)
    (schedule,) = backend.forward_metadata[False].plans.values()
    query, key, value = (t.reshape(-1, t.shape[-1] // SIZE, SIZE) for t in rows({0: 8}, scheduler.rng, torch.float32))
    for layer in layers:
        backend.forward(query, key, value, layer, batch)
    # The engine may leave out rows of a padded step; the schedule holds them.
    backend.forward(query[:7], key[:7], value[:7], layers[0], batch)
    assert given == [[schedule.data_ptr()], [schedule.data_ptr()], []]
    assert schedule.tolist() == [1] * 4


def test_sinks_are_right_and_known_before_the_first_step() -> None:
    sinks = torch.randn(HEADS)
    layer = make_layer()
    assert max(run(make_pool(), [layer], sinks=sinks)[1]) < 1e-5
    runner = make_runner(make_pool(), layer)
    runner.model.get_submodule("0").sinks = torch.nn.Parameter(sinks)
    assert create_backend(runner)._layers[layer].config.sinks


def test_values_of_another_width_are_right() -> None:
    pool, layer = make_pool(v_head_dim=24), make_layer(v_head_dim=24)
    assert max(run(pool, [layer], value_size=24)[1]) < 1e-5


def test_bf16_is_right() -> None:
    assert max(run(make_pool(dtype=torch.bfloat16), [make_layer()], torch.bfloat16)[1]) < 1e-2


@pytest.mark.parametrize(
    "dtype, scales",
    [
        (torch.float8_e4m3fn, "none"),
        (torch.float8_e4m3fn, "parameters"),
        (torch.float8_e4m3fn, "numbers"),
        (torch.float8_e5m2, "parameters"),
    ],
)
def test_fp8_caches_use_the_scales_of_the_engine(dtype: torch.dtype, scales: str) -> None:
    layer = make_layer()
    if scales == "parameters":
        layer.k_scale, layer.v_scale = (
            torch.nn.Parameter(torch.tensor(scale), requires_grad=False) for scale in (0.005, 0.03)
        )
    elif scales == "numbers":
        layer.k_scale, layer.v_scale = 0.005, 0.03  # keys beyond the range too
    backend, errors = run(make_pool(dtype=dtype), [layer], torch.bfloat16)
    assert max(errors) < 1e-2
    if scales == "parameters":
        assert backend._layers[layer].k_scale.data_ptr() == layer.k_scale.data_ptr()


def test_a_pool_with_heads_before_tokens_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = make_pool()
    assert pool.get_key_buffer(0).shape[1:] == (KV_HEADS, 16, SIZE)
    assert max(run(pool, [make_layer(0), make_layer(1)])[1]) < 1e-5


def test_the_pool_of_windows_of_its_own_ids_is_right() -> None:
    layers = [make_layer(0), make_layer(1, sliding_window_size=7)]
    backend, errors = run(make_swa_pool(), layers)
    assert max(errors) < 1e-5
    assert [backend._layers[layer].windowed for layer in layers] == [False, True]
    tables = [backend.forward_metadata[windowed].block_table[0, 0] for windowed in (False, True)]
    assert tables[0] != tables[1]


@pytest.mark.parametrize("windowed", [False, True])
def test_the_engine_gets_the_same_of_its_own_backend(windowed: bool) -> None:
    layer = make_layer(sliding_window_size=7 if windowed else -1)
    runners = [make_runner(make_pool(), layer) for _ in range(2)]
    ours, theirs = create_backend(runners[0]), TorchNativeAttnBackend(runners[1])
    schedulers, rng = [Scheduler(runner) for runner in runners], torch.Generator().manual_seed(2)
    for new, mode in STEPS:
        query, key, value = rows(new, rng, torch.float32)
        outputs = []
        for backend, scheduler in zip((ours, theirs), schedulers, strict=True):
            batch = scheduler.batch(new, mode)
            backend.init_forward_metadata(batch)
            split = key.reshape(-1, KV_HEADS, SIZE), value.reshape(-1, KV_HEADS, SIZE)
            outputs.append(backend.forward(query.contiguous(), *split, layer, batch))
        assert relative_l2(*outputs) < 1e-5
    for name in ("k_buffer", "v_buffer"):
        assert torch.equal(*(getattr(runner.token_to_kv_pool, name)[0] for runner in runners))


def test_keys_and_values_lie_in_the_memory_of_the_engine_and_nothing_else_changes() -> None:
    pool, layers = make_pool(), [make_layer(0), make_layer(1)]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(7.0)
    runner = make_runner(pool, *layers)
    backend, scheduler = create_backend(runner), Scheduler(runner)
    batch = scheduler.batch({0: 20, 1: 3}, ForwardMode.EXTEND)
    backend.init_forward_metadata(batch)
    query, key, value = (tensor.contiguous() for tensor in rows({0: 23}, scheduler.rng, torch.float32))
    key, value = key.view(-1, KV_HEADS, SIZE), value.view(-1, KV_HEADS, SIZE)
    backend.forward(query, key, value, layers[1], batch)
    calls = backend._layers[layers[1]].calls
    views = calls.key_cache, calls.value_cache
    for buffer, stored, view in zip((pool.k_buffer, pool.v_buffer), (key, value), views, strict=True):
        assert view.data_ptr() == buffer[1].data_ptr() and view.shape[1:] == (16, KV_HEADS, SIZE)
        assert torch.equal(buffer[1][batch.out_cache_loc], stored)
        others = torch.ones(buffer[1].shape[0], dtype=torch.bool).index_fill(0, batch.out_cache_loc, False)
        assert bool((buffer[0] == 7).all()) and bool((buffer[1][others] == 7).all())
    before = [buffer[1].clone() for buffer in (pool.k_buffer, pool.v_buffer)]
    again = backend.forward(query, key + 1, value + 1, layers[1], batch, save_kv_cache=False)
    shared = backend.forward(query, None, None, layers[1], batch)
    assert torch.equal(again, shared)
    assert all(torch.equal(old, buffer[1]) for old, buffer in zip(before, (pool.k_buffer, pool.v_buffer), strict=True))


class NoSync(TorchDispatchMode):
    """Raise where a value of a tensor reaches the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default and func is not torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def test_a_decode_step_of_a_graph_has_fixed_addresses_no_sync_and_harmless_padding() -> None:
    """What a capture records: the part of the step that runs in the graph, once for all lengths."""
    runner = make_runner(make_swa_pool(), make_layer(0), layer := make_layer(1, sliding_window_size=7))
    backend, scheduler = create_backend(runner), Scheduler(runner)
    backend.init_cuda_graph_state(8, 8)
    prompt = scheduler.batch({0: 30, 1: 4}, ForwardMode.EXTEND)
    backend.init_forward_metadata(prompt)
    dense, rng = Dense(), torch.Generator().manual_seed(3)
    query, key, value = (t.reshape(-1, t.shape[-1] // SIZE, SIZE) for t in rows({0: 34}, rng, torch.float32))
    dense.step({0: 30, 1: 4}, query, key, value, layer, None)
    backend.forward(query, key, value, layer, prompt)

    captured = scheduler.batch({0: 1, 1: 1}, ForwardMode.DECODE, padding=2)
    static = {name: getattr(captured, name) for name in ("req_pool_indices", "seq_lens", "out_cache_loc")}
    addresses = []
    for step in range(3):
        replayed = captured if step == 0 else scheduler.batch({0: 1, 1: 1}, ForwardMode.DECODE, padding=2)
        for name, buffer in static.items():
            buffer.copy_(getattr(replayed, name))
        backend.init_forward_metadata_out_graph(captured, in_capture=True)
        with NoSync():
            backend.init_forward_metadata_in_graph(captured)
        tensors = [t for step in backend.forward_metadata.values() for t in (step.seq_lens, step.block_table)]
        addresses.append([tensor.data_ptr() for tensor in tensors])
        query, key, value = (t.reshape(-1, t.shape[-1] // SIZE, SIZE) for t in rows({0: 4}, rng, torch.float32))
        wanted = dense.step({0: 1, 1: 1}, query[:2], key[:2], value[:2], layer, None)
        output = backend.forward(query, key, value, layer, captured)
        assert relative_l2(output[:2], wanted) < 1e-5 and bool(output.isfinite().all())
    assert addresses[0] == addresses[1] == addresses[2]


def test_idle_steps_and_a_full_batch_after_one() -> None:
    runner = make_runner(make_pool(), layer := make_layer())
    backend, scheduler = create_backend(runner), Scheduler(runner)
    idle = ForwardBatch(
        forward_mode=ForwardMode.IDLE,
        batch_size=0,
        input_ids=torch.zeros(0, dtype=torch.int64),
        req_pool_indices=torch.zeros(0, dtype=torch.int64),
        seq_lens=torch.zeros(0, dtype=torch.int64),
        out_cache_loc=torch.zeros(0, dtype=torch.int64),
        seq_lens_sum=0,
    )
    backend.init_forward_metadata(idle)
    assert backend.forward(torch.zeros(0, HEADS * SIZE), None, None, layer, idle).shape == (0, HEADS * SIZE)
    backend.forward_metadata = None  # the engine's way to drop the last step
    batch = scheduler.batch({0: 3, 1: 1, 2: 2, 3: 1}, ForwardMode.EXTEND)
    backend.init_forward_metadata(batch)
    query, key, value = (t.reshape(-1, t.shape[-1] // SIZE, SIZE) for t in rows({0: 7}, scheduler.rng, torch.float32))
    assert backend.forward(query, key, value, layer, batch).shape == (7, HEADS * SIZE)
