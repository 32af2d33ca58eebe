"""Fuzz targets: functions of bytes that may only return or refuse. Used by run.py (atheris) and test_corpus.py.

The first byte of an input chooses the reader, so that one corpus covers raw files and well-framed ones.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.artifact.reader import open_artifact, read_blobs
from ciuic_cli.checkpoint.architecture import build_config
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.checkpoint.shards import INDEX_NAME
from ciuic_cli.codecs import native
from ciuic_cli.codecs.bits import BITS, stored_bits, tile_nbytes
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.sizes import packed_nbytes
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.transform import log2_block, padded
from ciuic_cli.codecs.trellis import decode, decode_dense
from ciuic_cli.errors import InputError

CONFIG = json.dumps({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2})
ARTIFACT_CONFIG = json.dumps({"quantization_config": {"quant_method": "ciuic", "format_version": 1}})
MOST_WEIGHTS = 1 << 15
"""Weights of the largest matrix that is decoded (chosen): an input of a few bytes can announce many weights."""
WIDTHS = stored_bits(BITS).tolist()


def framed(header: bytes, data: bytes) -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


def small_shard(name: str) -> bytes:
    header = {name: {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    return framed(json.dumps(header).encode(), bytes(8))


class Folder:
    """A temporary folder, in memory if possible, whose files are replaced for every input."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self.path = Path(tempfile.mkdtemp(prefix="fuzz-", dir=shared if shared.is_dir() else None))

    def fill(self, **files: bytes) -> Path:
        for old in self.path.iterdir():
            old.unlink()
        for name, content in files.items():
            (self.path / name).write_bytes(content)
        return self.path

    def remove(self) -> None:
        shutil.rmtree(self.path)


def checkpoint(data: bytes, folder: Folder) -> None:
    """The checkpoint reader. First byte: 0 raw shard, 1 framed shard, 2 index, else config."""
    way, rest = data[:1], data[1:]
    files = {"config.json": CONFIG.encode(), "model.safetensors": small_shard("w")}
    if way == b"\0":
        files["model.safetensors"] = rest
    elif way == b"\1":
        files["model.safetensors"] = framed(rest[2:], bytes(int.from_bytes(rest[:2], "little")))
    elif way == b"\2":
        files |= {INDEX_NAME: rest, "a.safetensors": small_shard("u"), "b.safetensors": small_shard("v")}
    else:
        files["config.json"] = rest
    place = folder.fill(**files)
    try:
        found = open_checkpoint(place)
        for name in itertools.islice(found.tensors, 8):
            found.read_decoded(name)
        build_config(found.config, place / "config.json")
    except InputError as error:
        assert error.remedy, error


def artifact(data: bytes, folder: Folder) -> None:
    """The artifact reader. First byte: 0 raw matrix, 1 stack, 2 file, 3 config, else a matrix of the right length."""
    way, rest = data[:1], data[1:]
    try:
        if way == b"\0":
            _decode(PackedMatrix.from_buffer(rest, where="w"))
        elif way == b"\1":
            for expert in ExpertStack.from_buffer(rest, where="w").experts[:4]:
                _decode(expert)
        elif way == b"\2":
            read_blobs([folder.fill(**{"model.safetensors": rest}) / "model.safetensors"])
        elif way == b"\3":
            open_artifact(folder.fill(**{"config.json": rest, "model.safetensors": small_shard("w")}))
        else:
            _decode(PackedMatrix.from_buffer(_of_right_length(rest), where="w"))
    except InputError as error:
        assert error.remedy, error


def _decode(matrix: PackedMatrix) -> None:
    if matrix.header.rows_padded * matrix.header.cols_padded > MOST_WEIGHTS:
        return
    decoded = decode(matrix)
    assert decoded.shape == (matrix.rows, matrix.header.cols_padded), decoded.shape
    assert decode_dense(matrix).shape == (matrix.rows, matrix.cols)
    for part in matrix.lowrank or ():
        _decode(part)


