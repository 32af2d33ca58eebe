"""Division of integers that rounds up."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """The least integer that is not below dividend / divisor; divisor: positive."""
    return -(-dividend // divisor)


def round_up(number: int, divisor: int) -> int:
    """The least multiple of `divisor` that is not below `number`; divisor: positive."""
    return ceil_div(number, divisor) * divisor
