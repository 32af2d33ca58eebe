"""`CompressOptions`: all options of `compress`, checked in one place for the command line and Python.

Error messages name an option as the command line does (`--target-bpw`); the field in Python is `target_bpw`. Nothing
heavy is imported here, so wrong options are refused at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from ciuic_cli.codecs.rate_distortion import MSE_BY_L, WINDOWS, nominal_window
from ciuic_cli.errors import UsageError
from ciuic_cli.text.shares import with_mix


@dataclass(frozen=True)
class Effort:
    """The work of one effort level.

    states: mean trellis states per weight, over which the search goes; the plan gives each matrix 2^12 to 2^16
    (`compression/windows.py`). nsamples: calibration sequences. probed_layers: most layers that a probe perturbs.
    recovery_steps: optimizer steps that tune row scales and norms after rounding. probe_tokens: a role's probe runs the
    first so many tokens of every held-out sequence; the last probe runs all of them, because later tokens lose less.
    passages: of each calibration sequence (`text/calibration.py`). least_held_out: at least so many sequences are held
    out for probes and measuring, unless that is more than a third of all. With two of one passage, the probes followed
    the kind of text that these happened to be (docs/experiments/scale/account.md). tall_outputs: whether the statistics
    have all of G, not its diagonal alone, where a matrix has more rows than columns. gradient_every: one of so many
    sequences runs backward for the statistics, which then give G; all of them run forward and give H.
    """

    states: int
    nsamples: int
    probed_layers: int
    recovery_steps: int
    probe_tokens: int = 256
    passages: int = 1
    least_held_out: int = 4
    tall_outputs: bool = True
    gradient_every: int = 1


EFFORTS = {
    "fast": Effort(
        states=1 << 12,
        nsamples=26,
        probed_layers=8,
        recovery_steps=0,
        probe_tokens=192,
        passages=4,
        least_held_out=2,
        tall_outputs=False,
        gradient_every=3,
    ),
    "default": Effort(states=1 << 15, nsamples=96, probed_layers=16, recovery_steps=0, gradient_every=2),
    "best": Effort(states=1 << 16, nsamples=128, probed_layers=16, recovery_steps=90),
}
"""By name. 2^12 states instead of 2^16 cost 14 % of KL (measured: docs/experiments/versions/ablation.md), 2^14 instead
of 3 * 2^13 cost 2 % (docs/experiments/codes/windows.md). Passages: docs/experiments/statistics/passages.md. Sequences,
and how many of them run backward: docs/experiments/statistics/forward-only.md. Tokens of probes:
docs/experiments/allocation/probe-tokens.md; the 8 probed layers of "fast" were chosen, not tuned. Tall matrices:
docs/experiments/statistics/tall-matrices.md. 90 recovery steps pass the package's own calibration text once
(docs/experiments/recovery/factors-and-norms.md)."""
DEFAULT_EFFORT = "default"
"""The effort level that is taken if none is given."""
MTP = ("keep", "drop")
"""Choices for multi-token-prediction layers."""
BITS = tuple(MSE_BY_L[16])
"""The bits per weight that the trellis code offers."""
DEFAULT_BITS = tuple(bits for bits in BITS if bits >= 2)
"""The bits per weight that the budget may choose from by default.

Fewer than 2 bits look good in experts that are rarely chosen, but only on the calibration text (measured:
docs/experiments/allocation/bit-widths.md)."""
RANK_STEP = 16
"""Ranks of low-rank parts are multiples of this: the side of a tile."""
DEFAULT_RATIO = 4.0
"""Bytes of all parameters at 2 bytes each over bytes of the artifact's safetensors files."""
DEFAULT_SEQLEN = 512
"""Tokens per calibration sequence, if the model has that many positions (chosen, not tuned)."""
NSAMPLES = (2, 1 << 20)
"""Fewest and most calibration sequences. Two are one for the statistics and one held out; the most is chosen."""
STATES = (1 << WINDOWS[0], 1 << WINDOWS[-1])
"""Fewest and most trellis states per weight: those of the shortest and of the longest window of the format."""
SEQLEN = (32, 1 << 20)
"""Fewest and most tokens per calibration sequence (chosen, not tuned)."""
SEED = (0, 2**32 - 1)
"""Smallest and largest seed: 32 bits."""
_DEVICE = re.compile(r"auto|cpu|cuda|cuda:[0-9]+")
"""Names of devices."""


