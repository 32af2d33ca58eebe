"""Whole runs on a GPU and on the CPU: compression by phase with its KL, and generated tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import ciuic_cli
from ciuic_cli.report.schema import MemoryReport

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "samples" / "deepseek-v3-tiny"
SAMPLE_TEXT = ROOT / "samples" / "text" / "calibration.txt"
SMOLLM2 = ROOT / "build" / "smollm2"
"""Made by `benchmarks/packaged_model.py`."""


class PhaseClock:
    """A progress function that adds up the seconds between its calls by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def compress(model: Path, out: Path, device: str, effort: str, **options: Any) -> dict[str, Any]:
    """Compress a checkpoint; seconds by phase, KL, and which machine coded what."""
    clock = PhaseClock()
    report = ciuic_cli.compress(
        model, out, device=device, effort=effort, force=True, progress=clock, **options
    )
    return {"out": str(out), "phases": clock.seconds, **figures(report)}


def figures(report: MemoryReport) -> dict[str, Any]:
    return {
        "seconds": report.seconds,
        "measured_kl": report.measured_kl,
        "measured_kl_stderr": report.measured_kl_stderr,
        "predicted_kl": report.predicted_kl,
        "coded_on": report.coded_on,
    }


def compare(gpu: dict[str, Any], cpu: dict[str, Any]) -> dict[str, Any]:
    """The two runs' KL: whether they differ by less than two standard errors of the difference."""
    error = (gpu["measured_kl_stderr"] ** 2 + cpu["measured_kl_stderr"] ** 2) ** 0.5
    difference = gpu["measured_kl"] - cpu["measured_kl"]
    return {
        "difference": difference,
        "standard_error": error,
        "equal": abs(difference) <= 2 * error,
        "times_cpu": cpu["seconds"] / gpu["seconds"],
    }


@torch.inference_mode()
def tokens(artifact: Path, device: str, count: int = 32) -> dict[str, Any]:
    """Greedy tokens of an artifact on the CPU and on `device`, and the largest difference of the first logits."""
    found, logits = [], []
    prompt = torch.arange(5, 21)[None]
    for where in ("cpu", device):
        model = ciuic_cli.load(artifact, device=where)
        made = model.generate(prompt.to(where), max_new_tokens=count, do_sample=False)
        found.append(made[0, prompt.shape[1] :].cpu())
        logits.append(model(prompt.to(where)).logits[0, -1].float().cpu())
        del model
    length = min(len(tokens) for tokens in found)
    equal = (found[0][:length] == found[1][:length]).long().cumprod(0)
    return {
        "tokens": length,
        "equal_until": int(equal.sum()),
        "largest_logit_difference": float((logits[0] - logits[1]).abs().max()),
        "spread_of_logits": float(logits[0].std()),
    }
