"""train_report.html: a training run as one page for people, in the style of memory_report.html."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ciuic_cli.report.readable import readable_bytes
from ciuic_cli.report.templating import render_template
from ciuic_cli.report.training.curves import Chart, Series, line_chart, moving_average

_SMOOTHED = 20
"""Steps before a step whose losses are averaged with its own (chosen)."""
_MOST_POINTS = 2000
"""Most steps that a line shows (chosen: about two per pixel). Of longer runs it shows every n-th."""


def render_training_page(report: Mapping[str, Any]) -> str:
    """The report of a training run, `train_report.json`, as one HTML page."""
    return render_template(
        "training.html.jinja",
        headline=_headline(report),
        summary=f"{report['steps']:,} steps of {report['planned_steps']:,}, {report['examples']:,} examples "
        f"in {report['rows']:,} rows, {report['trained_parameters']:,} trained parameters",
        loss_chart=_loss_chart(report),
        memory_chart=_memory_chart(report),
        evaluations=report["evaluations"],
        best_step=report["best_step"],
        options={name: _shown(value) for name, value in sorted(report["options"].items())},
    )


def _headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    losses, evaluations = report["losses"], report["evaluations"]
    figures = [(f"{losses[-1]:.3f}", f"training loss of the last step; of the first {losses[0]:.3f}")]
    if evaluations:
        best = min(evaluations, key=lambda one: (one["step"] != report["best_step"], one["step"]))
        figures.append((f"{best['loss']:.3f}", f"lowest evaluation loss, at step {best['step']}"))
    return [
        *figures,
        (f"{report['tokens_per_second']:,.0f}", "tokens per second of training"),
        (readable_bytes(max(report["memory_bytes"])), "highest memory at the end of a step"),
        (f"{report['seconds']:,.0f} s", "of training, without evaluations"),
    ]


def _loss_chart(report: Mapping[str, Any]) -> Chart:
    steps = [(float(step), loss) for step, loss in enumerate(report["losses"], start=1)]
    evaluated = [(float(one["step"]), one["loss"]) for one in report["evaluations"]]
    return line_chart(
        "Loss by step",
        [
            Series("before", "training, each step", _thinned(steps)),
            Series(
                "after",
                f"training, mean of {_SMOOTHED + 1} steps",
                _thinned(moving_average(steps, _SMOOTHED)),
            ),
            Series("measured", "evaluation", evaluated, has_dots=True),
        ],
    )


def _memory_chart(report: Mapping[str, Any]) -> Chart:
    points = [(float(step), float(used)) for step, used in enumerate(report["memory_bytes"], start=1)]
    series = [Series("after", "memory", _thinned(points))]
    return line_chart(
        "Memory by step", series, label=lambda value: readable_bytes(round(value)), from_zero=True
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return points[:: -(-len(points) // _MOST_POINTS)] if points else points


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "all"
    return (
        {None: "none", True: "yes", False: "no"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )
