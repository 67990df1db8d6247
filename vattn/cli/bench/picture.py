"""The picture of a benchmark: a roofline, and a panel of ratios for each kind of step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vattn.calibration.result_files import figures, write_picture
from vattn.cli.bench.report import kind_of

WIDTH = 9.0
"""Inches of one panel."""

BAR, FRAME = 0.17, 1.2
"""Inches of a bar with its label, and of what is around the bars of a panel."""

ROOFLINE = 6.0
"""Inches of the roofline's height."""


def plot(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a run."""
    write_picture(draw(result), path, dpi=110)


def draw(result: dict[str, Any]) -> Any:
    """Draw what every kernel reached over how much it computes per byte, and vattn beside the best peer row by row."""
    new_figure = figures()
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "peer_over_own" in row:
            panels.setdefault(kind_of(row), []).append(row)
    # Two panels side by side are as high as the longer one.
    kinds = sorted(panels, key=lambda kind: -len(panels[kind]))
    heights = [FRAME + BAR * len(panels[kind]) for kind in kinds[::2]]
    figure = new_figure(figsize=(2 * WIDTH, ROOFLINE + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(1 + len(heights), 2, height_ratios=[ROOFLINE, *heights])
    _roofline(figure.add_subplot(grid[0, :]), result)
    for place, kind in enumerate(kinds):
        _ratios(figure.add_subplot(grid[1 + place // 2, place % 2]), kind, panels[kind])
    figure.suptitle(f"vattn bench attention: {result['device']}, {result['date']}")
    return figure


def _roofline(axes: Any, result: dict[str, Any]) -> None:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in result["rows"]:
        for name, entry in row.get("kernels", {}).items():
            if "us" in entry:
                place = row["flops"] / row["bytes"], row["flops"] / entry["us"] / 1e6
                points.setdefault(name, []).append(place)
    reach = [x for places in points.values() for x, _ in places] or [1.0]
    left, right = min(reach) / 2, max(reach) * 2
    hbm = result["ceilings"].get("hbm_tb_s")
    for name, style in (("bf16_tflops", "-"), ("fp8_tflops", "--")):
        top = result["ceilings"].get(name)
        if isinstance(hbm, float) and isinstance(top, float):
            corner = top / hbm
            axes.plot([left, corner, max(right, corner)], [left * hbm, top, top], "k" + style, lw=1, label=name)
    for (name, places), marker in zip(points.items(), "os^vD<>Pph*X" * 3, strict=False):
        size = 60 if name.startswith("vattn") else 25
        axes.scatter(*zip(*places, strict=True), s=size, marker=marker, alpha=0.7, label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte moved", ylabel="TFLOP/s")
    axes.grid(True, which="both", alpha=0.2)
    axes.set_title("What kernels reached, and the ceilings of the run")
    axes.legend(fontsize=8, ncols=2)


def _ratios(axes: Any, kind: str, rows: list[dict[str, Any]]) -> None:
    steps = [str(row["work"]).removeprefix(kind).strip(" ,") for row in rows]
    values = [row["peer_over_own"] for row in rows]
    axes.barh(range(len(rows)), values, color=["tab:green" if value >= 1 else "tab:orange" for value in values])
    labels = [f"{row['model']}, {step}, {row['cache']}" for row, step in zip(rows, steps, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(1, color="k", lw=1)
    axes.set_title(f"{kind}: {len(rows)} rows")
    axes.set_xlabel("time of the best peer / time of vattn (above 1, vattn is faster)")
