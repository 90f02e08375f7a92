"""The charts of a report as PNG files, by way of matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from beamwright.errors import UnavailableError
from beamwright.evaluate.eval_charts import COLOURS, axis_ticks, format_number
from beamwright.evaluate.eval_runs import Chart
from beamwright.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 140
_SPREAD = 1.025  # factor between neighbours at the same x
_DASHES = ("-", "--", ":")


def write_pngs(charts: Sequence[Chart], page: Path) -> list[Path]:
    """Write a file per chart beside the page: `report-n.png` for `report.html`.

    Raises:
        UnavailableError: without matplotlib; InputError: if a file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (an extra)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "no PNGs: they need matplotlib (pip install 'beamwright[plot]')"
        ) from error
    files = []
    for chart in charts:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), chart)
        figure.legend(loc="outside right upper", fontsize=8)  # beside the lines, never over them
        file = page.with_name(f"{page.stem}-{chart.name}.png")
        content = io.BytesIO()
        figure.savefig(content, dpi=_DPI, format="png")
        write_bytes(file, content.getvalue())
        files.append(file)
    return files


def _draw(axes: Axes, chart: Chart) -> None:
    for number, line in enumerate(chart.lines):
        place = number - (len(chart.lines) - 1) / 2
        shift = _SPREAD**place if chart.counted else 1.0  # intervals at one x stand side by side
        below = [0.0 if p.low is None else max(0.0, p.y - p.low) for p in line.points]
        above = [0.0 if p.high is None else max(0.0, p.high - p.y) for p in line.points]
        dash = _DASHES[line.style // len(COLOURS) % len(_DASHES)]
        colour = COLOURS[line.style % len(COLOURS)]
        axes.errorbar(
            [point.x * shift for point in line.points],
            [point.y for point in line.points],
            [below, above],
            fmt=f"o{dash}",
            color=colour,
            ecolor=f"{colour}66",
            capsize=3,
            markersize=4,
            label=line.name,
        )
    axes.set_xscale("log")
    ticks = axis_ticks(chart)
    axes.set_xticks(ticks, [format_number(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(chart.x_label)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylabel("pass@k" if chart.name == "pass" else "accuracy")
    axes.set_title(chart.title, fontsize=10)
    axes.grid(alpha=0.3)
