"""Freed memory returns to the system, oneDNN's caches are limited, and exhaustion is recognised by its message."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ciuic_cli.process.memory import KEPT_BYTES, exhaustion

FREED = """
import numpy as np
from ciuic_cli.process.memory import resident_bytes, return_freed_memory, configure_allocators
{prepare}
kept = []
def layer():
    blocks = []
    for _ in range(400):
        blocks.append(np.ones(1 << 16))  # half a megabyte: below the threshold for separate mappings
        kept.append(np.ones(16))  # small blocks in between that stay
    return blocks
held = layer()
full = resident_bytes()
del held
return_freed_memory()
print(full - resident_bytes())
"""


def test_memory_of_a_freed_layer_returns_to_the_system() -> None:
    script = FREED.format(prepare="configure_allocators()")
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 0.9 * 400 * 8 * (1 << 16)


HOLES = """
import numpy as np
from ciuic_cli.process.memory import limit_freed_memory, resident_bytes, return_freed_memory, configure_allocators
configure_allocators({kept_bytes})
# A heap of many holes, each a little larger than the one before, with blocks in between that stay.
holes, kept = [], []
for number in range(400):
    holes.append(np.ones((1 << 16) + 8 * number))
    kept.append(np.ones(512))
holes.clear()
return_freed_memory()
limit_freed_memory()
least, most = resident_bytes(), 0
for number in reversed(range(400)):
    {limit}
    np.ones((1 << 16) + 8 * number)  # one at a time, each in another hole
    most = max(most, resident_bytes())
print(most - least)
"""


def test_memory_freed_in_a_loop_returns_during_the_loop() -> None:
    def growth(limit: str, kept_bytes: int = 0) -> int:
        done = subprocess.run(
            [sys.executable, "-c", HOLES.format(limit=limit, kept_bytes=kept_bytes)],
            check=True,
            capture_output=True,
            text=True,
        )
        return int(done.stdout)

    assert growth("limit_freed_memory(64 << 20)") < 80 << 20 < growth("pass")
    assert growth("limit_freed_memory(64 << 20)", KEPT_BYTES) > 80 << 20  # so few bytes stay


FAULTS = """
import resource
import numpy as np
from ciuic_cli.process.memory import reuse_activations
{prepare}
def layer():
    return [np.ones(1 << 17) for _ in range(30)]  # blocks of 1 MB, 30 MB in all
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
layer()
before = faults()
for _ in range(4):
    layer()
print(faults() - before)
"""


@pytest.mark.parametrize(
    ("environment", "reused"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}, False)]
)
def test_activations_of_one_layer_are_reused_by_the_next(environment: dict[str, str], reused: bool) -> None:
    def count(prepare: str) -> int:
        script = [sys.executable, "-c", FAULTS.format(prepare=prepare)]
        done = subprocess.run(
            script, check=True, capture_output=True, text=True, env={**os.environ, **environment}
        )
        return int(done.stdout)

    pages = 4 * (30 << 20) // 4096
    assert (count("reuse_activations()") < 0.1 * pages) is reused
    assert count("pass") > 0.9 * pages


@pytest.mark.parametrize("name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"])
@pytest.mark.parametrize(("before", "after"), [(None, "64"), ("1024", "1024")])
def test_a_limit_that_the_user_has_set_is_kept(name: str, before: str | None, after: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != name}
    if before is not None:
        environment[name] = before
    script = (
        "import os; from ciuic_cli.process.memory import configure_allocators; configure_allocators(); "
        f"print(os.environ[{name!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == after


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's exception."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "memory is exhausted"),
        (OSError(12, "Cannot allocate memory"), "memory is exhausted"),
        (RuntimeError("unable to mmap 67992 bytes from file </x>: Cannot allocate memory (12)"), "memory is"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "memory is"),
        (RuntimeError("std::bad_alloc"), "memory is exhausted"),
        (RuntimeError("could not create a primitive"), "memory is exhausted"),
        (RuntimeError("could not create a memory object"), "memory is exhausted"),
        (RuntimeError("could not execute a primitive"), "memory is exhausted"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), "memory is"),
        (RuntimeError("[enforce fail] Failed to allocate 64 bytes"), "memory is exhausted"),
        (RuntimeError("can't alloc"), "memory is exhausted"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory is exhausted"),
        (RuntimeError("can't start new thread"), "no more threads"),
        (BaseException("ThreadPoolBuildError { kind: IOError(Os { code: 11 }) }"), "no more threads"),
        (OutOfMemoryError("CUDA out of memory"), "device memory is exhausted"),
        (OSError(28, "No space left on device"), None),
        (ImportError("no module named torch"), None),
        (ValueError("a size of 3"), None),
    ],
)
def test_exhaustion_is_recognised(error: BaseException, expected: str | None) -> None:
    fault = exhaustion(error)
    assert (fault is None) == (expected is None)
    if fault is not None:
        assert str(expected) in fault.message and fault.remedy and fault.exit_code == 5
