"""`python -m vattn bench`: cells, checks before times, peers that are missing or throw, tables and plots."""

from __future__ import annotations

import importlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import fake_flashinfer
from tests.support import relative_l2
from vattn.__main__ import main
from vattn.cli.bench import attention, peers, picture, random_steps, report, shapes
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.peers import ON_CPU, NotThisCellError, Peer
from vattn.cli.bench.published import PUBLISHED
from vattn.errors import ConfigError, UnknownOptionError
from vattn.kernels import replay

CPU = attention.Settings(replays=1, device="cpu")
CEILINGS: dict[str, Any] = {"hbm_tb_s": 2.0, "bf16_tflops": 100.0, "fp8_tflops": "failed: no"}


def small(model: str = "llama3-8b", work: str = "prefill 1x8k") -> tuple[shapes.LayerShape, shapes.Work]:
    return shapes.tiny(shapes.LAYERS[model], shapes.WORKS[work])


def test_names_are_beginnings_or_whole() -> None:
    def names(models: list[str], works: list[str]) -> set[str]:
        return {f"{layer.name}/{work.name}" for layer, work in shapes.choose_cells(models, works)}

    ones = {f"llama3-8b/decode 1x{keys}" for keys in ("1k", "8k", "128k")}
    assert names(["llama3-8b"], ["decode 1x"]) == ones
    assert {name.split("/")[0] for name in names(["gpt"], ["decode 1x1k"])} == {"gpt-oss-20b", "gpt-oss-20b-window"}
    assert len(shapes.choose_cells([], [])) == len(shapes.WORKS) + 3 * (len(shapes.LAYERS) - 1)
    assert {layer.name for layer, _ in shapes.default_cells()} == set(shapes.LAYERS)
    for wrong in ((["llama9"], []), ([], ["dance"])):
        with pytest.raises(UnknownOptionError, match="beginning"):
            shapes.choose_cells(*wrong)
    with pytest.raises(UnknownOptionError, match="--peers 'fa9'"):
        peers.choose_peers(["fa9"])
    assert peers.choose_peers(["none"]) == []
    assert {peer.key for peer in peers.choose_peers(["fa3", "xqa"])} == {"fa3", "xqa"}


@pytest.mark.parametrize(
    ("model", "work", "cache"),
    [
        ("llama3-8b", "prefill 1x8k", "bf16"),
        ("gemma3-12b-window-cap", "speculative 64x4k, 4", "fp8"),
        ("gpt-oss-20b-window", "mixed 8x512 + 128 decodes of 4k", "bf16"),
        ("llama3-8b", "mixed 8x512 + 128 decodes of 4k", "fp8"),
    ],
)
def test_a_cell_is_right_on_the_torch_backend(model: str, work: str, cache: str) -> None:
    row = attention.run_cell(*small(model, work), cache, [ON_CPU], CPU, CEILINGS)
    entry = row["kernels"][ON_CPU.name]
    assert entry["us"] > 0 and entry["error"] < 1.6e-2
    assert row["best_own"] == ON_CPU.name and row["of_hbm"] == pytest.approx(row["tb_s"] / 2, abs=1e-3)
    assert "peer_over_own" not in row


def test_cells_count_what_is_visible() -> None:
    layer, work = shapes.LayerShape("x", 4, 2, 32, window=8), shapes.Work("y", ((3, 20), (1, 5)))
    cell = Cell(layer, work, "fp8", 16, 0, "cpu")
    # Rows of the first request see 8 keys each out of 10 different ones, the second sees 5.
    assert cell.flops == 4 * (3 * 8 + 5) * 4 * 32
    assert cell.bytes == 2 * (10 + 5) * 2 * 32 * 1 + 2 * 4 * 4 * 32 * 2


def test_wide_blocks_are_the_same_keys() -> None:
    cell = Cell(shapes.LAYERS["llama3-8b-tp8"], shapes.Work("y", ((1, 100), (1, 130))), "bf16", 16, 3, "cpu")
    for (request, (_, keys)), tokens in itertools.product(enumerate(cell.work.requests), (64, 128)):
        narrow = cell.kv_cache[0][cell.table[request].long()].flatten(0, 1)[:keys]
        key, _, table = cell.wide(tokens)
        assert key.shape[1] == tokens and torch.equal(narrow, key[table[request].long()].flatten(0, 1)[:keys])


