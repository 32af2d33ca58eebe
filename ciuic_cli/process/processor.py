"""Facts about the processor. torch is imported late: one of them is asked for before torch may be loaded."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_LIMIT_NAMES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that name the newest instructions which oneDNN, torch's library of products, may use. oneDNN
reads the first one that is set."""
_NEWER_INSTRUCTIONS = {
    "SSE41": ("avx", "amx"),
    "AVX": ("avx2", "avx512", "amx"),
    "AVX2": ("avx512", "amx"),
    "AVX2_VNNI": ("avx512", "amx"),
    "AVX2_VNNI_2": ("avx512", "amx"),
    "AVX512_CORE": ("avx512_bf16", "amx"),
    "AVX512_CORE_VNNI": ("avx512_bf16", "amx"),
    "AVX512_CORE_BF16": ("amx",),
    "AVX512_CORE_FP16": ("amx",),
}
"""Which instructions each value of these variables excludes: beginnings of names in `torch.cpu.get_capabilities`. Only
instructions that this project asks for are listed. A value that is not listed excludes none of them."""


def is_intel() -> bool:
    """Whether Linux names Intel as the vendor; False where that is unknown."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are faster than float32 ones.

    They are twice as fast or more with a matrix unit (AMX), on AMD's processors with AVX512_BF16, and on ARM's. Intel's
    vector units multiply bfloat16 at half of float32's rate, which counts where a virtual machine hides AMX (measured:
    docs/experiments/statistics/faster-moments.md).
    """
    names = ("amx_bf16", "bf16") if is_intel() else ("amx_bf16", "bf16", "avx512_bf16")
    return any(has_instructions(name) for name in names)


@functools.cache
def has_instructions(name: str) -> bool:
    """True if the processor has these instructions and the environment allows oneDNN to use them.

    name: a key of `torch.cpu.get_capabilities`.
    """
    import torch

    limit = next((os.environ[each] for each in _LIMIT_NAMES if each in os.environ), "").upper()
    is_excluded = name.startswith(_NEWER_INSTRUCTIONS.get(limit, ()))
    return bool(torch.cpu.get_capabilities().get(name)) and not is_excluded
