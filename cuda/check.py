"""Assembles every CUDA kernel for every supported architecture, without a GPU; fails if a kernel spills registers.

    python cuda/check.py            NVRTC for all architectures; also nvcc for one, if it is on the PATH
    python cuda/check.py --full     also nvcc for all architectures, and L = 12 (trellis state bits)

NVRTC compiles every kernel alone, as for a user; nvcc compiles whole files. What passed is cached by the digest of its
sources in build/cuda-check, so that only changes are assembled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ciuic_cli.errors import CiuicError, EnvironmentFault  # noqa: E402
from ciuic_cli.kernels import compiler, sources  # noqa: E402

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
NVCC_ARCHITECTURE = 90

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Job:
    """One compilation for one architecture and L: of one kernel with NVRTC, of all kernels of a file with nvcc."""

    compiler: str
    kernels: tuple[str, ...]
    architecture: int
    L: int

    @property
    def unit(self) -> str:
        return sources.UNIT_OF[self.kernels[0]]


@dataclass(frozen=True)
class Kernel:
    """The resources of one kernel as ptxas reports them; registers per thread."""

    name: str
    architecture: int
    registers: int
    stack_bytes: int
    spill_bytes: int


def main() -> int:
    """Prints registers per kernel and architecture. Returns 1 if a kernel spills or a job lacks one, else 0."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--full", action="store_true", help="every architecture with nvcc too, and L = 12")
    options.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    chosen = options.parse_args()
    begin = time.monotonic()
    try:
        results = run(jobs_for(chosen.full), chosen.jobs)
    except CiuicError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    problems = [problem for job, kernels in results.items() for problem in problems_of(job, kernels)]
    print_table(results)
    for problem in problems:
        print(problem, file=sys.stderr)
    count = sum(len(kernels) for kernels in results.values())
    print(f"{count} kernels assembled in {time.monotonic() - begin:.0f} s, {len(problems)} with problems")
    return 1 if problems else 0


def jobs_for(full: bool) -> list[Job]:
    """The jobs, the longest first, so that the workers finish at about the same time."""
    jobs = []
    if shutil.which("nvcc") is not None:
        for_nvcc = ARCHITECTURES if full else (NVCC_ARCHITECTURE,)
        jobs += [Job("nvcc", kernels, arch, 16) for kernels in sources.UNITS.values() for arch in for_nvcc]
    for L in (16, 12) if full else (16,):
        jobs += [Job("nvrtc", (kernel,), arch, L) for kernel in sources.UNIT_OF for arch in ARCHITECTURES]
    return sorted(jobs, key=lambda job: -len(job.kernels))


def run(jobs: list[Job], workers: int) -> dict[Job, list[Kernel]]:
    """The kernels of every job, from the cache where nothing has changed."""
    results = {}
    missing = []
    for job in jobs:
        cached = read_cache(job)
        if cached is None:
            missing.append(job)
        else:
            results[job] = cached
    with ProcessPoolExecutor(workers) as pool:
        for job, log in zip(missing, pool.map(assemble, missing), strict=True):
            results[job] = parse(log)
            if not problems_of(job, results[job]):
                write_cache(job, results[job])
    return {job: results[job] for job in jobs}


def assemble(job: Job) -> str:
    """The report of `ptxas -v` on a job's kernels.

    Raises:
        EnvironmentFault: they do not compile, or the compiler is missing.
    """
    if job.compiler == "nvrtc":
        (kernel,) = job.kernels
        return compiler.resource_report(kernel, f"sm_{job.architecture}", job.L)
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-std=c++17", f"-arch=sm_{job.architecture}", "-cubin", "-Xptxas", "-v"]
        command += [f"-DCIUIC_L={job.L}", f"-I{sources.folder()}", f"-I{ROOT / 'ciuic_cli/native'}"]
        command += ["-o", f"{folder}/out.cubin", str(sources.folder() / f"{job.unit}.cu")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"nvcc refuses {job.unit}.cu for sm_{job.architecture}: {done.stderr}")
    return done.stderr


def parse(log: str) -> list[Kernel]:
    """The kernels in a report of `ptxas -v`."""
    kernels = []
    for part in re.split(r"(?=Compiling entry function)", log)[1:]:
        entry, spills, registers = _ENTRY.search(part), _SPILLS.search(part), _REGISTERS.search(part)
        if entry and spills and registers:
            stack, stores, loads = (int(number) for number in spills.groups())
            kernels.append(Kernel(entry[1], int(entry[2]), int(registers[1]), stack, stores + loads))
    return kernels


def problems_of(job: Job, kernels: Iterable[Kernel]) -> list[str]:
    """Messages for kernels that spill or use a stack, that the report lacks, and that it has beside the job's."""
    where = f"({job.compiler}, sm_{job.architecture}, L = {job.L})"
    by_name = {kernel.name: kernel for kernel in kernels}
    missing = [f"{name} is missing {where}" for name in job.kernels if name not in by_name]
    others = [f"{name} is compiled beside {job.kernels} {where}" for name in by_name.keys() - {*job.kernels}]
    return (
        missing
        + others
        + [
            f"{kernel.name} spills {kernel.spill_bytes} bytes, stack frame {kernel.stack_bytes} {where}"
            for kernel in by_name.values()
            if kernel.spill_bytes or kernel.stack_bytes
        ]
    )


def print_table(results: dict[Job, list[Kernel]]) -> None:
    """Registers per thread at L = 16: a line per kernel, a column per architecture."""
    table: dict[str, dict[int, int]] = {}
    for job, kernels in results.items():
        if job.compiler == "nvrtc" and job.L == 16:
            for kernel in kernels:
                table.setdefault(kernel.name, {})[kernel.architecture] = kernel.registers
    print(f"{'registers':24}" + "".join(f"{f'sm_{arch}':>8}" for arch in ARCHITECTURES))
    for name, by_arch in table.items():
        print(f"{name:24}" + "".join(f"{by_arch.get(arch, '-'):>8}" for arch in ARCHITECTURES))


def read_cache(job: Job) -> list[Kernel] | None:
    try:
        return [Kernel(**kernel) for kernel in json.loads(cache_file(job).read_text())]
    except (OSError, ValueError, TypeError):
        return None


def write_cache(job: Job, kernels: list[Kernel]) -> None:
    file = cache_file(job)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps([asdict(kernel) for kernel in kernels]))
    partial.replace(file)


def cache_file(job: Job) -> Path:
    tool: object = compiler.nvrtc_version()
    if job.compiler == "nvcc":
        tool = shutil.which("nvcc")
    inputs = (job, sources.digest(job.unit), compiler.OPTIONS, tool)
    key = hashlib.sha256(repr(inputs).encode()).hexdigest()
    return ROOT / "build" / "cuda-check" / f"{key[:32]}.json"


if __name__ == "__main__":
    sys.exit(main())
