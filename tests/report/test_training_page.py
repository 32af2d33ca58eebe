"""The page of a training run: its curves lie where the numbers say, and hostile or endless values do no harm."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ciuic_cli.report.training.curves import Series, line_chart, moving_average
from ciuic_cli.report.training.training_page import render_training_page

NAN = float("nan")


def report(steps: int, **changed: Any) -> dict[str, Any]:
    return {
        "steps": steps, "planned_steps": steps, "examples": 2, "rows": 2, "tokens": 9, "seconds": 1.0,
        "losses": [4.0 - step / steps for step in range(steps)], "evaluations": [], "best_step": None,
        "memory_bytes": [500_000_000] * steps, "trained_parameters": 5, "tokens_per_second": 7.0, "options": {},
        **changed,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (2.13, 2.97), (3.0, 3.0), (0.0, 0.0), (1e-5, 2e-5), (-3, 17), (6e8, 7e8)]
)
def test_ticks_are_round_and_enclose_the_points(low: float, high: float) -> None:
    chart = line_chart("a", [Series("after", "a", [(1.0, low), (9.0, high)])])
    labels = [float(tick.label) for tick in chart.y_ticks]
    assert 2 <= len(labels) <= 9 and labels[0] <= low and labels[-1] >= high
    assert [tick.percent for tick in chart.y_ticks] == pytest.approx(
        [100 * number / (len(labels) - 1) for number in range(len(labels))]
    )
    (line,) = chart.lines
    places = [float(place) for place in re.findall(r"[\d.]+ ([\d.]+)", line.path)]
    span = labels[-1] - labels[0]
    assert places == pytest.approx([1000 * (labels[-1] - y) / span for y in (low, high)], abs=0.1)


def test_a_value_that_is_not_finite_interrupts_the_line() -> None:
    chart = line_chart("a", [Series("after", "a", [(1, 1.0), (2, 2.0), (3, NAN), (4, 1.0)], has_dots=True)])
    assert re.sub(r"[\d. ]", "", chart.lines[0].path) == "MLM" and chart.lines[0].dots.count("M") == 3
    assert line_chart("a", [Series("after", "a", [(1, NAN)])]).lines[0].path == ""
    assert moving_average([(1, 2.0), (2, 4.0), (3, 9.0)], 1) == [(1, 2.0), (2, 3.0), (3, 6.5)]


def test_the_page_shows_the_run() -> None:
    evaluations = [{"step": 2, "loss": 3.5}, {"step": 4, "loss": 3.25}]
    page = render_training_page(
        report(
            5, evaluations=evaluations, best_step=4, planned_steps=9, options={"model": "<script>\x1b[31m"}
        )
    )
    assert (
        "5 steps of 9" in page and "3.250" in page and "at step 4" in page and page.count("the lowest") == 1
    )
    assert page.count('class="dots measured"') == 1
    assert "<script" not in page and "\x1b" not in page
    assert "Evaluations" not in render_training_page(report(1)), "one step, and none"


def test_long_runs_make_no_endless_page() -> None:
    page = render_training_page(report(100_000))
    assert len(page) < 200_000 and page.count("L") > 900 and "100,000 steps" in page