def test_contiguous_copies_are_the_same_attention() -> None:
    cell = Cell(shapes.LAYERS["llama3-8b-tp8"], shapes.Work("y", ((33, 33),) * 2), "bf16", 16, 3, "cpu")
    query, key, value = (part.float() for part in cell.contiguous)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=cell.scale, enable_gqa=True
    )
    assert cell.error(output.transpose(1, 2).flatten(0, 1)) < 1e-5
    assert relative_l2(query.transpose(1, 2).flatten(0, 1), cell.query.float()) == 0


def test_peers_that_cannot_throw_or_are_wrong_are_reported_and_the_run_goes_on() -> None:
    def throws(cell: Cell) -> Any:
        raise RuntimeError("an illegal instruction")

    def cannot(cell: Cell) -> Any:
        raise NotThisCellError("this cell")

    def wrong(cell: Cell) -> Any:
        right = ON_CPU.make(cell)
        return lambda: right() * 1.1

    found = [
        Peer("thrower", "t", lambda: None, throws),
        Peer("cannot", "c", lambda: None, cannot),
        Peer("wrong", "w", lambda: None, wrong),
        ON_CPU,
        Peer("rival", "r", lambda: None, ON_CPU.make),
    ]
    row = attention.run_cell(*small(), "bf16", found, CPU, CEILINGS)
    kernels = row["kernels"]
    assert "an illegal instruction" in kernels["thrower"]["failed"]
    assert kernels["cannot"] == {"skipped": "this cell"}
    assert "us" not in kernels["wrong"] and "at most" in kernels["wrong"]["wrong"]
    assert row["best_peer"] == "rival" and row["peer_over_own"] > 0
    notes = report.notes_of(row)
    assert len(notes) == 2 and report.failures([row]) == 0
    assert report.failures([{**row, "kernels": {"vattn": {"failed": "x"}}}]) == 1


def test_a_ceiling_is_no_peer(monkeypatch) -> None:
    """What reads the keys is timed without a check, and only where it reads what attention does."""

    def reads(cell: Cell) -> Any:
        return lambda: torch.zeros(3)

    stream = Peer(peers.STREAM.name, "s", lambda: None, reads, attends=False)
    clock = {ON_CPU.name: 8.0, "stream": 6.0, "rival": 10.0}
    monkeypatch.setattr(attention, "interleave", lambda timers, replays: {name: clock[name] for name in timers})
    found = [ON_CPU, stream, Peer("rival", "r", lambda: None, ON_CPU.make)]
    row = attention.run_cell(*small(work="decode 32x1k"), "bf16", found, CPU, CEILINGS)
    assert (row["best_peer"], row["peer_over_own"], row["stream_over_own"]) == ("rival", 1.25, 0.75)
    assert report.cells_of(row)[7] == "0.75" and len(report.cells_of(row)) == len(report.COLUMNS)
    plain, window = small()[0], small("mistral-7b-window")[0]
    for layer, requests in ((plain, ((1, 40), (1, 30))), (plain, ((9, 40),) * 2), (window, ((1, 40),) * 2)):
        cell = Cell(layer, shapes.Work("y", requests), "bf16", 16, 0, "cpu")
        with pytest.raises(NotThisCellError, match="window"):
            peers.STREAM.make(cell)


def test_the_command_on_a_machine_without_a_gpu(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "attention"]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert main(["bench", "attention", "--device", "cpu", "--peers", "foo"]) == 2
    assert "--peers 'foo'" in capsys.readouterr().err
    files = {name: tmp_path / f"o.{name}" for name in ("json", "md", "png")}
    options = ["--device", "cpu", "--models", "llama3-8b", "--work", "decode 1x1k;prefill 1x8k", "--cache", "bf16"]
    assert main(["bench", "attention", *options, "--json", str(files["json"]), "--markdown", str(files["md"])]) == 0
    assert "decode 1x1k (tiny)" in capsys.readouterr().out
    result = report.read_result(files["json"])
    assert len(result["rows"]) == 2 and result["peers"] == {ON_CPU.name: "found"}
    assert "| llama3-8b | prefill 1x8k (tiny) | bf16 |" in files["md"].read_text()
    pytest.importorskip("matplotlib")
    result["ceilings"] = CEILINGS
    result["rows"][0].update(peer_over_own=1.2, best_peer=ON_CPU.name)
    files["json"].write_text(json.dumps(result))
    assert main(["bench", "attention", "--from", str(files["json"]), "--plot", str(files["png"])]) == 0
    assert files["png"].read_bytes()[:4] == b"\x89PNG"


