"""What may be asked of a run: the values that each option can have, for the command line and Python alike.

Options have their names on the command line in messages; in Python, `--target-bpw` is target_bpw. Nothing heavy is
imported here, so that wrong options are answered at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.errors import UsageError


@dataclass(frozen=True)
class Effort:
    """What an effort level spends: trellis window L, calibration sequences, and steps of recovery."""

    L: int
    nsamples: int
    recovery_steps: int


EFFORTS = {"fast": Effort(12, 24, 0), "default": Effort(16, 64, 0), "best": Effort(16, 128, 90)}
MTP = ("keep", "drop")
WIDTHS = tuple(MSE_BY_L[16])
"""Bits per weight that the code has."""
DEFAULT_WIDTHS = tuple(width for width in WIDTHS if width >= 2)
"""Less is predicted to pay in experts that are rarely chosen, and does not on text other than the calibration's
(docs/QUALITY.md, "Widths"): such errors are not small any more."""
RANK_STEP = 16
DEFAULT_RATIO = 4.0
DEFAULT_SEQLEN = 512
NSAMPLES = (2, 1 << 20)
SEQLEN = (32, 1 << 20)
SEED = (0, 2**32 - 1)
"""The least and the most, as of the two before."""
_DEVICE = re.compile(r"auto|cpu|cuda|cuda:[0-9]+")


@dataclass(frozen=True)
class Options:
    """Everything besides the weights and the text that decides the artifact's bytes."""

    ratio: float
    effort: str
    L: int
    nsamples: int
    recovery_steps: int
    seqlen: int
    seed: int
    prune: str | float
    rank: str | int
    bits: tuple[float, ...]
    mtp: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bits": list(self.bits)}


def check_target(ratio: object, target_bpw: object, target_size: object) -> dict[str, Any]:
    """The one byte target by its name; none given: the default ratio. Raises UsageError for two, or an absurd one."""
    given = {"--ratio": ratio, "--target-bpw": target_bpw, "--target-size": target_size}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} contradict each other", remedy="give one of them")
    if target_size is not None:
        return {"target_size": check_size(target_size)}
    if target_bpw is not None:
        if not (_is_number(target_bpw) and 0 < target_bpw <= 16):
            raise UsageError(
                f"--target-bpw {_shown(target_bpw)} is not above 0 and at most 16 bits per weight",
                remedy="4 is a quarter of 16-bit weights",
            )
        return {"target_bpw": target_bpw}
    wanted = DEFAULT_RATIO if ratio is None else ratio
    if not (_is_number(wanted) and math.isfinite(wanted) and wanted >= 1):
        raise UsageError(
            f"--ratio {_shown(wanted)} is no finite number of at least 1", remedy="4 is the default"
        )
    return {"ratio": wanted}


def check_size(size: object) -> int:
    """Bytes of a whole artifact; raises UsageError for anything but a whole number above 0."""
    if not (_is_whole(size) and size >= 1):
        raise UsageError(
            f"{_shown(size)} is no size of a model in bytes",
            remedy="give a size like 8GiB, 500MB or 4365952 (in Python: 4365952)",
        )
    return size


def check_texts(calibration: object) -> tuple[Path, ...]:
    """The calibration files, of one path or of several; raises UsageError for what is none."""
    return tuple(check_path("--calibration", text) for text in _items(calibration))


def check_path(name: str, path: object) -> Path:
    """A path of a form that files can have; raises UsageError for any other."""
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise UsageError(f"{name}: {_shown(path)} is no path", remedy="give a str or a pathlib.Path")
    return Path(path)


def check_prune(prune: object) -> str | float:
    """ "off", "auto", or a share in [0, 1); raises UsageError for anything else."""
    if isinstance(prune, str) and prune in ("off", "auto"):
        return prune
    if not (_is_number(prune) and 0.0 <= prune < 1.0):
        raise UsageError(
            f"--prune {_shown(prune)} is neither off, auto nor a share in [0, 1)",
            remedy="0.1 leaves out a tenth of the prunable weights",
        )
    return float(prune)


def check_rank(rank: object) -> str | int:
    """ "off", "auto", or a positive multiple of 16; raises UsageError for anything else."""
    if isinstance(rank, str) and rank in ("off", "auto"):
        return rank
    if not (_is_whole(rank) and rank >= 1):
        raise UsageError(
            f"--rank {_shown(rank)} is neither off, auto nor a positive number",
            remedy=f"use a multiple of {RANK_STEP}",
        )
    if rank % RANK_STEP:
        raise UsageError(
            f"--rank {_shown(rank)} is no multiple of {RANK_STEP}",
            remedy=f"use {_shown(rank + -rank % RANK_STEP)}",
        )
    return rank


def width_names(widths: Iterable[float]) -> str:
    """As the command line takes them: "2,2.5,3"."""
    return ",".join(f"{width:g}" for width in widths)


def check_bits(bits: object) -> tuple[float, ...]:
    """Widths, ascending and each once; raises UsageError for none, and for any that the code has not."""
    widths = _items(bits)
    wrong = [width for width in widths if not (_is_number(width) and width in WIDTHS)]
    if wrong or not widths:
        what = f"{_shown(wrong[0])} is not among the possible widths" if wrong else "no width is given"
        raise UsageError(
            f"--bits: {what}",
            remedy=f"choose from {width_names(WIDTHS)} (in Python: a list of numbers)",
        )
    return tuple(width for width in WIDTHS if width in widths)


def check_settings(
    *, nsamples: object, seqlen: object, seed: object, effort: object, mtp: object, device: object
) -> None:
    """Raise UsageError for a setting that is not among its names, or no whole number within its limits.

    nsamples and seqlen may be None: as the effort and the model have them.
    """
    _check_name("--effort", effort, EFFORTS)
    _check_name("--mtp", mtp, MTP)
    check_device(device)
    _check_number("--seed", seed, SEED)
    for name, value, limits in (("--nsamples", nsamples, NSAMPLES), ("--seqlen", seqlen, SEQLEN)):
        if value is not None:
            _check_number(name, value, limits)


def check_device(device: object) -> str:
    """ "auto", "cpu", "cuda" or "cuda:N"; raises UsageError for anything else."""
    if not (isinstance(device, str) and _DEVICE.fullmatch(device)):
        raise UsageError(f"--device {_shown(device)} is no device", remedy="use auto, cpu, cuda or cuda:N")
    return device


def _check_name(option: str, value: object, names: Iterable[str]) -> None:
    *others, last = names
    if not (isinstance(value, str) and value in (*others, last)):
        raise UsageError(f"{option} is {_shown(value)}, not {', '.join(others)} or {last}")


def _check_number(option: str, value: object, limits: tuple[int, int]) -> None:
    least, most = limits
    if not (_is_whole(value) and least <= value <= most):
        raise UsageError(f"{option} is {_shown(value)}, not a whole number from {least} to {most}")


def _items(value: object) -> list[Any]:
    """What a collection holds; anything else, a str too, is one item."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float) or _is_whole(value)


def _shown(value: object) -> str:
    """What a value looks like, as far as a message has room for it."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"
