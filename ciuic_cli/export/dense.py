"""An artifact's decoded weights as an ordinary checkpoint, under the names of the original's files: `ciuic export`.

Tensors are decoded and written in pieces, so memory peaks at one piece: 2^20 weights of a matrix, or one expert. Only
parameters that transformers converts together are held as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.layout import StoredTensor, place, stored_bytes
from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import Artifact, open_artifact, require_compressed, require_dense
from ciuic_cli.artifact.tensors import decoded_pieces, dense_tensor
from ciuic_cli.checkpoint.architecture import fixed_dtypes
from ciuic_cli.checkpoint.compressible import file_shape
from ciuic_cli.checkpoint.formats import TORCH_DTYPES
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.export.file_names import FileGroup, file_groups, to_files
from ciuic_cli.process import atomic_files
from ciuic_cli.process.file_faults import environment_fault
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.runtime.routing import MASKED_SCORE, masked_experts, pruned_experts, routers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes that a checkpoint can be exported in, by the name of the option."""
Rows = Callable[[str], Iterator[torch.Tensor]]
"""The decoded rows of a compressed tensor in order, float32 (some rows, cols); of a stack, expert after expert."""
_SAFETENSORS_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Exported:
    """What `export_dense` wrote: bytes and number of the safetensors files, and warnings for the user."""

    file_bytes: int
    files: int
    warnings: tuple[str, ...]


