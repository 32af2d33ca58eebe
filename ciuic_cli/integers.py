"""Integers: division that rounds up, and sizes in bytes and times in seconds as people write them."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from ciuic_cli.errors import UsageError

_UNITS = {
    unit: base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((letter, 1000), (f"{letter}B", 1000), (f"{letter}IB", 1024))
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)")

_DURATION = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s)?")


def ceil_div(dividend: int, divisor: int) -> int:
    """The least integer that is not below dividend / divisor; divisor: positive."""
    return -(-dividend // divisor)


def round_up(number: int, divisor: int) -> int:
    """The least multiple of `divisor` that is not below `number`; divisor: positive."""
    return ceil_div(number, divisor) * divisor


def parse_size(text: str) -> int:
    """The bytes of "8GiB", "500MB", "1.5G" or "4365952"; raises UsageError for anything else.

    Units are powers of 1000, or of 1024 with an "i". Case does not matter, and the "B" is optional.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in ("", "B", *_UNITS):
        raise UsageError(f"{text!r:.60} is not a size", remedy="write it like 8GiB, 500MB, 1.5GB or 4365952")
    size = Decimal(match[1]) * _UNITS.get(unit, 1)
    if 0 < size < 1 or (unit in ("", "B") and size != int(size)):
        raise UsageError(
            f"{text!r} is not a whole number of bytes", remedy="write it like 8GiB, 500MB or 1.5GB"
        )
    return int(size)


def parse_duration(text: str) -> int:
    """The seconds of "1h", "90m", "1h30m" or "45s"; raises UsageError for anything else."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        raise UsageError(f"{text!r:.60} is not a time", remedy="write it like 1h, 90m, 1h30m or 45s")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def duration_text(seconds: float) -> str:
    """A time as `parse_duration` reads it, rounded up: "1h5m", "90s"."""
    whole = math.ceil(seconds)
    hours, minutes = divmod(ceil_div(whole, 60), 60)
    return f"{whole}s" if whole < 180 else f"{hours}h{minutes}m" if hours else f"{minutes}m"