def test_a_run_ends_in_time(tmp_path: Path, capsys) -> None:
    path = tmp_path / "o.json"
    options = ["--device", "cpu", "--models", "llama3-8b", "--work", "decode", "--seconds", "0", "--json", str(path)]
    assert main(["bench", "attention", *options]) == 0
    assert len(report.read_result(path)["rows"]) == 1
    count = 2 * sum(name.startswith("decode") for name in shapes.WORKS)
    assert f"1 of {count} rows" in capsys.readouterr().err


def test_kernels_of_all_rows_are_compiled_first_on_cells_without_values(monkeypatch) -> None:
    made: list[tuple[int, ...]] = []

    def make(cell: Cell) -> Any:
        assert replay.active.compile_only
        made.append(tuple(cell.kv_cache.shape))
        if cell.fp8:
            raise RuntimeError("no such kernel")
        return lambda: cell.query

    rows = [(*small(), cache) for cache in ("fp8", "bf16")]
    ahead = [(row, [Peer("vattn", "vattn", lambda: None, make)]) for row in rows]
    attention.compile_kernels(ahead, CPU)
    assert made == []
    monkeypatch.setattr(attention, "is_compiling_ahead", lambda: True)
    attention.compile_kernels(ahead, CPU)
    assert made == [tuple(Cell(*row, 16, 0, "cpu").kv_cache.shape) for row in rows]
    assert not replay.active.compile_only


def test_rows_run_in_the_order_that_is_asked_for() -> None:
    def names(*only: str, caches: tuple[str, ...] = ("bf16", "fp8")) -> list[str]:
        rows = shapes.choose_rows(shapes.every_cell(), caches, only)
        return [f"{layer.name}/{work.name}/{cache}" for layer, work, cache in rows]

    assert len(names()) == 2 * len(shapes.LAYERS) * len(shapes.WORKS) == len(set(names()))
    assert names("gemma3-12b/prefill 1x8k/fp8", "llama3-8b/decode 1x/bf16", "/decode 1x1k/bf16")[:5] == [
        "gemma3-12b/prefill 1x8k/fp8",
        "llama3-8b/decode 1x1k/bf16",
        "llama3-8b/decode 1x8k/bf16",
        "llama3-8b/decode 1x128k/bf16",
        "gemma3-12b-window-cap/decode 1x1k/bf16",
    ]
    assert len(names("llama3-8b/speculative 64x4k, 8")) == 2
    for wrong in ("llama9", "llama3-8b/dance", "llama3-8b//int4", "a/b/c/d"):
        with pytest.raises(UnknownOptionError, match="--only"):
            names("llama3-8b", wrong)


def test_a_run_goes_on_where_another_stopped(tmp_path: Path, capsys, monkeypatch) -> None:
    path = tmp_path / "o.json"
    options = ["--device", "cpu", "--only", "llama3-8b/decode 1x;/prefill 1x8k/bf16", "--json", str(path)]
    count = 6 + len(shapes.LAYERS)
    assert main(["bench", "attention", *options, "--resume", "--seconds", "0"]) == 0
    assert f"1 of {count} rows" in capsys.readouterr().err
    before = report.read_result(path)
    before["rows"].append({**before["rows"][0], "work": "decode 1x8k (tiny)", "failed": "out of memory"})
    path.write_text(json.dumps(before))
    ran: list[str] = []
    run_cell = attention.run_cell
    monkeypatch.setattr(attention, "run_cell", lambda *a: (ran.append(a[1].name), run_cell(*a))[1])
    assert main(["bench", "attention", *options, "--resume"]) == 0
    assert len(ran) == count - 1 and ran[0] == "decode 1x1k (tiny)", "the first row is kept, the failed one runs again"
    result = report.read_result(path)
    assert len({report.name_of(row) for row in result["rows"]}) == len(result["rows"]) == count
    assert result["rows"][0] == before["rows"][0] and result["resumed"][0]["first_row"] == 1
    assert "rows from 2 on" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))
    assert main(["bench", "attention", *options, "--resume"]) == 0 and len(ran) == count - 1
    assert main(["bench", "attention", *options, "--resume", "--block-size", "32"]) == 2
    assert "block_size 16" in capsys.readouterr().err
    assert main(["bench", "attention", *options[:-2], "--resume"]) == 2
    assert "--resume without --json" in capsys.readouterr().err
    path.write_text(json.dumps({**result, "device": "another GPU"}))
    assert main(["bench", "attention", *options, "--resume"]) == 2
    assert "another GPU" in capsys.readouterr().err


