"""Results have the same bits for any number of threads; `parallel_map` completes every item and stops on errors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ciuic_cli.passes import lowrank, scale
from ciuic_cli.passes.fisher import Contexts, KroneckerFisher
from ciuic_cli.passes.linear_algebra import (
    cholesky,
    inverse_lower,
    solve_lower,
    solve_transposed,
    times_lower_transposed,
)
from ciuic_cli.passes.predicted_loss import pruning_loss
from ciuic_cli.passes.prepare import prepare
from ciuic_cli.passes.prune import channel_loss
from ciuic_cli.passes.scale import BLOCK_INPUTS
from ciuic_cli.process.threads import in_order, one_thread, parallel_map, renew_pool
from ciuic_cli.statistics.head_fisher import context_moment
from ciuic_cli.statistics.symmetric_product import add_symmetric_product, symmetric_product

SIZE = 700


def _positive(generator: torch.Generator, size: int = SIZE) -> torch.Tensor:
    x = torch.randn(size, size + 40, dtype=torch.float64, generator=generator)
    return x @ x.T / size


def _prepared(generator: torch.Generator) -> torch.Tensor:
    moment = _positive(generator).float()
    weight = torch.randn(SIZE, SIZE, generator=generator)
    made = prepare(weight, KroneckerFisher(moment / moment.trace(), moment))
    assert made.inputs.factor is not None and made.outputs.factor is not None
    return torch.cat([made.weight, made.inputs.factor, made.outputs.factor], dim=1)


def _inverse_in_blocks(generator: torch.Generator) -> torch.Tensor:
    diagonal = scale._inverse_diagonal(_moment(generator, BLOCK_INPUTS + 600))
    assert diagonal is not None
    return diagonal


WORK: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "product": lambda g: torch.randn(SIZE, 2048, generator=g) @ torch.randn(2048, SIZE, generator=g),
    "product in bfloat16": lambda g: (
        torch.randn(SIZE, 2048, generator=g).bfloat16() @ torch.randn(2048, SIZE, generator=g).bfloat16()
    ).float(),
    "product in float64": lambda g: (
        torch.randn(SIZE, SIZE, dtype=torch.float64, generator=g)
        @ torch.randn(SIZE, SIZE, dtype=torch.float64, generator=g)
    ),
    "moment": lambda g: symmetric_product(*2 * (torch.randn(1536, 130, generator=g),)),
    "added moment": lambda g: _added_moment(torch.randn(1000, 500, generator=g), rounded=False),
    "added rounded moment": lambda g: _added_moment(torch.randn(1000, 500, generator=g), rounded=True),
    "inverse": lambda g: inverse_lower(_lower(g)),
    "sum along rows": lambda g: torch.randn(SIZE, 4096, generator=g).square().sum(1),
    "factorisation": lambda g: _cholesky(_positive(g)),
    "factorisation of 640": lambda g: _cholesky(_positive(g, 640).float() + torch.eye(640)),
    "factorisation of 1024": lambda g: _cholesky(_positive(g, 1024).float() + torch.eye(1024)),
    "low rank": lambda g: lowrank.factor(
        torch.randn(SIZE, SIZE, generator=g), torch.rand(SIZE, generator=g), 64
    )[0],
    "solution": lambda g: solve_transposed(
        _lower(g), solve_lower(_lower(g), torch.randn(SIZE, 300, generator=g))
    ),
    "product with a triangle": lambda g: times_lower_transposed(
        torch.randn(301, SIZE, generator=g), _lower(g)
    ),
    "prepared matrix": _prepared,
    "loss of pruning": lambda g: pruning_loss(
        torch.randn(300, 1100, generator=g), KroneckerFisher(_moment(g, 1100), torch.ones(300))
    ),
    "inverse's diagonal in blocks": _inverse_in_blocks,
    "moment of contexts": lambda g: context_moment(
        Contexts(torch.randn(900, 500, generator=g).bfloat16(), torch.rand(900, generator=g)),
        torch.rand(900, generator=g),
    ),
    "losses of channels": lambda g: torch.from_numpy(
        channel_loss(torch.randn(300, 1030, generator=g), KroneckerFisher(_moment(g, 1030), _moment(g, 300)))
    ),
}


def _moment(generator: torch.Generator, size: int) -> torch.Tensor:
    x = torch.randn(size, 64, generator=generator)
    return x @ x.T


def _added_moment(factor: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    moment = torch.zeros(factor.shape[1], factor.shape[1])
    add_symmetric_product(moment, factor, factor, torch.bfloat16, rounded=rounded)
    return moment


def _lower(generator: torch.Generator) -> torch.Tensor:
    lower = cholesky(_positive(generator))
    assert lower is not None
    return lower.float()


def _cholesky(matrix: torch.Tensor) -> torch.Tensor:
    lower = cholesky(matrix)
    assert lower is not None
    torch.testing.assert_close(lower @ lower.T, matrix)
    return lower


@pytest.mark.parametrize("what", WORK)
def test_results_do_not_depend_on_the_number_of_threads(what: str) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(WORK[what](torch.Generator().manual_seed(0)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_number_of_threads_is_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def _together(item: int) -> int:
    return 2


def _openmp_threads(_: int) -> int:
    """OpenMP's number of threads for the thread that asks, which need not be torch's."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    library = next(line.split()[-1] for line in maps if "libgomp" in line)
    return int(ctypes.CDLL(library).omp_get_max_threads())


