"""Which matrices of transformers' model a tensor of a GGUF file holds, and in which order of rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import WeightMatrix, weight_matrices
from ciuic_cli.allocation.row_chunks import read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.export.gguf.types import GgufType, candidates

_STACK = re.compile(r"(?P<experts>.+\.experts)\.(?P<part>gate_up_proj|down_proj)")
"""In-memory names of experts' stacks."""
_WRAPPERS = ("language_model.", "text_model.")
"""Parts of names in models with several inputs, which GGUF's names do not have."""


@dataclass(frozen=True)
class Part:
    """Rows of one matrix of the model that are one matrix of a GGUF tensor.

    rows: their numbers in the model's matrix, (m,) int64, in the order of the GGUF tensor.
    """

    matrix: WeightMatrix
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor that gets a type from the plan.

    Attributes:
        name: in the GGUF file.
        parts: one matrix, or one of each expert.
        cols: weights per row. weights: in all.
        types: the types for such rows, by size.
    """

    name: str
    parts: tuple[Part, ...]
    cols: int
    weights: int
    types: tuple[GgufType, ...]


class GgufFile:
    """Reads a GGUF file whose tensors are float32, bfloat16 or float16."""

    def __init__(self, path: Path) -> None:
        gguf = _gguf()
        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = reader.get_field("general.architecture").contents()
        layers = reader.get_field(f"{architecture}.block_count").contents()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = (
            gguf.get_tensor_name_map(numbers[architecture], layers) if architecture in numbers else None
        )
        self._bfloat16 = gguf.GGMLQuantizationType.BF16
        self.nbytes = path.stat().st_size
        self.path = path

    @property
    def weights(self) -> int:
        """All numbers of all tensors."""
        return sum(int(tensor.n_elements) for tensor in self._tensors.values())

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the file that are not of tensors: mostly the tokenizer."""
        return self.nbytes - sum(self.stored_bytes(name) for name in self._tensors)

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor with its padding."""
        return padded(int(self._tensors[name].n_bytes))

    def name_of(self, model_name: str) -> str | None:
        """The GGUF name of a tensor with this name in a Hugging Face checkpoint; None if there is none in the file."""
        for wrapper in _WRAPPERS:
            model_name = model_name.replace(wrapper, "")
        name = self._names and self._names.get_name(model_name, try_suffixes=(".weight",))
        return name if name in self._tensors else None

    def matrices(self, name: str) -> NDArray[Any]:
        """A tensor as (matrices, rows, cols), in its dtype; bfloat16 as uint16."""
        tensor = self._tensors[name]
        cols, rows, *rest = [int(size) for size in tensor.shape]
        data = tensor.data
        if tensor.tensor_type == self._bfloat16:
            data = data.view(np.uint16)
        return data.reshape(int(np.prod(rest, dtype=np.int64)), rows, cols)

    def matrix(self, name: str, number: int) -> torch.Tensor:
        """One matrix of a tensor, float32 (rows, cols)."""
        values = self.matrices(name)[number]
        if values.dtype == np.uint16:
            return torch.from_numpy(values.astype(np.int16)).view(torch.bfloat16).float()
        return torch.from_numpy(values.astype(np.float32))


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise EnvironmentFault(
            "the package gguf is not installed", remedy='pip install "ciuic-cli[gguf]"'
        ) from error
    return gguf


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in a file: a multiple of 32, GGUF's alignment."""
    return -(-nbytes // 32) * 32


def match_tensors(
    model_map: ModelMap, file: GgufFile, known: str, without: Collection[str] = ()
) -> tuple[list[GgufTensor], list[WeightMatrix]]:
    """The tensors of a converted file that hold compressible matrices, and the matrices that no tensor holds as they
    are.

    known: as in `candidates`. without: names of types that no tensor gets.
    """
    found: dict[str, list[Part | None]] = {}
    unmatched = []
    for matrix in weight_matrices(model_map.parameters.values()):
        targets = _targets(matrix)
        names = [file.name_of(name) for name, _ in targets]
        if None in names:
            unmatched.append(matrix)
            continue
        weight = read_matrix(model_map, matrix)
        for name, (_, rows) in zip(names, targets, strict=True):
            assert name is not None
            part = _part(file, name, matrix, rows, weight)
            found.setdefault(name, []).append(part)
            if part is None:
                unmatched.append(matrix)
    tensors = []
    for name, parts in found.items():
        kept = [part for part in parts if part is not None]
        if len(kept) < len(parts) or len(kept) != len(file.matrices(name)):
            continue
        cols = kept[0].matrix.cols
        types = tuple(kind for kind in candidates(cols, known) if kind.name not in without)
        if types:
            weights = sum(len(part.rows) for part in kept) * cols
            tensors.append(GgufTensor(name, tuple(kept), cols, weights, types))
    if not tensors:
        raise InputError(
            "no tensor of the converted file is a matrix of the model, so there is nothing to plan",
            file=model_map.checkpoint.folder,
            remedy="quantize it with llama-quantize",
        )
    return tensors, unmatched


def _targets(matrix: WeightMatrix) -> Sequence[tuple[str, slice]]:
    """Names in the checkpoint's files of the tensors that a matrix makes, and the rows of each."""
    stack = _STACK.fullmatch(matrix.name)
    if matrix.expert is None or stack is None:
        return [(matrix.name, slice(0, matrix.rows))]
    if stack["part"] == "down_proj":
        return [(f"{matrix.name}.weight", slice(0, matrix.rows))]
    half = matrix.rows // 2
    return [
        (f"{stack['experts']}.gate_proj.weight", slice(0, half)),
        (f"{stack['experts']}.up_proj.weight", slice(half, matrix.rows)),
    ]


def _part(file: GgufFile, name: str, matrix: WeightMatrix, rows: slice, weight: torch.Tensor) -> Part | None:
    """The rows of a matrix in the order in which a GGUF tensor has them; None if it has other numbers.

    The converter exchanges rows of some matrices (queries and keys of Llama's kind).
    """
    stored = file.matrices(name)
    number = matrix.expert or 0
    if number >= len(stored) or stored[number].shape != (rows.stop - rows.start, matrix.cols):
        return None
    target = file.matrix(name, number)
    source = weight[rows].to(torch.bfloat16).float()
    order = np.arange(len(source))
    if not torch.equal(source, target):
        order = _row_order(source, target)
        if not torch.equal(source[torch.from_numpy(order)], target):
            return None
    return Part(matrix, rows.start + order)


def _row_order(source: torch.Tensor, target: torch.Tensor) -> NDArray[np.int64]:
    """For each row of `target` the number of the equal row of `source`, if the rows of both are the same."""
    order = np.empty(len(source), np.int64)
    order[_sorted(target)] = _sorted(source)
    return order


def _sorted(rows: torch.Tensor) -> NDArray[np.int64]:
    """Row numbers in the order of the rows' bytes."""
    numbers = np.ascontiguousarray(rows.numpy())
    return np.argsort(numbers.view(np.dtype((np.void, numbers.strides[0]))).ravel(), kind="stable")
