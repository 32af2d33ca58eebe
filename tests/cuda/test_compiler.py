"""NVRTC and its cache: targets, one kernel per compilation, damaged files and concurrent processes."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.kernels import compiler, sources

KERNEL = "linear_bytes_n4"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CIUIC_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records compilations; replaces NVRTC, which takes seconds."""
    calls: list[str] = []

    def fake(kernel: str, architecture: str, L: int = 16) -> bytes:
        calls.append(f"{kernel} {architecture} {L}")
        return calls[-1].encode()

    monkeypatch.setattr(compiler, "compile_kernel", fake)
    return calls


def test_targets() -> None:
    assert compiler.target(75) == "sm_75"
    assert compiler.target(90) == "sm_90"
    assert compiler.target(999).startswith("compute_")
    with pytest.raises(EnvironmentFault, match="too old"):
        compiler.target(70)


def test_nvrtc_compiles_and_its_log_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compiler.compile_kernel("transform", "sm_80")
    assert code[:4] == b"\x7fELF" and b"transform" in code
    monkeypatch.setattr(sources, "source", lambda unit: "this is no kernel;")
    with pytest.raises(EnvironmentFault, match=r"does not compile for sm_80: .*error"):
        compiler.compile_kernel("transform", "sm_80")


@pytest.mark.parametrize("kernel", ["encode_h14", "linear_bytes_n4", "lowrank_columns"])
def test_a_kernel_is_compiled_without_the_others_of_its_file(kernel: str) -> None:
    code = compiler.compile_kernel(kernel, "sm_90", 12)
    assert set(re.findall(rb"\.text\.(\w+)", code)) == {kernel.encode()}


def test_compiled_once_per_input(cache: Path, counted: list[str]) -> None:
    first = compiler.cached_kernel(KERNEL, "sm_90")
    assert compiler.cached_kernel(KERNEL, "sm_90") == first and len(counted) == 1
    compiler.cached_kernel(KERNEL, "sm_80")
    compiler.cached_kernel(KERNEL, "sm_90", 13)
    assert not compiler.is_cached("transform", "sm_90")
    compiler.cached_kernel("transform", "sm_90")
    assert compiler.is_cached("transform", "sm_90")
    assert len(counted) == 4 and len(list(cache.iterdir())) == 4


def test_changed_source_is_compiled_anew(
    cache: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.cached_kernel(KERNEL, "sm_90")
    monkeypatch.setattr(sources, "digest", lambda unit: "another")
    compiler.cached_kernel(KERNEL, "sm_90")
    assert len(counted) == 2


def test_a_damaged_file_is_compiled_anew(cache: Path, counted: list[str]) -> None:
    good = compiler.cached_kernel(KERNEL, "sm_90")
    (file,) = cache.iterdir()
    for damage in (b"", file.read_bytes()[:-1], b"\0" * 40):
        file.write_bytes(damage)
        assert compiler.cached_kernel(KERNEL, "sm_90") == good
    assert len(counted) == 4


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("CIUIC_CACHE", str(blocked))
    assert compiler.cached_kernel(KERNEL, "sm_90") == compiler.cached_kernel(KERNEL, "sm_90")
    assert len(counted) == 2


def _write_many(folder: str, seed: int) -> None:
    file = Path(folder) / "kernels" / "unit.bin"
    for repetition in range(100):
        compiler._write(file, bytes([seed, repetition]) * 50_000)
        code = compiler._read(file)
        assert code is not None and len(set(code[::2])) == len(set(code[1::2])) == 1


def test_concurrent_processes_never_read_half_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(str(tmp_path), seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert [file.name for file in (tmp_path / "kernels").iterdir()] == ["unit.bin"]


def test_every_kernel_is_in_its_unit() -> None:
    for unit, kernels in sources.UNITS.items():
        text = sources.source(unit)
        for kernel in kernels:
            assert kernel in text or f"ENCODE({kernel.removeprefix('encode_h')}," in text, kernel
    assert "trellis_decode.h" in sources.headers()