def export_dense(
    path: str | Path,
    destination: str | Path,
    *,
    to: str = "bf16",
    rows: Callable[[Artifact], Rows] | None = None,
    progress: Progress = no_progress,
) -> Exported:
    """Write an artifact's decoded weights as a checkpoint, with config.json and tokenizer files.

    Args:
        path: the artifact's folder, or a hub id.
        destination: folder to write; it must be absent or empty. It appears when it is complete.
        to: a key of DTYPES. Tensors that the model computes with in float32 in any case stay float32.
        rows: replaces the decoded rows, for example by those with a merged adapter.
        progress: called as progress("write", done, total) in bytes.

    Raises:
        InputError: no artifact, or a damaged one; the destination holds files.
        EnvironmentFault: the disk is full, or the destination cannot be written.
    """
    artifact = open_artifact(path)
    out = Path(os.path.realpath(destination))
    publishing.require_new(out, artifact.folder)
    weights = _DenseWeights(artifact, DTYPES[to], (rows or _decoded_rows)(artifact))
    shards = place(weights.layout())
    total = stored_bytes(shards)
    written = 0

    def count(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        progress("write", written, total)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.require_space(out, total)
        folder = publishing.begin(out)
        tensors = weights.tensors()
        writer.write_shards(shards, folder, lambda name: _next(tensors, name), count)
        writer.write_index(shards, folder)
        writer.copy_companions(artifact.folder, folder)
        _write_config(folder, artifact.config, DTYPES[to])
        publishing.publish(out, force=False)
    except BaseException as error:
        publishing.discard(out)
        if isinstance(error, OSError):
            raise environment_fault(error, out) from error
        raise
    return Exported(total, len(shards), tuple(weights.warnings))


def _decoded_rows(artifact: Artifact) -> Rows:
    return lambda name: decoded_pieces(artifact.blobs[name])


def _next(tensors: Iterator[tuple[str, Iterable[torch.Tensor]]], name: str) -> Iterator[memoryview]:
    """The bytes of the next tensor, which must be the one of this name."""
    made, pieces = next(tensors)
    if made != name:
        raise RuntimeError(f"{made} was made instead of {name}")
    for piece in pieces:
        raw: Any = piece.contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(raw)


def _write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    dropped = ("quantization_config", "torch_dtype", "auto_map")
    values = {key: value for key, value in config.items() if key not in dropped}
    values["dtype"] = str(dtype).removeprefix("torch.")
    text = json.dumps(values, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


class _DenseWeights:
    """The tensors of the checkpoint: their layout from the headers, then their values one after another.

    warnings: sentences about what a dense checkpoint cannot express.
    """

    def __init__(self, artifact: Artifact, dtype: torch.dtype, rows: Rows) -> None:
        self.artifact, self.dtype, self.rows = artifact, dtype, rows
        self.model = meta_model(artifact)
        classified = classify(self.model)
        expected = {name: tensor for name, (_, tensor) in classified.items()}
        require_dense(artifact, expected)
        require_compressed(artifact, expected)
        self.transposed = {name for name, (found, _) in classified.items() if found.transposed}
        self.fixed = fixed_dtypes(self.model, self.model.dtype, dtype)
        self.masks, self.warnings = self._router_masks()
        groups = file_groups(self.model, [name for name in classified if name in artifact.tensors])
        groups += self._prediction_groups(expected)
        # The widest numbers first, so that every tensor is aligned in its file.
        self.groups = sorted(groups, key=lambda group: -self._dtype_of(group.names[0]).itemsize)

    def layout(self) -> list[StoredTensor]:
        """Names, dtypes, shapes and bytes, in the order of `tensors`."""
        stored = []
        for group in self.groups:
            dtype = self._dtype_of(group.names[0])
            for name in _ordered(group):
                shape = self._file_shape(group, name)
                nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                stored.append(StoredTensor(name, _SAFETENSORS_NAMES[dtype], shape, nbytes))
        return stored

    def tensors(self) -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
        """Name and consecutive parts of every tensor. The parts must be taken before the next tensor is asked for."""
        for group in self.groups:
            name = group.names[0]
            if group.renamed:
                yield next(iter(group.targets)), self._parts(name)
            elif group.by_expert and name in self.artifact.blobs:
                for expert, targets in zip(self._matrices(name), group.by_expert, strict=True):
                    made = to_files(self.model, {name: expert[None]})
                    yield from (
                        (target, (value,)) for target, value in zip(targets, made.values(), strict=True)
                    )
            else:
                made = to_files(self.model, {name: self._value(name) for name in group.names})
                for target in _ordered(group):
                    yield target, (made.pop(target),)

    def _file_shape(self, group: FileGroup, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the checkpoint, in which stacks of experts may be flat."""
        shape = group.targets[name]
        return file_shape(self.model, group.names[0], shape) if group.renamed else shape

    def _dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a stored tensor in the checkpoint."""
        stored = TORCH_DTYPES[self.artifact.tensors[name].dtype]
        if name not in self.artifact.blobs and (not stored.is_floating_point or self.artifact.mtp.owns(name)):
            return stored
        return self.fixed.get(name, self.dtype)

    def _parts(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor in the model's orientation, in consecutive parts."""
        if name not in self.artifact.blobs:
            yield self._value(name)
        elif name in self.transposed:
            yield from self._matrices(name)
        else:
            dtype = self._dtype_of(name)
            yield from (piece.to(dtype) for piece in self.rows(name))

    def _matrices(self, name: str) -> Iterator[torch.Tensor]:
        """The matrix of a compressed tensor, or its experts one by one, in the model's orientation."""
        shape = self.artifact.blobs[name].shape
        matrix, begin = torch.empty(shape[-2:], dtype=self._dtype_of(name), device="cpu"), 0
        for piece in self.rows(name):
            matrix[begin : begin + len(piece)] = piece
            begin += len(piece)
            if begin == len(matrix):
                yield matrix.mT if name in self.transposed else matrix
                begin = 0

    def _value(self, name: str) -> torch.Tensor:
        """A whole tensor in the model's orientation."""
        if name in self.artifact.blobs:
            matrices = [matrix.clone() for matrix in self._matrices(name)]
            return torch.stack(matrices) if len(self.artifact.blobs[name].shape) == 3 else matrices[0]
        value = dense_tensor(self.artifact, name)
        if name in self.masks:
            value[self.masks[name]] = MASKED_SCORE
        return value.to(self._dtype_of(name))

    def _router_masks(self) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The bias of a router -> mask of its pruned experts, and warnings about routers without a bias."""
        pruned = {}
        for name, blob in self.artifact.blobs.items():
            if len(blob.shape) == 3 and name.endswith(".down_proj") and not self.artifact.mtp.owns(name):
                with blob.matrices() as experts:
                    pruned[name.removesuffix(".down_proj")] = pruned_experts(experts)
        names = {module: name for name, module in self.model.named_modules()}
        masks, without_bias = {}, []
        for router, of_router in routers(self.model, pruned):
            mask = masked_experts(router, of_router)
            if not mask.any():
                continue
            if isinstance(getattr(router, "e_score_correction_bias", None), torch.Tensor):
                masks[f"{names[router]}.e_score_correction_bias"] = mask
            else:
                without_bias.append(names[router])
        warnings = []
        if without_bias:
            warnings.append(
                f"{len(without_bias)} routers have no bias that could exclude pruned experts ({without_bias[0]}): in "
                "the exported model tokens are routed to them and lose that share of their output; the artifact "
                "excludes them, and predicts better"
            )
        return masks, warnings

    def _prediction_groups(self, model: dict[str, torch.Tensor]) -> list[FileGroup]:
        """Kept multi-token-prediction layers, which have the names of the original's files already."""
        mtp = self.artifact.mtp
        if not mtp.kept:
            return []
        sources = {name: name for name in self.artifact.tensors if name not in model and mtp.owns(name)}
        groups = []
        for name, source in (sources | mtp.shared).items():
            blob = self.artifact.blobs.get(source)
            shape = self.artifact.tensors[source].shape if blob is None else blob.shape
            groups.append(FileGroup((source,), {name: shape}, renamed=True))
        return groups


def _ordered(group: FileGroup) -> list[str]:
    """The targets in the order in which they are written: those of an expert together."""
    return [target for part in group.by_expert for target in part] or list(group.targets)
