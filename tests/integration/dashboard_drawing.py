"""Draws dashboards as Grafana lays them out, from a Prometheus' answers, with matplotlib.

For the pictures in docs/ only: enough of Grafana's panels to recognise one's own dashboard in them.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.integration.watched import Watched, finite_values
from tests.unit.dashboards.pictures import KEYWORD, panels_text
from tests.unit.dashboards.reading import Dashboard, Panel, Query

COLUMNS = 24
CELL_INCHES = (0.62, 0.36)
PAPER, PANEL, INK, FAINT = "#111217", "#181b1f", "#ccccdc", "#565a66"
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d"]
DPI = 85
MAX_LEGENDS = 8
MAX_LEGEND_CHARACTERS = 34


def draw_dashboard(dashboard: Dashboard, seen: Watched, file: Path) -> None:
    """Write a PNG of at most 128 colours that says which panels it shows."""
    num_rows = max(p.raw["gridPos"]["y"] + p.raw["gridPos"]["h"] for p in dashboard.panels)
    width, height = COLUMNS * CELL_INCHES[0], (num_rows + 1) * CELL_INCHES[1]
    with mpl.rc_context({"font.size": 7, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
        figure.text(0.006, 1 - 0.3 / height, dashboard.title, size=11, weight="bold", va="center")
        for panel in dashboard.panels:
            _draw_panel(_place(figure, panel, num_rows), panel, seen)
        figure.savefig(file)
    about = PngInfo()
    about.add_text(KEYWORD, panels_text(dashboard))
    Image.open(file).convert("RGB").quantize(128).save(file, optimize=True, pnginfo=about)


def _place(figure: Figure, panel: Panel, num_rows: int) -> Axes:
    """The panel's box with its title; returns the axes inside it."""
    at, total = panel.raw["gridPos"], num_rows + 1
    x, w = at["x"] / COLUMNS, at["w"] / COLUMNS
    y, h = 1 - (at["y"] + at["h"] + 1) / total, at["h"] / total
    box = figure.add_axes((x + 0.002, y + 0.06 / total, w - 0.004, h - 0.12 / total))
    box.set(xticks=[], yticks=[], facecolor=PANEL)
    inset = 0.12 / (w * COLUMNS * CELL_INCHES[0])
    box.text(inset, 1 - 0.25 / h / total, panel.title, size=7.5, va="top")
    for spine in box.spines.values():
        spine.set_visible(False)
    bottom = 1.9 if panel.kind == "timeseries" else 0.9
    inner = (x + 0.034, y + bottom / total, w - 0.042, h - (bottom + 0.95) / total)
    axes = figure.add_axes(inner)
    axes.set_facecolor(PANEL)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, length=0, labelsize=6)
    return axes


def _draw_panel(axes: Axes, panel: Panel, seen: Watched) -> None:
    drawers: dict[str, Callable[[Axes, Panel, Watched], None]] = {
        "timeseries": _draw_lines,
        "heatmap": _draw_heatmap,
        "stat": _draw_stat,
        "table": _draw_table,
    }
    drawers[panel.kind](axes, panel, seen)


def _draw_lines(axes: Axes, panel: Panel, seen: Watched) -> None:
    series = [(q, one) for q in panel.queries for one in seen.over_time(q.expression)]
    lines = [(_legend(query, one), *_points(one)) for query, one in series]
    lines = [line for line in lines if np.isfinite(line[2]).any()]
    lines.sort(key=lambda line: not np.nansum(line[2]))  # what has something to show comes first
    defaults = panel.raw["fieldConfig"]["defaults"]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        times = np.unique(np.concatenate([times for _, times, _ in lines]))
        heights = [np.interp(times, at, np.nan_to_num(values)) for _, at, values in lines]
        names = [name for name, _, _ in lines]
        axes.stackplot(times, heights, labels=names, colors=COLOURS, alpha=0.55, linewidth=0)
    else:
        for index, (name, times, values) in enumerate(lines):
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(times, values, color=colour, linewidth=1.1, label=name)
    axes.set_ylim(defaults["min"], 1.04 * defaults["max"] if "max" in defaults else None)
    axes.grid(color=FAINT, linewidth=0.3, alpha=0.6)
    _format(axes, panel.unit, seen)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[:MAX_LEGENDS], labels[:MAX_LEGENDS], loc="upper left", bbox_to_anchor=(-0.02, -0.1),
        ncols=4, fontsize=6, frameon=False, labelcolor=INK, handlelength=1.0, columnspacing=1.0,
    )  # fmt: skip


def _draw_heatmap(axes: Axes, panel: Panel, seen: Watched) -> None:
    (query,) = panel.queries
    found = seen.over_time(query.expression)
    series = sorted(found, key=lambda one: float(one["metric"]["le"]))
    cumulative = np.array([_points(one)[1] for one in series])
    counts = np.diff(cumulative, axis=0, prepend=0.0)
    used = np.flatnonzero(np.nan_to_num(counts).sum(axis=1) > 0)
    low, high = max(0, used[0] - 1), min(len(counts), used[-1] + 2)
    shown = np.ma.masked_less_equal(counts[low:high], 1e-9)
    times = _points(series[0])[0]
    axes.pcolormesh(times, np.arange(low, high), shown**0.5, cmap="turbo", shading="nearest")
    bounds = [float(one["metric"]["le"]) for one in series[low:high]]
    every = max(1, len(bounds) // 8)
    labels = [_number(bound, panel.unit) if np.isfinite(bound) else "+Inf" for bound in bounds]
    _format(axes, panel.unit, seen)
    axes.set_yticks(np.arange(low, high)[::every] + 0.5, labels[::every])


def _draw_stat(axes: Axes, panel: Panel, seen: Watched) -> None:
    (query,) = panel.queries
    values = finite_values(seen.over_time(query.expression))
    axes.set(xticks=[], yticks=[])
    text = _number(values[-1], panel.unit) if values else "no data"
    axes.text(0.5, 0.45, text, size=17, ha="center", va="center", color=COLOURS[0])


def _draw_table(axes: Axes, panel: Panel, seen: Watched) -> None:
    (query,) = panel.queries
    rows = [one["metric"] for one in seen.at_the_end(query.expression)]
    names = panel.raw["transformations"][0]["options"]["renameByName"]
    columns = sorted(rows[0]) if rows else ["no data"]
    axes.set(xticks=[], yticks=[], xlim=(0, len(columns)), ylim=(max(5, len(rows) + 1), 0))
    for column, key in enumerate(columns):
        axes.text(column, 0.5, names.get(key, key), weight="bold", va="center")
        for index, row in enumerate(rows):
            axes.text(column, index + 1.5, row[key], va="center")


def _points(one: dict) -> tuple[np.ndarray, np.ndarray]:
    times, values = zip(*one["values"], strict=True)
    return np.array(times, dtype=float), np.array(values, dtype=float)


def _legend(query: Query, one: dict) -> str:
    text = query.legend
    for label, value in one["metric"].items():
        text = text.replace("{{" + label + "}}", value)
    return text[:MAX_LEGEND_CHARACTERS]


def _format(axes: Axes, unit: str, seen: Watched) -> None:
    axes.set_xlim(seen.start_s, seen.end_s)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S"))
    )
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value, unit)))


def _number(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if abs(value) * factor >= 1 or name == "µs":
                return f"{value * factor:.3g} {name}" if value else "0"
    suffix = {"reqps": " req/s", "ops": "/s", "short": ""}.get(unit) or unit.partition(":")[2]
    if unit == "short":
        suffix = ""
    for factor, letter in ((1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}{suffix}"
    return f"{value:.3g}{suffix}"
