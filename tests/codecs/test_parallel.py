"""Threads: calls from several threads at once, and calls after a fork."""

from __future__ import annotations

import os
import threading

import torch

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.testing import random_matrix


def test_calls_from_many_threads() -> None:
    matrix = random_matrix(320, 320, [4, 3, 2])
    x = torch.randn(1, 320)
    expected = trellis.matmul(matrix, x, threads=1)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(30):
            if not torch.equal(trellis.matmul(matrix, x, threads=1 + index % 3), expected):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_forked_child_has_threads_of_its_own() -> None:
    """A child cannot use its parent's OpenMP threads, so this also tests the thread pool."""
    matrix = random_matrix(320, 320, 4)
    x = torch.randn(1, 320)
    expected = trellis.matmul(matrix, x, threads=2)  # the parent's threads are running
    child = os.fork()
    if child == 0:
        same = all(torch.equal(trellis.matmul(matrix, x, threads=2), expected) for _ in range(50))
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
