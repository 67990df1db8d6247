"""Random batches full of garbage where garbage is allowed, and the error measure of the test suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn
from vattn.backends import selector
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.cache.stored_rows import decode_stored, encode_stored
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, VarlenAttentionArgs
from vattn.ops.reference import attention as reference
from vattn.ops.reference.attention import held_positions
from vattn.ops.reference.mask import visible_mask
from vattn.quantization.codecs import dequantise_output, encode_kv, encode_query, load_query
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS, OutputFormat

GARBAGE_BYTE = 0xFF
"""Repeated, it is NaN in every float format that vattn stores."""


def usable(name: str) -> str:
    """Return the name of a backend, or skip the test with the reason why it cannot be used here."""
    problem = selector.get_backend(name).problem()
    if problem is not None:
        pytest.skip(problem)
    return name


@contextmanager
def no_sync() -> Iterator[None]:
    """Raise where the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call that has run before in a CUDA graph; return the graph and what the call returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def record_calls(monkeypatch: pytest.MonkeyPatch, functions: dict[str, tuple[Any, str]]) -> list[str]:
    """Return a list that gets a name at each call of a function, given as its module and attribute; nothing replays."""
    from vattn.backends import dispatch

    ran: list[str] = []
    monkeypatch.setattr(dispatch, "replay_or_run", lambda recordings, args, run: run())

    def recorded(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return inner(*args, **options)

        return run

    for name, (module, attribute) in functions.items():
        monkeypatch.setattr(module, attribute, recorded(name, getattr(module, attribute)))
    return ran


def relative_l2(got: Tensor, expected: Tensor) -> float:
    """Return `|got - expected| / |expected|` in float64; equal infinities agree, NaN anywhere gives NaN."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    difference = torch.where(got == expected, 0.0, got - expected)
    size = torch.where(expected.isinf(), 0.0, expected).norm()
    return float(difference.norm() / size.clamp(min=1e-30)) if bool(difference.any()) or bool(size.isnan()) else 0.0


def contents(owner: Any) -> dict[str, Tensor]:
    """Copy the bytes of a layer's buffers, its cache included, of a step, of an op's arguments or of a tensor."""
    if isinstance(owner, tuple):
        named = owner._asdict()
    elif isinstance(owner, Tensor):
        named = {"tensor": owner}
    else:
        named = owner._buffers if isinstance(owner, torch.nn.Module) else owner.tensors()
    tensors = {name: t.detach() for name, t in named.items() if isinstance(t, Tensor) and not t.is_meta}
    whole = torch.contiguous_format
    return {name: t.clone(memory_format=whole).view(-1).view(torch.uint8) for name, t in tensors.items()}


@contextmanager
def unchanged(owner: Any) -> Iterator[None]:
    """Check that a block changes nothing of `contents`."""
    before = contents(owner)
    yield
    now = contents(owner)
    changed = [name for name, old in before.items() if name not in now or not torch.equal(old, now[name])]
    assert now.keys() == before.keys() and not changed, f"changed {changed}"


def poisoned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a contiguous tensor whose every byte is 0xFF: NaN in every float format."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if tensor.numel():
        tensor.view(torch.uint8).fill_(GARBAGE_BYTE)
    return tensor


def make_config(**changes: Any) -> AttentionConfig:
    """Return a small fp32 config with some fields changed; dependent fields follow (cache dtype, scale kinds)."""
    values: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", **changes}
    values.setdefault("head_size_v", values["head_size"])
    values.setdefault("scale", values["head_size"] ** -0.5)
    values.setdefault("kv_cache_dtype", values["dtype"])
    if KV_FORMATS[values["kv_cache_dtype"]].quantised:
        values.setdefault("kv_scale", "tensor")
    if values.get("query_format", "none") != "none":
        values.setdefault("query_scale", "tensor")
    return AttentionConfig(**values)


@dataclass
class Batch:
    """Arguments of one attention call and what they were made from.

    Attributes:
        args: `AttentionArgs` or `VarlenAttentionArgs`, complete; outputs are filled with garbage.
        config: the config whose string is in `args`.
        query_lens, seq_lens: of the real requests.
        keys, values: fp32 `[s, K, *]` of each real request, as stored (after quantisation).
        queries: fp32 `[q, H, D]` of each real request, as stored.
    """

    args: Any
    config: AttentionConfig
    query_lens: list[int]
    seq_lens: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return sum(self.query_lens)

    def with_backend(self, name: str) -> Batch:
        """Return the same batch for another backend, with outputs of its own."""
        config = self.config.replace(backend=name)
        outputs = {field: poisoned_like(getattr(self.args, field)) for field in ("output", "output_block_scale", "lse")}
        return replace(self, config=config, args=self.args._replace(config=config.encode(), **outputs))

    def planned(self) -> Batch:
        """Return the batch with the plan that a builder makes for its backend, if that takes one."""
        args, backend = self.args, selector.get_backend(self.config.backend)
        shape = backend.plan_shape(self.config, args.query.shape[0], *args.block_table.shape)
        if not shape:
            return self
        schedule = torch.full(shape, -1, dtype=torch.int32, device=args.query.device)
        torch.ops.vattn.plan(args.query_start_loc, args.seq_lens, schedule, args.config)
        return replace(self, args=args._replace(plan=[schedule]))

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Call the op; return the output as fp32 `[T, H, V]` (dequantised) and the LSE."""
        import vattn.ops.schemas  # noqa: F401  registers the ops

        is_paged = isinstance(self.args, AttentionArgs)
        op = torch.ops.vattn.attention if is_paged else torch.ops.vattn.varlen_attention
        op(*self.args)
        return self.output(), self.args.lse

    def output(self) -> Tensor:
        """Return what the output tensors hold, dequantised to fp32 `[T, H, V]`."""
        args = self.args
        return dequantise_output(args.output, self.config.output_format, args.output_block_scale, args.output_scale)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the reference's fp32 output before any rounding, and LSE."""
        if isinstance(self.args, AttentionArgs):
            return reference.paged_attention(self.args, self.config)
        return reference.packed_attention(self.args, self.config)


def with_cache(model: Any, num_blocks: int) -> Any:
    """Return a layer or model with an fp32 cache."""
    vattn.allocate_kv_cache(model, num_blocks=num_blocks, dtype=torch.float32)
    return model


def moved(args: Any, device: torch.device | str) -> Any:
    """Return an op's arguments with every tensor on a device, keys and values as views of one storage there."""
    there = args._replace(**{name: t.to(device) for name, t in args._asdict().items() if isinstance(t, Tensor)})
    return with_storage(there, storage_of(args).to(device)) if hasattr(args, "key_cache") else there


def storage_of(args: Any) -> Tensor:
    """Return the raw storage that an op's keys and values are views of."""
    if args.value_cache is None:
        return args.key_cache
    config, keys = AttentionConfig.parse(args.config), args.key_cache
    flat = torch.empty(0, dtype=kv_cache_dtype(config), device=keys.device).set_(keys.untyped_storage())
    return flat.view(kv_cache_shape(config, keys.shape[0]))


def with_storage(args: Any, storage: Tensor) -> Any:
    """Return an op's arguments with the keys and values of another raw storage."""
    key_cache, value_cache = op_views(storage, AttentionConfig.parse(args.config))
    return args._replace(key_cache=key_cache, value_cache=value_cache)


def poisoned_like(tensor: Tensor | None) -> Tensor | None:
    """Return `poisoned_empty` of a tensor's shape and strides."""
    if tensor is None:
        return None
    if tensor.ndim == 2 and not tensor.is_contiguous():
        return poisoned_empty(tensor.shape[::-1], tensor.dtype, tensor.device).t()
    return poisoned_empty(tensor.shape, tensor.dtype, tensor.device)


def random_paged_batch(
    config: AttentionConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    table_width: int | None = None,
    poison: bool = True,
    num_padding_tokens: int = 0,
    num_padding_reqs: int = 0,
) -> Batch:
    """Return a random paged batch with every tensor that the config asks for.

    With `poison`, NaN fills unused blocks, unwritten tails, blocks that no row sees and padding rows of the query, and
    unused table entries hold ids in and out of range. Blocks of a request are scattered over the cache.

    Args:
        query_lens, seq_lens: of the real requests; a query longer than its sequence is allowed.
        table_width: columns of the block table, by default one more than needed.
    """
    rng = torch.Generator().manual_seed(seed)
    keys, values, scales = _keys_and_values(config, seq_lens, rng)
    masks = _mask_inputs(config, seq_lens, num_padding_reqs, rng)
    held = seq_lens if config.dcp_shard is None else [config.dcp_shard.count(length) for length in seq_lens]
    needed = [-(-length // config.block_size) for length in held]
    num_blocks = sum(needed) + 3
    width = max([1, *needed]) + 1 if table_width is None else table_width
    kv_cache = torch.zeros(kv_cache_shape(config, num_blocks), dtype=kv_cache_dtype(config))
    if poison:
        kv_cache.view(torch.uint8).fill_(GARBAGE_BYTE)
    table = _garbage_ids((len(seq_lens) + num_padding_reqs, width), num_blocks, rng)
    free = torch.randperm(num_blocks, generator=rng).tolist()
    for request, count in enumerate(needed):
        blocks, free = torch.tensor(free[:count], dtype=torch.long), free[count:]
        table[request, :count] = blocks[:width].int()
        places = held_positions(config.dcp_shard, held[request], torch.device("cpu"))
        own = slice(None) if places is None else places
        _store(kv_cache, blocks, keys[request][own], values[request][own], scales, config)
        if poison:
            hidden = _hidden_blocks(config, masks, request, query_lens[request], seq_lens[request])
            kv_cache.view(torch.uint8)[(blocks[hidden],) if kv_cache.ndim == 2 else (slice(None), blocks[hidden])] = (
                GARBAGE_BYTE
            )
    query, queries, q_scale = _query(config, query_lens, num_padding_tokens, poison, rng)
    key_cache, value_cache = op_views(kv_cache, config)
    args = AttentionArgs(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        query_start_loc=_starts(query_lens, num_padding_reqs),
        seq_lens=torch.tensor([*seq_lens, *[0] * num_padding_reqs], dtype=torch.int32),
        block_table=table,
        **_outputs(config, query.shape[0]),
        q_scale=q_scale,
        k_scale=scales[0],
        v_scale=scales[1],
        **masks,
        local_seq_lens=None
        if config.dcp_shard is None
        else torch.tensor([*held, *[0] * num_padding_reqs], dtype=torch.int32),
        plan=[],
        workspace=None,
        config=config.encode(),
    )
    return _to_device(Batch(args, config, list(query_lens), list(seq_lens), keys, values, queries), scales, device)


def random_packed_batch(
    config: AttentionConfig,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    poison: bool = True,
    num_padding_tokens: int = 0,
    num_padding_reqs: int = 0,
) -> Batch:
    """Return a random batch for `vattn::varlen_attention`; `config.block_size` must be 0. See `random_paged_batch`."""
    rng = torch.Generator().manual_seed(seed)
    keys, values, scales = _keys_and_values(config, kv_lens, rng)
    masks = _mask_inputs(config, kv_lens, num_padding_reqs, rng)
    query, queries, q_scale = _query(config, query_lens, num_padding_tokens, poison, rng)
    fmt = config.kv_cache_dtype if is_storable(config) else config.dtype
    stored = [
        torch.cat(
            [
                *(encode_kv(part, fmt, scale if KV_FORMATS[fmt].quantised else None) for part in parts),
                _padding_rows(parts, fmt, num_padding_tokens, poison),
            ]
        )
        for parts, scale in ((keys, scales[0]), (values, scales[1]))
    ]
    args = VarlenAttentionArgs(
        query=query,
        key=stored[0],
        value=stored[1],
        query_start_loc=_starts(query_lens, num_padding_reqs),
        kv_start_loc=_starts(kv_lens, num_padding_reqs),
        **_outputs(config, query.shape[0]),
        q_scale=q_scale,
        k_scale=scales[0],
        v_scale=scales[1],
        **masks,
        plan=[],
        workspace=None,
        config=config.encode(),
    )
    return _to_device(Batch(args, config, list(query_lens), list(kv_lens), keys, values, queries), scales, device)


def _padding_rows(parts: list[Tensor], fmt: str, count: int, poison: bool) -> Tensor:
    shape, dtype = (count, *parts[0].shape[1:]), KV_FORMATS[fmt].value_dtype
    return poisoned_empty(shape, dtype) if poison else torch.zeros(shape, dtype=dtype)


def _starts(lengths: Sequence[int], num_padding_reqs: int) -> Tensor:
    return torch.tensor([0, *lengths, *[0] * num_padding_reqs]).cumsum(0).int()


def random_scale(kind: str, num_kv_heads: int, peak: float, rng: torch.Generator) -> Tensor | None:
    """Return a scale that is no power of two and lets values of about `peak` reach a few hundred, or `None`."""
    if kind == "none":
        return None
    count = num_kv_heads if kind == "head" else 1
    return (0.7 + torch.rand(count, generator=rng)) * peak / 300


def _keys_and_values(
    config: AttentionConfig, seq_lens: Sequence[int], rng: torch.Generator
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Make model-dtype keys and values of every request, and their scales."""
    heads, dtype = config.num_kv_heads, MODEL_DTYPES[config.dtype]
    keys = [torch.randn(n, heads, config.head_size, generator=rng).to(dtype) for n in seq_lens]
    values = [torch.randn(n, heads, config.head_size_v, generator=rng).to(dtype) for n in seq_lens]
    return keys, values, [random_scale(config.kv_scale, heads, 4.0, rng) for _ in range(2)]


def is_storable(config: AttentionConfig) -> bool:
    """Return whether the format takes the head sizes, and has rows where the config wants them.

    Every backend refuses a request that is not storable, whatever its keys.
    """
    fmt = KV_FORMATS[config.kv_cache_dtype]
    sizes = fmt.head_size_problems(config.head_size, config.head_size_v)
    return not sizes and not (fmt.packed and config.block_size == 0)


def _store(
    kv_cache: Tensor,
    blocks: Tensor,
    key: Tensor,
    value: Tensor,
    scales: Sequence[Tensor | None],
    config: AttentionConfig,
) -> None:
    if not is_storable(config):
        return
    position = torch.arange(key.shape[0])
    slots = blocks[position // config.block_size] * config.block_size + position % config.block_size
    update = CacheUpdateArgs(key, value, *op_views(kv_cache, config), slots, scales[0], scales[1], config.encode())
    reference.kv_cache_update(update, config)


def _hidden_blocks(
    config: AttentionConfig, masks: dict[str, Any], request: int, query_len: int, seq_len: int
) -> Tensor:
    """Return indices of one request's blocks that no row of it sees."""
    flags, ranges = masks["causal_flags"], masks["mm_ranges"]
    visible = visible_mask(
        config,
        query_len,
        seq_len,
        causal=None if flags is None else bool(flags[request] != 0),
        mm_ranges=None if ranges is None else ranges[request],
    )
    count = seq_len if config.dcp_shard is None else config.dcp_shard.count(seq_len)
    places = held_positions(config.dcp_shard, count, torch.device("cpu"))
    seen = torch.zeros(-(-count // config.block_size) * config.block_size, dtype=torch.bool)
    seen[:count] = visible.any(dim=0)[slice(None) if places is None else places]
    return (~seen.view(-1, config.block_size).any(dim=1)).nonzero().flatten()


def _garbage_ids(shape: tuple[int, int], num_blocks: int, rng: torch.Generator) -> Tensor:
    choices = torch.tensor([-1, 0, num_blocks - 1, num_blocks, num_blocks + 12345, 2**31 - 1, -(2**31)])
    return choices[torch.randint(len(choices), shape, generator=rng)].int()


def _query(
    config: AttentionConfig, query_lens: Sequence[int], num_padding_tokens: int, poison: bool, rng: torch.Generator
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Return the packed query, each request's part of it in fp32, and its scale."""
    num_tokens, dtype = sum(query_lens), MODEL_DTYPES[config.dtype]
    query = torch.randn(num_tokens, config.num_heads, config.head_size, generator=rng).to(dtype)
    q_scale = random_scale(config.query_scale, config.num_kv_heads, 4.0, rng)
    if q_scale is not None and config.takes_fp8_query:
        query = encode_query(query, q_scale, config.num_kv_heads)
    queries = list(load_query(query, q_scale, config.num_kv_heads, config.query_load).split(list(query_lens)))
    shape = (num_padding_tokens, config.num_heads, config.head_size)
    padding = poisoned_empty(shape, query.dtype) if poison else torch.zeros(shape, dtype=query.dtype)
    return torch.cat([query, padding]), queries, q_scale


def poisoned_outputs(fmt: OutputFormat, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return output and block scales of a format for values `[T, H, V]`, full of garbage."""
    return tuple(map(poisoned_like, fmt.allocate(torch.empty(tuple(shape)), shape[2], dtype)))  # type: ignore[return-value]


def _outputs(config: AttentionConfig, num_tokens: int) -> dict[str, Any]:
    """Make garbage-filled outputs, and the static output scale."""
    fmt = OUTPUT_FORMATS[config.output_format]
    shape = (num_tokens, config.num_heads, config.head_size_v)
    output, scales = poisoned_outputs(fmt, shape, MODEL_DTYPES[config.dtype])
    return {
        "output": output,
        "output_block_scale": scales,
        "lse": poisoned_empty((num_tokens, config.num_heads), torch.float32) if config.lse else None,
        "output_scale": torch.tensor([0.0113]) if fmt.static_scale else None,
    }


def _mask_inputs(
    config: AttentionConfig, seq_lens: Sequence[int], num_padding_reqs: int, rng: torch.Generator
) -> dict[str, Any]:
    """Make the tensors that mask and bias features ask for."""
    num_heads, num_reqs = config.num_heads, len(seq_lens) + num_padding_reqs
    slopes = 2.0 ** -(8.0 * torch.arange(1, num_heads + 1) / num_heads) if config.alibi != "none" else None
    flags = None
    if config.causality == "per_request":
        flags = torch.tensor([0, 1, 7])[torch.randint(3, (num_reqs,), generator=rng)].int()
    bias = tree_id = None
    if config.tree_bias:
        bias = random_trees(2, 5, rng)
        tree_id = torch.randint(-1, 2, (num_reqs,), generator=rng).int()
    ranges = random_ranges([*seq_lens, *[0] * num_padding_reqs], rng) if config.mm_prefix != "none" else None
    return {
        "alibi_slopes": slopes,
        "sinks": torch.randn(num_heads, generator=rng) if config.sinks else None,
        "causal_flags": flags,
        "bias": bias,
        "tree_id": tree_id,
        "mm_ranges": ranges,
    }


def random_trees(count: int, size: int, rng: torch.Generator) -> Tensor:
    """Return biases `[count, size, size]`: a node sees the root, itself and random nodes before it, finite shifts."""
    hidden = torch.rand(count, size, size, generator=rng) < 0.4
    hidden[:, :, 0] = False
    hidden[:, range(size), range(size)] = False
    shifts = torch.randn(count, size, size, generator=rng)
    return torch.where(hidden | torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf, shifts)


def random_ranges(seq_lens: Sequence[int], rng: torch.Generator) -> Tensor:
    """Return ranges int32 `[B, 3, 2]`: one valid in a request that is long enough, one that may be, one unused."""
    ranges = torch.zeros(len(seq_lens), 3, 2, dtype=torch.int32)
    for request, length in enumerate(seq_lens):
        limit = max(2, length)
        ranges[request, 0] = torch.randint(limit, (2,), generator=rng).sort().values
        ranges[request, 1] = torch.randint(limit + 4, (2,), generator=rng)
        ranges[request, 2] = 5
    return ranges


def _to_device(batch: Batch, scales: Sequence[Tensor | None], device: torch.device | str) -> Batch:
    """Move the arguments, and keep keys and values as the cache stores them."""
    config, storable = batch.config, is_storable(batch.config)

    def stored(parts: list[Tensor], of_values: bool) -> list[Tensor]:
        if not storable:
            return [part.float().to(device) for part in parts]
        scale = scales[of_values]
        return [
            decode_stored(encode_stored(part, config, of_values, scale), config, of_values, scale).to(device)
            for part in parts
        ]

    return replace(
        batch,
        args=moved(batch.args, device),
        keys=stored(batch.keys, False),
        values=stored(batch.values, True),
        queries=[query.to(device) for query in batch.queries],
    )
