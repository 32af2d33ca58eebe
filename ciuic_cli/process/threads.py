"""Threads of torch: `one_thread` and `threads` fix their number for results that depend on it; `parallel_map` and
`in_order` work on several items at once; `renew_pool` prepares a forked process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from ciuic_cli.process.signals import defer_signals

Item = TypeVar("Item")
Result = TypeVar("Result")
_thread = threading.local()
"""`is_of_pool`: set in the threads in which `parallel_map` makes several items at once."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread, for operations whose rounding depends on the number of threads.

    Such operations are sums over a whole tensor, QR and singular values. Element-wise operations, sums along rows and
    large products do not depend on it (tests/process/test_threads.py). In layers,
    `layerwise/operations/stable_bits.py` replaces small products and the gradient of softmax.
    """
    with threads(1):
        yield


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run torch with `number` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def renew_pool() -> None:
    """Let torch make its pool of threads now, if this process is a fork whose pool stayed in the parent.

    Otherwise torch makes it when a thread first computes, and if two threads begin at once, as in transformers' loader,
    one finds no pool: "pool INTERNAL ASSERT FAILED ... Invalid thread pool". Changes no setting.
    """
    torch.set_num_threads(torch.get_num_threads())


def parallel_map(
    items: Iterable[Item], make: Callable[[Item], Result], side_by_side: Callable[[Item], int]
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, make(item)) for every item, in the order of completion.

    `side_by_side` says how many items run at once, each with one of torch's threads: small products side by side keep
    the cores busier than one product split among them. An item for which it says 1 runs alone, with all threads. An
    item is taken from `items` only when a thread is free.
    """
    for count, group in itertools.groupby(items, side_by_side):
        if count == 1:
            for item in group:
                yield item, make(item)
        else:
            yield from _map_in_pool(group, make, count)


def runs_beside_others() -> bool:
    """True in a thread of `parallel_map`'s pool, where torch has one thread."""
    return getattr(_thread, "is_of_pool", False)


def _begin_in_pool() -> None:
    """Begin a thread of the pool. The first call of `get_num_threads` gives the thread one OpenMP thread. oneDNN's
    products do not make that call, and would use all of OpenMP's threads."""
    torch.get_num_threads()
    _thread.is_of_pool = True


def in_order(items: Iterable[Item], make: Callable[[Item], Result], side_by_side: int) -> Iterator[Result]:
    """Yield make(item) for every item, in the order of the items; `side_by_side` items run at once (`parallel_map`).

    Results that are finished before an earlier one wait in memory.
    """
    waiting: dict[int, Result] = {}
    due = 0
    for (number, _), result in parallel_map(
        enumerate(items), lambda item: make(item[1]), lambda _: side_by_side
    ):
        waiting[number] = result
        while due in waiting:
            yield waiting.pop(due)
            due += 1


def _map_in_pool(
    items: Iterable[Item], make: Callable[[Item], Result], count: int
) -> Iterator[tuple[Item, Result]]:
    running: dict[Future[Result], Item] = {}
    with one_thread(), ThreadPoolExecutor(count, "ciuic-work", _begin_in_pool) as pool:
        try:
            for item in items:
                with defer_signals():
                    future = pool.submit(make, item)
                running[future] = item
                if len(running) == count:
                    yield from _pop_finished(running)
            while running:
                yield from _pop_finished(running)
        finally:
            pool.shutdown(cancel_futures=True)


def _pop_finished(running: dict[Future[Result], Item]) -> Iterator[tuple[Item, Result]]:
    """Wait for at least one future, remove all finished ones from `running`, and yield their items and results."""
    done: set[Future[Result]] = set()
    while not done:  # with a timeout, because a signal that another thread receives does not wake this one
        with defer_signals():
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
    for future in done:
        yield running.pop(future), future.result()
