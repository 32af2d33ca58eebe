"""The account of a run: what is counted, in which part, and whose seconds."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ciuic_cli.process.threads import in_order, one_thread
from ciuic_cli.profiling.account import REST, Account, Entry, counted_here, keeping, measured, step
from ciuic_cli.profiling.peaks import TIMED_DTYPES, AccountRow, account_rows, measure_peaks, phase_sums
from ciuic_cli.statistics.symmetric_product import add_symmetric_product


def _busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_products_count_in_the_innermost_part_only() -> None:
    a, b, square = torch.ones(8, 32), torch.ones(32, 4), torch.eye(16, dtype=torch.float64)
    account = Account()
    with keeping(account):
        a @ b  # in no part
        with measured("arms", "down"):
            a @ b
            with step("factors"):
                torch.linalg.cholesky(square)
            with measured("moments", "up"):
                a.bfloat16() @ b.bfloat16()
    parts = account.entries
    assert parts["arms", REST, "down"].operations == {torch.float32: 2 * 8 * 32 * 4}
    assert parts["arms", REST, "down"].nbytes == 4 * (8 * 32 + 32 * 4 + 8 * 4)
    assert parts["arms", "factors", "down"].operations == {torch.float64: 16**3 // 3}
    assert parts["moments", REST, "up"].operations == {torch.bfloat16: 2 * 8 * 32 * 4}
    assert len(parts) == 3


def test_backward_and_attention_are_counted() -> None:
    x, weight = torch.ones(8, 32, requires_grad=True), torch.ones(4, 32, requires_grad=True)
    query = torch.ones(1, 2, 8, 16)
    account = Account()
    with keeping(account):
        with measured("backward", ""):
            torch.nn.functional.linear(x, weight).sum().backward()
        with measured("attention", ""):
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert account.entries["backward", REST, ""].operations == {torch.float32: 3 * 2 * 8 * 32 * 4}
    assert account.entries["attention", REST, ""].operations == {torch.float32: 2 * 2 * 2 * 8 * 8 * 16}


def test_seconds_are_the_processors_and_those_of_a_part_inside_are_taken_off() -> None:
    account = Account()
    with keeping(account), measured("arms", "down"):
        time.sleep(0.3)
        with step("factors"):
            _busy(0.2)
    seconds = {name: entry.seconds for (_, name, _), entry in account.entries.items()}
    assert seconds["factors"] == pytest.approx(0.2, abs=0.1)
    assert seconds[REST] < 0.1


def test_threads_add_their_own_seconds() -> None:
    account = Account()

    def work() -> None:
        with one_thread(), measured("encode", "up"):
            _busy(0.2)
            torch.ones(8, 32) @ torch.ones(32, 4)

    with keeping(account):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entry = account.entries["encode", REST, "up"]
    assert entry.seconds == pytest.approx(0.6, abs=0.2)
    assert entry.operations[torch.float32] == 3 * 2 * 8 * 32 * 4


def test_without_an_account_nothing_is_counted() -> None:
    with measured("arms", "down"), step("factors"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    account = Account()
    with keeping(account), step("factors"):  # no phase is open
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert account.entries == {}


def test_shares_of_the_peak_weigh_every_dtype_with_its_own_rate() -> None:
    account = Account()
    account.entries["arms", REST, "up"] = Entry(seconds=1.0)
    entry = Entry(seconds=4.0)
    entry.operations.update({torch.float32: 200, torch.float64: 100})
    account.entries["arms", "factors", "up"] = entry
    account.entries["forward", REST, ""] = Entry(seconds=2.0)
    peaks = {torch.float32: 100.0, torch.float64: 50.0}
    rows = account_rows(account, peaks)
    assert [(row.phase, row.step, row.share) for row in rows] == [
        ("arms", "factors", 1.0), ("arms", REST, None), ("forward", REST, None),
    ]  # fmt: skip
    assert rows[0].operations == 300


def test_peaks_are_rates_of_one_thread() -> None:
    peaks = measure_peaks()
    assert set(peaks) == set(TIMED_DTYPES)
    assert all(1e8 < rate < 1e14 for rate in peaks.values())
    assert peaks[torch.float32] > peaks[torch.float64]


def test_what_other_threads_do_counts_in_the_part_that_is_open() -> None:
    account = Account()

    def work(_: int) -> None:
        _busy(0.2)
        torch.ones(8, 32) @ torch.ones(32, 4)

    with keeping(account), measured("forward", ""):
        list(in_order(range(4), counted_here(work), 2))
        work(0)
    entry = account.entries["forward", REST, ""]
    assert entry.operations == {torch.float32: 5 * 2 * 8 * 32 * 4}
    assert entry.seconds == pytest.approx(1.0, abs=0.2)  # and not twice that of the other threads


def test_sums_of_moments_count_half_of_their_products() -> None:
    moment, factor = torch.zeros(50, 50), torch.randn(64, 50)
    account = Account()
    with keeping(account), measured("moments", "q"):
        add_symmetric_product(moment, factor, factor)
    entry = account.entries["moments", REST, "q"]
    half, whole = 64 * 50 * 51, 2 * 64 * 50 * 50  # by the native kernel, or by torch where it lacks one
    assert half <= entry.operations[torch.float32] <= whole
    assert entry.nbytes >= factor.nbytes + moment.nbytes


def test_phases_are_summed_with_their_shares() -> None:
    rows = [
        AccountRow("arms", "factors", "q", 60, 8, 3.0, 0.5),
        AccountRow("encode", "search", "q", 0, 1, 6.0, None),
        AccountRow("arms", "rest", "k", 20, 2, 1.0, 0.1),
    ]
    arms, encode, everything = phase_sums(rows)
    assert (arms.phase, arms.operations, arms.bytes, arms.seconds) == ("arms", 80, 10, 4.0)
    assert arms.share == pytest.approx(1.6 / 4)  # 1.6 s at the peak
    assert encode.share is None
    assert everything.phase == "all" and everything.share == pytest.approx(1.6 / 10)
