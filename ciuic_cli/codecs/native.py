"""Loads the native library (libciuic_native) and declares its functions.

The library is a plain C interface reached through ctypes; `ciuic_cli/native/ciuic_native.h` documents it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

import ciuic_cli
from ciuic_cli.errors import EnvironmentFault, UsageError

ABI_VERSION = 20
"""Version of the C interface that this package calls; the library reports its own."""

_LIBRARY_NAME = "libciuic_native.dylib" if sys.platform == "darwin" else "libciuic_native.so"
_STATUS = {
    -1: "an argument is out of range (null, negative, or a shape that is no multiple of 16)",
    -2: "bits per weight must be values that the format has, and the trellis state 12 to 16 bits long",
    -5: "the call was cancelled",
    -4: "the matrix, its scales or its error feedback contain NaN or infinite values",
}

_pointer = ctypes.c_void_p
_long = ctypes.c_long
_int = ctypes.c_int
_uint32 = ctypes.c_uint32
_MATRIX = (*[_pointer] * 4, _long, _long, _int)  # codes, group offsets, bits, scales, rows, columns, L


class CiuicMatrix(ctypes.Structure):
    """CiuicMatrix of `ciuic_native.h`: the addresses and numbers that describe a compressed matrix as a factor."""

    _fields_ = (
        *((name, _pointer) for name in ("codes", "group_offset", "row_bits", "scale")),
        *((name, _pointer) for name in ("order", "input_factors", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "rows_out", "cols_in")),
        ("L", ctypes.c_int32),
        ("log2_block", ctypes.c_int32),
        ("seed", _uint32),
        ("unused", _uint32),
    )


class CiuicStep(ctypes.Structure):
    """CiuicStep of `ciuic_native.h`: one step of a program."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "source", "second", "out")),
        *((name, ctypes.c_int32) for name in ("matrix", "argument", "activation", "heads")),
        ("size", ctypes.c_int64),
        ("number", ctypes.c_float),
        ("unused_too", ctypes.c_float),
        ("vector", _pointer),
    )


class CiuicCaches(ctypes.Structure):
    """CiuicCaches of `ciuic_native.h`: the keys and values that a program reads and writes."""

    _fields_ = (
        *((name, _pointer) for name in ("arrays", "bias")),
        *((name, ctypes.c_int64) for name in ("count", "context")),
        *((f"{of}_stride", ctypes.c_int64) for of in ("sequence", "head", "token")),
    )


class CiuicLatentAttention(ctypes.Structure):
    """CiuicLatentAttention of `ciuic_native.h`: one call of attention over cached latents."""

    _fields_ = (
        *((name, _pointer) for name in ("query", "rotary_query", "latents", "rotary_keys")),
        *((name, _pointer) for name in ("bias", "sinks")),
        *((f"{of}_{step}", ctypes.c_int64) for of in ("latent", "rotary") for step in ("sequence", "token")),
        *((name, ctypes.c_int64) for name in ("sequences", "rows", "context", "rank", "rope")),
        ("scaling", ctypes.c_float),
        ("unused", ctypes.c_float),
    )


class CiuicPromptAttention(ctypes.Structure):
    """CiuicPromptAttention of `ciuic_native.h`: one call of a prompt's attention."""

    _fields_ = (
        *((name, _pointer) for name in ("query", "keys", "values", "mask")),
        *(
            (f"{of}_{step}", ctypes.c_int64)
            for of in ("query", "key", "value")
            for step in ("sequence", "head", "token")
        ),
        *((name, ctypes.c_int64) for name in ("mask_sequence", "mask_query")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "queries", "context")),
        *((name, ctypes.c_int64) for name in ("size", "value_size")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("bf16", "causal", "unused")),
    )


class CiuicSequenceAttention(ctypes.Structure):
    """CiuicSequenceAttention of `ciuic_native.h`: one call of attention that is differentiated."""

    _fields_ = (
        *((name, _pointer) for name in ("query", "keys", "values", "mask", "out", "log_sums")),
        *((name, _pointer) for name in ("gradient", "query_gradient", "key_gradient", "value_gradient")),
        *CiuicPromptAttention._fields_[4:],
    )


class CiuicIndexScores(ctypes.Structure):
    """CiuicIndexScores of `ciuic_native.h`: one call of an indexer's scores."""

    _fields_ = (
        *((name, _pointer) for name in ("queries", "weights", "keys")),
        *((name, ctypes.c_int64) for name in ("key_sequence", "key_token", "sequences", "rows")),
        *((name, ctypes.c_int64) for name in ("heads", "columns", "tokens")),
    )


