"""Opens an artifact and checks the headers of its files and blobs; no weights are loaded.

The files are mapped, and every field of a blob's header is checked (shapes, bits per weight, ranks, offsets, exact
lengths), so that no kernel gets a blob that would make it read out of bounds. Damage inside the codes decodes to other
weights; only `ciuic inspect --verify` finds it, by checksum.
"""

from __future__ import annotations

import math
import mmap
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.artifact.schema import FORMAT_VERSION, QUANT_METHOD
from ciuic_cli.checkpoint.expert_ids import require_expert_table
from ciuic_cli.checkpoint.folder import (
    check_files,
    checked_file,
    locate,
    read_config,
    require_unreplaced,
)
from ciuic_cli.checkpoint.formats import TORCH_DTYPES, can_hold
from ciuic_cli.checkpoint.header import TensorEntry, read_header
from ciuic_cli.checkpoint.mtp import PredictionLayers
from ciuic_cli.checkpoint.shards import shard_names
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.errors import InputError
from ciuic_cli.process.file_faults import reading

_DAMAGED = "the artifact is damaged or was not written by ciuic; fetch or compress it again"
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
"""The number of a layer or an expert in a tensor's name."""
_MIXED = "the files of two artifacts are mixed; fetch or compress it again"


@dataclass(frozen=True)
class Blob:
    """One compressed tensor. It owns a reference to the mapping of its file.

    entry: its place in the file. shape: of the decoded tensor, (rows, cols) or (experts, rows, cols). data: its bytes,
    uint8 (nbytes,), in `mapping`, the mapping of the whole file. It stays that of the checked file, even if another
    file gets the name.
    """

    entry: TensorEntry
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8] = field(repr=False, compare=False)
    mapping: mmap.mmap = field(repr=False, compare=False)

    @contextmanager
    def matrices(self) -> Iterator[tuple[PackedMatrix, ...]]:
        """The matrix, or one per expert, for use inside the `with` block; the codes stay in the mapped file."""
        try:
            if len(self.shape) == 3:
                yield ExpertStack.from_buffer(self.data, where=self.entry.name).experts
            else:
                yield (PackedMatrix.from_buffer(self.data, where=self.entry.name),)
        finally:
            _release(self.mapping, self.entry)


@dataclass(frozen=True)
class ArtifactFiles:
    """All tensors of an artifact's files by name, those among them that are blobs, and the bytes of the files."""

    tensors: dict[str, TensorEntry]
    blobs: dict[str, Blob]
    file_bytes: int


@dataclass(frozen=True)
class Artifact(ArtifactFiles):
    """An opened artifact folder.

    config: its config.json. quantization: the `quantization_config` in it. mtp: the original's multi-token-prediction
    layers, and whether the artifact keeps them.
    """

    folder: Path
    config: dict[str, Any]
    quantization: dict[str, Any]
    mtp: PredictionLayers

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of every tensor in the model; of compressed ones the decoded shape."""
        return [
            self.blobs[name].shape if name in self.blobs else entry.shape
            for name, entry in self.tensors.items()
        ]


def open_artifact(path: str | Path) -> Artifact:
    """Open a folder or hub id, and check the headers of its files and blobs.

    Raises InputError if it is no artifact, was written in a newer format, or is damaged: unreadable or inconsistent
    files, a tensor in two files, impossible fields in a blob, or a number of tensors of multi-token-prediction layers
    that differs from its config.
    """
    folder = locate(path)
    with require_unreplaced(folder):
        return _open(folder)


def _open(folder: Path) -> Artifact:
    check_files(folder)
    config = read_config(folder)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != QUANT_METHOD:
        raise InputError(
            "not a ciuic artifact: its config.json has no quantization_config of ciuic",
            file=folder,
            remedy="give the output folder of `ciuic compress`; transformers itself loads dense models",
        )
    check_format(quantization, folder / "config.json")
    names, weight_map = shard_names(folder)
    files = read_blobs([checked_file(folder, name) for name in names])
    absent = [name for name in weight_map or {} if name not in files.tensors]
    if absent:
        raise InputError(
            f"the index names {len(absent)} tensor(s) that no file has: {', '.join(absent[:3])}",
            file=folder,
            tensor=absent[0],
            remedy=_MIXED,
        )
    mtp = PredictionLayers.from_dict(quantization.get("mtp"), folder / "config.json")
    present = sum(mtp.owns(name) for name in files.tensors)
    if mtp.kept and present != mtp.stored:
        raise InputError(
            f"the files have {present} tensor(s) of multi-token-prediction layers, not {mtp.stored}",
            file=folder,
            remedy=_DAMAGED,
        )
    return Artifact(files.tensors, files.blobs, files.file_bytes, folder, config, quantization, mtp)


def check_format(quantization: Mapping[str, Any], file: Path | None = None) -> None:
    """Raise InputError unless this package reads the format version of the `quantization_config`."""
    version = quantization.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(
            f"format_version {version!r:.60} is not a version number", file=file, remedy=_DAMAGED
        )
    if version > FORMAT_VERSION:
        raise InputError(
            f"the artifact has format version {version}, this ciuic reads up to {FORMAT_VERSION}",
            file=file,
            remedy="update ciuic: pip install --upgrade ciuic-cli",
        )


def require_counted(
    artifact: ArtifactFiles, unknown: Iterable[str], expected: Iterable[str], mtp: PredictionLayers
) -> None:
    """Refuse files with more layers than the config counts: the model would lack its last layers, or some experts.

    unknown: names of stored tensors that the model does not have. expected: the model's names. If the model has the
    same name with another number, the tensor belongs to a layer or expert that config.json does not count; tensors of
    `mtp` are exempt. Raises InputError.
    """
    numberless = {_NUMBER.sub(".#", name) for name in expected}
    for name in unknown:
        if _NUMBER.sub(".#", name) in numberless and not mtp.owns(name):
            raise InputError(
                "config.json counts fewer layers than the files hold: the tensor is not part of the model",
                file=artifact.tensors[name].file.with_name("config.json"),
                tensor=name,
                remedy=_DAMAGED,
            )


def require_dense(artifact: ArtifactFiles, expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse uncompressed tensors that differ from the model's in shape, or whose dtype the model cannot hold.

    expected: the model's tensors (on the meta device) by their names in the artifact. Raises InputError with file and
    tensor.
    """
    for name, entry in artifact.tensors.items():
        wanted = expected.get(name)
        if name in artifact.blobs or wanted is None:
            continue
        stored = TORCH_DTYPES.get(entry.dtype)
        if entry.shape != tuple(wanted.shape):
            fault = f"the tensor has shape {entry.shape}, the config requires {tuple(wanted.shape)}"
        elif stored is None or not can_hold(wanted.dtype, stored):
            fault = f"the tensor is stored as {entry.dtype}, the model has {wanted.dtype}"
        else:
            continue
        raise InputError(fault, file=entry.file, tensor=name, remedy=_DAMAGED)


