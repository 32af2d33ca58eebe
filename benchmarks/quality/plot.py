"""KL divergence against bits per weight as an SVG drawing, one panel per text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 700, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 48
COLOURS = ("#c1440e", "#3f7d20", "#7a4fa3", "#0f7c8a", "#8a6d0f", "#5c5c5c")
OWN_COLOUR = "#1f4fa0"
LABEL_HEIGHT, LETTER_WIDTH, RADIUS = 11, 5.4, 4


@dataclass(frozen=True)
class Point:
    family: str
    label: str
    bits: float
    divergence: float
    ours: bool
    curve: bool


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map of values to pixels."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.logarithmic
            else (self.low, self.high, value)
        )
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within [low, high]."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    marks = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high]


def label_places(
    wanted: Sequence[tuple[float, float, int]], obstacles: Sequence[tuple[float, float]] = ()
) -> list[float]:
    """Baselines for labels at (x, y) with a number of letters: pushed down until none covers another, nor an
    obstacle (a point's x and the baseline of a label at its height)."""
    placed = [(x - RADIUS, x + RADIUS, y) for x, y in obstacles]
    found = [0.0] * len(wanted)
    for index in sorted(range(len(wanted)), key=lambda i: wanted[i][1]):
        x, y, letters = wanted[index]
        right = x + letters * LETTER_WIDTH
        for left_other, right_other, y_other in sorted(placed, key=lambda item: item[2]):
            if x < right_other and left_other < right and abs(y - y_other) < LABEL_HEIGHT:
                y = y_other + LABEL_HEIGHT
        placed.append((x, right, y))
        found[index] = y
    return found


def _text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(content)}</text>'


def _axes(x: Scale, y: Scale) -> list[str]:
    drawn = []
    for bits in range(math.ceil(x.low), math.floor(x.high) + 1):
        at = x(bits)
        drawn.append(f'<path d="M{at:.1f} {y.begin} V{y.end}" class="grid"/>')
        drawn.append(_text(at, y.begin + 16, str(bits), 'text-anchor="middle"'))
    for mark in decades(y.low, y.high):
        at = y(mark)
        drawn.append(f'<path d="M{x.begin} {at:.1f} H{x.end}" class="grid"/>')
        drawn.append(_text(x.begin - 6, at + 4, f"{mark:g}", 'text-anchor="end"'))
    middle = (x.begin + x.end) / 2
    drawn.append(_text(middle, y.begin + 36, "bits per weight, all stored bytes", 'text-anchor="middle"'))
    return drawn


def panel(title: str, points: Sequence[Point], top: float) -> list[str]:
    """The elements of one text's panel, whose upper edge is at `top`."""
    bits, divergences = [point.bits for point in points], [point.divergence for point in points]
    x = Scale(min(bits) - 0.3, max(bits) + 1.2, LEFT, WIDTH - RIGHT)
    y = Scale(min(divergences) * 0.8, max(divergences) * 1.25, top + HEIGHT - BOTTOM, top + TOP, True)
    drawn = [_text(LEFT, top + 24, f"KL divergence (nats per token), {title}", 'class="title"'), *_axes(x, y)]
    own = sorted((point for point in points if point.curve), key=lambda point: point.bits)
    if len(own) > 1:
        line = " ".join(f"{x(point.bits):.1f},{y(point.divergence):.1f}" for point in own)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{OWN_COLOUR}" stroke-width="2"/>')
    families = sorted({point.family for point in points if not point.ours})
    spots = [(x(point.bits), y(point.divergence) + 3.5) for point in points]
    wanted = [(at + 7, low, len(point.label)) for point, (at, low) in zip(points, spots, strict=True)]
    places = label_places(wanted, spots)
    for point, (at, low), baseline in zip(points, spots, places, strict=True):
        colour = OWN_COLOUR if point.ours else COLOURS[families.index(point.family) % len(COLOURS)]
        drawn.append(
            f'<circle cx="{x(point.bits):.1f}" cy="{y(point.divergence):.1f}" r="{RADIUS}" fill="{colour}"/>'
        )
        if baseline > low:
            drawn.append(
                f'<path d="M{at:.1f} {low - 3.5:.1f} L{at + 6:.1f} {baseline - 3.5:.1f}" class="leader"/>'
            )
        drawn.append(_text(at + 7, baseline, point.label, f'class="label" style="fill:{colour}"'))
    return drawn


def label_of(name: str) -> str:
    """A contestant's name as short as the drawing has room for: "Q4_K_M + Q4_0" with the embedding's type."""
    return name.removeprefix("ciuic ").removeprefix("llama.cpp ").replace(", embedding ", " + ")


def points(rows: Sequence[dict[str, Any]], text: str) -> list[Point]:
    """The measured contestants of one text."""
    measured = [row for row in rows if text in row["texts"]]
    return [
        Point(
            row["tool"],
            label_of(row["name"]),
            row["bpw"],
            row["texts"][text]["kl_mean"],
            row["ours"],
            row["curve"],
        )
        for row in measured
    ]


def drawing(panels: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """An SVG document with one panel per (title, points); a panel needs at least one point."""
    height = HEIGHT * len(panels)
    drawn = [
        element
        for number, (title, points) in enumerate(panels)
        for element in panel(title, points, number * HEIGHT)
    ]
    style = (
        "text{font:11px sans-serif;fill:#222}.title{font-size:13px;font-weight:bold}.label{font-size:10px}"
        ".grid{stroke:#ddd}.leader{stroke:#888;stroke-width:.6}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            *drawn,
            "</svg>\n",
        ]
    )
