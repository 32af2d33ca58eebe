"""All checks and measurements that need a GPU, in steps of at most eight minutes: `make gpu`.

    python benchmarks/gpu.py [STEP ...] [--out build/gpu]     all steps, or check, kernels, compress, generate, train
    python benchmarks/gpu.py --checks-only [--small]          only the checks of every kernel

Every figure is written at once to OUT/STEP.json. A step that is run again skips what that file has, so that an
interrupted hour on a GPU loses nothing. In each step the pieces that teach most per minute come first. Exits with 1 if
a check fails, with 5 if there is no GPU on which the kernels run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_models
import gpu_runs
import gpu_timing
import gpu_training
import torch
from gpu_steps import Record

from ciuic_cli import kernels
from ciuic_cli.kernels import compiler, sources
from ciuic_cli.kernels.launcher import CudaLauncher, launcher_for

_SANITIZER_SECONDS = 90


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("steps", nargs="*", metavar="STEP")
    options.add_argument("--out", type=Path, default=Path("build/gpu"))
    options.add_argument("--checks-only", action="store_true")
    options.add_argument("--small", action="store_true")
    chosen = options.parse_args()
    if unknown := set(chosen.steps) - set(STEPS):
        options.error(f"{', '.join(sorted(unknown))}: the steps are {', '.join(STEPS)}")
    works, reason = kernels.available("cuda")
    if not works:
        print(f"no GPU on which the kernels run: {reason}", file=sys.stderr)
        return 5
    device = torch.device("cuda", torch.cuda.current_device())
    if chosen.checks_only:
        return report_checks(gpu_checks.run(device, small=chosen.small))
    code = 0
    for name in chosen.steps or STEPS:
        record = Record(chosen.out / f"{name}.json", environment(device))
        STEPS[name](record, device, chosen.out)
        summary(name, record.result)
        failed = [check for check in record.result["pieces"].get("checks", []) if not check["passed"]]
        code = 1 if failed else code
    return code


def check(record: Record, device: torch.device, out: Path) -> None:
    """True if every kernel agrees with float64."""
    record.piece("build_seconds", lambda: build(device), 30)

    def checks() -> list[dict[str, Any]]:
        done = gpu_checks.run(device)
        report_checks(done)
        return [
            {"name": one.name, "error": one.error, "bound": one.bound, "passed": one.passed} for one in done
        ]

    record.piece("checks", checks, 60)
    record.piece("sanitizer", sanitizer, _SANITIZER_SECONDS)


def time_kernels(record: Record, device: torch.device, out: Path) -> None:
    """The rates of the kernels, and of rounding whole matrices."""
    bandwidth = record.piece("copy_bandwidth", gpu_timing.copy_bandwidth, 5)
    if not bandwidth:
        return
    first, *others = gpu_timing.SHAPES
    record.piece(_linear(first), lambda: gpu_timing.products(first, (4,), bandwidth), 25)
    record.piece("encoder", gpu_timing.encoder, 15)
    record.piece("rounding", lambda: gpu_timing.rounding(device), 40)
    record.piece("experts", lambda: gpu_timing.routed(bandwidth), 40)
    for shape in others:
        record.piece(_linear(shape), lambda shape=shape: gpu_timing.products(shape, (4,), bandwidth), 25)
    mixed = (2, 3, 4, 5, 6)
    record.piece("linear mixed bits", lambda: gpu_timing.products((4096, 4096), mixed, bandwidth), 25)
    for shape in (first, *others):
        record.piece(f"choices {shape}", lambda shape=shape: gpu_timing.choices(shape, bandwidth), 10)
    record.piece("pieces", lambda: gpu_timing.pieces(bandwidth), 15)


def _linear(shape: tuple[int, int]) -> str:
    return f"linear {shape[0]}x{shape[1]}"


def compress(record: Record, device: torch.device, out: Path) -> None:
    """The sample and SmolLM2 from end to end on the GPU, by phase; then the same on the CPU, for their KL."""
    models: dict[str, tuple[Path, dict[str, Any], float]] = {
        "sample": (gpu_runs.SAMPLE, {"calibration": [gpu_runs.SAMPLE_TEXT]}, 60),
        "smollm2": (gpu_runs.SMOLLM2, {}, 180),
    }
    for where in ("cuda", "cpu"):
        for name, (model, extra, seconds) in models.items():
            record.piece(
                f"{name} on {where}",
                lambda name=name, model=model, extra=extra, where=where: gpu_runs.compress(
                    model, out / f"{name}-{where}", where, "fast", **extra
                ),
                seconds,
            )
    for name in models:
        runs = [record.result["pieces"].get(f"{name} on {where}") for where in ("cuda", "cpu")]
        if all(runs):
            record.piece(f"{name}: KL", lambda runs=runs: gpu_runs.compare(*runs), 1)


def generate(record: Record, device: torch.device, out: Path) -> None:
    """Tokens of the compressed models on both devices, and seconds per token of large ones."""
    for name in ("sample", "smollm2"):
        folder = out / f"{name}-cuda"
        record.piece(f"tokens of {name}", lambda folder=folder: gpu_runs.tokens(folder, "cuda"), 30)
    for family in gpu_models.CONFIGS:
        record.piece(f"model {family}", lambda family=family: gpu_models.run(family), 60)


def train(record: Record, device: torch.device, out: Path) -> None:
    """Losses of short runs on both devices, and memory and time of a model of a billion weights."""
    compressed = out / "sample-cuda"
    for name, options in gpu_training.RUNS.items():
        model = gpu_runs.SAMPLE if name.startswith("full") else compressed
        record.piece(name, lambda model=model, options=options: gpu_training.on_both(model, options, out), 40)
    for name, options in gpu_training.LARGE.items():
        record.piece(f"large: {name}", lambda options=options: gpu_training.large(options, out), 60)


STEPS: dict[str, Callable[[Record, torch.device, Path], None]] = {
    "check": check,
    "kernels": time_kernels,
    "compress": compress,
    "generate": generate,
    "train": train,
}
"""The steps in the order in which `make gpu` runs them."""


def environment(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    launcher = launcher_for(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": launcher.limits.multiprocessors,
        "shared_bytes_per_block": launcher.limits.shared_bytes,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": ".".join(map(str, compiler.nvrtc_version())),
        "sources": {unit: sources.digest(unit)[:16] for unit in sources.UNITS},
    }


def build(device: torch.device) -> dict[str, float]:
    """Seconds to compile the kernels of each unit for this GPU without the cache, one after another; then those of all
    units in several threads. Also loads all kernels."""
    launcher = launcher_for(device)
    assert isinstance(launcher, CudaLauncher)

    def compile_all(kernels: Iterable[str], threads: int) -> float:
        started = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(partial(compiler.compile_kernel, architecture=launcher.architecture), kernels))
        return time.monotonic() - started

    seconds = {unit: compile_all(kernels, 1) for unit, kernels in sources.UNITS.items()}
    threads = len(os.sched_getaffinity(0))
    seconds[f"all, {threads} threads"] = compile_all(sources.UNIT_OF, threads)
    launcher.load_all((kernel, L) for L in (16, 13) for kernel in sources.UNIT_OF)
    return seconds


def sanitizer() -> dict[str, Any]:
    """The small checks under compute-sanitizer's memcheck, if it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"found": False}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--checks-only"]
    try:
        done = subprocess.run(
            [*command, "--small"], capture_output=True, text=True, timeout=_SANITIZER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"found": True, "finished": False}
    return {"found": True, "finished": True, "exit_code": done.returncode, "tail": done.stdout[-2000:]}


