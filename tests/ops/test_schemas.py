"""The ops as torch sees them: schemas, shape functions, autograd guards, mutation under compilation."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import vattn
from tests.ops.rope_cases import MAX_POSITIONS, make_call
from tests.support import make_config, poisoned_empty, random_packed_batch, random_paged_batch, with_cache
from vattn.backends import dispatch, selector
from vattn.backends.torch_sdpa.backend import TorchSDPABackend
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views, separate
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.errors import GradientError
from vattn.ops import arguments, schemas
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, MergeArgs, PlanArgs, RopeUpdateArgs, VarlenAttentionArgs
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.lora_arguments import LoRAArgs
from vattn.ops.reference.mla_indexer import IndexerSelectArgs, IndexerUpdateArgs
from vattn.ops.reference.mla_rope import MLARopeUpdateArgs
from vattn.quantization.formats import OUTPUT_FORMATS

ARGUMENTS: dict[str, Any] = {
    "kv_cache_update": CacheUpdateArgs,
    "rope_kv_cache_update": RopeUpdateArgs,
    "attention": AttentionArgs,
    "varlen_attention": VarlenAttentionArgs,
    "plan": PlanArgs,
    "merge_attn_states": MergeArgs,
    "mla_kv_cache_update": MLACacheUpdateArgs,
    "mla_rope_kv_cache_update": MLARopeUpdateArgs,
    "mla_indexer_update": IndexerUpdateArgs,
    "mla_indexer_select": IndexerSelectArgs,
    "mla_attention": MLAAttentionArgs,
    "add_lora": LoRAArgs,
}
WRITTEN = {
    "kv_cache_update": {"key_cache", "value_cache"},
    "rope_kv_cache_update": {"query_out", "key_cache", "value_cache"},
    "attention": {"output", "output_block_scale", "lse", "workspace"},
    "varlen_attention": {"output", "output_block_scale", "lse", "workspace"},
    "plan": {"schedule"},
    "merge_attn_states": {"output", "output_lse"},
    "mla_kv_cache_update": {"kv_cache"},
    "mla_rope_kv_cache_update": {"kv_cache"},
    "mla_indexer_update": {"index_cache"},
    "mla_indexer_select": {"topk_indices"},
    "mla_attention": {"output", "output_block_scale", "lse", "workspace"},
    "add_lora": {"output"},
}
KINDS = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[Tensor]": list[Tensor],
    "List[int]": list[int],
    "str": str,
}


def overload(name: str) -> Any:
    return getattr(torch.ops.vattn, name).default


def update_args(**changes: Any) -> CacheUpdateArgs:
    config = make_config(block_size=8, backend="TORCH_SDPA", **changes)
    scale = torch.tensor([0.0113]) if config.kv_scale == "tensor" else None
    cache = torch.zeros(kv_cache_shape(config, 3), dtype=kv_cache_dtype(config))
    key, value = torch.randn(4, 2, config.head_size), torch.randn(4, 2, config.head_size_v)
    return CacheUpdateArgs(
        key, value, *op_views(cache, config), torch.tensor([5, -1, 23, 99]), scale, scale, config.encode()
    )


def merge_args() -> MergeArgs:
    def part() -> tuple[Tensor, Tensor]:
        return torch.randn(3, 2, 8), torch.randn(3, 2)

    return MergeArgs(torch.zeros(3, 2, 8), torch.zeros(3, 2), *part(), *part())


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_named_tuples_are_in_the_order_of_the_schema(name: str) -> None:
    schema, fields = overload(name)._schema, get_type_hints(ARGUMENTS[name], vars(arguments))
    assert [argument.name for argument in schema.arguments] == list(ARGUMENTS[name]._fields)
    assert [KINDS[str(argument.type)] for argument in schema.arguments] == list(fields.values())
    assert not schema.returns


@pytest.mark.parametrize("name", list(schemas.MUTATING_OPS))
def test_what_an_op_writes_is_marked_and_nothing_else_is(name: str) -> None:
    marked = {a.name for a in overload(name)._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert marked == WRITTEN[name]


@pytest.mark.parametrize("name", [*schemas.MUTATING_OPS, *schemas.QUANTISING_OPS, *schemas.PRODUCT_OPS])
def test_every_op_has_a_device_implementation_of_its_name(name: str) -> None:
    assert callable(getattr(dispatch, name))
    if name in schemas.QUANTISING_OPS:
        names = [argument.name for argument in overload(name)._schema.arguments]
        assert names == list(inspect.signature(getattr(dispatch, name)).parameters)


UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check(name: str, args: tuple[Any, ...]) -> None:
    """Run opcheck, and compare the bytes of everything the schema does not mark as written."""
    given = [x for x in args if isinstance(x, Tensor)]
    # opcheck's schema test multiplies the arguments, which torch cannot do with FP8; the bytes are compared below.
    skipped = 1 if any(x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for x in given) else 0
    result = torch.library.opcheck(overload(name), args, test_utils=UTILITIES[skipped:])
    assert set(result.values()) == {"SUCCESS"} and len(result) == 4 - skipped, result
    schema = overload(name)._schema.arguments
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    with torch.no_grad():
        overload(name)(*args)
    for argument, old, new in zip(schema, before, args, strict=True):
        if isinstance(new, Tensor) and argument.name not in WRITTEN.get(name, ()):
            assert torch.equal(as_bytes(old), as_bytes(new)), argument.name


def as_bytes(x: Tensor) -> Tensor:
    return x.flatten().contiguous().view(torch.uint8)


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse_sinks_flags": {"lse": True, "sinks": True, "causality": "per_request", "mm_prefix": "full"},
    "tree_alibi": {"tree_bias": True, "alibi": "linear"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "query_format": "fp8_e4m3", "query_scale": "head"},
    "static_output": {"output_format": "fp8_static"},
    "group_output": {"output_format": "fp8_group64_col", "lse": True},
    "nvfp4_output": {"output_format": "nvfp4_swizzled"},
}


@pytest.mark.parametrize("name", list(ATTENTION))
def test_opcheck_of_attention(name: str) -> None:
    config = make_config(block_size=8, backend="TORCH_SDPA", **ATTENTION[name])
    batch = random_paged_batch(config, [3, 0, 1], [9, 0, 5], poison=False, num_padding_tokens=1, num_padding_reqs=1)
    check("attention", zero_outputs(batch.args))
    if name in ("plain", "lse_sinks_flags", "fp8"):
        packed = random_packed_batch(config.replace(block_size=0), [3, 0, 1], [9, 0, 5], poison=False)
        check("varlen_attention", zero_outputs(packed.args))


def zero_outputs(args: Any) -> Any:
    """Outputs start as zeros: opcheck compares what an op leaves with `allclose`, which no NaN survives."""
    for name in ("output", "output_block_scale", "lse"):
        if getattr(args, name) is not None:
            getattr(args, name).zero_()
    return args


def test_opcheck_of_kv_cache_update() -> None:
    check("kv_cache_update", update_args())
    check("kv_cache_update", update_args(kv_cache_dtype="fp8_e4m3", kv_cache_layout="HND"))
    check("kv_cache_update", update_args(head_size=24, head_size_v=8))


def rope_args(**changes: Any) -> RopeUpdateArgs:
    config = make_config(block_size=8, backend="TORCH_SDPA", **changes)
    args = make_call(config, RopeConfig(config.head_size // 2, norm="rms", norm_eps=1e-6), num_tokens=5)
    args.query_out.zero_()
    keys, values = separate((args.key_cache.zero_(), args.value_cache.zero_()))
    return args._replace(key_cache=keys, value_cache=values)


def test_opcheck_of_rope_kv_cache_update() -> None:
    check("rope_kv_cache_update", rope_args(kv_cache_dtype="fp8_e4m3", query_format="fp8_e4m3", query_scale="head"))
    check("rope_kv_cache_update", rope_args(head_size=24, head_size_v=8, kv_cache_layout="HND"))


class _Planner(TorchSDPABackend):
    """A backend whose schedule is the number of keys per request."""

    name = "PLANNER"

    def plan(self, args: PlanArgs, config: AttentionConfig) -> None:
        args.schedule[: args.seq_lens.shape[0]] = args.seq_lens


def test_opcheck_of_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    selector.backend_names()
    monkeypatch.setitem(selector._BACKENDS, "PLANNER", _Planner())
    config = make_config(backend="PLANNER").encode()
    check("plan", PlanArgs(torch.tensor([0, 2, 3]).int(), torch.tensor([5, 9]).int(), torch.zeros(4).int(), config))


def test_opcheck_of_merge_attn_states() -> None:
    check("merge_attn_states", merge_args())
    check("merge_attn_states", merge_args()._replace(output_lse=None))


@pytest.mark.parametrize("rows", [1, 3])
def test_opcheck_of_the_quantisers(rows: int) -> None:
    x, scale = torch.randn(rows, 192), torch.tensor([0.0113])
    check("quant_fp8_static", (x, scale))
    check("quant_fp8_per_token", (x,))
    for power_of_two, column_major in ((False, False), (True, True)):
        check("quant_fp8_group", (x, 64, power_of_two, column_major))
    for swizzled in (False, True):
        check("quant_nvfp4", (x, scale, swizzled))


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_shape_functions_give_the_strides_of_the_device(rows: int, column_major: bool) -> None:
    x, scale, ops = torch.randn(rows, 64), torch.ones(1), torch.ops.vattn
    for call in (
        lambda x, scale: ops.quant_fp8_group(x, 64, False, column_major),
        lambda x, scale: ops.quant_fp8_group(x, 16, False, column_major),
        lambda x, scale: ops.quant_nvfp4(x, scale, column_major),
        lambda x, scale: ops.quant_fp8_per_token(x),
        lambda x, scale: (ops.quant_fp8_static(x, scale),),
    ):
        for real, meta in zip(call(x, scale), call(x.to("meta"), scale.to("meta")), strict=True):
            assert (real.shape, real.dtype) == (meta.shape, meta.dtype)
            assert real.stride() == meta.stride() or not rows


def calls_with_gradients() -> dict[str, tuple[Any, ...]]:
    batch = random_paged_batch(make_config(backend="TORCH_SDPA", sinks=True), [2], [5])
    args = batch.args
    schedules = [torch.zeros(3, requires_grad=True)]
    x = torch.randn(3, 64, requires_grad=True)
    update = update_args()
    packed = random_packed_batch(make_config(backend="TORCH_SDPA", block_size=0), [2], [5]).args
    return {
        "attention": args._replace(query=args.query.requires_grad_()),
        "attention with a sink": args._replace(query=args.query.detach(), sinks=args.sinks.clone().requires_grad_()),
        "attention with a schedule": args._replace(query=args.query.detach(), plan=schedules),
        "varlen_attention": packed._replace(value=packed.value.requires_grad_()),
        "kv_cache_update": update._replace(key=update.key.requires_grad_()),
        "rope_kv_cache_update": rope_args()._replace(cos=torch.ones(MAX_POSITIONS, 4, requires_grad=True)),
        "merge_attn_states": merge_args()._replace(prefix_lse=torch.zeros(3, 2, requires_grad=True)),
        "quant_fp8_static": (x, torch.ones(1)),
        "quant_fp8_per_token": (x,),
        "quant_fp8_group": (x, 64, False, False),
        "quant_nvfp4": (x, torch.ones(1), False),
    }


@pytest.mark.parametrize("call", list(calls_with_gradients()))
def test_an_input_that_requires_a_gradient_is_refused_while_grad_mode_is_on(call: str) -> None:
    args, name = calls_with_gradients()[call], call.split()[0]
    with pytest.raises(GradientError, match=rf"vattn::{name} got an input that requires a gradient.*torch\.no_grad"):
        overload(name)(*args)
    if "schedule" not in call:
        with torch.no_grad():
            overload(name)(*args)
        with torch.inference_mode():
            overload(name)(*args)


def test_a_tangent_is_refused_in_any_grad_mode() -> None:
    def quantise(x: Tensor) -> Tensor:
        return overload("quant_fp8_static")(x, torch.ones(1))

    x = torch.randn(3, 64)
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode), pytest.raises(GradientError, match=r"quant_fp8_static got .* tangent"):
            torch.func.jvp(quantise, (x,), (x,))


def shift_by_two(cache: Tensor, config: str) -> tuple[Tensor, Tensor]:
    """Copy a cache with every token two slots later, by writing into a clone what is read from the original."""
    rows = cache.shape[1] * cache.shape[2]
    key, value = cache[0].flatten(0, 1), cache[1].flatten(0, 1)
    moved = cache.clone()
    torch.ops.vattn.kv_cache_update(key, value, moved[0], moved[1], torch.arange(rows) + 2, None, None, config)
    return moved, cache


def merge_into_a_clone(prefix: Tensor, prefix_lse: Tensor, suffix: Tensor, suffix_lse: Tensor) -> tuple[Tensor, Tensor]:
    output = prefix.clone()
    torch.ops.vattn.merge_attn_states(output, None, prefix, prefix_lse, suffix, suffix_lse)
    return output, prefix


def attend_into_a_clone(*args: Any) -> tuple[Tensor, Tensor]:
    named = AttentionArgs(*args)
    output = named.query.clone()
    torch.ops.vattn.attention(*named._replace(output=output))
    return output, named.query


def alias_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    config = make_config(block_size=8, backend="TORCH_SDPA")
    attention = random_paged_batch(config, [3, 2], [9, 5]).args
    return {
        "kv_cache_update": (shift_by_two, (torch.randn(kv_cache_shape(config, 3)), config.encode())),
        "merge_attn_states": (merge_into_a_clone, merge_args()[2:]),
        "attention": (attend_into_a_clone, attention),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(alias_cases()))
def test_a_clone_that_is_written_stays_a_clone_when_compiled(name: str) -> None:
    """`y = x.clone(); op(y, x)` must not become `op(x, x)` (PyTorch issue 198031)."""
    function, args = alias_cases()[name]
    expected = [x.clone() for x in function(*args)]
    got = torch.compile(function, fullgraph=True)(*args)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(got[0], got[1])


@pytest.mark.parametrize("name", [name for name, fmt in OUTPUT_FORMATS.items() if fmt.container is not None])
def test_output_formats_of_the_op_write_every_byte(name: str) -> None:
    config = make_config(output_format=name, backend="TORCH_SDPA", lse=True, head_size=64)
    first = random_paged_batch(config, [3, 0, 2], [9, 0, 1], num_padding_tokens=2)
    zeroed = random_paged_batch(config, [3, 0, 2], [9, 0, 1], num_padding_tokens=2)
    zero_outputs(zeroed.args)
    for batch in (first, zeroed):
        batch.run()
    for field in ("output", "output_block_scale", "lse"):
        a, b = getattr(first.args, field), getattr(zeroed.args, field)
        assert a is None or torch.equal(as_bytes(a), as_bytes(b))


def test_merging_writes_into_poisoned_outputs() -> None:
    args = merge_args()
    poisoned = args._replace(output=poisoned_empty((3, 2, 8), torch.float32))
    torch.ops.vattn.merge_attn_states(*args)
    torch.ops.vattn.merge_attn_states(*poisoned)
    assert torch.equal(args.output, poisoned.output)


@pytest.mark.parametrize("name", list(schemas.TRANSFER_OPS))
def test_no_cuda_graph_may_hold_a_transfer_op(name: str) -> None:
    assert torch.Tag.cudagraph_unsafe in overload(name).tags
    written = {a.name for a in overload(name)._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert (
        written == {"kv_transfer_wait": {"key_cache", "value_cache", "kv_cache"}, "kv_transfer_save": {"token"}}[name]
    )


@torch.no_grad()
def test_layers_are_traced_with_symbolic_sizes() -> None:
    layer = with_cache(vattn.Attention(2, 16, scale=0.25, num_kv_heads=1, prefix="layer"), 4)
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, layers=layer)
    step = builder.build([3], [3], [[1]])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer(query, key, value, metadata=step)
        return out

    inputs = torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16)
    traced = make_fx(attend, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    assert "vattn.attention" in traced.code
