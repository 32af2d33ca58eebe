"""All checks and measurements that need a GPU, in one command of at most eight minutes: `make gpu`.

    python benchmarks/gpu.py [--out build/gpu.json]           build, check, and time kernels and models
    python benchmarks/gpu.py --checks-only [--small]          only the checks of every kernel

Exits with 1 if a check fails, with 5 if there is no GPU on which the kernels run. Steps that would exceed the time
limit are skipped and listed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_models
import gpu_timing
import torch

from ciuic_cli import kernels
from ciuic_cli.kernels import compiler, sources
from ciuic_cli.kernels.launcher import CudaLauncher, launcher_for

LIMIT_SECONDS = 460
"""Time limit of the whole run: eight minutes with a margin."""
_SANITIZER_SECONDS = 90


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, default=Path("build/gpu.json"))
    options.add_argument("--checks-only", action="store_true")
    options.add_argument("--small", action="store_true")
    chosen = options.parse_args()
    works, reason = kernels.available("cuda")
    if not works:
        print(f"no GPU on which the kernels run: {reason}", file=sys.stderr)
        return 5
    device = torch.device("cuda", torch.cuda.current_device())
    if chosen.checks_only:
        return report_checks(gpu_checks.run(device, small=chosen.small))

    begin = time.monotonic()
    result: dict[str, Any] = {"environment": environment(device), "left_out": []}

    def step(name: str, work: Callable[[], Any], needs: float) -> Any:
        """Run one step if `needs` seconds are left, and write the results so far. A failure of the step is recorded,
        not raised. Returns the step's result or None."""
        if time.monotonic() - begin + needs > LIMIT_SECONDS:
            result["left_out"].append(f"{name}: no time left")
            return None
        started = time.monotonic()
        try:
            result[name] = work()
        except Exception as error:  # any failure: the other steps still run
            result["left_out"].append(f"{name}: {error}")
            print(f"{name} failed: {error}", file=sys.stderr)
            with suppress(Exception):  # fails if the device is in an error state
                torch.cuda.empty_cache()
        result.setdefault("step_seconds", {})[name] = time.monotonic() - started
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(result, indent=1))
        return result.get(name)

    step("build_seconds", lambda: build(device), 30)
    failed = 0

    def checks() -> list[dict[str, Any]]:
        nonlocal failed
        done = gpu_checks.run(device)
        failed = report_checks(done)
        return [{"name": check.name, "error": check.error, "bound": check.bound} for check in done]

    step("checks", checks, 60)
    step("sanitizer", sanitizer, _SANITIZER_SECONDS)
    bandwidth = step("copy_bandwidth", gpu_timing.copy_bandwidth, 5)
    if bandwidth:
        for shape in gpu_timing.SHAPES:
            name = f"linear {shape[0]}x{shape[1]}"
            step(name, lambda shape=shape: gpu_timing.products(shape, (4,), bandwidth), 25)
        step("linear mixed bits", lambda: gpu_timing.products((4096, 4096), (2, 3, 4, 5, 6), bandwidth), 25)
        step("experts", lambda: gpu_timing.routed(bandwidth), 40)
        step("encoder", gpu_timing.encoder, 15)
        step("pieces", lambda: gpu_timing.pieces(bandwidth), 15)
    for family in gpu_models.CONFIGS:
        step(f"model {family}", lambda family=family: gpu_models.run(family), 60)
    result["seconds"] = time.monotonic() - begin
    chosen.out.write_text(json.dumps(result, indent=1))
    summary(result)
    return failed


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
    }


def build(device: torch.device) -> dict[str, float]:
    """Seconds to compile each unit for this GPU without the cache. Also loads all kernels."""
    launcher = launcher_for(device)
    assert isinstance(launcher, CudaLauncher)
    seconds = {}
    for unit, names in sources.UNITS.items():
        started = time.monotonic()
        compiler.compile_unit(unit, launcher.architecture)
        seconds[unit] = time.monotonic() - started
        for L in (16, 13):
            for name in names:
                launcher.load(name, L)
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


def summary(result: dict[str, Any]) -> None:
    """Print a short table. It comes last, so that the end of a log shows it."""
    print(f"{result['environment']['gpu']}: copy {result.get('copy_bandwidth', 0) / 1e12:.2f} TB/s")
    print(f"{'kernel':44}{'us':>9}{'of copy':>9}{'x bf16':>8}{'x NF4':>8}{'G w/s':>9}")
    for value in result.values():
        for line in value if isinstance(value, list) else []:
            if "seconds" not in line:
                continue
            name = line["kernel"]
            if "shape" in line:
                name = f"{name} {line['shape']} {line['bits']} x{line['batch']}"
            cells = [
                f"{line['seconds'] * 1e6:9.1f}",
                f"{line['of_bandwidth']:9.2f}" if "of_bandwidth" in line else " " * 9,
                f"{line['times_bf16']:8.2f}" if "times_bf16" in line else " " * 8,
                f"{line['times_nf4']:8.2f}" if "times_nf4" in line else " " * 8,
                f"{line['weights_per_second'] / 1e9:9.2f}" if "weights_per_second" in line else "",
            ]
            print(f"{name:44}" + "".join(cells))
    for name, value in result.items():
        if name.startswith("model "):
            print(f"{name}: {json.dumps(value)}")
    for line in result["left_out"]:
        print(f"left out: {line}")
    print(f"{result['seconds']:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
