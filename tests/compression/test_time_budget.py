"""A time budget: the choice of least loss that fits, and runs that continue with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import compress_tiny, weights_of

from ciuic_cli.compression import task
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.compression.recipe import read_recipe
from ciuic_cli.compression.time_budget import predicted_loss, within_time
from ciuic_cli.cost.run_time import TextSize
from ciuic_cli.errors import InputError, TargetError, UsageError
from ciuic_cli.integers import duration_text, parse_duration


def _seconds(options: CompressOptions) -> float:
    return 10 + 2 * options.sequences + options.mean_states / 1000 + 500 * (options.effort == "best")


def test_more_time_is_spent_and_lowers_the_predicted_loss() -> None:
    losses = []
    for seconds in (30, 100, 200, 2000):
        chosen = within_time(CompressOptions(time_budget=seconds), _seconds)
        assert _seconds(chosen) <= seconds and chosen.time_budget is None
        losses.append(predicted_loss(chosen))
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4
    assert chosen.effort == "best" and chosen.nsamples == 128 and chosen.mean_states == 1 << 16


def test_what_the_user_gave_stays() -> None:
    chosen = within_time(CompressOptions(time_budget=100, nsamples=20, states=5000), _seconds)
    assert (chosen.nsamples, chosen.states) == (20, 5000)


def test_an_impossible_budget_names_the_least_time() -> None:
    with pytest.raises(TargetError, match="within 20 s") as raised:
        within_time(CompressOptions(time_budget=20), _seconds)
    assert raised.value.exit_code == 4
    assert raised.value.remedy is not None and "take 23s" in raised.value.remedy  # 10 + 2 * 4 + 4.096
    assert "at least 34s" in raised.value.remedy


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h", 3600), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("2H5m1s", 7501)]
)
def test_times_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(duration_text(seconds)) >= seconds


@pytest.mark.parametrize("text", ["", "1", "h", "1d", "-1h", "30m1h", "1.5h"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a time"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1h", True])
def test_wrong_budgets_are_refused(seconds: Any) -> None:
    with pytest.raises(UsageError, match="--time-budget"):
        CompressOptions(time_budget=seconds)


def test_effort_and_time_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--effort and --time-budget"):
        CompressOptions(time_budget=60, effort="fast")


def test_a_run_that_continues_keeps_its_choice(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"
    limits = [100.0]  # seconds beside which those of a busy machine do not matter

    def seconds(model_map: Any, rates: Any, size: TextSize, *, states: int, **_: int) -> dict[str, float]:
        """A machine on which only few sequences fit at first, and many later."""
        return {"statistics": size.sequences * limits[0], "encode": states / 1e4 + 1e5 * bool(size.recovery)}

    monkeypatch.setattr(task, "phase_seconds", seconds)
    options: dict[str, Any] = {"effort": "default", "nsamples": None, "time_budget": 1200.0}

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "encode":
            raise KeyboardInterrupt

    whole = compress_tiny(source, tmp_path / "whole", text, **options)
    assert whole.options["nsamples"] == 12 and whole.options["states"] == 1 << 16
    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, progress=interrupt, **options)
    limits[0] = 10.0
    with pytest.raises(InputError, match="other inputs or options"):
        compress_tiny(source, out, text, **{**options, "time_budget": 1300.0})
    hints: list[str] = []
    report = compress_tiny(source, out, text, hint=hints.append, **options)
    assert any("continuing" in hint for hint in hints)
    assert not any("expected to take" in hint for hint in hints)
    assert report.options == whole.options
    assert any("with 12 calibration sequences" in hint for hint in hints)
    assert whole.forecast is not None and report.forecast is None  # the rest of a run has no forecast
    assert weights_of(out) == weights_of(tmp_path / "whole")
    recipe = read_recipe(str(out / "recipe.yaml"))
    assert recipe["nsamples"] == 12 and "time_budget" not in recipe
    fresh = compress_tiny(source, tmp_path / "fresh", text, hint=hints.append, **options)
    assert fresh.options["nsamples"] == 96
    assert any("with 96 calibration sequences and 65,536 trellis states" in hint for hint in hints)
    assert any("expected to take" in hint for hint in hints)


def test_a_run_that_takes_longer_than_it_may_says_so(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "within_time", lambda options, seconds_of: replace(options, time_budget=None))
    hints: list[str] = []
    report = compress_tiny(
        tiny_checkpoint("llama_tied"), tmp_path / "out", text, hint=hints.append, effort="default",
        nsamples=4, time_budget=0.02,
    )  # fmt: skip
    assert report.seconds > 0.02
    (said,) = (hint for hint in hints if "the run took" in hint)
    assert "more than the 0.02 s of --time-budget" in said