@dataclass(frozen=True)
class CompressOptions:
    """The options of a run. Creating it checks every value.

    Attributes:
        ratio: bytes of all parameters at 2 bytes each over bytes of the artifact's safetensors files. The budget is one
            of ratio, target_bpw and target_size; with none of them the ratio is 4.
        target_bpw: stored bits per parameter, at most 16.
        target_size: bytes of the artifact's safetensors files.
        calibration: UTF-8 text files. The package's mix adds half as many sequences, which count less
            (`text/shares.py`). None: the mix alone.
        calibration_only: whether all sequences are from `calibration`.
        nsamples: calibration sequences, without those that the mix adds; None: those of the effort level.
        seqlen: tokens per calibration sequence; None: 512, or as many as the model has positions.
        seed: seed of all random numbers. Another seed gives other bytes.
        effort: "fast", "default" or "best", see `EFFORTS`.
        states: mean trellis states per weight, 4,096 to 65,536; None: those of the effort level.
        time_budget: seconds. Instead of `effort`: the effort level, sequences and states with the least predicted KL
            whose forecast time fits; `nsamples` and `states` stay if they are given.
        prune: "off", "auto", or the share of the prunable weights to prune, in [0, 1).
        rank: "off", "auto", or the rank of every low-rank part, a multiple of 16.
        bits: the bits per weight that the budget may choose from, a subset of `BITS`.
        mtp: "keep" or "drop" the multi-token-prediction layers. Kept layers count as parameters.
        device: "auto", "cpu", "cuda" or "cuda:N".
        prompt: a text that original and artifact continue at the end, for the report.
        dry_run: stop at the plan and write nothing.
        force: replace an older artifact at the output, and discard an unfinished run that had other options.

    Raises:
        UsageError: a value that the option cannot have, or two byte targets at once.
    """

    ratio: float | None = None
    target_bpw: float | None = None
    target_size: int | None = None
    calibration: tuple[Path, ...] = ()
    calibration_only: bool = False
    nsamples: int | None = None
    seqlen: int | None = None
    seed: int = 0
    effort: str = DEFAULT_EFFORT
    states: int | None = None
    time_budget: float | None = None
    prune: str | float = "auto"
    rank: str | int = "auto"
    bits: tuple[float, ...] = field(default=DEFAULT_BITS)
    mtp: str = "drop"
    device: str = "auto"
    prompt: str | None = None
    dry_run: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        _check_target(self.ratio, self.target_bpw, self.target_size)
        checked = {
            "calibration": tuple(check_path("--calibration", text) for text in _items(self.calibration)),
            "prune": _checked_prune(self.prune),
            "rank": _checked_rank(self.rank),
            "bits": _checked_bits(self.bits),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.calibration_only, bool):
            raise UsageError(f"--calibration-only is {_shown(self.calibration_only)}, not true or false")
        if self.calibration_only and not self.calibration:
            raise UsageError(
                "--calibration-only without a text",
                remedy="give the text with --calibration, or leave it out",
            )
        _check_name("--effort", self.effort, EFFORTS)
        _check_time_budget(self.time_budget, self.effort)
        _check_name("--mtp", self.mtp, MTP)
        check_device(self.device)
        _check_prompt(self.prompt)
        _check_number("--seed", self.seed, SEED)
        for option, count, limits in (
            ("--nsamples", self.nsamples, NSAMPLES),
            ("--seqlen", self.seqlen, SEQLEN),
            ("--states", self.states, STATES),
        ):
            if count is not None:
                _check_number(option, count, limits)

    @property
    def level(self) -> Effort:
        return EFFORTS[self.effort]

    @property
    def mean_states(self) -> int:
        """Mean trellis states per weight."""
        return self.level.states if self.states is None else self.states

    @property
    def L(self) -> int:
        """Trellis state bits that predictions assume before the plan chooses those of each matrix."""
        return nominal_window(self.mean_states)

    @property
    def sequences(self) -> int:
        """Calibration sequences, including those held out for measuring KL, and those that the package's mix adds."""
        count = self.nsamples or self.level.nsamples
        return with_mix(count) if self.calibration and not self.calibration_only else count

    def budget(self, original: int) -> int:
        """Bytes that the artifact's safetensors files may take. original: bytes of all parameters at 2 bytes each."""
        if self.target_size is not None:
            return self.target_size
        if self.target_bpw is not None:
            return int(original * self.target_bpw / 16)
        return int(original / (DEFAULT_RATIO if self.ratio is None else self.ratio))

    def sequence_length(self, positions: int | None) -> int:
        """Tokens per calibration sequence for a model with this many positions (None: unlimited).

        Raises UsageError if the user asked for more tokens than the model has positions.
        """
        if self.seqlen is None:
            return DEFAULT_SEQLEN if positions is None else min(DEFAULT_SEQLEN, positions)
        if positions is not None and self.seqlen > positions:
            raise UsageError(
                f"--seqlen {self.seqlen}: the model has {positions} positions",
                remedy=f"use at most {positions}",
            )
        return self.seqlen

    def as_dict(self, *, ratio: float, seqlen: int) -> dict[str, Any]:
        """The options that decide the artifact's bytes, as settled for a model; for the report and the journal.

        ratio: bytes at 2 per parameter over the budget. seqlen: tokens per calibration sequence.
        """
        left_out = (
            "target_bpw", "target_size", "calibration", "calibration_only", "prompt", "dry_run", "force",
            "time_budget",
        )  # fmt: skip
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in left_out}
        return {
            **values,
            "ratio": ratio,
            "L": self.L,
            "states": self.mean_states,
            "nsamples": self.sequences,
            "recovery_steps": self.level.recovery_steps,
            "seqlen": seqlen,
            "bits": list(self.bits),
        }


