"""Numbers formatted for people."""

from __future__ import annotations


def readable_bytes(count: float) -> str:
    """Bytes in decimal units: 999 B, 1.00 kB, 17.5 MB, 1.31 TB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable: TB returns")


def readable_kl(nats: float) -> str:
    """A KL divergence with three significant digits: 0.0123, 1.20e-05."""
    return f"{nats:#.3g}"


def count_of(count: int, noun: str) -> str:
    """A number with a noun that takes an s in the plural: 1 row, 2 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
