"""`--time-budget`: the options with the least predicted KL whose forecast time fits.

Predicted KL is relative, a product of what was measured for one choice at a time: the search's states, the calibration
text, the probes, and recovery. It orders choices; it is no forecast of a run's KL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ciuic_cli.codecs.rate_distortion import MSE_BY_L, nominal_window
from ciuic_cli.compression.options import EFFORTS, STATES, CompressOptions
from ciuic_cli.errors import TargetError
from ciuic_cli.integers import duration_text

SEQUENCES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Calibration sequences to choose from (chosen; more than 128 gain nothing:
docs/experiments/statistics/calibration-text.md)."""
TEXT_LOSS = {1: 7.0, 4: 4.0}
"""Share of KL that n sequences lose, times n, by passages of a sequence. Rough fits to runs of SmolLM2: 15 to 16 % with
fewer sequences of one passage (four texts, docs/experiments/scale/account.md), and 15 % with 12 instead of 24 sequences
of four (six texts, docs/experiments/statistics/passages.md)."""
INPUT_SHARE = 0.7
"""The share of TEXT_LOSS that few tokens in H cause. Few tokens in G cause the rest (measured:
docs/experiments/statistics/forward-only.md)."""
FACTORS = {"fast": 1.03, "default": 1.0, "best": 0.96}
"""KL by effort level apart from states and text, over that of default. Fewer probed layers count like no probes, which
cost 2 % (docs/experiments/versions/ablation.md), an assumption; diagonals of G for tall matrices cost 1 %
(docs/experiments/statistics/tall-matrices.md); recovery gains 4 % (docs/QUALITY.md)."""
_FORECAST_MARGIN = 1.5
"""The advised time over the forecast of the shortest run. The next run times this machine anew (chosen: on a busy one,
forecasts of the sample were 8 and 11 s)."""
_TYPICAL_BITS = 4
"""Bits per weight at which windows are compared."""


def predicted_loss(options: CompressOptions) -> float:
    """Relative KL of a choice; 1 would be the best text, windows of 16 bits and no recovery."""
    code = MSE_BY_L[nominal_window(options.mean_states)][_TYPICAL_BITS] / MSE_BY_L[16][_TYPICAL_BITS]
    fewer_in_g = INPUT_SHARE + (1 - INPUT_SHARE) * options.level.gradient_every
    text = 1 + TEXT_LOSS[options.level.passages] * fewer_in_g / options.sequences
    return code * text * FACTORS[options.effort]


def within_time(options: CompressOptions, seconds_of: Callable[[CompressOptions], float]) -> CompressOptions:
    """The options with effort, sequences and states that fit into `options.time_budget`; without that budget.

    Sequences and states that the user gave stay. seconds_of: the forecast of a choice.

    Raises TargetError if nothing fits; it names the least time.
    """
    assert options.time_budget is not None
    timed = [(seconds_of(choice), choice) for choice in _choices(options)]
    fitting = [(predicted_loss(choice), seconds, choice) for seconds, choice in timed]
    fitting = [item for item in fitting if item[1] <= options.time_budget]
    if not fitting:
        least = min(seconds for seconds, _ in timed)
        raise TargetError(
            f"--time-budget: no choice of text, search and probes is forecast to end within {options.time_budget:g} s",
            remedy=f"allow at least {duration_text(_FORECAST_MARGIN * least)}; the shortest run is forecast to take "
            f"{duration_text(least)}",
        )
    return min(fitting, key=lambda item: item[:2])[2]


def _choices(options: CompressOptions) -> Iterator[CompressOptions]:
    least, most = (states.bit_length() - 1 for states in STATES)
    for effort in EFFORTS:
        for nsamples in SEQUENCES if options.nsamples is None else (options.nsamples,):
            for states in (
                [1 << window for window in range(least, most + 1)]
                if options.states is None
                else [options.states]
            ):
                yield replace(options, time_budget=None, effort=effort, nsamples=nsamples, states=states)
