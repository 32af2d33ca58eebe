"""The CUDA sources: their folder, their text, and which kernel is in which file."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from ciuic_cli.codecs.bits import BITS
from ciuic_cli.errors import EnvironmentFault

UNITS: dict[str, tuple[str, ...]] = {
    "linear": (
        "linear_bytes_n4",
        "linear_bytes_n8",
        "linear_half_n16",
        "linear_half_n32",
    ),
    "transform": ("transform",),
    "decode": ("decode_rows", "embedding_rows", "lowrank_columns"),
    "encode": tuple(f"encode_h{int(2 * bits)}" for bits in BITS[1:]),
}
"""Files (`<unit>.cu`) and the kernels in each."""

UNIT_OF = {kernel: unit for unit, kernels in UNITS.items() for kernel in kernels}
"""The file of each kernel."""

_PACKAGE = Path(__file__).resolve().parents[1]
_HEADERS = ("one_kernel.h", "device.h", "parameters.h", "decode_lane.h", "hadamard.h")
_DECODER = "trellis_decode.h"
"""The decoder's arithmetic; the file is the native library's, so that there is one definition."""


def folder() -> Path:
    """The folder of the `.cu` files: `ciuic_cli/cuda` in an installed package, `cuda` in a checkout.

    Raises:
        EnvironmentFault: neither exists.
    """
    for candidate in (_PACKAGE / "cuda", _PACKAGE.parent / "cuda"):
        if (candidate / "linear.cu").is_file():
            return candidate
    raise EnvironmentFault(
        "the CUDA sources are missing from this installation",
        remedy="Install ciuic-cli again from its wheel.",
    )


@lru_cache
def headers() -> dict[str, str]:
    """Text of every header, by the name in `#include`."""
    texts = {name: (folder() / name).read_text() for name in _HEADERS}
    texts[_DECODER] = (_PACKAGE / "native" / _DECODER).read_text()
    return texts


@lru_cache
def source(unit: str) -> str:
    """Text of `<unit>.cu`."""
    return (folder() / f"{unit}.cu").read_text()


def choice(kernel: str) -> tuple[str, ...]:
    """Compiler options with which a kernel's file defines this kernel only (`cuda/one_kernel.h`)."""
    return "-DCIUIC_ONE", f"-DCIUIC_ONE_{kernel}=,"


@lru_cache
def digest(unit: str) -> str:
    """SHA-256 over the sources of a unit, headers included."""
    state = hashlib.sha256(source(unit).encode())
    for name, text in sorted(headers().items()):
        state.update(f"\0{name}\0{text}".encode())
    return state.hexdigest()
