"""Runs a script with the kernels of one instruction set, to compare what the instruction sets compute."""

from __future__ import annotations

import os
import subprocess
import sys

from ciuic_cli.codecs import native

NAMES = ("portable", "avx2", "avx512vnni", "amx")


def digests(script: str) -> dict[str, str]:
    """What a script printed last, by the kernels that it used: all that this machine has.

    The script prints `native.cpu_kernels()` and a digest. A machine that lacks an instruction set uses another.
    """
    found = {}
    for name in NAMES:
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"CIUIC_CPU_KERNELS": name},
            capture_output=True,
            text=True,
            check=True,
        )
        used, digest = result.stdout.split()
        assert used in (name, native.cpu_kernels()), f"{used} instead of {name}"
        found[used] = digest
    assert "portable" in found
    return found
