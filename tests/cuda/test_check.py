"""cuda/check.py: parsing ptxas's report; a spill or a missing kernel is a problem."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ciuic_cli.kernels import sources

REPORT = """
ptxas info    : Compiling entry function 'decode_rows' for 'sm_90'
ptxas info    : Function properties for decode_rows
ptxas         .     {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 46 registers, used 0 barriers
ptxas info    : Compiling entry function 'embedding_rows' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 127 registers, used 0 barriers
"""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    file = Path(__file__).parents[2] / "cuda" / "check.py"
    spec = importlib.util.spec_from_file_location("cuda_check", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cuda_check", module)
    spec.loader.exec_module(module)
    return module


def test_spills_and_missing_kernels_are_problems(check: ModuleType) -> None:
    job = check.Job("nvcc", sources.UNITS["decode"], 90, 16)
    kernels = check.parse(REPORT.format(stack=16, stores=8, loads=12))
    assert [(kernel.name, kernel.registers, kernel.spill_bytes) for kernel in kernels] == [
        ("decode_rows", 46, 20),
        ("embedding_rows", 127, 0),
    ]
    problems = check.problems_of(job, kernels)
    assert len(problems) == 2
    assert "lowrank_columns is missing" in problems[0] and "decode_rows spills 20 bytes" in problems[1]


def test_a_second_kernel_is_a_problem(check: ModuleType) -> None:
    kernels = check.parse(REPORT.format(stack=0, stores=0, loads=0))
    (problem,) = check.problems_of(check.Job("nvrtc", ("decode_rows",), 90, 16), kernels)
    assert "embedding_rows is compiled beside" in problem


def test_every_kernel_is_compiled_alone_for_every_supported_gpu(check: ModuleType) -> None:
    assert check.ARCHITECTURES == (75, 80, 86, 89, 90, 100, 120)
    jobs = [job for job in check.jobs_for(full=False) if job.compiler == "nvrtc"]
    for kernel in sources.UNIT_OF:
        assert {job.architecture for job in jobs if job.kernels == (kernel,)} == set(check.ARCHITECTURES)
    assert {job.L for job in check.jobs_for(full=True)} == {12, 16}


def test_one_kernel_assembles_and_is_remembered(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    job = check.Job("nvrtc", ("transform",), 75, 16)
    (kernel,) = check.run([job], 1)[job]
    assert (kernel.name, kernel.architecture, kernel.spill_bytes, kernel.stack_bytes) == (
        "transform",
        75,
        0,
        0,
    )
    assert 16 <= kernel.registers <= 128
    monkeypatch.setattr(check, "assemble", lambda job: pytest.fail("compiled again"))
    assert check.run([job], 1)[job] == [kernel]
