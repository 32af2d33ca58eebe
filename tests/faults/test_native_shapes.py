"""Fault 42: adversarial but accepted shapes through the native kernels, with arrays between guard pages.

`make faults` and `make sanitize` run this with the library under the sanitizers as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import BASE_SEED

SHAPES = Path(__file__).parent / "campaigns" / "shapes.py"
KERNELS = ("amx", "avx512vnni", "avx2", "portable")


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def shapes(*options: object, **environment: str) -> tuple[int, str]:
    """(number of matrices that passed through every function, digest of all results)."""
    done = python(SHAPES, "--seed", BASE_SEED, *options, **environment)
    assert done.returncode == 0, done.stderr
    _, count, digest = done.stdout.split()
    return int(count), digest


def test_fault_42_accepted_shapes_stay_inside_their_memory() -> None:
    count, _ = shapes()
    assert count > 100


@pytest.mark.campaign
def test_fault_42_many_shapes_on_every_instruction_set() -> None:
    found = [shapes("--many", CIUIC_CPU_KERNELS=name) for name in KERNELS]
    assert found[0][0] > 300 and len(set(found)) == 1, found


@pytest.mark.parametrize(("shift", "at"), [(None, 48), (0, -1), (1, -2)])
def test_fault_42_one_byte_outside_ends_the_process(shift: int | None, at: int) -> None:
    """Without this the tests above could not fail."""
    touch = f"""
import ctypes, sys
sys.path.insert(0, {str(SHAPES.parent)!r})
from shapes import Guarded
guarded = Guarded({shift})
array = guarded.empty((12,), "float32")
print(ctypes.string_at(array.ctypes.data, 48) == bytes([0xA5]) * 48, flush=True)
ctypes.string_at(array.ctypes.data + {at}, 1)
print("read outside")
"""
    done = python("-c", touch)
    assert done.stdout == "True\n" and done.returncode != 0, done.stdout + done.stderr
