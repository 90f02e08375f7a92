"""A chart of accuracies as inline SVG: lines, points and intervals. No scripts, no packages."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from beamwright.evaluate.eval_runs import Chart, Line

COLOURS = (
    "#123f5c", "#c4432b", "#4f9a94", "#dc9a3a", "#7d5fa8", "#3b76b8", "#8a7a4a", "#a33f6f",
    "#5c8f3a",
)  # fmt: skip
_ON_DARK = (
    "#8fc4e8", "#f0775f", "#63b5ad", "#e0a44c", "#a98be0", "#5f9be6", "#c2b07a", "#dd7fae",
    "#8fc46a",
)  # fmt: skip
_WIDTH, _HEIGHT = 640.0, 338.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 12.0, 50.0
_SPREAD = 7.0  # between neighbours at the same x
_DASHES = ("", "6 3", "2 3")  # a second and third turn through the colours


@dataclass(frozen=True)
class _Axes:
    """From values to places; x is logarithmic, y a share within [low, high]."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def of(cls, chart: Chart) -> _Axes:
        points = [point for line in chart.lines for point in line.points]
        xs = [point.x for point in points]
        lows = [point.y if point.low is None else point.low for point in points]
        highs = [point.y if point.high is None else point.high for point in points]
        margin = 1.15 if max(xs) > min(xs) else 2.0
        y_low = max(0.0, math.floor(min(lows) * 10) / 10)
        y_high = min(1.0, math.ceil(max(highs) * 10) / 10)
        if y_high - y_low < 0.1:
            y_low, y_high = max(0.0, y_high - 0.1), max(0.1, y_high)
        return cls(min(xs) / margin, max(xs) * margin, y_low, y_high)

    def x(self, value: float) -> float:
        share = math.log(value / self.x_low) / math.log(self.x_high / self.x_low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def draw_svg(chart: Chart) -> str:
    """The chart as an `svg` element; what a point stands for is its tooltip."""
    axes = _Axes.of(chart)
    spread = min(_SPREAD, 40 / len(chart.lines)) if chart.counted else 0.0
    middle = (len(chart.lines) - 1) / 2
    parts = [
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" '
        f'aria-label="{html.escape(chart.title)}">',
        *_grid(axes, chart),
        *(
            _draw_line(axes, line, (number - middle) * spread)
            for number, line in enumerate(chart.lines)
        ),
        "</svg>",
    ]
    return "\n".join(parts)


def colour_rules() -> str:
    """Style rules that give `--method` to the classes of lines, on light and on dark."""
    light, dark = (
        "\n".join(f"  .m{number} {{ --method: {each}; }}" for number, each in enumerate(colours))
        for colours in (COLOURS, _ON_DARK)
    )
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def swatch(style: int) -> str:
    """The legend's sample of a line."""
    return (
        f'<svg class="{_class(style)}" viewBox="0 0 28 10" width="28" height="10" '
        f'aria-hidden="true"><path class="line" d="M0 5H28" stroke-dasharray="{_dash(style)}"/>'
        '<circle cx="14" cy="5" r="4"/></svg>'
    )


def _draw_line(axes: _Axes, line: Line, shift: float) -> str:
    """shift: to the right, so that intervals at the same x stand side by side."""
    parts = []
    for point in line.points:
        if point.low is not None and point.high is not None:
            x, low, high = axes.x(point.x) + shift, axes.y(point.low), axes.y(point.high)
            parts.append(
                f'<path class="interval" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8'
                f'M{x - 4:.1f} {high:.1f}h8"/>'
            )
    places = " ".join(
        f"{axes.x(point.x) + shift:.1f},{axes.y(point.y):.1f}" for point in line.points
    )
    parts.append(
        f'<polyline class="line" points="{places}" stroke-dasharray="{_dash(line.style)}"/>'
    )
    for point in line.points:
        tip = f"{point.label}: {point.y:.1%} at {format_number(point.x)}"
        if point.low is not None and point.high is not None:
            tip += f" (95 %: {point.low:.1%} to {point.high:.1%})"
        parts.append(
            f'<circle cx="{axes.x(point.x) + shift:.1f}" cy="{axes.y(point.y):.1f}" r="4.5">'
            f"<title>{html.escape(tip)}</title></circle>"
        )
    name = f"<title>{html.escape(line.name)}</title>"
    return f'<g class="{_class(line.style)}">{name}{"".join(parts)}</g>'


def _grid(axes: _Axes, chart: Chart) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    step = 0.1 if axes.y_high - axes.y_low > 0.25 else 0.02
    for number in range(round(axes.y_low / step), round(axes.y_high / step) + 1):
        y, shown = axes.y(number * step), f"{number * step:.0%}"
        parts.append(f'<path class="grid" d="M{_LEFT:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7:.1f}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    for value in axis_ticks(chart):
        x = axes.x(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom:.1f}v4"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">'
            f"{format_number(value)}</text>"
        )
    middle = (_LEFT + right) / 2
    label = html.escape(chart.x_label)
    parts.append(
        f'<text x="{middle:.1f}" y="{_HEIGHT - 6:.1f}" text-anchor="middle">{label}</text>'
    )
    return parts


def axis_ticks(chart: Chart) -> list[float]:
    """Where x is labelled: at every n or k; else at 1, 2, 5 of every decade, or finer."""
    axes = _Axes.of(chart)
    own = sorted({point.x for line in chart.lines for point in line.points})
    if chart.counted:
        return own
    first, last = math.floor(math.log10(axes.x_low)), math.ceil(math.log10(axes.x_high))
    for steps in ((1,) if last - first > 4 else (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        within = [value for value in values if axes.x_low <= value <= axes.x_high]
        if len(within) > 1:  # a single tick does not say what the scale is
            return within
    return own


def format_number(value: float) -> str:
    """Three significant digits, with k and M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and unit == "M"):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _class(style: int) -> str:
    return f"m{style % len(COLOURS)}"


def _dash(style: int) -> str:
    return _DASHES[style // len(COLOURS) % len(_DASHES)]
