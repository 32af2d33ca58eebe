"""What is set for OpenMP and MKL, and what it does to products."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ciuic_cli.process import numeric_libraries

NARROW_PRODUCTS = """
import torch
from ciuic_cli.process.numeric_libraries import make_products_reproducible
make_products_reproducible()
found = []
for threads in (1, 2, 3, 4):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(130, 1536, generator=generator, dtype=torch.float64)
    found.append([left @ torch.randn(1536, n, generator=generator, dtype=torch.float64) for n in (32, 130, 256)])
assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    return monkeypatch


@pytest.mark.parametrize(("vendor", "expected"), [("intel", "AUTO,STRICT"), ("other", None)])
def test_mkl_is_set_on_intel_processors_only(
    environment: pytest.MonkeyPatch, vendor: str, expected: str | None
) -> None:
    environment.setattr(numeric_libraries, "is_intel", lambda: vendor == "intel")
    numeric_libraries.make_products_reproducible()
    assert os.environ.get("MKL_CBWR") == expected


def test_the_user_s_setting_wins(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(numeric_libraries, "is_intel", lambda: True)
    environment.setenv("MKL_CBWR", "COMPATIBLE")
    numeric_libraries.make_products_reproducible()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"


def test_narrow_products_do_not_depend_on_the_number_of_threads() -> None:
    """In a process where torch is loaded already, as for the Python function `compress`."""
    clean = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    subprocess.run([sys.executable, "-c", NARROW_PRODUCTS], env=clean, check=True)
