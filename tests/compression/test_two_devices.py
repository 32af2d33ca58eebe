"""A run that was interrupted continues on another device: the report says which coded what, and the artifact loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_runs import compress_tiny

import ciuic_cli
from ciuic_cli import kernels
from ciuic_cli.allocation.machine import Machine, machine_for, processor
from ciuic_cli.compression import run as module
from ciuic_cli.kernels import fronts
from ciuic_cli.report.schema import MemoryReport

prepared: set[tuple[float, int]] = set()
searched: set[tuple[float, int]] = set()


def search(targets: torch.Tensor, bits: float, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    searched.add((bits, L))
    return fronts.native_search(targets, bits, L)


GPU = Machine(
    "a stand-in GPU",
    torch.device("cpu"),
    partial(fronts.round_matrix, search=search),
    lambda matrix: 3,
    prepare=prepared.update,
)


def test_a_run_continues_on_the_other_device(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny_checkpoint("llama"), tmp_path / "out"
    original, coded = module.encode_matrix, []

    def interrupted(*args: object, **options: object) -> object:
        if len(coded) == 5:
            raise KeyboardInterrupt
        coded.append(None)
        return original(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "encode_matrix", interrupted)
    monkeypatch.setattr(module, "machine_for", lambda device, hint: GPU)
    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, device="auto", rank=16)
    assert searched and searched <= prepared, "a kernel would have been compiled late"
    monkeypatch.setattr(module, "encode_matrix", original)
    monkeypatch.setattr(module, "machine_for", machine_for)
    hints: list[str] = []
    report = compress_tiny(source, out, text, device="cpu", rank=16, hint=hints.append)
    assert any("continuing" in hint for hint in hints)
    assert report.coded_on is not None and set(report.coded_on) == {"cpu", "a stand-in GPU"}
    assert 1 <= report.coded_on["a stand-in GPU"] <= 5
    stored = json.loads((out / "memory_report.json").read_text())
    assert MemoryReport.from_dict(stored).coded_on == stored["coded_on"] == report.coded_on
    assert report.measured_kl is not None and report.measured_kl < 1.5 * report.predicted_kl + 0.05
    logits = ciuic_cli.load(out, device="cpu")(input_ids=torch.arange(9)[None]).logits
    assert bool(torch.isfinite(logits).all())


def test_without_working_kernels_the_processor_codes_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hints: list[str] = []
    with pytest.warns(RuntimeWarning):
        machine = machine_for(torch.device("cuda", 7), hints.append)
    assert machine.name == "cpu" and machine.device.type == "cpu"
    assert len(hints) == 1 and "coding runs on the CPU" in hints[0]
    assert processor().rounder is machine.rounder


def test_a_user_who_waits_for_kernels_is_told_so_before_matrices_are_timed(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints: list[str] = []

    def available(device: torch.device, hint: Callable[[str], None]) -> tuple[bool, str]:
        hint("compiling")
        return False, ""

    monkeypatch.setattr(kernels, "available", available)
    compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text, dry_run=True, hint=hints.append)
    assert hints[0] == "compiling" and "a whole run is expected" in hints[1]
