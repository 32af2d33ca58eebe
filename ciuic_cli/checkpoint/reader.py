"""An opened checkpoint: `open_checkpoint` takes a folder or hub id and returns a `Checkpoint`, which reads tensors.

Opening reads the headers only. A tensor, or a range of its rows, is read with `pread` into memory of its own, so that
neither the file nor a mapping of it counts towards the process's memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from ciuic_cli.checkpoint import formats
from ciuic_cli.checkpoint.folder import check_files, checked_file, locate, read_config
from ciuic_cli.checkpoint.formats import SCALE_DTYPES, SCALES_ONLY, TORCH_DTYPES, NumberFormat
from ciuic_cli.checkpoint.header import TensorEntry, read_header
from ciuic_cli.checkpoint.shards import check_index, shard_names
from ciuic_cli.errors import InputError
from ciuic_cli.hub.mirror import reading_from
from ciuic_cli.process.file_faults import reading

_BLOCKS = "_blocks"
"""End of the name of a tensor in a grouped format; its parameter's name lacks it."""
_MAX_READ = 1 << 30
"""Bytes requested in one system call. Linux transfers at most 2 GiB."""
_GROUPED_QUANTIZATION = "mxfp4"
"""The `quant_method` of checkpoints with tensors X_blocks and X_scales, which make the parameter X."""
_SUPPORTED_QUANTIZATION = ("fp8", _GROUPED_QUANTIZATION)
"""Values of `quant_method` in config.json whose weights can be decoded."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. It holds no open file: every read opens the shard again.

    Attributes:
        config: the content of config.json.
        tensors: header entries of all shards, by tensor name; of a grouped format, by the parameter's.
        source_bytes: size of all shards together.
        warnings: messages for the user.
        scales: weight -> its scale tensor, for weights in one of `formats.FORMATS`.
        is_stored: whether the weights are those of the folder, so that a recipe can repeat what was done with them.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    source_bytes: int
    warnings: tuple[str, ...] = ()
    scales: dict[str, str] = field(default_factory=dict)
    is_stored: ClassVar[bool] = True

    def entry(self, name: str) -> TensorEntry:
        """The header entry of a tensor. Raises InputError if the checkpoint has no tensor of this name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise InputError(
                "the checkpoint has no such tensor", file=self.folder, tensor=name, remedy="download it again"
            ) from None

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor in its stored dtype and shape, or its rows [first, last) along the first dimension.

        Dtypes with fewer than 8 bits are returned as packed uint8 bytes. Raises InputError if the file has shrunk since
        it was opened, EnvironmentFault if reading fails, ValueError for rows outside the tensor.
        """
        entry = self.entry(name)
        try:
            shape = list(formats.stored_shape(entry.dtype, entry.shape))
        except ValueError as error:
            raise InputError(str(error), file=entry.file, tensor=name, remedy=formats.SCALE_REMEDY) from error
        begin = entry.begin
        if rows is not None:
            first, last = rows
            if not shape or not 0 <= first <= last <= shape[0]:
                raise ValueError(f"rows {rows} of {name} with shape {entry.shape}")
            if shape[0]:
                begin += first * (entry.nbytes // shape[0])
            shape[0] = last - first
        tensor = torch.empty(shape, dtype=TORCH_DTYPES.get(entry.dtype, torch.uint8))
        _read_into(tensor, entry, begin)
        return tensor

    def format_of(self, name: str) -> NumberFormat | None:
        """The tensor's format if it is stored with scales; None if it is stored as plain numbers."""
        entry = self.entry(name)
        grouped = entry.name == name + _BLOCKS
        return formats.format_of(entry.dtype, has_scale=grouped or name in self.scales, grouped=grouped)

    def decoded_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the decoded tensor."""
        entry, number_format = self.entry(name), self.format_of(name)
        return entry.shape if number_format is None else number_format.decoded_shape(entry.dtype, entry.shape)

    def read_decoded(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The decoded tensor: weights with scales as float32, any other tensor in its stored dtype.

        `rows` as in `read`. Raises InputError if a weight in one of `formats.FORMATS` has no scale or one of the wrong
        shape, if the tensor is stored in a format of scales, and as `read` does.
        """
        entry, number_format = self.entry(name), self.format_of(name)
        if entry.dtype == SCALES_ONLY:
            raise InputError(
                f"the tensor is stored as {SCALES_ONLY}, a format of scales: it holds powers of two and no weights",
                file=entry.file,
                tensor=name,
                remedy=formats.SCALE_REMEDY,
            )
        if number_format is None:
            return self.read(name, rows)
        if name not in self.scales:
            raise InputError(
                f"{entry.dtype} weight without its scale (looked for {', '.join(_scale_names(name))})",
                file=entry.file,
                tensor=name,
                remedy=formats.SCALE_REMEDY,
            )
        block = self._scale_block(name, number_format)
        values = number_format.decode(self.read(name, rows))
        if number_format.grouped:
            return formats.apply_group_scales(values, self.read(self.scales[name], rows))
        scales = self.read(self.scales[name])
        return formats.apply_scales(values, scales, block, 0 if rows is None else rows[0])

    def read_finite(
        self, name: str, rows: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """`read_decoded`, but raises InputError if a value is NaN or infinite, or becomes so in `dtype`."""
        values = self.read_decoded(name, rows)
        if formats.count_nonfinite(values, dtype):
            scale = self.scales.get(name)
            if scale is not None:  # name the scale if the fault is there
                decoded = formats.decode_scales(self.read(scale))
                formats.require_finite(decoded, scale, file=self.entry(scale).file)
            formats.require_finite(values, name, dtype, file=self.entry(name).file)
        return values

    def check_scales(self) -> None:
        """Raise InputError if a weight that needs a scale has none of the right shape. Reads no values."""
        for name, entry in self.tensors.items():
            number_format = self.format_of(name)
            if number_format is not None and name in self.scales:
                self._scale_block(name, number_format)
            elif (number_format is not None or entry.dtype == SCALES_ONLY) and (
                name.endswith("weight") or entry.name != name
            ):
                self.read_decoded(name, (0, 0))

    def _scale_block(self, name: str, number_format: NumberFormat) -> tuple[int, int]:
        """Rows and columns of the weight that share one scale; raises InputError as `read_decoded`."""
        entry = self.entry(name)
        scale = self.entry(self.scales[name])
        if scale.dtype not in SCALE_DTYPES:
            raise InputError(
                f"the scale has dtype {scale.dtype}; known dtypes are {', '.join(SCALE_DTYPES)}",
                file=scale.file,
                tensor=scale.name,
                remedy=formats.SCALE_REMEDY,
            )
        if number_format.grouped:
            return _group_block(entry, scale, number_format)
        return formats.scale_block(
            self.decoded_shape(name),
            scale.shape,
            _weight_block(self.config, self.folder / "config.json"),
            fixed=number_format.scale_block,
            file=entry.file,
            tensor=name,
        )

    def files(self) -> list[Path]:
        """The safetensors files in order of their names."""
        return sorted({entry.file for entry in self.tensors.values()})


def read_entry(entry: TensorEntry) -> torch.Tensor:
    """A whole tensor of a dtype in TORCH_DTYPES, of any safetensors file, as stored. Raises as `Checkpoint.read`."""
    # An explicit device, because transformers makes "meta" the default device while it builds a model.
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="cpu")
    _read_into(tensor, entry, entry.begin)
    return tensor


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder or hub id. Only config.json, the index and the headers are read.

    Raises InputError for everything that makes a checkpoint unreadable: unsafe or absent files (`folder`), missing
    shards or a wrong index (`shards`), damaged headers (`header`), a tensor in two shards, a quantization format other
    than FP8, FP4 and MXFP4, and scales that are absent or of the wrong shape.
    """
    folder = locate(path)
    check_files(folder)
    config = read_config(folder)
    names, weight_map = shard_names(folder)
    method = _quantization_method(config)
    if method is not None and method not in _SUPPORTED_QUANTIZATION:
        state = (
            "a ciuic artifact: compressed already" if method == "ciuic" else f"quantized with {method!r:.40}"
        )
        raise InputError(
            f"the checkpoint is {state}",
            file=folder / "config.json",
            remedy="start from the original weights",
        )
    tensors: dict[str, TensorEntry] = {}
    source_bytes = 0
    for name in names:
        header = read_header(checked_file(folder, name))
        source_bytes += header.file_bytes
        for tensor, entry in header.tensors.items():
            if tensor in tensors:
                raise InputError(
                    f"the tensor is in two shards: {tensors[tensor].file.name} and {name}",
                    file=folder / name,
                    tensor=tensor,
                    remedy="download the checkpoint again; do not mix the files of two versions",
                )
            tensors[tensor] = entry
    warnings = check_index(folder, tensors, weight_map)
    if method == _GROUPED_QUANTIZATION:
        tensors = {name.removesuffix(_BLOCKS): entry for name, entry in tensors.items()}
    checkpoint = Checkpoint(folder, config, tensors, source_bytes, tuple(warnings), _find_scales(tensors))
    checkpoint.check_scales()
    return checkpoint


def _quantization_method(config: dict[str, Any]) -> str | None:
    section = config.get("quantization_config")
    if section is None:
        return None
    return str(section.get("quant_method")) if isinstance(section, dict) else str(section)


def _weight_block(config: dict[str, Any], file: Path) -> tuple[int, int] | None:
    """Rows and columns that share one scale of an FP8 weight; None if config.json states no block."""
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
    """The names that the scale of a weight can have."""
    base = name.removesuffix("weight")
    return [f"{name}_scale_inv", f"{name}_scale", f"{name}_scales"] + (
        [f"{base}scale"] if base != name else []
    )


def _group_block(entry: TensorEntry, scale: TensorEntry, number_format: NumberFormat) -> tuple[int, int]:
    """The block of a grouped format; raises InputError if tensor and scale do not fit together."""
    block = number_format.scale_block or (1, 1)
    nbytes = block[1] * number_format.bits // 8
    if len(entry.shape) == 4 and entry.shape[3] == nbytes and scale.shape == entry.shape[:3]:
        return block
    raise InputError(
        f"the scale has shape {scale.shape} and the blocks {entry.shape}, instead of (experts, outputs, groups) and "
        f"(experts, outputs, groups, {nbytes})",
        file=entry.file,
        tensor=entry.name,
        remedy=formats.SCALE_REMEDY,
    )


def _find_scales(tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Weight -> scale tensor. Raises InputError for a weight with several scales."""
    scales = {}
    for name, entry in tensors.items():
        if formats.format_of(entry.dtype, has_scale=True) is not None:
            candidates = [scale for scale in _scale_names(name) if scale in tensors]
            if len(candidates) > 1:
                raise InputError(
                    f"the weight has {len(candidates)} scales: {' and '.join(candidates)}; only one is allowed",
                    file=entry.file,
                    tensor=name,
                    remedy=formats.SCALE_REMEDY,
                )
            if candidates:
                scales[name] = candidates[0]
    return scales


def _read_into(tensor: torch.Tensor, entry: TensorEntry, begin: int) -> None:
    """Fill `tensor` with the bytes of the entry's file from the offset `begin` on."""
    if tensor.numel() == 0:
        return
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    view = memoryview(raw)
    # The header was read before, so a failure now is not the file's.
    with reading_from(entry.file, begin, begin + len(view)), reading(entry.file, entry.name):
        descriptor = os.open(entry.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            done = 0
            while done < len(view):
                count = os.preadv(descriptor, [view[done : done + _MAX_READ]], begin + done)
                if count == 0:
                    raise InputError(
                        "the file ends inside the tensor: it has changed since it was opened",
                        file=entry.file,
                        tensor=entry.name,
                        remedy="leave the checkpoint alone while it is read, and start again",
                    )
                done += count
        finally:
            os.close(descriptor)