def test_a_draw_is_a_third_of_each_kind_half_of_each_cache_and_the_same_for_a_seed() -> None:
    rows = random_steps.draw(120, 7)
    assert rows == random_steps.draw(120, 7) != random_steps.draw(120, 8)
    assert rows[:30] == random_steps.draw(30, 7)
    counts = Counter((work.name.split()[0], cache) for _, work, cache in rows)
    assert counts == {(kind, cache): 20 for kind in ("decode", "prefill", "mixed") for cache in ("bf16", "fp8")}
    assert len({(layer.name, work.name, cache) for layer, work, cache in rows}) == 120
    assert len({(layer.heads, layer.kv_heads, layer.head_size) for layer, _, _ in rows}) > 30
    for layer, work, cache in rows:
        assert all(0 < new <= keys for new, keys in work.requests)
        stored = sum(keys for _, keys in work.requests) * 2 * layer.kv_heads * layer.head_size
        pairs = sum(new * keys for new, keys in work.requests)
        assert stored * (1 if cache == "fp8" else 2) <= random_steps.MOST_CACHE_BYTES
        assert 4 * pairs * layer.heads * layer.head_size <= random_steps.MOST_OPERATIONS
    drafts = [work for _, work, _ in rows if work.name.startswith("mixed") and len({q for q, _ in work.requests}) == 1]
    assert drafts and max(work.requests[0][0] for work in drafts) <= 8
    assert any(new < keys for _, work, _ in rows if work.name.startswith("prefill") for new, keys in work.requests)


def test_published_layers_are_at_least_60_and_valid() -> None:
    shapes_of = {str(layer) for layer in PUBLISHED}
    assert len(shapes_of) >= 60 and len({layer.name for layer in PUBLISHED}) == len(PUBLISHED)
    for layer in PUBLISHED:
        assert layer.heads % layer.kv_heads == 0 and layer.head_size % 8 == 0


def test_a_summary_counts_rows_with_a_peer_and_lists_the_others() -> None:
    def row(ratio: float | None, work: str, cache: str = "bf16") -> dict[str, Any]:
        found = {"model": "m", "work": work, "cache": cache}
        return found if ratio is None else {**found, "peer_over_own": ratio, "best_peer": "FA3"}

    rows = [row(0.5, "decode #0: 1 x 1"), row(2.0, "prefill #1: 2 x 9"), row(None, "mixed #2: 3 x 5", "fp8")]
    rows += [row(4.0, "decode #3: 1 x 1"), *(row(1.0, f"prefill #{n}: 1 x 1", "fp8") for n in range(4, 12))]
    lines = report.summary({"rows": rows})
    assert lines[0].startswith("all: 11 rows, peer / vattn 1.134 (geometric mean), 1 below 0.97 (9%)")
    assert lines[1].startswith("decode, bf16: 2 rows, peer / vattn 1.414")
    worst = lines.index("the worst 10:")
    assert lines[worst + 1] == "  0.500 m, decode #0: 1 x 1, bf16 (FA3)" and len(lines) == worst + 13
    assert lines[-2:] == ["not counted, 1 without a peer:", "  m, mixed #2: 3 x 5, fp8"]
    assert report.summary({"rows": rows[2:3]}) == []


def test_random_rows_run_and_their_picture_has_a_panel_for_each_kind(tmp_path: Path, capsys) -> None:
    path = tmp_path / "o.json"
    options = ["--device", "cpu", "--random", "6", "--seed", "3", "--json", str(path)]
    assert main(["bench", "attention", *options]) == 0
    result = report.read_result(path)
    assert [report.kind_of(row) for row in result["rows"]] == ["decode", "prefill", "mixed"] * 2
    pytest.importorskip("matplotlib")
    for row in result["rows"]:
        row.update(peer_over_own=1.2, best_peer="FA3")
    many = {**result, "ceilings": CEILINGS, "rows": [row for _ in range(24) for row in result["rows"]]}
    figure = picture.draw(many)
    figure.draw_without_rendering()
    panels = {axes.get_title(): axes for axes in figure.axes[1:]}
    assert set(panels) == {f"{kind}: 48 rows" for kind in ("decode", "prefill", "mixed")} and figure.axes[0].get_title()
    for axes in panels.values():
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes)), "labels overlap"
        assert min(box.x0 for box in boxes) >= 0 and max(box.x1 for box in boxes) <= axes.get_window_extent().x0


