"""Geometry of the report page's figures: where bars, cells and texts lie, in SVG pixels. The templates draw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ciuic_cli.errors import printable
from ciuic_cli.report.schema import ComponentReport

PRUNED_COLOUR = "#e8a33d"
_STOPS = ((1.0, (222, 234, 246)), (3.0, (134, 182, 226)), (5.0, (62, 122, 196)), (8.0, (22, 58, 126)))
"""Colours (RGB) by bits per weight, from light to dark; colours between two stops are interpolated."""


@dataclass(frozen=True)
class Bars:
    """Input of one line of a bar chart: its name, one value per series, and the label right of the longest bar."""

    name: str
    values: tuple[float, ...]
    label: str


@dataclass(frozen=True)
class PlacedBar:
    series: str
    y: int
    length: float


@dataclass(frozen=True)
class BarLine:
    """A line of a bar chart. text_y: of the name and the label. label_x: left end of the label."""

    name: str
    label: str
    text_y: int
    label_x: int
    bars: tuple[PlacedBar, ...]


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars. left: where the bars begin. thickness: of a bar."""

    title: str
    width: int
    height: int
    left: int
    thickness: int
    lines: tuple[BarLine, ...]


@dataclass(frozen=True)
class PlacedText:
    text: str
    x: int
    y: int


@dataclass(frozen=True)
class Cell:
    """A cell of the heat map: its corner, fill colour, text (at text_x, in the CSS class `ink`), and tooltip.

    span: the range over several matrices or experts, shown below the text; empty for one.
    """

    x: int
    y: int
    fill: str
    ink: str
    text_x: int
    text: str
    span: str
    details: str


@dataclass(frozen=True)
class HeatMap:
    """Bits per weight: one row of cells per layer, one column per role."""

    title: str
    width: int
    height: int
    cell_width: int
    cell_height: int
    column_words: tuple[PlacedText, ...]
    row_names: tuple[PlacedText, ...]
    cells: tuple[Cell, ...]


def bar_chart(title: str, series: Sequence[str], lines: Sequence[Bars]) -> BarChart:
    """A chart with one bar per series in every line. Bars of values that are not positive and finite are 1 px long."""
    left, longest_bar, line_height = 150, 500, 12 + 10 * len(series)
    finite = [value for line in lines for value in line.values if math.isfinite(value)]
    largest = max([value for value in finite if value > 0], default=1.0)
    placed = []
    for number, line in enumerate(lines):
        y = number * line_height + 4
        lengths = [
            longest_bar * value / largest if math.isfinite(value) and value > 0 else 0.0
            for value in line.values
        ]
        bars = [
            PlacedBar(name, y + 10 * index, max(1.0, length))
            for index, (name, length) in enumerate(zip(series, lengths, strict=True))
        ]
        label_x = round(left + max(lengths) + 10)
        placed.append(BarLine(line.name, line.label, y + 5 * len(series) + 4, label_x, tuple(bars)))
    return BarChart(title, 1016, len(lines) * line_height + 8, left, 9, tuple(placed))


def heat_map(title: str, rows: Sequence[tuple[str, Sequence[ComponentReport]]]) -> HeatMap:
    """A heat map of rows, each with its name and its compressed components; columns in the order of their roles."""
    roles = list(dict.fromkeys(component.role for _, components in rows for component in components))
    left, top, width, height = 80, 48, 78, 34
    words = []
    for column, role in enumerate(roles):
        lines = _wrapped(printable(role, 40))
        x = round(left + column * width + width / 2)
        words += [PlacedText(word, x, top - 8 - 14 * (len(lines) - 1 - i)) for i, word in enumerate(lines)]
    names, cells = [], []
    for number, (name, components) in enumerate(rows):
        y = top + number * height
        names.append(PlacedText(name, left - 10, y + 21))
        by_role: dict[str, list[ComponentReport]] = {}
        for component in components:
            by_role.setdefault(component.role, []).append(component)
        cells += [_cell(left + roles.index(role) * width, y, width, group) for role, group in by_role.items()]
    return HeatMap(
        title=title,
        width=left + len(roles) * width,
        height=top + len(rows) * height + 8,
        cell_width=width,
        cell_height=height,
        column_words=tuple(words),
        row_names=tuple(names),
        cells=tuple(cells),
    )


def bits_colour(bits: float) -> tuple[str, str]:
    """Fill colour of a cell, and the CSS class of the text on it."""
    bits = min(max(bits, _STOPS[0][0]), _STOPS[-1][0])
    mixed = _STOPS[0][1]
    for (low, first), (high, second) in pairwise(_STOPS):
        if low <= bits <= high:
            share = (bits - low) / (high - low)
            red, green, blue = (round(a + share * (b - a)) for a, b in zip(first, second, strict=True))
            mixed = (red, green, blue)
    return "#{:02x}{:02x}{:02x}".format(*mixed), "light" if bits > 4.5 else "dark"


def _cell(x: int, y: int, width: int, components: Sequence[ComponentReport]) -> Cell:
    """The cell of one layer's components of one role."""
    parameters = sum(component.parameters for component in components)
    bits = 8 * sum(component.bytes for component in components) / max(1, parameters)
    is_pruned = all(component.pruned >= 1 for component in components)
    fill, ink = (PRUNED_COLOUR, "dark") if is_pruned else bits_colour(bits)
    values = [expert.bits for component in components for expert in component.experts or ()]
    values = values or [component.bits for component in components]
    return Cell(
        x=x,
        y=y,
        fill=fill,
        ink=ink,
        text_x=round(x + width / 2 - 1),
        text="pruned" if is_pruned else f"{bits:.2f}",
        span=f"{min(values):.1f} – {max(values):.1f}" if len(values) > 1 else "",
        details="\n".join(_details(component) for component in components),
    )


def _details(component: ComponentReport) -> str:
    """The tooltip line of a component."""
    details = f"{printable(component.name)}: {component.bits:.2f} bits"
    if component.rank:
        details += f", rank {component.rank}"
    if component.pruned:
        details += f", {100 * component.pruned:.1f} % pruned"
    pruned_experts = sum(expert.pruned for expert in component.experts or ())
    return details + (f", {pruned_experts} experts pruned" if pruned_experts else "")


def _wrapped(role: str) -> list[str]:
    """A role's name in lines of about ten characters, broken at its underscores."""
    lines: list[str] = []
    for word in role.split("_"):
        if lines and len(lines[-1]) + 1 + len(word) <= 10:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