def _check_prompt(prompt: object) -> None:
    if prompt is not None and not (isinstance(prompt, str) and prompt.strip()):
        raise UsageError(f"--prompt: {_shown(prompt)} is no text", remedy="give a text to continue")


def _check_time_budget(seconds: object, effort: str) -> None:
    if seconds is None:
        return
    if not (_is_number(seconds) and math.isfinite(seconds) and seconds > 0):
        raise UsageError(
            f"--time-budget: {_shown(seconds)} is not a time above 0",
            remedy="write it like 1h, 90m or 1h30m (in Python: seconds)",
        )
    if effort != DEFAULT_EFFORT:
        raise UsageError("--effort and --time-budget both set the time", remedy="give only one of them")


def check_path(name: str, path: object) -> Path:
    """The path as a `Path`; raises UsageError for a value that cannot be one. name: the option, for the message."""
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise UsageError(f"{name}: {_shown(path)} is not a path", remedy="give a str or a pathlib.Path")
    return Path(path)


def check_device(device: object) -> str:
    """The device's name; raises UsageError unless it is "auto", "cpu", "cuda" or "cuda:N"."""
    if not (isinstance(device, str) and _DEVICE.fullmatch(device)):
        raise UsageError(f"--device {_shown(device)} is not a device", remedy="use auto, cpu, cuda or cuda:N")
    return device


def bits_text(bits: Iterable[float]) -> str:
    """Bits per weight as the command line takes them: "2,2.5,3"."""
    return ",".join(f"{value:g}" for value in bits)


def _check_target(ratio: object, target_bpw: object, target_size: object) -> None:
    given = {"--ratio": ratio, "--target-bpw": target_bpw, "--target-size": target_size}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} each set the budget", remedy="give only one of them")
    if target_size is not None and not (_is_whole(target_size) and target_size >= 1):
        raise UsageError(
            f"--target-size: {_shown(target_size)} is not a positive number of bytes",
            remedy="give a size like 8GiB, 500MB or 4365952 (in Python: 4365952)",
        )
    if target_bpw is not None and not (_is_number(target_bpw) and 0 < target_bpw <= 16):
        raise UsageError(
            f"--target-bpw {_shown(target_bpw)} is not above 0 and at most 16 bits per weight",
            remedy="4 is a quarter of 16-bit weights",
        )
    if ratio is not None and not (_is_number(ratio) and math.isfinite(ratio) and ratio >= 1):
        raise UsageError(
            f"--ratio {_shown(ratio)} is not a finite number of at least 1", remedy="4 is the default"
        )


def _checked_prune(prune: object) -> str | float:
    if isinstance(prune, str) and prune in ("off", "auto"):
        return prune
    if not (_is_number(prune) and 0.0 <= prune < 1.0):
        raise UsageError(
            f"--prune {_shown(prune)} is neither off, auto nor a share in [0, 1)",
            remedy="0.1 prunes a tenth of the prunable weights",
        )
    return float(prune)


def _checked_rank(rank: object) -> str | int:
    if isinstance(rank, str) and rank in ("off", "auto"):
        return rank
    if not (_is_whole(rank) and rank >= 1):
        raise UsageError(
            f"--rank {_shown(rank)} is neither off, auto nor a positive whole number",
            remedy=f"use a multiple of {RANK_STEP}",
        )
    if rank % RANK_STEP:
        raise UsageError(
            f"--rank {_shown(rank)} is not a multiple of {RANK_STEP}",
            remedy=f"use {_shown(max(RANK_STEP, rank - rank % RANK_STEP))}",
        )
    return rank


def _checked_bits(bits: object) -> tuple[float, ...]:
    """The bits per weight in ascending order, without duplicates."""
    values = _items(bits)
    wrong = [value for value in values if not (_is_number(value) and value in BITS)]
    if wrong or not values:
        problem = (
            f"{_shown(wrong[0])} bits per weight are not offered" if wrong else "no bits per weight are given"
        )
        raise UsageError(
            f"--bits: {problem}", remedy=f"choose from {bits_text(BITS)} (in Python: a list of numbers)"
        )
    return tuple(value for value in BITS if value in values)


def _check_name(option: str, value: object, names: Iterable[str]) -> None:
    *others, last = names
    if not (isinstance(value, str) and value in (*others, last)):
        raise UsageError(f"{option} is {_shown(value)}, not {', '.join(others)} or {last}")


def _check_number(option: str, value: object, limits: tuple[int, int]) -> None:
    least, most = limits
    if not (_is_whole(value) and least <= value <= most):
        raise UsageError(f"{option} is {_shown(value)}, not a whole number from {least} to {most}")


def _items(value: object) -> list[Any]:
    """The items of a collection; any other value, including a str, is one item."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float) or _is_whole(value)


def _shown(value: object) -> str:
    """The value for a message, at most 60 characters."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of thousands of digits"
