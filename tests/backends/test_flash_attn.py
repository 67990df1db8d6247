"""FLASH_ATTN where there is no library: what it says, what it would refuse with one, and how it would call each."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import vattn
from tests.backends.flash_stand_ins import fake_fa2, fake_fa3, fake_fa4, offsets, torch_varlen
from tests.conformance.cases import batch_of_row
from tests.conformance.compare import compare
from tests.conformance.rows import MIXED, Row
from tests.support import make_config
from vattn.backends import selector
from vattn.backends.external_rows import rows_as_requests, zero_invalid_rows
from vattn.backends.flash_attn import backend as flash_attn
from vattn.backends.flash_attn import libraries as flash_attention
from vattn.backends.flash_attn import plan as planning
from vattn.backends.flash_attn.libraries import LIBRARY_VARIABLE, FlashLibrary, find_library
from vattn.config.device import DeviceInfo
from vattn.errors import CacheError, ConfigError, UnsupportedRequestError
from vattn.ops.arguments import PlanArgs

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
HOPPER = DeviceInfo("cuda", (9, 0), "H")
PLAIN = make_config(
    dtype="bfloat16", kv_cache_dtype="bfloat16", head_size=64, head_size_v=64, block_size=16, backend="FLASH_ATTN"
)
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", "query_format": "fp8_e4m3", "query_scale": "tensor"}


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch):
    """No library loaded and none remembered, before and after."""
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(flash_attention, "_loaded", {})
    flash_attention.find_library.cache_clear()
    selector.forget_decisions()
    yield monkeypatch
    flash_attention.find_library.cache_clear()
    selector.forget_decisions()


def reasons(library: FlashLibrary, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    monkeypatch.setattr(flash_attn, "find_library", lambda *_: library)
    monkeypatch.setattr(flash_attn, "_TRITON", type("Found", (), {"problem": staticmethod(lambda: None)}))
    return selector.get_backend("FLASH_ATTN").reasons(PLAIN.replace(**changes), HOPPER)


FA3 = FlashLibrary("FlashAttention-3", "fa3.so", paged=True)
TORCH = FlashLibrary("torch varlen_attn", "2.11", paged=False)
FA3_PACKAGE = FlashLibrary("FlashAttention-3", "3.0.0b1", True, "flash_attn_interface")
FA4 = FlashLibrary("FlashAttention-4", "4.0.0b36", True, "flash_attn.cute")
FA2 = FlashLibrary("FlashAttention-2", "2.8.3", True, "flash_attn")
TORCH_PAGED = FlashLibrary("torch varlen_attn", "2.13.0+FA3", paged=True)


def test_without_a_library_the_error_says_how_to_load_one(forgotten) -> None:
    forgotten.setattr("torch.version.cuda", None)
    with pytest.raises(UnsupportedRequestError, match=r"vattn\.load_flash_attn\(path\)"):
        selector.choose(PLAIN, HOPPER)
    # An automatic choice passes over it.
    assert selector.explain(PLAIN.replace(backend="auto"), "cpu").chosen == "TORCH_SDPA"


def test_files_that_are_no_library_are_refused(forgotten, tmp_path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        vattn.load_flash_attn(tmp_path / "absent.so")
    torn = tmp_path / "torn.so"
    torn.write_bytes(b"\x7fELF")
    with pytest.raises(ConfigError, match="built for torch"):
        vattn.load_flash_attn(torn)
    assert flash_attention._loaded == {}


def test_a_wrong_path_in_the_environment_is_the_reason_and_hides_no_other_backend(forgotten, tmp_path) -> None:
    forgotten.setenv(LIBRARY_VARIABLE, str(tmp_path / "absent.so"))
    explanation = selector.explain(PLAIN.replace(backend="auto"), "cpu")
    assert explanation.chosen == "TORCH_SDPA"
    with pytest.raises(UnsupportedRequestError, match=r"absent\.so"):
        selector.choose(PLAIN, HOPPER)


@pytest.mark.parametrize(
    ("library", "changes"),
    [
        (FA3, {}),
        (FA3, {"sliding_window": 100}),
        (FA3, {"causality": "bidirectional", "sliding_window": 100}),
        (FA3, {"logits_soft_cap": 30.0, "sinks": True}),
        (FA3, {"lse": True}),
        (FA3, {"block_size": 0}),
        (FA3, FP8),
        (FA3, {**FP8, "kv_scale": "head", "query_scale": "head", "kv_cache_layout": "HND"}),
        (FA3_PACKAGE, FP8),
        (FA4, {"sinks": True, "logits_soft_cap": 30.0, "batch_invariant": True}),
        (FA2, {"block_size": 256, "sliding_window": 9, "lse": True}),
        (FA2, {"block_size": 0, "alibi": "linear", "causality": "bidirectional"}),
        (TORCH_PAGED, {"block_size": 256, "sliding_window": 9}),
    ],
    ids=str,
)
def test_what_libraries_accept(library, changes, monkeypatch) -> None:
    assert reasons(library, monkeypatch, **changes) == []


@pytest.mark.parametrize(
    ("library", "changes", "why"),
    [
        (FA3, {"dtype": "float32", "kv_cache_dtype": "float32"}, "dtype float32"),
        (FA3, {"block_size": 8}, "block_size 8"),
        (FA3, {"alibi": "linear"}, "alibi is not implemented"),
        (FA3, {"tree_bias": True}, "tree_bias is not implemented"),
        (FA3, {"output_format": "fp8_static"}, "output_format fp8_static"),
        (FA3, {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}, "query_format='fp8_e4m3'"),
        (FA3, {"query_format": "fp8_e4m3", "query_scale": "tensor"}, "use an FP8 cache"),
        (FA3, {"dtype": "float16", "kv_cache_dtype": "float16", "sinks": True}, "sinks in bf16"),
        (FA3, {"kv_cache_dtype": "float16"}, "use a bfloat16 cache"),
        (FA3, {**FP8, "head_size": 72, "head_size_v": 72}, "head_size 72 with fp8_e4m3"),
        (FA3_PACKAGE, {"sinks": True}, "sinks is not implemented"),
        (FA4, FP8, "kv_cache_dtype fp8_e4m3"),
        (FA2, {}, "block_size 16"),
        (FA2, {"block_size": 256, "alibi": "linear", "lse": True}, "which a log-sum-exp sees"),
        (FA2, {"block_size": 256, "alibi": "sqrt"}, "alibi_sqrt is not implemented"),
        (TORCH_PAGED, {"alibi": "linear"}, "alibi is not implemented"),
        (FA4, {"batch_invariant": True, "sliding_window": 9}, "use TRITON_ATTN"),
        (FA2, {"block_size": 256, "batch_invariant": True}, "batch_invariant is not implemented"),
        (TORCH_PAGED, {"logits_soft_cap": 3.0}, "logits_soft_cap is not implemented"),
    ],
    ids=str,
)
def test_what_libraries_refuse(library, changes, why, monkeypatch) -> None:
    found = reasons(library, monkeypatch, **changes)
    assert [reason for reason in found if why in reason and str(library) in reason]


def test_a_library_by_path_is_refused_on_gpus_that_it_has_no_kernels_for(monkeypatch) -> None:
    reasons(FA3, monkeypatch)
    backend = selector.get_backend("FLASH_ATTN")
    assert "only for sm_90" in backend.reasons(PLAIN, DeviceInfo("cuda", (10, 0), "B"))[0]
    assert "needs sm_90 or newer" in backend.reasons(PLAIN, DeviceInfo("cuda", (8, 0), "A"))[0]


def test_torchs_own_has_no_paged_cache(monkeypatch) -> None:
    assert reasons(TORCH, monkeypatch, block_size=0) == []
    assert "vattn.load_flash_attn(path)" in reasons(TORCH, monkeypatch)[0]


def test_the_newest_library_that_has_kernels_for_the_gpu_runs(forgotten) -> None:
    installed = {"flash-attn": "2.8.3", "flash-attn-4": "4.0.0b36", "flash_attn_3": "3.0.0b1"}
    forgotten.setattr("torch.version.cuda", "13.0")
    forgotten.setattr(flash_attention.FlashPackage, "version", lambda package: installed.get(package.distribution))
    forgotten.setattr(flash_attention, "package_problem", lambda package: None)

    def found(capability: tuple[int, int]) -> str:
        flash_attention.find_library.cache_clear()
        return flash_attention.find_library(capability).name

    assert [found(c) for c in ((8, 0), (9, 0), (10, 0), (12, 0))] == [
        "FlashAttention-2",
        "FlashAttention-3",
        "FlashAttention-4",
        "FlashAttention-2",
    ]
    assert flash_attention.find_library((9, 0), alibi=True).name == "FlashAttention-2"
    del installed["flash_attn_3"], installed["flash-attn"]
    assert flash_attention.find_library((9, 0), alibi=True).name == "FlashAttention-2", "what is found stays"
    flash_attention.find_library.cache_clear()
    assert flash_attention.find_library((9, 0), alibi=True).name == "FlashAttention-4", "which refuses ALiBi"
    assert [found(c) for c in ((8, 0), (9, 0))] == ["torch varlen_attn", "FlashAttention-4"]


def test_torchs_own_pages_with_an_implementation_that_does(forgotten) -> None:
    forgotten.setattr("torch.version.cuda", "13.0")
    forgotten.setattr(flash_attention.FlashPackage, "version", lambda package: None)
    found = {}
    for active in (None, "FA3", "FA4"):
        forgotten.setattr(
            "torch.nn.attention.current_flash_attention_impl", lambda active=active: active, raising=False
        )
        for capability in ((9, 0), (10, 0)):
            flash_attention.find_library.cache_clear()
            found[active, capability] = flash_attention.find_library(capability).paged
    expected = {("FA3", (9, 0)), ("FA4", (10, 0))} if torch.__version__ >= "2.12" else set()
    assert {key for key, paged in found.items() if paged} == expected


def test_flash_attention_4_has_fewer_head_sizes_on_newer_gpus(monkeypatch) -> None:
    wide = PLAIN.replace(head_size=192, head_size_v=192)
    assert reasons(FA4, monkeypatch, head_size=192, head_size_v=192) == []
    backend = selector.get_backend("FLASH_ATTN")
    assert "head_size 192 (runs 32, 40" in backend.reasons(wide, DeviceInfo("cuda", (10, 0), "B"))[0]
    assert backend.reasons(PLAIN, DeviceInfo("cuda", (10, 0), "B")) == []


def test_packages_too_old_or_broken_are_passed_over_and_named(forgotten) -> None:
    forgotten.setattr("torch.version.cuda", None)
    forgotten.setattr(
        flash_attention.FlashPackage,
        "version",
        lambda package: {"flash-attn": "2.3", "flash-attn-4": "4.0"}.get(package.distribution),
    )
    flash_attention.package_problem.cache_clear()
    assert find_library() is None
    problem = selector.get_backend("FLASH_ATTN").problem()
    assert "flash-attn 2.3 is older than 2.6 (pip install -U 'vattn[flash-attn-2]')" in problem
    assert "flash-attn-4 4.0 cannot be imported: No module named 'flash_attn'" in problem
    flash_attention.package_problem.cache_clear()


# Every library is stood in for by the reference behind the library's own words: its arguments must say the same.
STAND_INS = {
    FA3_PACKAGE: {"flash_attn_interface": fake_fa3},
    FA4: {"flash_attn.cute": fake_fa4},
    FA2: {"flash_attn": fake_fa2},
    TORCH_PAGED: {},
}
DECODES = ((1, 9), (1, 400), (2, 8), (1, 0))
PREFILLS = ((9, 30), (12, 12), (1, 5), (20, 2))
"""More rows than twice the requests: they go as they are."""


@pytest.mark.parametrize("lens", [MIXED, PREFILLS], ids=["rows", "prefills"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 5, "lse": True},
        {"causality": "bidirectional"},
        {"causality": "bidirectional", "sliding_window": 4},
        {"causality": "bidirectional", "attn_type": "encoder_decoder", "lse": True},
        {"logits_soft_cap": 1.5},
        {"alibi": "linear"},
        {"alibi": "linear", "sliding_window": 5, "logits_soft_cap": 1.5},
        {"alibi": "linear", "causality": "bidirectional"},
        {"alibi": "linear", "causality": "bidirectional", "block_size": 0},
        {"sinks": True},
        {"batch_invariant": True},
        {"block_size": 0},
        {"kv_cache_layout": "HND"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())) or "plain",
)
@pytest.mark.parametrize("library", STAND_INS, ids=str)
def test_the_words_of_every_package(library, changes, lens, monkeypatch) -> None:
    """The backend in front of a stand-in equals the reference; what the package lacks is refused."""
    if library == TORCH_PAGED:
        torch_varlen(monkeypatch)
        if changes.get("block_size") == 0:
            pytest.skip("without a cache it is an operator of torch for CUDA")
    config = {"dtype": "bfloat16", "head_size": 32, "block_size": 256, **changes}
    if reasons(library, monkeypatch, **{**config, "head_size_v": 32}):
        return
    for name, make in STAND_INS[library].items():
        monkeypatch.setitem(sys.modules, name, make())
    batch = batch_of_row(Row(config, lens, padding=(3, 2)), "FLASH_ATTN", seed=4)
    backend = selector.get_backend("FLASH_ATTN")
    run = backend.attention if batch.config.block_size else backend.varlen_attention
    monkeypatch.setattr(planning, "multiprocessors", lambda device: 132)
    run(batch.args, batch.config)
    compare(batch, *batch.expected())


@pytest.mark.parametrize("lens", [MIXED, DECODES])
@pytest.mark.parametrize("causality", ["causal", "bidirectional"])
def test_rows_as_requests_see_the_same_keys(lens, causality) -> None:
    queries, lengths = (torch.tensor(part, dtype=torch.int32) for part in zip(*lens, strict=True))
    starts, config = torch.tensor(offsets(queries), dtype=torch.int32), make_config(causality=causality)
    rows = rows_as_requests(starts, lengths, int(starts[-1]) + 2, config.causality == "causal")
    expected = [
        (request, max(0, seq - query + i + 1) if causality == "causal" else seq)
        for request, (query, seq) in enumerate(lens)
        for i in range(query)
    ]
    assert list(zip(rows.request.tolist(), rows.seq_lens.tolist(), strict=True))[:-2] == expected
    assert rows.seq_lens[-2:].tolist() == [0, 0]
    assert rows.start_loc.tolist() == list(range(len(expected) + 3))


STEPS = [
    MIXED,
    DECODES,
    tuple((index % 3, 5 + index) for index in range(300)),
    ((0, 0),),
    ((3, 1),),
    ((0, 3), (0, 4), (1, 9), (0, 2)),
]


@pytest.mark.parametrize("lens", STEPS, ids=len)
@pytest.mark.parametrize("causality", ["causal", "bidirectional"])
def test_the_kernel_finds_the_same_rows(lens, causality) -> None:
    library_rows = pytest.importorskip("vattn.kernels.triton.attention.external_rows")
    queries, lengths = (torch.tensor(part, dtype=torch.int32) for part in zip(*lens, strict=True))
    starts, config = torch.tensor(offsets(queries), dtype=torch.int32), make_config(causality=causality)
    rows = int(starts[-1]) + 2
    expected = rows_as_requests(starts, lengths, rows, config.causality == "causal")
    found = [torch.full((size,), -9, dtype=torch.int32) for size in (rows, rows, rows + 1)]
    library_rows.write_rows(starts, lengths, *found, causality == "causal")
    assert torch.equal(found[2], expected.start_loc)
    assert torch.equal(found[1], expected.seq_lens)
    assert torch.equal(found[0], expected.request)


@pytest.mark.parametrize("request_of_row", [None, [2, 0, 0, 3, 1]])
def test_the_kernel_copies_what_is_used_of_a_table(request_of_row) -> None:
    library_rows = pytest.importorskip("vattn.kernels.triton.attention.external_rows")
    width, size, blocks = 1100, 16, 50
    table = torch.randint(-100, 200, (4, width + 9), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    table, lengths = table[:, :width], torch.tensor([0, 17, 99999, 1030 * size + 1], dtype=torch.int32)
    request = None if request_of_row is None else torch.tensor(request_of_row, dtype=torch.int32)
    lengths = lengths if request is None else lengths[request.long()]
    found, inside = library_rows.table_of_rows(table, request, lengths, blocks, size)
    expected = (table if request is None else table[request.long()]).clamp(0, blocks - 1)
    clamped = lengths.clamp(max=width * size)
    assert torch.equal(inside, clamped)
    for row, length in enumerate(clamped.tolist()):
        used = -(-length // size)
        assert torch.equal(found[row, :used], expected[row, :used])
        assert not found[row, used:].any()


@pytest.mark.parametrize(("heads", "width"), [(1, 32), (5, 72), (16, 64)])
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_kernel_puts_rows_right(heads, width, with_lse) -> None:
    library_rows = pytest.importorskip("vattn.kernels.triton.attention.external_rows")
    rng, starts = torch.Generator().manual_seed(2), torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    output = torch.randn(9, heads, width, generator=rng).half()
    found = torch.randn(heads, 9, generator=rng)
    found[0, 1], found[-1, 5], found[:, 3] = torch.inf, -torch.inf, torch.inf
    found[:, 7:], output[7:] = torch.nan, torch.nan
    found[0, 2] = torch.nan
    seen = (torch.arange(9) < 7).unsqueeze(1) & ~found.t().isinf()
    expected, log = output.clone(), torch.empty(9, heads)
    zero_invalid_rows(expected, log, found.t(), seen)
    lse = torch.full((9, heads), 5.0) if with_lse else None
    library_rows.finish_rows(output, lse, found.t(), starts)
    assert torch.equal(output, expected)
    assert lse is None or torch.equal(lse.nan_to_num(7), log.nan_to_num(7))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("changes", [{}, {"logits_soft_cap": 1.5}])
def test_scales_that_are_not_positive_are_the_querys(scale, changes, monkeypatch) -> None:
    monkeypatch.setattr(flash_attn, "find_library", lambda *_: FA4)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake_fa4())
    monkeypatch.setattr(planning, "multiprocessors", lambda device: 132)
    config = {"dtype": "bfloat16", "head_size": 32, "block_size": 16, "scale": scale, **changes}
    batch = batch_of_row(Row(config, MIXED), "FLASH_ATTN", seed=4)
    seen = []
    run = flash_attn.run_flash
    monkeypatch.setattr(
        flash_attn, "run_flash", lambda library, call, out: seen.append(call) or run(library, call, out)
    )
    selector.get_backend("FLASH_ATTN").attention(batch.args, batch.config)
    compare(batch, *batch.expected())
    assert seen[0].scale > 0
    codes = torch.tensor([[[1.5, -2.0, 0.0]]]).to(torch.float8_e4m3fn)
    assert flash_attn._with_positive_scale(codes, -1.0).float().tolist() == [[[-1.5, 2.0, 0.0]]]
    assert not flash_attn._with_positive_scale(codes, 0.0).float().any()


def test_which_steps_go_by_rows() -> None:
    plain = make_config()
    assert planning.takes_rows(plain, 16, 8)
    assert not planning.takes_rows(plain, 17, 8)
    assert not planning.takes_rows(plain.replace(batch_invariant=True), 8, 8)
    both = plain.replace(causality="bidirectional")
    assert planning.takes_rows(both, 8, 8)
    assert not planning.takes_rows(both.replace(sliding_window=9), 8, 8)


def test_splits_are_bounded_by_sizes_alone(monkeypatch) -> None:
    monkeypatch.setattr(planning, "multiprocessors", lambda device: 132)
    config = make_config(num_heads=32, num_kv_heads=8, head_size=128)

    def splits(tokens: int, reqs: int, **changes: object) -> int:
        return planning.num_splits(config.replace(**changes), tokens, reqs, torch.device("cpu"))

    assert splits(1, 2) == splits(256, 256) == 32
    assert splits(512, 512) == 16
    assert splits(1000, 1000) == splits(4096, 8) == splits(64, 64, batch_invariant=True) == 1
    assert splits(128, 8) == 132 // 32


def test_a_schedule_is_never_smaller_for_fewer_tokens() -> None:
    sizes = [torch.Size(planning.plan_shape(make_config(), tokens)).numel() for tokens in range(1, 300)]
    assert sizes == sorted(sizes)
    # Four words of the library for each row, rounded up to four rows, one more, and three of ours.
    assert all(size >= 1 + 4 * (-(-tokens // 4) * 4) + 3 * tokens + 1 for tokens, size in enumerate(sizes, 1))


def test_the_schedule_of_a_step(monkeypatch) -> None:
    """What is made once a step is what a call would make for itself, and goes to the library with the call."""
    made = []

    def make_schedule(call, *sizes):
        made.append((call, sizes))
        return torch.arange(41, dtype=torch.int32)

    monkeypatch.setattr(planning, "make_schedule", make_schedule)
    monkeypatch.setattr(planning, "_schedule_sizes", {})
    batch = batch_of_row(Row({"dtype": "bfloat16", "block_size": 16, "head_size": 32}, DECODES), "FLASH_ATTN", seed=4)
    args, config = batch.args, batch.config
    schedule = torch.full(planning.plan_shape(config, args.query.shape[0]), -7, dtype=torch.int32)
    planning.fill_plan(PlanArgs(args.query_start_loc, args.seq_lens, schedule, args.config), config, (-1, -1))
    key = torch.zeros(9, 16, 2, 32)
    call = flash_attn._call(args, config, key, key)
    alone = planning.paged_call(call, args, config, scheduled=True)
    planned = planning.paged_call(call, args._replace(plan=[schedule]), config, scheduled=True)
    assert alone.schedule is None
    assert planned.schedule.tolist() == list(range(41))
    for name in ("seq_lens", "query_start_loc", "block_table"):
        assert torch.equal(getattr(alone, name), getattr(planned, name))
    described, sizes = made[0]
    assert torch.equal(described.seq_lens, alone.seq_lens)
    assert (described.max_query_len, described.num_splits) == (alone.max_query_len, alone.num_splits) == (1, 32)
    assert sizes == (16, 2, 32)
    # A window as wide as the table is none for the library, which then wants another schedule.
    both = config.replace(causality="bidirectional")
    turned = planning.paged_call(call, args._replace(plan=[schedule]), both, scheduled=True)
    assert turned.schedule is None
    assert torch.equal(turned.seq_lens, planning.paged_call(call, args, both, scheduled=True).seq_lens)
    planning.fill_plan(PlanArgs(args.query_start_loc, args.seq_lens, schedule, args.config), config, (900, 0))
    wide = planning.paged_call(call._replace(window=(900, 0)), args._replace(plan=[schedule]), config, scheduled=True)
    assert wide.schedule is None


def test_the_shape_of_a_cache_and_its_blocks() -> None:
    backend = selector.get_backend("FLASH_ATTN")
    assert backend.get_supported_head_sizes() == [32, 64, 96, 128, 160, 192, 224, 256]
    shape = backend.get_kv_cache_shape(6, 16, 2, 32)
    assert shape == (2, 6, 16, 2, 32)
    with pytest.raises(CacheError, match=r"Block size must be a multiple of 16\."):
        backend.get_kv_cache_shape(6, 24, 2, 32)
    for dtype in (torch.bfloat16, torch.uint8):
        source, target = (torch.arange(6144 * 2, dtype=torch.float32).view(shape).to(dtype) + x for x in (0, 1))
        before = target.clone()
        backend.swap_blocks(source, target, [(2, 5), (3, 0)])
        assert torch.equal(target[:, [5, 0]], source[:, [2, 3]])
        assert torch.equal(target[:, 1:5], before[:, 1:5])
        backend.copy_blocks([source, target], [(1, 4)])
        for cache in (source, target):
            assert torch.equal(cache[:, 4], cache[:, 1])
    with pytest.raises(CacheError, match="named twice"):
        backend.copy_blocks([source], [(1, 4), (2, 4)])
    with pytest.raises(CacheError, match="num_blocks, block_size"):
        backend.swap_blocks(source[0], target[0], [(1, 2)])


def test_explain_calls_untested_what_never_ran(monkeypatch) -> None:
    """The record in the repository is of one FlashAttention-3 library; every other library is untested."""
    monkeypatch.setattr(flash_attn, "library_digest", lambda: "bcea1246912e")
    for library, verdict in ((FA3, "ran: FlashAttention-3 library"), (FA4, "untested: with flash_attn.cute 4.0.0b36")):
        assert reasons(library, monkeypatch) == []
        selector.forget_decisions()
        explanation = selector.explain(PLAIN, HOPPER)
        assert explanation.chosen == "FLASH_ATTN"
        assert explanation.tested["FLASH_ATTN"].startswith(verdict)
        assert explanation.notes[0] == f"runs on {library}"
    selector.forget_decisions()
