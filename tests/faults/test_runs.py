"""Faults 30 to 34 and 38: targets, texts, statistics, disks and devices."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import (
    QUICK,
    Victim,
    bystanders,
    harmless,
    invoke,
    old_artifact,
    seeded,
    snapshot,
    spawn,
    unfinished,
    weights,
)
from interrupting import lose

import ciuic_cli
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.checkpoint.architecture import config_faults
from ciuic_cli.statistics.collect import collect_statistics

Make = Callable[..., Victim]


# --- 30: targets


@seeded(2, campaign=6)
@pytest.mark.parametrize("bits", ["2,3,4,5,6,8", "4", "8,6"])
@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_fault_30_an_unreachable_ratio(victim: Make, seed: int, bits: str, options: list[str]) -> None:
    v = victim(seed)
    wanted = v.random.choice([40, 900, 12345.6])
    arguments = ["--prune", "off", "--bits", bits]
    done = v.refused(
        "cannot be reached", "the least is", code=4, remedy="--ratio",
        options=[*arguments, "--ratio", wanted, *options], commands=["compress", "replace"],
    )  # fmt: skip
    assert "forward" not in done.stderr, "work was done first"
    best = re.search(r"--ratio ([0-9.]+)", done.field("try"))
    assert best is not None
    reachable = v.compress(*arguments, "--ratio", best[1], "--dry-run", "--json")
    assert reachable.code == 0, reachable.stderr
    assert json.loads(reachable.stdout)["ratio"] >= float(best[1])
    beyond = v.compress(*arguments, "--ratio", float(best[1]) + 0.02, "--dry-run")
    assert beyond.code == 4


@pytest.mark.parametrize(
    "options",
    [
        *(["--target-size", size] for size in ("1", "3kB")),
        *(["--target-bpw", bits] for bits in ("0.01", "1e-5", "1e-320")),
        *(["--ratio", ratio] for ratio in ("1e9", "1e300")),
    ],
)
def test_fault_30_other_unreachable_targets(victim: Make, options: list[str]) -> None:
    v = victim(1, "llama")
    for more in ([], ["--dry-run"]):
        before = snapshot(v.folder)
        done = invoke("compress", v.model, v.out, "--calibration", v.text, *QUICK, *options, *more)
        assert done.code == 4 and "cannot be reached" in done.stderr and "--ratio" in done.field("try")
        assert snapshot(v.folder) == before


@pytest.mark.parametrize("size", ["0", "0MB", "0.0GiB"])
def test_fault_30_a_size_of_nothing_is_wrong_usage(victim: Make, size: str) -> None:
    v = victim(1, "llama")
    done = invoke("compress", v.model, v.out, "--target-size", size)
    assert done.code == 2 and "not a positive number of bytes" in done.stderr and done.field("try")


# --- 31: texts


@seeded(1, campaign=4)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n\t\r\n ", "empty"),
        (b"short text", "tokens"),
        (b"x" * 200, "tokens"),
        (b"\xff\xfe" + "text ".encode("utf-16-le") * 500, "UTF-8"),
        ("caf\u00e9 ".encode("latin-1") * 500, "UTF-8"),
        (b"fine " * 400 + b"\x80", "UTF-8"),
        ("text ".encode("utf-16-le") * 500, "UTF-8"),
    ],
)
def test_fault_31_calibration_text_that_cannot_be_used(
    victim: Make, seed: int, content: bytes, words: str
) -> None:
    v = victim(seed)
    v.text = v.folder / f"text-{seed}.txt"
    v.text.write_bytes(content)
    done = v.refused(words, file=v.text.name, commands=["compress", "replace"])
    assert "forward" not in done.stderr


def test_fault_31_absent_text_a_folder_and_one_bad_of_two(victim: Make, tmp_path: Path) -> None:
    v = victim(0)
    good, bad = v.text, tmp_path / "bad.txt"
    bad.write_bytes(b"\xff")
    v.text = tmp_path / "none.txt"
    v.refused("cannot be read", file="none.txt", commands=["compress"])
    v.text = v.model
    v.refused("cannot be read", file="model", commands=["compress"])
    for place in (tmp_path / "pipe", Path("/dev/zero")):  # the one never answers, the other never ends
        if not place.exists():
            os.mkfifo(place)
        v.text = place
        v.refused("not a regular file", file=place.name, commands=["compress"])
        done = invoke("eval", v.model, "--text", place)
        assert done.code == 3 and place.name in done.field("file"), done.stderr
    v.text = good
    v.refused("UTF-8", file="bad.txt", options=["--calibration", bad], commands=["compress"])


def test_fault_31_a_text_of_many_gigabytes(victim: Make, tmp_path: Path) -> None:
    v = victim(0)
    v.text = tmp_path / "large.txt"
    with v.text.open("wb") as file:
        file.truncate(1 << 36)
    v.refused("more than", file="large.txt", remedy="part", commands=["compress"])


@pytest.mark.parametrize("what", ["compress", "eval"])
def test_fault_31_a_text_that_may_not_be_read(
    victim: Make, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    v = victim(0, "llama")
    monkeypatch.setattr("os.access", lambda path, *rest, **named: Path(path) != v.text)
    opened = Path.open

    def refuse(path: Path, *rest: Any, **named: Any) -> Any:
        if path == v.text:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **named)

    monkeypatch.setattr(Path, "open", refuse)
    done = v.compress() if what == "compress" else invoke("eval", v.model, "--text", v.text)
    assert done.code == 3 and "Permission denied" in done.stderr and v.text.name in done.field("file")
    harmless(done)


# --- 32, 33: statistics


@seeded(1, campaign=4)
def test_fault_32_an_expert_without_a_token(victim: Make, seed: int) -> None:
    v = victim(seed, "deepseek_v3")
    dead = v.random.randrange(6)

    def starve(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.fill_(0.0)
                tensor[dead] = -1e4

    v.edit_tensors(starve)
    done, report = v.succeeds()
    experts = [e for row in report["components"] if "experts" in row for e in row["experts"]]
    silent = sum(expert["tokens"] == 0 for expert in experts)
    assert silent >= 4 and report["statistics"]["experts_without_tokens"] == silent
    done.says(f"{silent} expert matrices saw no calibration token")
    model = ciuic_cli.load(v.out)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 40)[None]).logits).all()


@seeded(1, campaign=4)
@pytest.mark.parametrize("way", ["few tokens", "dead inputs", "equal inputs"])
def test_fault_33_a_singular_hessian_is_damped_and_said(victim: Make, seed: int, way: str) -> None:
    v = victim(seed, "llama")

    def degenerate(tensors: dict[str, torch.Tensor]) -> None:
        if way == "dead inputs":
            for name, tensor in tensors.items():
                if name.endswith("layernorm.weight"):
                    tensor[v.random.randrange(len(tensor))] = 0
        elif way == "equal inputs":
            tensors["model.embed_tokens.weight"].copy_(
                tensors["model.embed_tokens.weight"][:, :1].expand(-1, 48)
            )

    v.edit_tensors(degenerate)
    done, report = v.succeeds(*(["--seqlen", 32, "--nsamples", 2] if way == "few tokens" else []))
    if way != "equal inputs":  # those are of less than full rank without any sign of it in the counts
        assert report["statistics"]["singular_hessians"] > 0
        done.says("singular Hessian")
    model = ciuic_cli.load(v.out)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 40)[None]).logits).all()


# --- 34: disks


@seeded(1, campaign=4)
def test_fault_34_no_file_may_grow(victim: Make, seed: int) -> None:
    v = victim(seed, "llama")
    old_artifact(v.out)
    limit = v.random.choice([0, 100, 5000, 20_000, v.random.randrange(40_000)])
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
    """`small_disk(kilobytes)`: a file system of that size; needs the right to mount one."""
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


# --- 38: devices


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
        "ciuic_cli.checkpoint.architecture.AutoModelForCausalLM.from_config",
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
def test_what_the_machine_refuses_is_no_fault_of_the_config(
    victim: Make, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, said: str, remedy: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    v = victim(0, "llama")
    monkeypatch.setattr(place, refuse)
    done = v.refused(said, code=5, remedy=remedy)
    assert "config.json" not in done.stderr


def test_steps_are_kept_where_a_library_refuses_what_had_run_before(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(0, "llama")
    assert v.compress(out=v.folder / "whole").code == 0

    def refuse(*arguments: object, **options: object) -> None:
        with config_faults(v.model / "config.json"):
            raise RuntimeError("words that nobody knows")

    with monkeypatch.context() as patch:
        patch.setattr("ciuic_cli.compression.run.KLMeter", refuse)
        done = v.compress()
    assert done.code == 3, done.stderr
    done.says("words that nobody knows", "finished steps are kept")
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
    temporary = bystanders()
    done = v.compress(*options)
    assert done.code == 130 and "interrupted" in done.stderr, done.stderr
    assert "encode" not in done.stderr and not v.out.exists() and bystanders() == temporary
