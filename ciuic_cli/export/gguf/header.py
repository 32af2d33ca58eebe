"""Where the tensors of a GGUF file lie. Releases of the package gguf refuse files that have types newer than they."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value in the metadata, by its type (GGUF's specification, gguf_metadata_value_type)."""
_DEFAULT_ALIGNMENT = 32


def tensor_places(path: Path) -> dict[str, int]:
    """Byte at which the data of every tensor of a GGUF file begin, by name; for files that llama.cpp has written.

    Raises ValueError for a file of another format.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError(f"{path} is no GGUF file")
        _, tensors, entries = _numbers(file, "<IQQ")
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(entries):
            key, (kind,) = _string(file), _numbers(file, "<I")
            if key == "general.alignment":
                (alignment,) = _numbers(file, "<I")
            else:
                _skip(file, kind)
        offsets = {}
        for _ in range(tensors):
            name, (dimensions,) = _string(file), _numbers(file, "<I")
            *_, offsets[name] = _numbers(file, f"<{dimensions}QIQ")
        begin = -(-file.tell() // alignment) * alignment
    return {name: begin + offset for name, offset in offsets.items()}


def _skip(file: BinaryIO, kind: int) -> None:
    """Skip a value of the metadata."""
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY:
        inner, count = _numbers(file, "<IQ")
        if inner in _SIZES:
            file.seek(count * _SIZES[inner], 1)
        else:
            for _ in range(count):
                _skip(file, inner)
    else:
        file.seek(_SIZES[kind], 1)


def _string(file: BinaryIO) -> str:
    (length,) = _numbers(file, "<Q")
    return file.read(length).decode("utf-8", "replace")


def _numbers(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))
