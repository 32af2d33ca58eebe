"""A checkpoint folder: its config, its tensors' places, and reads of one tensor at a time.

Opening reads headers only. A tensor is read with `pread` into its own memory, so that neither the file nor a
mapping of it counts towards the process's memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.checkpoint import formats
from ciuic_cli.checkpoint.folder import (
    INDEX_NAME,
    check_files,
    checked_file,
    locate,
    read_config,
    shard_names,
)
from ciuic_cli.checkpoint.header import TensorEntry, read_header
from ciuic_cli.errors import InputError
from ciuic_cli.process.file_faults import reading

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The torch dtype of every stored dtype but F4, whose packed bytes are read as uint8."""

_FP8 = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
_PACKED_FP4 = ("I8", "U8", "F4")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "U8")
_MAX_READ = 1 << 30  # Linux transfers at most 2 GiB in one call
_SUPPORTED_QUANTIZATION = ("fp8",)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `scales` maps a weight to the tensor that holds its scales."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    source_bytes: int
    warnings: tuple[str, ...] = ()
    scales: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def entry(self, name: str) -> TensorEntry:
        """The place of a tensor. Raises InputError if the checkpoint has none of this name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise InputError(
                "the checkpoint has no such tensor", file=self.folder, tensor=name, remedy="download it again"
            ) from None

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """One tensor in its stored dtype and shape, or its rows [a, b) along the first dimension.

        F4 comes as uint8, two values per byte, the last dimension halved. Raises InputError if the file has
        shrunk since it was opened.
        """
        entry = self.entry(name)
        shape = list(entry.shape)
        if entry.dtype == "F4":
            if not shape or shape[-1] % 2:
                raise InputError(
                    f"FP4 needs an even last dimension, not {shape}",
                    file=entry.file,
                    tensor=name,
                    remedy=formats.SCALE_REMEDY,
                )
            shape[-1] //= 2
        begin = entry.begin
        if rows is not None:
            first, last = rows
            if not shape or not 0 <= first <= last <= shape[0]:
                raise ValueError(f"rows {rows} of {name} with shape {entry.shape}")
            if shape[0]:
                begin += first * (entry.nbytes // shape[0])
            shape[0] = last - first
        dtype = torch.uint8 if entry.dtype == "F4" else TORCH_DTYPES[entry.dtype]
        tensor = torch.empty(shape, dtype=dtype)
        _read_into(tensor, entry, begin)
        return tensor

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor holds 8-bit floats that need a scale."""
        return self.entry(name).dtype in _FP8

    def is_fp4(self, name: str) -> bool:
        """Whether the tensor holds packed 4-bit floats: dtype F4, or bytes that have a scale."""
        dtype = self.entry(name).dtype
        return dtype == "F4" or (dtype in _PACKED_FP4 and name in self.scales)

    def dense_shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape once decoded: packed FP4 bytes count double in the last dimension."""
        entry = self.entry(name)
        if entry.dtype != "F4" and self.is_fp4(name):
            return (*entry.shape[:-1], 2 * entry.shape[-1])
        return entry.shape

    def read_dense(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor as numbers: FP8 and FP4 times their scales in float32, any other dtype as stored.

        `rows` as in `read`. Raises InputError for an 8-bit float without a scale, or one of the wrong shape.
        """
        fp4 = self.is_fp4(name)
        if not (fp4 or self.is_fp8(name)):
            return self.read(name, rows)
        entry = self.entry(name)
        scale_name = self.scales.get(name)
        if scale_name is None:
            raise InputError(
                f"{entry.dtype} weight without its scale (looked for {', '.join(_scale_names(name))})",
                file=entry.file,
                tensor=name,
                remedy=formats.SCALE_REMEDY,
            )
        block = self._block(name, fp4)
        stored = self.read(name, rows)
        values = formats.unpack_fp4(stored) if fp4 else formats.decode_fp8(stored)
        return formats.apply_scales(values, self.read(scale_name), block, 0 if rows is None else rows[0])

    def read_finite(
        self, name: str, rows: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """As `read_dense`; raises InputError if any number read is NaN or infinite, or would be in `dtype`."""
        values = self.read_dense(name, rows)
        if formats.count_nonfinite(values, dtype):
            scale = self.scales.get(name)
            if scale is not None:  # the fault may be its own
                decoded = formats.decode_scales(self.read(scale))
                formats.require_finite(decoded, scale, file=self.entry(scale).file)
            formats.require_finite(values, name, dtype, file=self.entry(name).file)
        return values

    def check_scales(self) -> None:
        """Require from headers alone that every FP8 and FP4 weight has a scale that fits it."""
        for name, entry in self.tensors.items():
            if entry.dtype in _FP8 and name not in self.scales and name.endswith("weight"):
                self.read_dense(name, (0, 0))
            elif name in self.scales and (entry.dtype in _FP8 or self.is_fp4(name)):
                self._block(name, self.is_fp4(name))

    def _block(self, name: str, fp4: bool) -> tuple[int, int]:
        entry = self.entry(name)
        scale = self.entry(self.scales[name])
        if scale.dtype not in _SCALE_DTYPES:
            raise InputError(
                f"the scale has dtype {scale.dtype}; known are {', '.join(_SCALE_DTYPES)}",
                file=scale.file,
                tensor=scale.name,
                remedy=formats.SCALE_REMEDY,
            )
        return formats.scale_block(
            self.dense_shape(name),
            scale.shape,
            _weight_block(self.config, self.folder / "config.json"),
            fp4=fp4,
            file=entry.file,
            tensor=name,
        )

    def files(self) -> list[Path]:
        """The safetensors files, in order of their names."""
        return sorted({entry.file for entry in self.tensors.values()})


def read_entry(entry: TensorEntry) -> torch.Tensor:
    """A whole tensor of any safetensors file, in its stored dtype (not F4) and shape; raises as `Checkpoint.read`."""
    # On the CPU: while transformers builds a model, tensors come into being on the meta device.
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="cpu")
    _read_into(tensor, entry, entry.begin)
    return tensor