class CiuicPredictions(ctypes.Structure):
    """CiuicPredictions of `ciuic_native.h`: the predictions of a span of text."""

    _fields_ = (
        *((name, _pointer) for name in ("logits", "slopes", "draws", "squares")),
        *((name, ctypes.c_int64) for name in ("tokens", "vocabulary")),
        *((name, ctypes.c_int32) for name in ("bf16", "weights_bf16")),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ciuic_abi_version": (_int, ()),
    "ciuic_cpu_kernels": (ctypes.c_char_p, ()),
    "ciuic_round": (_int, (_pointer, _long, _long, *[_pointer] * 6, _int, _int, *[_pointer] * 4)),
    "ciuic_decode": (_int, (*_MATRIX, _long, _long, _pointer, _int, _int)),
    "ciuic_decode_rows": (_int, (*_MATRIX, _pointer, _long, _pointer, _int)),
    "ciuic_matmul": (_int, (_pointer, _pointer, _int, _long, _pointer, _int, _int, _int)),
    "ciuic_program_create": (_int, (_pointer, _int, _pointer, _int, _pointer, _int, _pointer)),
    "ciuic_program_free": (None, (_pointer,)),
    "ciuic_program_run": (_int, (_pointer, _pointer, _int, _pointer, _long, _int, _int, _int)),
    "ciuic_has_latent_attention": (_int, ()),
    "ciuic_latent_attention": (_int, (_pointer, _pointer, _int)),
    "ciuic_prompt_attention": (_int, (_pointer, _pointer, _int)),
    "ciuic_has_sequence_attention": (_int, (_int,)),
    "ciuic_sequence_attention": (_int, (_pointer, _int)),
    "ciuic_index_scores": (_int, (_pointer, _pointer, _int)),
    "ciuic_largest": (_int, (_pointer, _long, _long, _long, _pointer, _int)),
    "ciuic_has_symmetric_sums": (_int, (_int,)),
    "ciuic_symmetric_sums": (_int, (_pointer, _long, *[_pointer, _int] * 2, _long, _int, _int)),
    "ciuic_predictions": (_int, (*[_pointer] * 5, _int)),
    "ciuic_block_encode": (_int, (_pointer, _int, _long, *[_int] * 4, _uint32, _pointer, _pointer, _int)),
    "ciuic_block_decode": (_int, (_pointer, _pointer, _long, *[_int] * 3, _pointer, _int, _int)),
    "ciuic_hadamard": (_int, (_pointer, _int, _long, _long, _int, _uint32, _int, _int)),
}


def _candidates() -> list[Path]:
    """Paths to try. A wheel puts the library into the package; an editable install puts it into another folder of
    `ciuic_cli.__path__`."""
    override = os.environ.get("CIUIC_NATIVE_LIBRARY")
    if override:
        return [Path(override)]
    return [Path(folder) / _LIBRARY_NAME for folder in ciuic_cli.__path__]


@functools.lru_cache(maxsize=1)
def interface() -> ctypes.CDLL:
    """The loaded library with typed functions.

    The environment variable CIUIC_NATIVE_LIBRARY names another build of it, such as one with sanitizers.

    Raises:
        EnvironmentFault: the library is missing, does not load, or belongs to another version of this package.
    """
    path = next((candidate for candidate in _candidates() if candidate.is_file()), None)
    if path is None:
        raise EnvironmentFault(
            f"the native library {_LIBRARY_NAME} is not installed",
            remedy="Install the package with pip (it builds the library; a C++17 compiler is needed).",
        )
    try:
        loaded = ctypes.CDLL(os.fspath(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise EnvironmentFault(
            f"the native library does not load: {error}", file=path, remedy="Reinstall the package."
        ) from error
    version = loaded.ciuic_abi_version()
    if version != ABI_VERSION:
        raise EnvironmentFault(
            f"the native library has interface version {version}, this package needs {ABI_VERSION}",
            file=path,
            remedy="Reinstall the package.",
        )
    return loaded


def cpu_kernels() -> str:
    """Kernels in use: "amx", "avx512vnni", "avx2" or "portable". CIUIC_CPU_KERNELS in the environment forces one."""
    return interface().ciuic_cpu_kernels().decode()


def check(status: int, action: str) -> None:
    """Raises the error that a status code of the library stands for; its message begins with `action`.

    Raises:
        EnvironmentFault: memory ran out.
        UsageError: an argument was refused.
    """
    if status == 0:
        return
    if status == -3:
        raise EnvironmentFault(f"{action}: not enough memory", remedy="Free memory or use fewer threads.")
    raise UsageError(f"{action}: {_STATUS.get(status, f'status {status}')}")
