"""The header of one safetensors file: `read_header` takes a path and returns a `Header` with one entry per tensor.

The format (https://github.com/huggingface/safetensors): eight bytes with the little-endian length N of the header,
N bytes of JSON, then the data. Every JSON key except `__metadata__` names a tensor, with its `dtype`, its `shape` and
its `data_offsets` [begin, end) relative to the data. The tensors cover the data exactly, without overlaps or holes.

The file is not trusted: every size is checked against the file before memory is allocated. The parser is our own, not
the reference library's, so that every message can name file, tensor and remedy.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ciuic_cli.checkpoint.formats import DTYPE_BITS
from ciuic_cli.errors import InputError
from ciuic_cli.process.file_faults import reading

MAX_HEADER_BYTES = 100_000_000
"""Longest accepted header, in bytes. The reference implementation has the same limit."""

_LFS_PREFIX = b"version https://"
"""First bytes of a git-LFS pointer, in every version of its format."""
_MAX_SIZE = 2**63 - 1
"""Largest accepted size and offset: what a signed 64-bit integer holds."""
_DOWNLOAD_AGAIN = "download it again; the copy on disk is damaged or incomplete"


@dataclass(frozen=True)
class TensorEntry:
    """Place of one tensor in a file: `shape` numbers of `dtype` at bytes [begin, end) of `file` (absolute offsets)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
        tensors: by name.
        metadata: the content of `__metadata__`.
        file_bytes: size of the file.
        header_bytes: size of the header with the eight bytes of its length, and so the offset of the data.
    """

    file: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    file_bytes: int
    header_bytes: int


class _DuplicateKey(Exception):
    pass


def read_header(file: Path) -> Header:
    """Parse the header of one safetensors file. The data is not read.

    Raises InputError if the file cannot be opened, is empty, truncated, a git-LFS pointer or no regular file; if its
    header is too long, not JSON, or has duplicate keys; and if a tensor has an unknown dtype, or a byte range that
    disagrees with its shape, overlaps another, leaves a hole or does not fit the file. Raises EnvironmentFault if
    reading fails after the file was opened.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise InputError(
            f"cannot open the file: {error.strerror}", file=file, remedy="check the path and its permissions"
        ) from error
    try:
        with reading(file):
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InputError("not a regular file", file=file, remedy="give a folder of safetensors files")
            raw, length = _read_raw_header(descriptor, file, status.st_size)
    finally:
        os.close(descriptor)
    entries = _parse_json(raw, file)
    metadata = _metadata(entries.pop("__metadata__", {}), file)
    data_begin = 8 + length
    tensors = {name: _entry(name, value, file, data_begin) for name, value in entries.items()}
    _check_layout(list(tensors.values()), file, data_begin, status.st_size)
    return Header(file, tensors, metadata, status.st_size, data_begin)


def _read_raw_header(descriptor: int, file: Path, file_bytes: int) -> tuple[bytes, int]:
    if file_bytes == 0:
        raise InputError("the file is empty", file=file, remedy=_DOWNLOAD_AGAIN)
    start = os.pread(descriptor, 64, 0)
    if start.startswith(_LFS_PREFIX):
        raise InputError(
            "this is a git-LFS pointer, not the weights", file=file, remedy="run `git lfs pull` in the folder"
        )
    if file_bytes < 10:
        raise InputError(
            f"the file has {file_bytes} bytes, too few for a safetensors header",
            file=file,
            remedy=_DOWNLOAD_AGAIN,
        )
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are accepted",
            file=file,
            remedy="this is not a safetensors file, or it is damaged: " + _DOWNLOAD_AGAIN,
        )
    if 8 + length > file_bytes:
        raise InputError(
            f"the header is longer than the file: it claims {length} bytes, the file has {file_bytes - 8}",
            file=file,
            remedy=_DOWNLOAD_AGAIN,
        )
    raw = bytearray()
    while len(raw) < length:
        part = os.pread(descriptor, length - len(raw), 8 + len(raw))
        if not part:
            raise InputError("the file ends inside its header", file=file, remedy=_DOWNLOAD_AGAIN)
        raw += part
    return bytes(raw), length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return result


def _parse_json(raw: bytes, file: Path) -> dict[str, Any]:
    damaged = "the file is damaged or not safetensors: " + _DOWNLOAD_AGAIN
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the header is not UTF-8 (byte {error.start})", file=file, remedy=damaged
        ) from error
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise InputError(
            "the header names the same key twice", file=file, tensor=str(error), remedy=damaged
        ) from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"the header is not JSON: {reason}", file=file, remedy=damaged) from error
    if not isinstance(entries, dict):
        raise InputError("the header is JSON but not an object", file=file, remedy=damaged)
    for name in entries:
        if not _is_unicode(name):
            raise InputError(
                "the name of a tensor is not valid Unicode", file=file, tensor=name, remedy=damaged
            )
    return entries


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded. JSON can escape one half of a surrogate pair, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _metadata(value: object, file: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InputError(
            "`__metadata__` must map strings to strings",
            file=file,
            remedy="write the file again with the safetensors library",
        )
    return value


def _refuse(message: str, file: Path, tensor: str, remedy: str = _DOWNLOAD_AGAIN) -> NoReturn:
    raise InputError(message, file=file, tensor=tensor, remedy=remedy)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def _entry(name: str, value: object, file: Path, data_begin: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _refuse("the entry must have exactly dtype, shape and data_offsets", file, name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(
            f"unknown dtype {dtype!r:.60}; known dtypes are {', '.join(DTYPE_BITS)}",
            file,
            name,
            "convert the tensor to one of the known dtypes, or update ciuic",
        )
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        _refuse(f"the shape {shape!r:.60} is not a list of sizes", file, name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        _refuse(f"data_offsets {offsets!r:.60} is not [begin, end]", file, name)
    begin, end = offsets
    if end < begin:
        _refuse(f"data_offsets end ({end}) is before begin ({begin})", file, name)
    bits = DTYPE_BITS[dtype]
    for size in shape:
        # Checked at every step, so that a later zero hides no overflow and the product stays small.
        bits *= size
        if bits > 8 * _MAX_SIZE:
            _refuse(f"the product of the shape {shape!r:.60} overflows", file, name)
    if bits % 8 or bits // 8 != end - begin:
        _refuse(
            f"shape {shape!r:.60} of {dtype} needs {bits / 8:g} bytes, its span has {end - begin}", file, name
        )
    return TensorEntry(name, dtype, tuple(shape), file, data_begin + begin, data_begin + end)


def _check_layout(entries: list[TensorEntry], file: Path, data_begin: int, file_bytes: int) -> None:
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = data_begin
    for entry in entries:
        if entry.begin < position:
            _refuse(
                f"its bytes overlap those of the previous tensor by {position - entry.begin}",
                file,
                entry.name,
            )
        if entry.begin > position:
            _refuse(f"there is a hole of {entry.begin - position} bytes before the tensor", file, entry.name)
        position = entry.end
    if position > file_bytes:
        last = entries[-1].name
        _refuse(f"the file is truncated: it has {file_bytes} bytes, its tensors need {position}", file, last)
    if position < file_bytes:
        raise InputError(
            f"{file_bytes - position} bytes trail the last tensor", file=file, remedy=_DOWNLOAD_AGAIN
        )
