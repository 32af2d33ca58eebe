"""CudaLauncher with the real cuda-bindings and a stub driver that runs the emulated kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "emulator"


def test_a_product_through_the_driver(libraries: dict[int, ctypes.CDLL], tmp_path: Path) -> None:
    compiler = shutil.which("g++") or "c++"
    stub = tmp_path / "libcuda.so.1"
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(HERE / "stub_driver.cpp"), "-o", str(stub), "-ldl"], check=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": f"{HERE}:{HERE.parents[2]}",
        "CIUIC_TEST_EMULATED": libraries[16]._name,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "stub_script.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all as expected"