def test_mistakes_are_named(tmp_path: Path, capsys) -> None:
    torn = tmp_path / "torn.json"
    torn.write_text('{"format": 1, "rows": [')
    for arguments, text in (
        (["attention", "--from", str(torn)], "run it again"),
        (["attention", "--from", str(tmp_path / "none.json")], "bench attention --json"),
        (["attention", "--device", "cpu", "--block-size", "12"], "--block-size 12. Allowed: 1, 2, 4 and"),
        (["attention", "--device", "cpu", "--replays", "0"], "--replays 0. Allowed: 1 or more"),
        (["attention", "--device", "cpu", "--models", "gpt9"], "--models 'gpt9'"),
        (["attention", "--from", str(torn), "--work", "decode"], "--work with --from"),
        (["attention", "--device", "cpu", "--json", str(tmp_path / "none" / "o.json")], "a folder that exists"),
        (["attention", "--device", "cpu", "--markdown", str(tmp_path)], "a folder that exists"),
        (["attention", "--device", "cpu", "--seconds", "-3"], "--seconds -3"),
        (["attention", "--device", "cpu", "--random", "0"], "--random 0. Allowed: 1 or more"),
        (["attention", "--device", "cpu", "--random", "3", "--cache", "fp8"], "--random with --models"),
        (["attention", "--device", "cpu", "--seed", "3"], "--seed 3 without --random"),
    ):
        assert main(["bench", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_runs(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "attention", "--device", "cpu", "--plot", str(tmp_path / "o.foo")]) == 2
    said = capsys.readouterr()
    assert "png" in said.err and not said.out


def test_every_script_is_importable() -> None:
    for package in ("triton", "transformers"):
        pytest.importorskip(package)
    root = Path(__file__).parents[2]
    for path in sorted((root / "benchmarks").rglob("*.py")):
        module = importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
        assert module.__doc__, path


def test_a_torn_result_and_a_missing_matplotlib_are_refused(tmp_path: Path, monkeypatch) -> None:
    other = tmp_path / "other.json"
    kernels: dict[str, Any] = {"vattn": {"us": 1.0, "error": 1e-3}}
    row = {"model": "m", "work": "w", "cache": "c", "kernels": kernels, "best_own": "vattn"}
    whole = {"format": 1, "date": "d", "device": "x", "command": "c", "versions": {}, "ceilings": {}, "peers": {}}
    other.write_text(json.dumps({**whole, "rows": [row]}))
    assert report.read_result(other)["rows"] == [row]
    wrong_number = json.dumps({**whole, "rows": [{**row, "kernels": {"vattn": {"us": 1.0, "error": "none"}}}]})
    no_command = json.dumps({**whole, "rows": [row]}).replace('"command"', '"other"')
    torn = ("[1]", "{}", '{"format": 1, "rows": [{}]}', '{"format": 1, "rows": [3]}', '{"format": 1}')
    for content in (*torn, wrong_number, no_command):
        other.write_text(content)
        with pytest.raises(ConfigError, match="format"):
            report.read_result(other)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'vattn\[bench\]"):
        picture.plot({}, tmp_path / "out.png")


def test_a_flashinfer_wrapper_is_planned_for_the_cell(monkeypatch) -> None:
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr("vattn.backends.flashinfer.jit.can_compile", lambda: True)
    layer = shapes.LayerShape("x", 4, 2, 64, window=9, soft_cap=3.0)
    cell = Cell(layer, shapes.Work("y", ((3, 40), (1, 16), (5, 5))), "bf16", 16, 0, "cpu")
    assert cell.error(peers._flashinfer(cell, "fa2")()) < 1e-2
    for wrong, family in ((Cell(layer, cell.work, "fp8", 16, 0, "cpu"), "fa3"),):
        with pytest.raises(NotThisCellError):
            peers._flashinfer(wrong, family)


def test_the_layer_as_it_is_asked_for_is_shown_where_one_that_rounds_the_query_was_faster() -> None:
    row: dict[str, Any] = {"model": "m", "work": "w", "cache": "fp8", "best_own": "vattn, FP8 query"}
    times = {"vattn": {"us": 9.5, "error": 2e-3}, "vattn, FP8 query": {"us": 4.0, "error": 3e-2}}
    assert report.cells_of({**row, "kernels": times})[3] == "4.0 (FP8 query; 9.5 with a query of 16 bits)"
    refused = {**times, "vattn": {"skipped": "this cell"}}
    assert report.cells_of({**row, "kernels": refused})[3] == "4.0 (FP8 query)"
    assert report.cells_of({**row, "kernels": times, "best_own": "vattn"})[3] == "9.5"
