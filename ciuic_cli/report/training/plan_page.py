"""The page of `ciuic plan`: one stacked bar of memory per strategy, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ciuic_cli.report.readable import count_of, readable_bytes
from ciuic_cli.report.templating import render_template

CLASSES = ("weights", "adapter", "gradients", "states", "activations", "scratch", "process")
"""The parts of a bar, from left to right: keys of a strategy's "bytes"."""


@dataclass(frozen=True)
class Part:
    """A part of a bar. length: in percent of the longest bar. details: its tooltip."""

    kind: str
    length: float
    details: str


@dataclass(frozen=True)
class StackedBar:
    """The memory of a strategy."""

    name: str
    label: str
    fits: bool
    parts: tuple[Part, ...]


def render_plan_page(report: Mapping[str, Any]) -> str:
    """The report of `ciuic plan --json` as one HTML page."""
    found: Sequence[Mapping[str, Any]] = report["strategies"]
    longest = max(report["gpu_memory"], *(one["bytes"]["total"] for one in found))
    fitting = sum(one["fits"] for one in found)
    return render_template(
        "plan.html.jinja",
        model=report["model"],
        summary=f"{count_of(report['rows'], 'row')} of {report['sequence_len']:,} tokens per process and step; "
        f"{readable_bytes(report['gpu_memory'])} per process",
        headline=f"{fitting} of {len(found)} strategies fit",
        limit=100 * report["gpu_memory"] / longest,
        classes=CLASSES,
        bars=[_bar(one, longest) for one in found],
        strategies=found,
        measured=any(one.get("measured") for one in found),
    )


def _bar(strategy: Mapping[str, Any], longest: int) -> StackedBar:
    terms = strategy["bytes"]
    parts = tuple(
        Part(kind, 100 * terms[kind] / longest, f"{kind} {readable_bytes(terms[kind])}")
        for kind in CLASSES
        if terms[kind]
    )
    return StackedBar(strategy["name"], readable_bytes(terms["total"]), strategy["fits"], parts)
