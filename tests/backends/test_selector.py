"""Choosing a backend: capabilities become reasons, reasons choose, explain and write the error."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vattn
from tests.support import make_config
from vattn.backends import selector
from vattn.backends.base import Backend, Capabilities, Exclusion, Package
from vattn.backends.mla.registry import mla_backends
from vattn.cache.memory import CacheMemory
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, Sizes, parse_version
from vattn.config.features import FEATURES, requested_features
from vattn.config.mla import MLAConfig
from vattn.errors import CacheError, ConfigError, DeviceError, UnknownOptionError, UnsupportedRequestError

CPU = DeviceInfo("cpu")
INTERPRETER = DeviceInfo("cpu", triton_interpreter=True)
HOPPER = DeviceInfo("cuda", (9, 0), "H")
PLAIN = AttentionConfig(8, 2, 64, 64, 0.125, "float16", "float16")

NARROW = Capabilities(
    devices=("cuda", "interpreter"),
    dtypes=("float16", "bfloat16"),
    kv_cache_dtypes=("float16", "fp8_e4m3"),
    query_formats=("none",),
    output_formats=("none", "fp8_static", "fp8_group128"),
    attn_types=("decoder",),
    head_sizes=Sizes(values=(64, 96, 128)),
    block_sizes=Sizes(16, 16, 64),
    features=frozenset({"sliding_window", "sinks", "lse", "unequal_head_sizes"}),
    exclusions=(
        Exclusion(frozenset({"sinks", "lse"}), "sinks and lse together"),
        Exclusion(frozenset({"kv_cache_dtype=fp8_e4m3", "sliding_window"}), "a window over an FP8 cache"),
    ),
    minimum_capability=(8, 0),
    format_capability={"fp8_e4m3": (8, 9), "fp8_static": (9, 0)},
)


class Narrow(Backend):
    name = "NARROW"
    capabilities = NARROW


def reasons(device=HOPPER, capabilities=NARROW, **changes):
    backend = Narrow()
    backend.capabilities = capabilities
    return backend.reasons(PLAIN.replace(**changes), device)


FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}

ONE_REASON = {
    "device": (CPU, {}, "device cpu (runs on cuda, interpreter) (set TRITON_INTERPRET=1"),
    "too old a device": (DeviceInfo("cuda", (7, 5), "T"), {}, "T (sm_75) (needs sm_80 or newer)"),
    "kv format on too old a device": (
        DeviceInfo("cuda", (8, 0), "A"),
        FP8,
        "format fp8_e4m3 on A (sm_80) (needs sm_89",
    ),
    "output format on too old a device": (
        DeviceInfo("cuda", (8, 9), "L"),
        {"output_format": "fp8_static"},
        "format fp8_static on L (sm_89) (needs sm_90",
    ),
    "dtype": (HOPPER, {"dtype": "float32"}, "dtype float32 (runs float16, bfloat16)"),
    "kv cache dtype": (HOPPER, {"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16 (runs float16, fp8_e4m3)"),
    "query format": (
        HOPPER,
        {"query_format": "fp8_e4m3", "query_scale": "tensor"},
        "query_format fp8_e4m3 (runs none)",
    ),
    "output format": (HOPPER, {"output_format": "fp8_per_token"}, "output_format fp8_per_token (runs none, fp8_static"),
    "attention type": (HOPPER, {"attn_type": "encoder"}, "attn_type encoder (runs decoder)"),
    "head size": (HOPPER, {"head_size": 80, "head_size_v": 80}, "head_size 80 (runs 64, 96, 128)"),
    "value head size": (HOPPER, {"head_size_v": 80}, "head_size 80 (runs 64, 96, 128)"),
    "block size": (HOPPER, {"block_size": 8}, "block_size 8 (runs multiples of 16 from 16 to 64)"),
    "group and head": (
        HOPPER,
        {"head_size_v": 96, "output_format": "fp8_group128"},
        "output_format fp8_group128 with head_size_v 96",
    ),
    "feature": (HOPPER, {"logits_soft_cap": 30.0}, "logits_soft_cap is not implemented"),
    "pair of features": (HOPPER, {"sinks": True, "lse": True}, "sinks and lse together"),
    "feature and format": (HOPPER, {**FP8, "sliding_window": 8}, "a window over an FP8 cache"),
}


@pytest.mark.parametrize(("device", "changes", "start"), ONE_REASON.values(), ids=ONE_REASON.keys())
def test_each_capability_gives_its_own_reason(device, changes, start):
    found = reasons(device, **changes)
    assert len(found) == 1
    assert found[0].startswith(start)


def test_accepts_what_it_names():
    assert reasons() == []
    assert reasons(INTERPRETER) == []
    assert reasons(**FP8, output_format="fp8_static", sinks=True) == []


def test_all_reasons_are_given_at_once():
    found = reasons(dtype="float32", kv_cache_dtype="float32", logits_soft_cap=5.0, block_size=8)
    assert [text.split()[0] for text in found] == ["dtype", "kv_cache_dtype", "block_size", "logits_soft_cap"]


def test_a_packed_format_needs_blocks_whose_scales_lie_at_even_bytes():
    packed = dataclasses.replace(
        NARROW, kv_cache_dtypes=("turboquant_3bit_nc",), block_sizes=Sizes(values=(1, 2)), head_sizes=Sizes(),
        features=frozenset(FEATURES),
    )  # fmt: skip
    rows = {"kv_cache_dtype": "turboquant_3bit_nc", "head_size": 8, "head_size_v": 8}
    assert reasons(capabilities=packed, **rows, num_kv_heads=2, block_size=2) == []
    (found,) = reasons(capabilities=packed, **rows, num_kv_heads=1, block_size=1)
    assert "in blocks of 1 rows" in found
    (found,) = reasons(capabilities=packed, **rows, block_size=0)
    assert found.startswith("kv_cache_dtype turboquant_3bit_nc without a paged cache")


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_memory_that_kernels_cannot_read_is_refused_by_what_is_wrong(strided, aligned):
    able = dataclasses.replace(NARROW, strided_caches=strided, row_alignment=1 if aligned else 16)
    assert able.reads_any_memory == (strided and aligned)
    gaps, order = CacheMemory(dense=False, row_alignment=8), CacheMemory(dense=True, row_alignment=16)
    found = [text.split()[0] for text in able.memory_refusals(gaps)]
    assert found == ["gaps"] * (not strided) + ["rows"] * (not aligned)
    assert able.memory_refusals(order) == []


def test_features_that_a_backend_is_for_are_asked_of_every_request():
    tree = dataclasses.replace(NARROW, required_features=frozenset({"lse", "sinks", "sliding_window"}), exclusions=())
    found = [text.split(",")[0] for text in reasons(capabilities=tree, lse=True)]
    assert found == ["no sinks", "no sliding_window"]
    assert reasons(capabilities=tree, lse=True, sinks=True, sliding_window=3) == []


def test_output_variants_are_refused_one_by_one():
    able = dataclasses.replace(NARROW, output_variants=True)
    for name, value, output in (
        ("output_arithmetic", "multiply", "fp8_static"), ("output_min_scale", 0.25, "fp8_group128")
    ):  # fmt: skip
        asked = {name: value, "output_format": output}
        (found,) = reasons(**asked)
        assert found.startswith(f"{name} {value} ")
        assert reasons(capabilities=able, **asked) == []
    asked = {"output_arithmetic": "approximate_divide", "output_format": "fp8_static"}
    assert reasons(capabilities=able, **asked) == ["output_arithmetic approximate_divide (divides exactly)"]
    assert reasons(capabilities=dataclasses.replace(able, approximate_division=True), **asked) == []


def test_a_backend_that_says_nothing_more_plans_nothing():
    backend = Narrow()
    assert (backend.plan_shape(PLAIN, 3, 2, 4), backend.host_plan_size(PLAIN)) == ((), 0)
    assert (backend.plan_key(PLAIN), backend.runs_on(PLAIN, HOPPER)) == ("NARROW", "NARROW")
    assert backend.notes(PLAIN) == backend.general_steps(PLAIN, HOPPER) == []
    assert backend.running() == ("torch", torch.__version__.split("+")[0])
    with pytest.raises(UnsupportedRequestError, match="NARROW, which runs without schedules"):
        backend.plan(None, PLAIN)


FEATURE_EXAMPLES = {
    "bidirectional": {"causality": "bidirectional"},
    "causal_flags": {"causality": "per_request"},
    "sliding_window": {"sliding_window": 8},
    "chunk_lookback": {"sliding_window": 8, "chunk_lookback": 0},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "alibi": {"alibi": "linear"},
    "alibi_sqrt": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
    "tree_bias": {"tree_bias": True},
    "mm_prefix": {"mm_prefix": "clamped"},
    "unequal_head_sizes": {"head_size_v": 128},
    "head_pairs": {"head_pairs": "odd", "head_size_v": 128},
    "kv_scale_per_head": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
    "query_scale_per_head": {"query_format": "fp8_e4m3", "query_scale": "head"},
    "lse": {"lse": True},
    "context_parallel": {"context_parallel": True},
    "context_only": {"context_only": True},
    "batch_invariant": {"batch_invariant": True},
    "hnd_layout": {"kv_cache_layout": "HND"},
    "contiguous_kv": {"block_size": 0},
}


def test_every_feature_is_detected_alone():
    assert list(FEATURE_EXAMPLES) == list(FEATURES)
    assert requested_features(PLAIN) == frozenset()
    for name, changes in FEATURE_EXAMPLES.items():
        assert requested_features(PLAIN.replace(**changes)) == {name}


@pytest.mark.parametrize("name", FEATURES)
def test_a_backend_without_a_feature_refuses_it_by_name(name):
    all_formats = dataclasses.replace(
        NARROW, query_formats=("none", "fp8_e4m3"), exclusions=(), features=frozenset(FEATURES) - {name}
    )
    assert reasons(capabilities=all_formats, **FEATURE_EXAMPLES[name]) == [f"{name} is not implemented"]


def test_an_exclusion_may_name_the_causality():
    rule = Exclusion(frozenset({"causality=bidirectional", "sinks"}), "no")
    both = dataclasses.replace(NARROW, exclusions=(rule,), features=frozenset({"bidirectional", "sinks"}))
    assert reasons(capabilities=both, sinks=True) == []
    assert reasons(capabilities=both, sinks=True, causality="bidirectional") == ["no"]


def test_sizes():
    steps = Sizes(16, 32, 96)
    assert [size for size in range(200) if size in steps] == [32, 48, 64, 80, 96]
    assert str(steps) == "multiples of 16 from 32 to 96"
    assert [size for size in range(200) if size in Sizes(values=(7, 100))] == [7, 100]
    assert str(Sizes(values=(7, 100))) == "7, 100"


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.11.0+cu130", (2, 11, 0)), ("0.6.1rc2", (0, 6, 1)), ("3.6.0.dev1", (3, 6, 0)), ("x", ())]
)
def test_parse_version(text, numbers):
    assert parse_version(text) == numbers


def test_a_missing_or_old_package_is_a_reason():
    missing = Package("nothing", "no-such-distribution-at-all", (1, 2), "extra")
    assert "not installed" in missing.problem()
    assert "vattn[extra]" in missing.problem()
    old = Package("pytest", "pytest", (9999,), "test")
    assert "is older than 9999" in old.problem()
    assert Package("pytest", "pytest", (1,), "test").problem() is None
    found = reasons(capabilities=dataclasses.replace(NARROW, package=missing))
    assert found == [missing.problem()]


@pytest.fixture
def registry(monkeypatch):
    """The selector with two backends of ours, restored afterwards."""

    class Wide(Backend):
        name = "WIDE"
        capabilities = dataclasses.replace(
            NARROW, devices=("cpu", "cuda"), features=frozenset(FEATURES), dtypes=("float16", "float32")
        )

    monkeypatch.setattr(selector, "_BACKENDS", {})
    monkeypatch.setattr(selector, "PRIORITY", {"cuda": ("NARROW", "WIDE"), "cpu": ("WIDE",)})
    monkeypatch.setattr(selector, "_load_builtin", lambda: None)
    selector._decide.cache_clear()
    selector._log_once.cache_clear()
    selector.register_backend(Narrow())
    selector.register_backend(Wide())
    yield selector
    selector._decide.cache_clear()
    selector._log_once.cache_clear()


def test_automatic_choice_takes_the_first_that_accepts(registry):
    assert registry.choose(PLAIN, HOPPER).name == "NARROW"
    assert registry.choose(PLAIN.replace(alibi="linear"), HOPPER).name == "WIDE"
    assert registry.choose(PLAIN, CPU).name == "WIDE"
    assert registry.choose(PLAIN, INTERPRETER).name == "WIDE"


def test_explicit_choice_never_falls_back(registry):
    asked = PLAIN.replace(alibi="linear", backend="NARROW")
    with pytest.raises(UnsupportedRequestError, match="backend NARROW cannot run") as caught:
        registry.choose(asked, HOPPER)
    assert "alibi is not implemented" in str(caught.value)
    assert "WIDE" not in str(caught.value)
    assert registry.choose(asked.replace(backend="WIDE"), HOPPER).name == "WIDE"


def test_the_error_gives_the_reasons_of_the_nearest_backend(registry):
    with pytest.raises(UnsupportedRequestError, match="no backend can run") as caught:
        registry.choose(PLAIN.replace(head_size=80, block_size=8), CPU, layer="layers.3")
    text = str(caught.value)
    for part in ("layer 'layers.3'", "nearest is WIDE", "head_size 80", "block_size 8", "python -m vattn explain"):
        assert part in text
    assert "NARROW" not in text and "\n" not in text
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 1.5])
def test_a_device_that_is_none_is_named(device):
    with pytest.raises(DeviceError, match=str(device)):
        selector.explain(PLAIN, device)


def test_explain_raises_nothing_for_a_refusal(registry):
    refused = registry.explain(PLAIN.replace(head_size=80), CPU)
    assert refused.chosen is None
    assert set(refused.refusals) == {"NARROW", "WIDE"}
    assert "chosen : none" in str(refused)
    accepted = registry.explain(PLAIN, "cpu")
    assert accepted.chosen == "WIDE"
    assert "WIDE   : accepts" in str(accepted)


def test_explain_reads_a_layer(registry):
    storage = torch.zeros(4, 16, 2, 72, dtype=torch.float16)[..., :64]
    for views in ((storage, storage), (storage, None)):
        layer = SimpleNamespace(config=PLAIN, cache_views=lambda views=views: views)
        found = registry.explain(layer)
        assert found == registry.explain(PLAIN, "cpu", CacheMemory.of(*views)) and found.memory.row_alignment == 16
        assert "cache  : gaps" in str(found)
        assert registry.explain(layer, HOPPER).device == HOPPER
    with pytest.raises(ConfigError, match="a layer without a KV cache"):
        registry.explain(SimpleNamespace(config=None, cache_views=None))
    with pytest.raises(ConfigError, match="a request of type int"):
        registry.explain(3)


def test_a_backend_that_cannot_read_the_memory_is_passed_over(registry, monkeypatch):
    dense = dataclasses.replace(NARROW, strided_caches=False)
    monkeypatch.setattr(Narrow, "capabilities", dense)
    gaps = CacheMemory(dense=False, row_alignment=16)
    assert registry.choose(PLAIN, HOPPER).name == "NARROW"
    assert registry.choose(PLAIN, HOPPER, memory=gaps).name == "WIDE"
    refused = registry.explain(PLAIN, HOPPER, gaps).refusals
    assert refused["WIDE"] == () and refused["NARROW"][0].startswith("gaps between")


def test_unknown_backend_is_named(registry):
    with pytest.raises(UnknownOptionError, match=r"FAST.*NARROW, WIDE"):
        registry.choose(PLAIN.replace(backend="FAST"), CPU)


def test_choice_is_logged_once_per_distinct_request(registry, caplog):
    caplog.set_level(logging.INFO, logger="vattn")
    for _ in range(3):
        registry.choose(PLAIN, CPU)
    registry.choose(PLAIN.replace(sinks=True), CPU)
    registry.choose(PLAIN.replace(backend="WIDE"), CPU)
    assert [record.getMessage().split(" for ")[0] for record in caplog.records] == ["attention backend WIDE on CPU"] * 2


def test_a_name_can_be_registered_once(registry):
    with pytest.raises(ConfigError, match="'NARROW' is taken"):
        registry.register_backend(Narrow())


def test_a_new_backend_comes_last_and_is_seen_at_once(registry):
    asked = PLAIN.replace(head_size=80, head_size_v=80)
    assert registry.explain(asked, CPU).chosen is None

    class Extra(Backend):
        name = "EXTRA"
        capabilities = dataclasses.replace(
            NARROW, devices=("cpu",), head_sizes=Sizes(), block_sizes=Sizes(), features=frozenset(FEATURES)
        )

    registry.register_backend(Extra())
    assert registry.backend_names() == ("NARROW", "WIDE", "EXTRA")
    assert registry.choose(asked, CPU).name == "EXTRA"
    assert registry.choose(PLAIN, CPU).name == "WIDE"


def test_a_backend_registered_first_does_not_displace_the_builtin_ones(monkeypatch):
    monkeypatch.setattr(selector, "_BACKENDS", {})
    selector._decide.cache_clear()
    selector.register_backend(Narrow())
    assert selector.backend_names() == (*selector.BUILTIN, "NARROW")
    with pytest.raises(ConfigError, match="'TORCH_SDPA' is taken"):
        selector.register_backend(type("Copy", (Narrow,), {"name": "TORCH_SDPA"})())
    selector._decide.cache_clear()


def test_builtin_defaults_by_device():
    assert selector.explain(PLAIN.replace(dtype="float32", kv_cache_dtype="float32"), "cpu").chosen == "TORCH_SDPA"
    without_triton = selector.get_backend("TRITON_ATTN").problem() is not None
    assert selector.explain(PLAIN, HOPPER).chosen == ("TORCH_SDPA" if without_triton else "TRITON_ATTN")


def test_padded_head_sizes_are_declared() -> None:
    sm_90 = DeviceInfo("cuda", (9, 0), "sm_90")
    vision = {"block_size": 0, "causality": "bidirectional", "attn_type": "encoder", "dtype": "bfloat16"}
    for size, columns in ((64, None), (72, 128), (80, 128), (128, None)):
        found = selector.explain(make_config(head_size=size, backend="TRITON_ATTN", **vision), sm_90)
        if found.chosen is None:
            pytest.skip(str(found))
        text = f"note   : head_size {size} is computed as {columns} (columns of zeros in the kernel"
        assert (columns is None and not found.notes) or text in str(found)
    decoder = selector.explain(make_config(head_size=80, backend="TRITON_ATTN"), sm_90)
    assert decoder.notes[0] == "head_size 80 is computed as 128 (columns of zeros in the kernel, not in memory)"
    assert selector.explain(make_config(head_size=80), "cpu").notes == ()


def test_every_listed_backend_exists_and_lists_name_no_other() -> None:
    assert set(selector.BUILTIN) <= set(selector.backend_names())
    for names in selector.PRIORITY.values():
        assert set(names) <= set(selector.BUILTIN)
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("capability", "key"), [((7, 5), "cuda"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((12, 0), "sm_100")]
)
def test_a_gpu_takes_the_list_of_the_newest_architecture_that_is_not_newer(monkeypatch, capability, key):
    lists = {name: (name,) for name in ("cpu", "cuda", "sm_80", "sm_90", "sm_100")}
    monkeypatch.setattr(selector, "PRIORITY", lists)
    monkeypatch.setattr(selector, "_BACKENDS", dict.fromkeys(["TORCH_SDPA", *lists]))
    assert selector.priority(DeviceInfo("cuda", capability, "G"))[0] == key
    assert selector.priority(CPU)[:2] == ("cpu", "TORCH_SDPA")


def test_a_format_may_narrow_the_head_sizes():
    narrow = dataclasses.replace(NARROW, exclusions=(), format_head_sizes={"fp8_e4m3": Sizes(values=(64, 128))})
    assert reasons(capabilities=narrow, head_size=96, head_size_v=96) == []
    assert reasons(capabilities=narrow, **FP8) == []
    found = reasons(capabilities=narrow, **FP8, head_size=96, head_size_v=96)
    assert found == ["head_size 96 with fp8_e4m3 (runs 64, 128)"]
    assert reasons(capabilities=narrow, **FP8, head_size=80, head_size_v=80) == ["head_size 80 (runs 64, 96, 128)"]


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_a_backend_may_refuse_scales_that_turn_the_order_of_scores_round(scale):
    positive = dataclasses.replace(NARROW, negative_scales=False)
    assert reasons(scale=scale) == []
    assert reasons(capabilities=positive, scale=scale) == [f"scale {scale} (runs scales above 0)"]
    assert selector.get_backend("FLASHINFER").capabilities.negative_scales is False


HOPPER_GPU = DeviceInfo("cuda", (9, 0), "a Hopper GPU")
MISSED: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "none": ({}, None, None),
    "heads of 256, an FP8 cache": ({"head_size": 256, "kv_cache_dtype": "fp8_e4m3"}, None, None),
    "head": ({"head_size": 24}, "head_size 24", "head_size 24"),
    "block": ({"block_size": 24}, "block_size 24", "block_size 24"),
    "block of 16 boxes": ({"block_size": 528}, None, None),
    "packed": ({"kv_cache_dtype": "int4_per_token_head"}, None, "kv_cache_dtype int4_per_token_head"),
    "packed, wide": ({"kv_cache_dtype": "int4_per_token_head", "head_size": 256}, "head_size 256", "kv_cache_dtype"),
    "feature": ({"alibi": "linear"}, "alibi is not implemented", "alibi is not implemented"),
    "a rank's keys": ({"context_parallel": True, "context_world": 2}, None, "context_parallel"),
    "a rank's window": (
        {"context_parallel": True, "context_world": 2, "sliding_window": 9}, "sliding_window over a rank's keys",
        "context_parallel",
    ),
    "query to be rounded": (
        {"kv_cache_dtype": "fp8_e4m3", "query_format": "fp8_e4m3", "query_load": "divide"}, None, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSED)
def test_steps_that_miss_hoppers_kernels_are_named(case: str) -> None:
    changes, decodes, prompts = MISSED[case]
    base = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "block_size": 16}
    config = make_config(**{**base, "backend": "TRITON_ATTN", **changes})
    said = [note for note in selector.explain(config, HOPPER_GPU).notes if "general kernel" in note]
    wanted = [(name, why) for name, why in (("decodes", decodes), ("prompts", prompts)) if why is not None]
    assert len(said) == len(wanted), said
    for note, (name, why) in zip(said, wanted, strict=True):
        assert note.startswith(f"{name} run on the general kernel, not on Hopper's: ")
        assert why in note
    for other in ("cpu", DeviceInfo("cuda", (8, 0), "an A100")):
        assert not any("general kernel, not" in note for note in selector.explain(config, other).notes)


@pytest.mark.parametrize(("size", "decodes", "prompts"), [(128, 0, 0), (192, 0, 1), (528, 1, 1), (1, 1, 1)])
def test_latent_layers_say_which_blocks_miss_hoppers_kernels(size: int, decodes: int, prompts: int) -> None:
    config = MLAConfig(16, 128, 64, 128, 512, 192**-0.5, "bfloat16", "bfloat16", block_size=size, backend="TRITON_MLA")
    said = " ".join(selector.explain(config, HOPPER_GPU).notes)
    for steps, missing in (("decodes", decodes), ("prompts", prompts)):
        assert (f"{steps} run on the general kernel, not on Hopper's: block_size {size}" in said) == bool(missing)


def test_what_xformers_decodes_misses_no_kernel_of_ours() -> None:
    # Groups of 32 miss the decode kernel, and negative scales the one for prompts.
    base: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 1, "head_size": 64, "backend": "XFORMERS"}
    base |= {"dtype": "bfloat16", "scale": -1.0}
    backend = selector.get_backend("XFORMERS")
    paged = make_config(**base, block_size=256)
    assert [step.split()[0] for step in backend.general_steps(paged, HOPPER_GPU)] == ["prompts"]
    own = make_config(**base, block_size=16)
    assert [step.split()[0] for step in backend.general_steps(own, HOPPER_GPU)] == ["decodes", "prompts"]


BUILDERS = {
    "FLASH_ATTN": vattn.FlashAttentionMetadataBuilder,
    "XFORMERS": vattn.XFormersMetadataBuilder,
    "TREE_ATTN": vattn.TreeAttentionMetadataBuilder,
}


@pytest.mark.parametrize("name", [*selector.backend_names(), *mla_backends()])
def test_what_engines_look_up(name: str) -> None:
    """Every backend names its builder, its head sizes, the shape of its cache, and moves its blocks."""
    latents, pairs = name in mla_backends(), name == "DIFFERENTIAL_FLASH_ATTN"
    backend = mla_backends()[name] if latents else selector.get_backend(name)
    assert backend.get_builder_cls() is BUILDERS.get(name, vattn.AttentionMetadataBuilder)
    sizes = backend.get_supported_head_sizes()
    assert sizes and all(size in backend.capabilities.head_sizes for size in sizes)
    assert len(set(sizes)) == len(sizes)
    heads, width = (1, 576) if latents else (2, 64)
    assert width in sizes
    shape = backend.get_kv_cache_shape(6, 16, heads, width)
    assert shape == ((6, 16, 576) if latents else (2, 2, 6, 16, 1, 64) if pairs else (2, 6, 16, 2, 64))
    if pairs:  # The shape of `kv_cache_view`.
        shape = (2, 6, 16, 2, 64)
    for dtype in (torch.bfloat16, torch.uint8):
        source = torch.randint(255, shape).to(dtype)
        target, axis = torch.zeros_like(source), 0 if latents else 1
        backend.swap_blocks(source, target, [(2, 5), (3, 0)])
        found, given = target.movedim(axis, 0), source.movedim(axis, 0)
        assert torch.equal(found[[5, 0]], given[[2, 3]]) and not found[1:5].any()
        backend.copy_blocks([source], [(1, 4)])
        assert torch.equal(given[4], given[1])
    for wrong in ((0, 16, heads, width), (6, 3, heads, width), (6, 16, 0, width), (6, 16, heads, "64")):
        with pytest.raises((CacheError, ConfigError)):
            backend.get_kv_cache_shape(*wrong)
    with pytest.raises(CacheError, match="their spec"):
        backend.swap_blocks(torch.zeros(6, 16), torch.zeros(6, 16), [(0, 1)])
