"""The syntax trees of classes and functions."""

import ast
import gc
import json.decoder
import sys
import threading
from collections.abc import Iterator

import pytest

from ciuic_cli.source_code import syntax_tree


class _Cycle:
    """Garbage whose end runs Python code, so that another thread may go on while a collection lasts."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(50))


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Collections of garbage and changes of thread as often as Python allows."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(1)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switches")
def test_threads_may_parse_at_the_same_time() -> None:
    """Without the lock, Python 3.11.7 fails here with a SystemError."""
    faults: list[BaseException] = []

    def parse() -> None:
        for _ in range(200):
            _Cycle()
            try:
                syntax_tree.__wrapped__(json.decoder.JSONDecoder)
            except SystemError as error:
                faults.append(error)

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_code_that_was_made_at_run_time_has_an_empty_tree() -> None:
    names: dict[str, type] = {}
    exec("class Made: pass", names)
    assert syntax_tree(names["Made"]).body == []
    assert isinstance(syntax_tree(json.decoder.JSONDecoder).body[0], ast.ClassDef)
