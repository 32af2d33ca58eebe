"""Geometry of line charts for the report pages: a plot of 1000 x 1000 units that the page stretches to its width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SIDE = 1000
"""Units of a plot's width and height."""
Points = Sequence[tuple[float, float]]
"""(x, y) in the order of x. A y that is not finite interrupts the line."""


@dataclass(frozen=True)
class Series:
    """Input of a line: its CSS class, its name, its points, and whether each point gets a dot."""

    style: str
    name: str
    points: Points
    has_dots: bool = False


@dataclass(frozen=True)
class Line:
    """A line as an SVG path in units, and one as its dots; empty without dots."""

    style: str
    name: str
    path: str
    dots: str


@dataclass(frozen=True)
class Tick:
    """A label and its place, in percent of the plot's width from the left, or of its height from the bottom."""

    label: str
    percent: float


@dataclass(frozen=True)
class Chart:
    """Lines over common axes."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    label: Callable[[float], str] = lambda value: f"{value:g}",
    from_zero: bool = False,
) -> Chart:
    """A chart of all series.

    Args:
        label: the text of a y tick.
        from_zero: the y axis begins at 0, not near the lowest point.
    """
    points = [point for one in series for point in one.points if math.isfinite(point[1])]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    x_ticks = _round_numbers(min(xs), max(xs))
    y_ticks = _round_numbers(0.0 if from_zero else min(ys), max(ys))
    x_axis = (min(xs), max(max(xs), min(xs) + 1))
    y_axis = (min(y_ticks[0], *ys), max(y_ticks[-1], *ys))
    return Chart(
        title,
        tuple(_line(one, x_axis, y_axis) for one in series if one.points),
        tuple(Tick(f"{x:g}", 100 * _share(x, x_axis)) for x in x_ticks if x_axis[0] <= x <= x_axis[1]),
        tuple(Tick(label(y), 100 * _share(y, y_axis)) for y in y_ticks),
    )


def moving_average(points: Points, span: int) -> list[tuple[float, float]]:
    """The mean of each y and those of up to `span` points before it."""
    ys = [y for _, y in points]
    windows = (ys[max(0, number - span) : number + 1] for number in range(len(ys)))
    return [(x, sum(window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


def _line(series: Series, x_axis: tuple[float, float], y_axis: tuple[float, float]) -> Line:
    path, dots, is_joined = [], [], False
    for x, y in series.points:
        if not math.isfinite(y):
            is_joined = False
            continue
        place = f"{SIDE * _share(x, x_axis):.1f} {SIDE * (1 - _share(y, y_axis)):.1f}"
        path.append(f"{'L' if is_joined else 'M'}{place}")
        dots.append(f"M{place}h0")
        is_joined = True
    return Line(series.style, series.name, "".join(path), "".join(dots) if series.has_dots else "")


def _share(value: float, axis: tuple[float, float]) -> float:
    return (value - axis[0]) / (axis[1] - axis[0])


def _round_numbers(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most nine, from `low` or below to `high` or above."""
    spread = max(high - low, 1e-3 * abs(high), 1e-9)
    power = 10.0 ** math.floor(math.log10(spread / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if spread / (factor * power) <= 7)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]