def report_checks(checks: list[gpu_checks.Check]) -> int:
    """Print the failed checks; 1 if there are any, else 0."""
    failures = [check for check in checks if not check.passed]
    for check in failures:
        print(f"FAILED {check.name}: error {check.error:.3g}, bound {check.bound:.3g}", file=sys.stderr)
    print(f"{len(checks) - len(failures)} checks passed, {len(failures)} failed")
    return 1 if failures else 0


def summary(step: str, result: dict[str, Any]) -> None:
    """Print the figures of a step in short."""
    print(f"{step} on {result['environment']['gpu']}: {sum(result['seconds'].values()):.0f} s")
    for name, value in result["pieces"].items():
        lines = value if isinstance(value, list) else []
        timed = [line for line in lines if "seconds" in line]
        if timed:
            print(f"{'kernel':44}{'us':>9}{'of copy':>9}{'x bf16':>8}{'x NF4':>8}{'G w/s':>9}")
        elif not lines:
            print(f"{name}: {json.dumps(value)}")
        for line in timed:
            kernel = line["kernel"]
            if "shape" in line:
                kernel = f"{kernel} {line['shape']} {line.get('bits', '')} x{line.get('batch', 1)}"
            cells = [
                f"{line['seconds'] * 1e6:9.1f}",
                f"{line['of_bandwidth']:9.2f}" if "of_bandwidth" in line else " " * 9,
                f"{line['times_bf16']:8.2f}" if "times_bf16" in line else " " * 8,
                f"{line['times_nf4']:8.2f}" if "times_nf4" in line else " " * 8,
                f"{line['weights_per_second'] / 1e9:9.2f}" if "weights_per_second" in line else "",
            ]
            print(f"{kernel:44}" + "".join(cells))
    for line in result["left_out"]:
        print(f"left out: {line}")


if __name__ == "__main__":
    sys.exit(main())