def require_expert_ids(artifact: ArtifactFiles, tables: Mapping[str, int]) -> None:
    """Read the tables of expert ids and refuse ids of experts that do not exist.

    tables: as `expert_tables` returns them, by their names in the artifact. Raises InputError with file and tensor.
    """
    for name, experts in tables.items():
        require_expert_table(artifact.tensors[name], experts, _DAMAGED)


def require_compressed(artifact: ArtifactFiles, expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse compressed tensors that differ from the model's in shape, before anything of their shape is allocated.

    A tensor that the model does not have (of a multi-token-prediction layer) may have at most as many weights as the
    model's largest tensor. expected: as in `require_dense`. Raises InputError with file and tensor.
    """
    largest = max((tensor.numel() for tensor in expected.values()), default=0)
    for name, blob in artifact.blobs.items():
        wanted = expected.get(name)
        if wanted is not None and blob.shape != tuple(wanted.shape):
            fault = f"the config requires {tuple(wanted.shape)}"
        elif wanted is None and math.prod(blob.shape) > largest:
            fault = "more weights than any tensor of the model"
        else:
            continue
        raise InputError(
            f"the compressed matrix has shape {blob.shape}, {fault}",
            file=blob.entry.file,
            tensor=name,
            remedy=_MIXED,
        )


def read_blobs(files: Iterable[Path]) -> ArtifactFiles:
    """Parse the safetensors headers of an artifact's files and the headers of all blobs in them.

    Every one-dimensional uint8 tensor of an artifact is a blob. Raises InputError, with file and tensor, for anything
    that `read_header`, `PackedMatrix.from_buffer` or `ExpertStack.from_buffer` refuses, and for a tensor that is in two
    files; EnvironmentFault if a file cannot be read or mapped.
    """
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, Blob] = {}
    file_bytes = 0
    for file in files:
        header = read_header(file)
        file_bytes += header.file_bytes
        for name, entry in header.tensors.items():
            if name in tensors:
                raise InputError(
                    f"the tensor is in two files: {tensors[name].file.name} and {file.name}",
                    file=file,
                    tensor=name,
                    remedy=_MIXED,
                )
            tensors[name] = entry
        entries = [
            entry for entry in header.tensors.values() if entry.dtype == "U8" and len(entry.shape) == 1
        ]
        if entries:
            with reading(file), file.open("rb") as stream:
                mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            mapped = np.frombuffer(mapping, dtype=np.uint8)
            for entry in entries:
                data = mapped[entry.begin : entry.end]
                blobs[entry.name] = Blob(entry, _blob_shape(data, entry), data, mapping)
                _release(mapping, entry)
    return ArtifactFiles(tensors, blobs, file_bytes)


def _release(mapping: mmap.mmap, entry: TensorEntry) -> None:
    """Release a tensor's pages until the next access; reading one byte can make 2 MB of the file resident."""
    if sys.platform != "win32":
        begin = entry.begin - entry.begin % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)


def _blob_shape(blob: npt.NDArray[np.uint8], entry: TensorEntry) -> tuple[int, ...]:
    """Shape of the decoded tensor; checks the blob's header."""
    try:
        if bytes(blob[:4]) == b"CIUX":
            stack = ExpertStack.from_buffer(blob, where=entry.name)
            return len(stack.experts), stack.rows, stack.cols
        matrix = PackedMatrix.from_buffer(blob, where=entry.name)
        return matrix.rows, matrix.cols
    except InputError as error:
        raise InputError(
            error.message, file=entry.file, tensor=error.tensor or entry.name, remedy=error.remedy or _DAMAGED
        ) from error
