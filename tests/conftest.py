"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("COLUMNS", None)  # processes of pytest-xdist have it, and Rich would fold tables
# As the commands do. Besides, spinning threads make the suite take half as long again beside other work.
configure_numeric_libraries()

from tiny_checkpoints import make_checkpoint  # noqa: E402 (imports torch)

from ciuic_cli.allocation.machine import Machine  # noqa: E402
from ciuic_cli.cost import run_time, timing  # noqa: E402

SLOW_PLACES = (
    *(
        "benchmarks",
        "cli",
        "compression",
        "cuda",
        "evaluation",
        "families",
        "faults",
        "fuzz",
        "recovery",
        "runtime",
    ),
    *(
        "serving",
        "statistics",
        "train",
        "process/test_workers.py",
        "codecs/test_native.py",
        "text/test_tokenizer.py",
        "test_import_direction.py",
    ),
)
"""Folders and files whose tests run whole models, processes or a compiler; `make test-fast` leaves them out."""
LONGEST = (
    "test_wheel.py",
    "compression/test_callers.py",
    "process/test_workers.py",
    "train/test_ended_ranks.py",
)
"""Files that take minutes. They run first, so that none runs alone at the end."""

SENTENCE = "The river runs past the old mill, and in the evening the lamps are lit along both of its banks. "


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        if item.path.relative_to(root).as_posix().startswith(SLOW_PLACES):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.relative_to(root).as_posix() not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def timed_once() -> None:
    """Every run begins with a forecast: timings are kept, because hundreds of tests run the same shapes."""
    found: dict[Any, Any] = {}

    def keep(name: str) -> None:
        real = getattr(run_time, name)

        def timed(*args: Any, **options: Any) -> Any:
            names = [(each.name, each.device) if isinstance(each, Machine) else each for each in args]
            # A test that replaces the clock gets timings of its own.
            key = (name, *names, *options.items(), timing._clock)
            if key not in found:
                found[key] = real(*args, **options)
            return found[key]

        setattr(run_time, name, timed)

    for name in ("time_activations", "time_attention", "time_matrix", "time_moments", "time_products"):
        keep(name)


@pytest.fixture(scope="session", autouse=True)
def default_signal_handlers() -> None:
    """Signal handlers as in a terminal. Background jobs and their children ignore SIGINT, those of nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(family, **options)` -> folder, shared by all tests of the session: never write into it.

    family: a key of TINY_CONFIGS; options: as in `make_checkpoint`.
    """
    made: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items(), key=lambda item: item[0])))
        if key not in made:
            made[key] = make_checkpoint(family, tmp_path_factory.mktemp(family), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 1154 tokens of the byte-level tokenizer, counting the empty line that ends a document."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(SENTENCE * 12, encoding="utf-8")
    return file