def holds(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether both are floats, both truth values, or both integers and `dtype` has the range of what is stored."""
    if dtype.is_floating_point or stored.is_floating_point:
        return dtype.is_floating_point and stored.is_floating_point
    if torch.bool in (dtype, stored) or stored.is_complex:
        return dtype == stored
    wide, narrow = torch.iinfo(dtype), torch.iinfo(stored)
    return wide.min <= narrow.min and narrow.max <= wide.max


def is_integer(dtype: torch.dtype) -> bool:
    """Whether it is one of whole numbers; those of booleans are none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder or hub id; headers only are read.

    Raises InputError for everything that makes a checkpoint unreadable: see `folder.py` for files and names,
    `header.py` for the bytes of a shard; besides a tensor in two shards, tensors that the index places where
    they are not, quantization formats other than FP8, and scales that are absent or of the wrong shape.
    """
    folder = locate(path)
    check_files(folder)
    config = read_config(folder)
    names, weight_map = shard_names(folder)
    method = _quantization_method(config)
    if method is not None and method not in _SUPPORTED_QUANTIZATION:
        already = (
            "a ciuic artifact: compressed already" if method == "ciuic" else f"quantized with {method!r:.40}"
        )
        raise InputError(
            f"the checkpoint is {already}",
            file=folder / "config.json",
            remedy="start from the original weights",
        )
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    source_bytes = 0
    for name in names:
        header = read_header(checked_file(folder, name))
        source_bytes += header.file_bytes
        metadata.update(header.metadata)
        for tensor, entry in header.tensors.items():
            if tensor in tensors:
                raise InputError(
                    f"the tensor is in two shards: {tensors[tensor].file.name} and {name}",
                    file=folder / name,
                    tensor=tensor,
                    remedy="download the checkpoint again; do not mix the files of two versions",
                )
            tensors[tensor] = entry
    warnings = _compare_index(folder, tensors, weight_map)
    checkpoint = Checkpoint(
        folder, config, tensors, source_bytes, tuple(warnings), _find_scales(tensors), metadata
    )
    checkpoint.check_scales()
    return checkpoint


def _compare_index(
    folder: Path, tensors: dict[str, TensorEntry], weight_map: dict[str, str] | None
) -> list[str]:
    if weight_map is None:
        return []
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise InputError(
            f"the index names {len(lost)} tensor(s) that no shard has: {', '.join(lost[:3])}",
            file=folder / INDEX_NAME,
            tensor=lost[0],
            remedy="download the checkpoint again; do not mix the files of two versions",
        )
    files = {name: checked_file(folder, name) for name in set(weight_map.values())}
    for name, file in weight_map.items():
        if tensors[name].file != files[file]:
            raise InputError(
                f"the index places the tensor in {file}; it is in {tensors[name].file.name}",
                file=folder / INDEX_NAME,
                tensor=name,
                remedy="download the checkpoint again; do not mix the files of two versions",
            )
    warnings = []
    extra = [name for name in tensors if name not in weight_map]
    if extra:
        warnings.append(
            f"{len(extra)} tensor(s) are in the shards but not in the index: {', '.join(extra[:3])}"
        )
    if os.path.lexists(folder / "model.safetensors") and "model.safetensors" not in weight_map.values():
        warnings.append("model.safetensors is not named by the index and is ignored")
    return warnings


def _quantization_method(config: dict[str, Any]) -> str | None:
    section = config.get("quantization_config")
    if section is None:
        return None
    return str(section.get("quant_method")) if isinstance(section, dict) else str(section)


def _weight_block(config: dict[str, Any], file: Path) -> tuple[int, int] | None:
    """Rows and columns that share one scale of an FP8 weight; None where the config states none."""
    section = config.get("quantization_config")
    block = section.get("weight_block_size") if isinstance(section, dict) else None
    if block is None:
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and 0 < size <= 1 << 20 for size in block)
    ):
        raise InputError(
            f"weight_block_size {block!r:.60} in config.json is not two positive sizes",
            file=file,
            remedy="download config.json again",
        )
    return block[0], block[1]


def _scale_names(name: str) -> list[str]:
    base = name.removesuffix("weight")
    return [f"{name}_scale_inv", f"{name}_scale"] + ([f"{base}scale"] if base != name else [])


def _find_scales(tensors: dict[str, TensorEntry]) -> dict[str, str]:
    scales = {}
    for name, entry in tensors.items():
        if entry.dtype in _FP8 or entry.dtype in _PACKED_FP4:
            found = [scale for scale in _scale_names(name) if scale in tensors]
            if len(found) > 1:
                raise InputError(
                    f"the weight has {len(found)} scales, {' and '.join(found)}: which one counts is a guess",
                    file=entry.file,
                    tensor=name,
                    remedy=formats.SCALE_REMEDY,
                )
            if found:
                scales[name] = found[0]
    return scales


def _read_into(tensor: torch.Tensor, entry: TensorEntry, begin: int) -> None:
    if tensor.numel() == 0:
        return
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    view = memoryview(raw)
    with reading(entry.file, entry.name):  # its header was read before
        descriptor = os.open(entry.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            done = 0
            while done < len(view):
                got = os.preadv(descriptor, [view[done : done + _MAX_READ]], begin + done)
                if got == 0:
                    raise InputError(
                        "the file ends inside the tensor: it has changed since it was opened",
                        file=entry.file,
                        tensor=entry.name,
                        remedy="leave the checkpoint alone while it is read, and start again",
                    )
                done += got
        finally:
            os.close(descriptor)