def _of_right_length(data: bytes) -> bytes:
    """A matrix blob with the input's header fields, but small sizes, and exactly the bytes that these need."""
    head = bytearray(data[:32].ljust(32, b"\0"))
    rows, cols = 1 + head[8] % 80, 1 + head[12] % 80
    head[:4], head[5] = b"CIU1", head[5] & 4
    head[6] = log2_block(padded(cols))
    head[8:12], head[12:16], head[24:32] = rows.to_bytes(4, "little"), cols.to_bytes(4, "little"), bytes(8)
    bits = bytes(
        (*WIDTHS, value)[value % (len(WIDTHS) + 1)] for value in _repeated(data[32:], padded(rows) // 16)
    )
    scales = _repeated(data[40:], rows + (cols if head[5] else 0))
    blob = bytes(head) + bits + scales
    blob += bytes(-len(blob) % 16)
    size = packed_nbytes(rows, cols, np.frombuffer(bits, np.uint8), has_input_scale=bool(head[5]))
    return blob + _repeated(data, size - len(blob))


def _repeated(data: bytes, length: int) -> bytes:
    """`length` bytes: `data` repeated, zeros if it is empty."""
    return (data * (1 + length // max(1, len(data))) if data else bytes(length))[:length]


def native_functions(data: bytes, folder: Folder) -> None:
    """The native functions, with arrays of exactly the documented sizes and other arguments of any value."""
    take = iter(data)

    def byte() -> int:
        return next(take, 0)

    which, groups, tiles, L = byte() % 5, 1 + byte() % 4, 1 + byte() % 9, 10 + byte() % 9
    valid = byte() % 4 != 0
    widths = [WIDTHS[byte() % len(WIDTHS)] if valid else byte() for _ in range(groups)]
    rows, cols = 16 * groups, 16 * tiles
    body = bytes(take)
    bits = np.array(widths, dtype=np.uint8)
    sizes = (tile_nbytes(bits) * tiles).tolist()
    codes = np.array(np.frombuffer(_repeated(body, sum(sizes)), np.uint8))
    offsets = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
    scale = np.array(np.frombuffer(_repeated(body[3:], 4 * rows), np.float32))
    signed = [int.from_bytes(_repeated(body[at:], 1), "little", signed=True) for at in range(6)]
    library = native.interface()
    pointers = [array.ctypes.data for array in (codes, offsets, bits, scale)]
    if which == 0:
        begin, end = signed[0] % (rows + 3) - 1, signed[1] % (rows + 3) - 1
        half = signed[2] & 1
        out = np.empty((max(0, end - begin), cols), np.uint16 if half else np.float32)
        library.ciuic_decode(*pointers, rows, cols, L, begin, end, out.ctypes.data, half, 1 + (signed[3] & 1))
    elif which == 1:
        index = np.array([number % (rows + 4) - 2 for number in signed], np.int64)
        out = np.empty((len(index), cols), np.float32)
        library.ciuic_decode_rows(
            *pointers, rows, cols, L, index.ctypes.data, len(index), out.ctypes.data, 1 + (signed[0] & 1)
        )
    elif which == 2:
        batch, given, wanted = signed[0] % 10, cols - signed[1] % 17, rows - signed[2] % 17
        x_half, y_half = signed[4] & 1, signed[4] >> 1 & 1
        x = np.array(np.frombuffer(_repeated(body, (2 if x_half else 4) * batch * max(0, given)), np.uint8))
        y = np.empty((batch, max(0, wanted)), np.uint16 if y_half else np.float32)
        order = np.arange(max(1, wanted), dtype=np.int32)
        order = order[::-1].copy() if signed[5] & 8 else order + np.int32(signed[1] >> 6)
        block = signed[3] % 12 if signed[3] & 1 else log2_block(cols)
        matrix = native.CiuicMatrix(
            *pointers, order.ctypes.data if signed[5] & 4 else None, None, None, rows, cols, wanted, given,
            L, block, signed[4] & 0xFFFF,
        )  # fmt: skip
        library.ciuic_matmul(
            ctypes.addressof(matrix), x.ctypes.data, x_half, batch, y.ctypes.data, y_half,
            signed[5] & 1, 1 + (signed[5] >> 1 & 1),
        )  # fmt: skip
    elif which == 3:
        x = np.array(np.frombuffer(_repeated(body, 4 * rows * cols), np.float32))
        block = signed[0] % 40 - 2
        library.ciuic_hadamard(
            x.ctypes.data, signed[1] & 2, rows, cols, block, 7, signed[1] & 1, 1 + (signed[2] & 1)
        )
    else:
        weight = np.array(np.frombuffer(_repeated(body, 4 * rows * cols), np.float32)).reshape(rows, cols)
        decoded = np.empty_like(weight)
        library.ciuic_round(
            weight.ctypes.data, rows, cols, None, None, None, None, scale.ctypes.data, bits.ctypes.data,
            min(L, 12), 1, codes.ctypes.data, offsets.ctypes.data, decoded.ctypes.data, None,
        )  # fmt: skip


TARGETS: dict[str, Callable[[bytes, Folder], None]] = {
    "checkpoint": checkpoint,
    "artifact": artifact,
    "native": native_functions,
}
torch.set_num_threads(1)
