"""The same bits for any number of threads, and many small pieces of work side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from ciuic_cli.process.signals import deferred

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """For sums over a whole tensor, and for QR and singular values: their rounding depends on the number of threads.

    Products, element-wise operations and sums along rows do not (the tests hold this for the products).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(
    items: Iterable[Item], make: Callable[[Item], Result], alone: Callable[[Item], bool]
) -> Iterator[tuple[Item, Result]]:
    """Every item with what `make` gives for it, in the order in which they are finished.

    As many are made at once as torch may use threads, each by a single one: several small products side by side
    keep the cores busier than each product cut up among them. Items that are to be made `alone` get all threads.
    The next item is taken when there is a thread for it.
    """
    threads = torch.get_num_threads()
    for large, group in itertools.groupby(items, alone):
        if large or threads == 1:
            for item in group:
                yield item, make(item)
        else:
            yield from _pooled(group, make, threads)


def _pooled(
    items: Iterable[Item], make: Callable[[Item], Result], threads: int
) -> Iterator[tuple[Item, Result]]:
    running: dict[Future[Result], Item] = {}
    with one_thread(), ThreadPoolExecutor(threads, "ciuic-work") as pool:
        try:
            for item in items:
                with deferred():
                    future = pool.submit(make, item)
                running[future] = item
                if len(running) == threads:
                    yield from _finished(running)
            while running:
                yield from _finished(running)
        finally:
            pool.shutdown(cancel_futures=True)


def _finished(running: dict[Future[Result], Item]) -> Iterator[tuple[Item, Result]]:
    """Waits for one at least; those that are finished are no longer in `running`."""
    done: set[Future[Result]] = set()
    while not done:  # with a limit: a signal that another thread receives does not wake this one
        with deferred():
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
    for future in done:
        yield running.pop(future), future.result()
