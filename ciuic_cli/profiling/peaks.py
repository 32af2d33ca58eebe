"""The machine's measured peak (the best rate of one thread's matrix products), and the account as shares of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ciuic_cli.process.threads import one_thread
from ciuic_cli.profiling.account import Account, Entry

_SIZES = (256, 1024)
"""Rows and columns of the timed products (chosen: products larger than the last are not faster)."""
_LONGEST = 0.5
"""Seconds that a larger product may take, by the rate of the smaller ones (chosen: a processor without instructions for
bfloat16 takes several)."""
_REPEATS = 8
"""Timed products per dtype and size, of which the fastest counts (chosen)."""
TIMED_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes in which a run multiplies."""


def measure_peaks() -> dict[torch.dtype, float]:
    """Operations per second of one thread by dtype: MKL's and oneDNN's products are timed, and the faster one counts.

    Takes about a second.
    """
    with one_thread(), torch.no_grad():
        return {dtype: max(_rate(product, dtype) for product in _products(dtype)) for dtype in TIMED_DTYPES}


def _products(dtype: torch.dtype) -> list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    products: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [torch.mm]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        products.append(lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    return products


def _rate(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> float:
    rate = 0.0
    for size in _SIZES:
        operations = 2.0 * size**3
        if rate and operations / rate > _LONGEST:
            break
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        product(a, b)
        seconds = []
        for _ in range(_REPEATS):
            started = time.thread_time()
            product(a, b)
            seconds.append(time.thread_time() - started)
        rate = max(rate, operations / min(seconds))
    return rate


@dataclass(frozen=True)
class AccountRow:
    """A line of the account.

    Attributes:
        operations, bytes, seconds: see `account.py`.
        share: of `seconds`, how much the operations would take at the machine's peak; None without operations.
    """

    phase: str
    step: str
    kind: str
    operations: int
    bytes: int
    seconds: float
    share: float | None


def account_rows(account: Account, peaks: Mapping[torch.dtype, float]) -> list[AccountRow]:
    """The account's lines: phases in the order of the run, the longest part of a phase first.

    peaks: operations per second of a thread by dtype, from `measure_peaks`.
    """
    phases = list(dict.fromkeys(phase for phase, _, _ in account.entries))
    rows = [
        AccountRow(*part, sum(entry.operations.values()), entry.nbytes, entry.seconds, _share(entry, peaks))
        for part, entry in account.entries.items()
    ]
    return sorted(rows, key=lambda row: (phases.index(row.phase), -row.seconds))


def phase_sums(rows: Sequence[AccountRow]) -> list[AccountRow]:
    """One line for each phase of an account, and a last line with the sum of all phases.

    A line's share is of all its seconds, with those of parts that report no operations.
    """
    by_phase = {
        phase: [row for row in rows if row.phase == phase] for phase in dict.fromkeys(r.phase for r in rows)
    }
    return [_sum(phase, of_phase) for phase, of_phase in (*by_phase.items(), ("all", rows))]


def _sum(phase: str, rows: Sequence[AccountRow]) -> AccountRow:
    seconds = sum(row.seconds for row in rows)
    at_peak = sum(row.share * row.seconds for row in rows if row.share is not None)
    return AccountRow(
        phase,
        "",
        "",
        sum(row.operations for row in rows),
        sum(row.bytes for row in rows),
        seconds,
        at_peak / seconds if at_peak and seconds else None,
    )


def _share(entry: Entry, peaks: Mapping[torch.dtype, float]) -> float | None:
    at_peak = sum(count / peaks[dtype] for dtype, count in entry.operations.items() if dtype in peaks)
    return at_peak / entry.seconds if at_peak and entry.seconds else None
