"""Content of the report page's figures: lengths, colours and texts. The templates draw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from ciuic_cli.errors import printable
from ciuic_cli.report.schema import ComponentReport

PRUNED_COLOUR = "#e8a33d"
_STOPS = ((1.0, (222, 234, 246)), (3.0, (134, 182, 226)), (5.0, (62, 122, 196)), (8.0, (22, 58, 126)))
"""Colours (RGB) by bits per weight, from light to dark; colours between two stops are interpolated."""
_LEAST_KL, _LARGEST_KL = 1e-4, 1.0
"""Ends of the scale of KL divergences, in nats per token."""


@dataclass(frozen=True)
class Bars:
    """Input of one line of a bar chart: its name, one value per series, and its label."""

    name: str
    values: tuple[float, ...]
    label: str


@dataclass(frozen=True)
class PlacedBar:
    """A bar; length: in percent of the longest bar of the chart, at least 0.2."""

    series: str
    length: float


@dataclass(frozen=True)
class BarLine:
    """A line of a bar chart."""

    name: str
    label: str
    bars: tuple[PlacedBar, ...]


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars."""

    title: str
    lines: tuple[BarLine, ...]


@dataclass(frozen=True)
class Cell:
    """A cell of the heat map: its fill colour, its text in the CSS class `ink`, and its tooltip.

    span: the range over several matrices or experts, shown below the text; empty for one.
    """

    fill: str
    ink: str
    text: str
    span: str
    details: str


@dataclass(frozen=True)
class HeatMap:
    """Bits per weight: one row per layer, one column per role; None where a layer has no such role."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True)
class ExpertStrip:
    """The experts of a stack side by side, each one unit wide.

    count: experts. bands: (first expert, number of experts, colour) of neighbours with equal colours. details: tooltip.
    """

    count: int
    bands: tuple[tuple[int, int, str], ...]
    details: str


@dataclass(frozen=True)
class ExpertMap:
    """Bits per weight of every expert: one row per layer, one strip per role; None where a layer has no such role."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[ExpertStrip | None, ...]], ...]


@dataclass(frozen=True)
class KlScale:
    """A logarithmic scale of KL divergences.

    ticks: (position in percent of the width, KL, what it does to perplexity). marks: (position, label, CSS class).
    """

    ticks: tuple[tuple[float, str, str], ...]
    marks: tuple[tuple[float, str, str], ...]


def bar_chart(title: str, series: Sequence[str], lines: Sequence[Bars]) -> BarChart:
    """A chart with one bar per series in every line. Values that are not positive and finite get the shortest bar."""
    finite = [value for line in lines for value in line.values if math.isfinite(value)]
    largest = max([value for value in finite if value > 0], default=1.0)

    def length(value: float) -> float:
        share = 100 * value / largest if math.isfinite(value) and value > 0 else 0.0
        return max(0.2, share)

    placed = [
        BarLine(
            line.name,
            line.label,
            tuple(PlacedBar(name, length(value)) for name, value in zip(series, line.values, strict=True)),
        )
        for line in lines
    ]
    return BarChart(title, tuple(placed))


def heat_map(title: str, rows: Sequence[tuple[str, Sequence[ComponentReport]]]) -> HeatMap:
    """A heat map of rows, each with its name and its compressed components; columns in the order of their roles."""
    roles = _roles(rows)
    return HeatMap(
        title,
        roles,
        tuple(
            (name, tuple(_cell(of_role) if of_role else None for of_role in _by_role(components, roles)))
            for name, components in rows
        ),
    )


def expert_map(rows: Sequence[tuple[str, Sequence[ComponentReport]]]) -> ExpertMap | None:
    """The bits of every expert, of the components with experts; None if there are none."""
    rows = [(name, [component for component in found if component.experts]) for name, found in rows]
    rows = [(name, found) for name, found in rows if found]
    roles = _roles(rows)
    if not rows:
        return None
    return ExpertMap(
        roles,
        tuple(
            (name, tuple(_strip(of_role[0]) if of_role else None for of_role in _by_role(components, roles)))
            for name, components in rows
        ),
    )


def kl_scale(marks: Sequence[tuple[float | None, str, str]]) -> KlScale:
    """A scale with marks (KL in nats per token, label, CSS class); marks without a KL are left out.

    The tick at a KL says by which factor it raises perplexity on text that the original itself writes: e^KL.
    """
    ticks = [(0.001, "+0.1 %"), (0.01, "+1 %"), (0.1, "+11 %"), (1.0, "× 2.7")]
    return KlScale(
        tuple((_position(kl), f"{kl:g}", text) for kl, text in ticks),
        tuple((_position(kl), label, style) for kl, label, style in marks if kl is not None),
    )


def _position(kl: float) -> float:
    if not math.isfinite(kl):
        return 100.0
    share = math.log(max(kl, _LEAST_KL) / _LEAST_KL) / math.log(_LARGEST_KL / _LEAST_KL)
    return 100 * min(1.0, share)


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


def _roles(rows: Sequence[tuple[str, Sequence[ComponentReport]]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(component.role for _, components in rows for component in components))


def _by_role(components: Sequence[ComponentReport], roles: Sequence[str]) -> list[list[ComponentReport]]:
    return [[component for component in components if component.role == role] for role in roles]


def _cell(components: Sequence[ComponentReport]) -> Cell:
    """The cell of one layer's components of one role."""
    parameters = sum(component.parameters for component in components)
    bits = 8 * sum(component.bytes for component in components) / max(1, parameters)
    is_pruned = all(component.pruned >= 1 for component in components)
    fill, ink = (PRUNED_COLOUR, "dark") if is_pruned else bits_colour(bits)
    values = [expert.bits for component in components for expert in component.experts or ()]
    values = values or [component.bits for component in components]
    return Cell(
        fill=fill,
        ink=ink,
        text="pruned" if is_pruned else f"{bits:.2f}",
        span=f"{min(values):.1f} – {max(values):.1f}" if len(values) > 1 else "",
        details="\n".join(_details(component) for component in components),
    )


def _strip(component: ComponentReport) -> ExpertStrip:
    experts = component.experts or ()
    # Half bits are the finest steps of a code, so that more colours would not show more.
    colours = [
        PRUNED_COLOUR if expert.pruned else bits_colour(round(2 * expert.bits) / 2)[0] for expert in experts
    ]
    bands, begin = [], 0
    for colour, run in groupby(colours):
        count = len(list(run))
        bands.append((begin, count, colour))
        begin += count
    return ExpertStrip(len(experts), tuple(bands), _details(component))


def _details(component: ComponentReport) -> str:
    """The tooltip line of a component."""
    details = f"{printable(component.name)}: {component.bits:.2f} bits"
    if component.rank:
        details += f", rank {component.rank}"
    if component.pruned:
        details += f", {100 * component.pruned:.1f} % pruned"
    pruned_experts = sum(expert.pruned for expert in component.experts or ())
    return details + (f", {pruned_experts} experts pruned" if pruned_experts else "")
