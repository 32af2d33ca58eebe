"""KL divergence against bits per weight, one panel per text, as an SVG file (matplotlib: `pip install ".[bench]"`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

COLUMNS = 2
PANEL_INCHES = (4.6, 3.2)
COLOURS = ("#c1440e", "#3f7d20", "#7a4fa3", "#0f7c8a", "#8a6d0f", "#5c5c5c")
OWN_COLOUR = "#1f4fa0"
MARKERS = "osD^vP*X<>hdp"
"""Markers by the entry's place among its tool's entries."""
SVG = {"svg.fonttype": "none", "svg.hashsalt": "ciuic", "font.size": 9}
"""Text stays text, and the same results give the same file."""


@dataclass(frozen=True)
class Point:
    """One contestant on one text. bits: per weight; divergence: KL, nats per token; curve: part of this tool's line."""

    tool: str
    name: str
    bits: float
    divergence: float
    ours: bool
    curve: bool


def points(rows: Sequence[dict[str, Any]], text: str) -> list[Point]:
    """The contestants that were measured on one text, in their order."""
    return [
        Point(row["tool"], row["name"], row["bpw"], row["texts"][text]["kl_mean"], row["ours"], row["curve"])
        for row in rows
        if text in row["texts"]
    ]


def styles(panels: Sequence[tuple[str, Sequence[Point]]]) -> dict[str, tuple[str, str]]:
    """(colour, marker) of every legend entry: a colour per tool, a marker per entry of a tool."""
    every = {label_of(point): point for _, panel in panels for point in panel}
    peers = sorted({point.tool for point in every.values() if not point.ours})
    found: dict[str, tuple[str, str]] = {}
    used: dict[str, int] = {}
    for label, point in every.items():
        number = used[point.tool] = used.get(point.tool, -1) + 1
        colour = OWN_COLOUR if point.ours else COLOURS[peers.index(point.tool) % len(COLOURS)]
        found[label] = (colour, MARKERS[number % len(MARKERS)])
    return found


def label_of(point: Point) -> str:
    """The legend entry of a point: the contestant's name, or one entry for all points of this tool's line."""
    return point.tool if point.curve else point.name


def figure(panels: Sequence[tuple[str, Sequence[Point]]]) -> Figure:
    """One panel per (text, points), a logarithmic axis for KL, one legend below all panels."""
    count = -(-len(panels) // COLUMNS)
    width, height = PANEL_INCHES
    drawn = Figure(figsize=(COLUMNS * width, count * height + 1.2), layout="constrained")
    looks = styles(panels)
    for number, (text, found) in enumerate(panels):
        axes = drawn.add_subplot(count, COLUMNS, number + 1)
        axes.set_yscale("log")
        axes.set_title(_literal(text))
        axes.set_xlabel("bits per weight, all stored bytes")
        axes.set_ylabel("KL (nats per token)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(visible=True, linewidth=0.4, color="#dddddd")
        curve = sorted((point.bits, point.divergence) for point in found if point.curve)
        if len(curve) > 1:
            axes.plot(*zip(*curve, strict=True), color=OWN_COLOUR, linewidth=1.5, gid="curve")
        for point in found:
            label = label_of(point)
            colour, marker = looks[label]
            axes.plot(
                [point.bits], [point.divergence], marker, color=colour, markersize=5, label=_literal(label)
            )
    entries = {
        label: handle
        for axes in drawn.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=3, fontsize=8)
    return drawn


def _literal(name: str) -> str:
    """A name as matplotlib shows it literally: it would read text between dollar signs as a formula."""
    return name.replace("$", r"\$")


def write(panels: Sequence[tuple[str, Sequence[Point]]], file: Path) -> None:
    """Write the drawing as SVG. Each panel needs at least one point."""
    with matplotlib.rc_context(SVG):
        figure(panels).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