@pytest.mark.skipif(sys.platform != "linux", reason="finds OpenMP's library in /proc")
def test_openmp_has_one_thread_beside_other_items() -> None:
    with _threads(3):
        assert [number for _, number in parallel_map(range(6), _openmp_threads, lambda _: 3)] == 6 * [1]


def test_items_that_run_alone_have_all_threads() -> None:
    def make(item: int) -> int:
        return torch.get_num_threads()

    with _threads(3):
        made = dict(parallel_map(range(9), make, lambda item: 1 if item in (0, 4, 5) else 3))
    assert made == {item: 3 if item in (0, 4, 5) else 1 for item in range(9)}


@pytest.mark.parametrize("what", WORK)
def test_parallel_work_has_the_same_bits(what: str) -> None:
    with _threads(1):
        alone = WORK[what](torch.Generator().manual_seed(0))
    with _threads(2):
        made = dict(parallel_map(range(4), lambda _: WORK[what](torch.Generator().manual_seed(0)), _together))
    assert sorted(made) == [0, 1, 2, 3]
    assert all(torch.equal(alone, each) for each in made.values())


def test_as_many_items_run_at_once_as_is_said() -> None:
    barrier, seen = threading.Barrier(3, timeout=60), []

    def make(item: int) -> int:
        barrier.wait()  # breaks unless three items run at once
        seen.append(torch.get_num_threads())
        return item * item

    with _threads(3):
        made = dict(parallel_map(range(6), make, lambda item: 3))
    assert made == {item: item * item for item in range(6)}
    assert seen == [1] * 6


def test_items_are_taken_only_when_a_thread_is_free() -> None:
    taken: list[int] = []
    with _threads(2):
        work = parallel_map((taken.append(item) or item for item in range(9)), lambda item: item, _together)
        next(work)
        assert len(taken) <= 3
        work.close()
        assert len(taken) <= 3


def test_with_one_thread_items_run_in_order_in_the_calling_thread() -> None:
    with _threads(1):
        here = threading.get_ident()
        assert list(parallel_map(range(3), lambda item: threading.get_ident() - here, lambda item: 1)) == [
            (0, 0),
            (1, 0),
            (2, 0),
        ]


def test_an_error_in_one_item_ends_the_map() -> None:
    made = []

    def make(item: int) -> None:
        if item == 3:
            raise KeyError(item)
        made.append(item)

    with _threads(2), pytest.raises(KeyError):
        list(parallel_map(range(100), make, _together))
    assert len(made) < 10


INTERRUPTED_AT_WORK = """
import faulthandler, signal, sys, threading
import torch
from ciuic_cli.process.signals import interruptible
from ciuic_cli.process.threads import parallel_map

faulthandler.dump_traceback_later(60, exit=True)  # in case of a deadlock
torch.set_num_threads(2)
POOLS = ("threading.py", "futures/_base.py", "futures/thread.py")

def interrupted(place):
    # Raise a signal at the place-th return from a function of Python's thread pools. False if there are fewer returns.
    left = place
    def trace(frame, event, argument):
        nonlocal left
        if event == "return" and frame.f_code.co_filename.endswith(POOLS):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGTERM)
        return trace
    try:
        with interruptible():
            sys.settrace(trace)
            for _ in parallel_map(range(4), lambda item: item, lambda item: 2):
                pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False

places = 0
while interrupted(places + 1):
    places += 1
print(places, threading.active_count())
"""


def test_an_interruption_anywhere_never_leaves_the_workers_waiting() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_WORK], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    places, threads = map(int, done.stdout.split())
    assert places > 40 and threads == 1


def test_results_come_in_the_order_of_the_items() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def make(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05 if number == 0 else 0.01)
        with lock:
            running -= 1
        return 10 * number

    assert list(in_order(range(6), make, 3)) == [0, 10, 20, 30, 40, 50]
    assert most == 3
    most = 0
    assert list(in_order(range(3), make, 1)) == [0, 10, 20]
    assert most == 1


def test_threads_of_a_fork_may_begin_at_once() -> None:
    """Without `renew_pool`, on two free cores, one fork in twenty failed (80 of 1,500)."""

    def compute_in_six_threads() -> bool:
        begin, succeeded = threading.Barrier(6), []

        def compute() -> None:
            begin.wait()
            torch.zeros(100_000).add_(1)
            succeeded.append(True)

        workers = [threading.Thread(target=compute) for _ in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return len(succeeded) == 6

    with _threads(1):  # the threads of a pool do not survive a fork
        torch.zeros(100_000).add_(1)
        for _ in range(60):
            pid = os.fork()
            if pid == 0:
                renew_pool()
                os._exit(0 if compute_in_six_threads() else 1)
            assert os.waitpid(pid, 0)[1] == 0


def test_renewing_the_pool_keeps_the_number_of_threads() -> None:
    for count in (1, 2):
        with _threads(count):
            renew_pool()
            assert torch.get_num_threads() == count
