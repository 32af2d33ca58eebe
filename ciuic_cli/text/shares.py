"""How many calibration sequences are from the user's text, how many from the package's mix, and what these count."""

MIX_DIVISOR = 3
"""One in so many sequences is from the package's mix, if the user gives a text (measured:
docs/experiments/statistics/narrow-text.md)."""
MIX_WEIGHT = 0.5
"""Weight of the loss on a sequence of the mix in the statistics; a sequence of the user's text has the weight 1
(measured on the same page). Probes and recovery have no weights."""


def with_mix(count: int) -> int:
    """The number of all sequences if `count` are from the user's text."""
    return MIX_DIVISOR * count // (MIX_DIVISOR - 1)


def shares_of(count: int, mix: int, own: int) -> tuple[int, int]:
    """How many of `count` sequences are from the package's mix, and how many from the user's text.

    mix, own: sequences that there are. Where one text is too short, the other fills up.
    """
    from_own = min(own, count - count // MIX_DIVISOR)
    from_mix = min(mix, count - from_own)
    return from_mix, min(own, count - from_mix)
