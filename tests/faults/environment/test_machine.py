"""Faults 34 and 38: what the machine lacks (disk space, devices, memory), and signals that Python loses."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import (
    Victim,
    harmless,
    invoke,
    old_artifact,
    seeded,
    snapshot,
    spawn,
    temporary_folders,
    unfinished,
    weights,
)
from interrupting import lose

from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.checkpoint.architecture import config_faults
from ciuic_cli.statistics.collect import collect_statistics

Make = Callable[..., Victim]


# --- 34: disks


@seeded(1, campaign=4)
def test_fault_34_no_file_may_grow(victim: Make, seed: int) -> None:
    v = victim(seed, "llama")
    old_artifact(v.out)
    limit = 0 if seed == 0 else v.random.choice([0, 100, 5000, 20_000, v.random.randrange(40_000)])
    done = spawn(
        *v.arguments(), "--force",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.code == 5, done.stderr
    harmless(done)
    assert "File too large" in done.stderr and done.field("file") and done.field("try")
    assert (v.out / CHECKSUMS).read_text() == "old" and not unfinished(v.folder)
    assert v.compress("--force").code == 0
    whole = v.folder / "whole"
    assert v.compress(out=whole).code == 0
    assert weights(v.out) == weights(whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(kilobytes)`: the folder of a new tmpfs of that size; mounting needs root."""
    mounted: list[Path] = []

    def make(kilobytes: int) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place],
            check=True,
            capture_output=True,
        )
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", place], check=True)


MAY_MOUNT = os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.mark.skipif(not MAY_MOUNT, reason="only the superuser can mount a small file system")
@seeded(2, campaign=6)
def test_fault_34_the_disk_is_full_before(victim: Make, small_disk: Callable[[int], Path], seed: int) -> None:
    v = victim(seed, "llama")
    disk = small_disk(64)
    (disk / "filler").write_bytes(bytes((64 - v.random.choice([0, 8, 16])) << 10))
    before = snapshot(disk)
    done = invoke(*v.arguments(disk / "out"))
    assert done.code == 5, done.stderr
    harmless(done)
    assert "full" in done.stderr and "free" in done.field("try") and done.field("file")
    assert snapshot(disk) == before and "forward" not in done.stderr


@pytest.mark.skipif(not MAY_MOUNT, reason="only the superuser can mount a small file system")
@seeded(2, campaign=6)
def test_fault_34_the_disk_fills_up_during_the_run(
    victim: Make, small_disk: Callable[[int], Path], seed: int
) -> None:
    v = victim(seed, "llama")
    disk = small_disk(v.random.choice([200, 320, 600]))
    out = disk / "out"
    done = invoke(*v.arguments(out))
    assert done.code == 5, done.stderr
    harmless(done)
    assert "No space left" in done.stderr and "free disk space" in done.field("try")
    assert not out.exists() and not unfinished(disk)
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    again = invoke(*v.arguments(out))
    assert again.code == 0 and "continuing" in again.stderr, again.stderr
    assert v.compress().code == 0
    assert weights(out) == weights(v.out)


@pytest.mark.skipif(not MAY_MOUNT, reason="only the superuser can mount a small file system")
def test_fault_34_a_dry_run_fills_the_folder_for_temporary_files(
    victim: Make, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(0, "llama")
    disk = small_disk(100)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    done = v.compress("--dry-run")
    assert done.code == 5 and "No space left" in done.stderr, done.stderr
    harmless(done)
    assert done.field("file") == str(disk)
    assert "TMPDIR" in done.field("try") and "goes on" not in done.field("try")
    assert not list(disk.iterdir())


# --- 38: devices and memory


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:97"])
@pytest.mark.parametrize("what", ["compress", "eval", "bench"])
def test_fault_38_no_gpu(
    victim: Make, artifact: Path, monkeypatch: pytest.MonkeyPatch, device: str, what: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    v = victim(0, "llama")
    before = snapshot(v.folder)
    done = (
        v.compress("--device", device) if what == "compress" else invoke(what, artifact, "--device", device)
    )
    assert done.code == 5, done.stderr
    harmless(done)
    assert "no CUDA device" in done.stderr and "--device cpu" in done.field("try")
    assert snapshot(v.folder) == before


def test_fault_38_without_a_gpu_the_cpu_is_said_to_be_used(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    v = victim(0, "llama")
    v.compress("--dry-run").says("no GPU", "CPU")


@pytest.mark.parametrize(
    "place",
    [
        "transformers.AutoModelForCausalLM.from_config",
        "ciuic_cli.checkpoint.architecture.PretrainedConfig.from_dict",
    ],
)
@pytest.mark.parametrize(
    ("error", "said", "remedy"),
    [
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), "temporary", "TMPDIR"),
        (OSError(28, "No space left on device", "/tmp/x"), "No space left", "disk space"),
        (MemoryError(), "memory is exhausted", "free memory"),
    ],
)
def test_faults_of_the_machine_are_not_blamed_on_the_config(
    victim: Make, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, said: str, remedy: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    v = victim(0, "llama")
    monkeypatch.setattr(place, refuse)
    done = v.refused(said, code=5, remedy=remedy)
    assert "config.json" not in done.stderr


def test_finished_steps_are_kept_if_a_library_fails_later(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(0, "llama")
    assert v.compress(out=v.folder / "whole").code == 0

    def refuse(*arguments: object, **options: object) -> None:
        with config_faults(v.model / "config.json"):
            raise RuntimeError("unknown failure")

    with monkeypatch.context() as patch:
        patch.setattr("ciuic_cli.compression.run.KLMeter", refuse)
        done = v.compress()
    assert done.code == 3, done.stderr
    done.says("unknown failure", "finished steps are kept")
    done = v.compress()
    assert done.code == 0 and "forward" not in done.stderr, done.stderr
    done.says("continuing the unfinished run")
    assert weights(v.out) == weights(v.folder / "whole")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")],
)
def test_fault_38_memory_is_exhausted(
    victim: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("ciuic_cli.compression.run.collect_statistics", exhausted)
    v = victim(0, "llama")
    done = v.compress()
    assert done.code == 5 and "memory is exhausted" in done.stderr and not v.out.exists()
    harmless(done)


# --- interruptions


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_signal_that_python_loses_ends_the_run(
    victim: Make, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def losing(*arguments: Any, **more: Any) -> Any:
        lose(signal.SIGTERM)
        return collect_statistics(*arguments, **more)

    monkeypatch.setattr("ciuic_cli.compression.run.collect_statistics", losing)
    v = victim(0, "llama")
    temporary = temporary_folders()
    done = v.compress(*options)
    assert done.code == 130 and "interrupted" in done.stderr, done.stderr
    assert "encode" not in done.stderr and not v.out.exists() and temporary_folders() == temporary


# --- Python's own switches


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which programs share what Python compiles."""
    return {
        **os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("compiled")),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["inspect", pytest.param("compress", marks=pytest.mark.campaign)])
def test_fault_38_python_without_docstrings_is_named(
    victim: Make, compiled_once: dict[str, str], name: str
) -> None:
    """transformers reads its own docstrings; config.json is not at fault."""
    v = victim(0, "llama")
    arguments = v.arguments() if name == "compress" else ["inspect", v.model]
    done = spawn(*arguments, env={**compiled_once, "PYTHONOPTIMIZE": "2"})
    assert done.code == 5 and "without docstrings" in done.stderr and "-OO" in done.field("try"), done.stderr
    harmless(done)
    if name == "compress":  # Python compiles all libraries again for this level
        assert spawn(*arguments, env={**compiled_once, "PYTHONOPTIMIZE": "1"}).code == 0
