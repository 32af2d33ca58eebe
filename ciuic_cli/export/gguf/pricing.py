"""The price of every type of every tensor: the KL that llama.cpp's own rounding to this type is predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import fisher_of
from ciuic_cli.export.gguf.feedback import round_again
from ciuic_cli.export.gguf.llama_cpp import LlamaCpp
from ciuic_cli.export.gguf.tensors import GgufFile, GgufTensor, padded
from ciuic_cli.export.gguf.types import LARGEST
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.process.progress import Progress
from ciuic_cli.statistics.files import Statistics

_ROWS = 4096
"""Rows of a matrix with a diagonal G that are priced at a time; bounds the temporaries (chosen, not tuned)."""


def price_types(
    tensors: Sequence[GgufTensor],
    source: GgufFile,
    statistics: Statistics,
    llama_cpp: LlamaCpp,
    importance: Path,
    work: Path,
    progress: Progress,
) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """Predicted KL per token and bytes of every tensor at every type, and the bytes of all the rest of the file.

    In pass k every tensor with so many types is rounded by llama-quantize to its k-th type, gets its codes with error
    feedback, and is decoded again by llama-quantize.

    Returns:
        loss (tensors, types) with np.inf where a tensor has fewer types; bytes (tensors, types); bytes of metadata and
        of the tensors that have no price.
    """
    most = max(len(tensor.types) for tensor in tensors)
    loss = np.full((len(tensors), most), np.inf)
    nbytes = np.zeros((len(tensors), most), np.int64)
    rest = 0
    rounded, decoded = work / "rounded.gguf", work / "decoded.gguf"
    for number in range(most):
        # LARGEST, for tensors whose types are all priced, is rounded fastest.
        types = [tensor.types[number] if number < len(tensor.types) else LARGEST for tensor in tensors]
        chosen = {tensor.name: kind for tensor, kind in zip(tensors, types, strict=True)}
        llama_cpp.quantize(source.path, rounded, chosen, importance, work, LARGEST.file_type)
        sizes = {tensor.name: padded(chosen[tensor.name].nbytes(tensor.weights)) for tensor in tensors}
        rest = rounded.stat().st_size - sum(sizes.values())
        new = [index for index, tensor in enumerate(tensors) if number < len(tensor.types)]
        round_again(
            rounded, [tensors[index] for index in new], [types[index] for index in new], source, statistics
        )
        llama_cpp.decode(rounded, decoded)
        rounded.unlink()
        values = GgufFile(decoded)
        for index in new:
            loss[index, number] = _loss(tensors[index], source, values, statistics)
            nbytes[index, number] = sizes[tensors[index].name]
        del values
        decoded.unlink()
        progress("price", number + 1, most)
    return loss, nbytes, rest


def _loss(tensor: GgufTensor, source: GgufFile, rounded: GgufFile, statistics: Statistics) -> float:
    total = 0.0
    for number, part in enumerate(tensor.parts):
        error = source.matrix(tensor.name, number) - rounded.matrix(tensor.name, number)
        fisher = fisher_of(part.matrix, statistics).reordered(torch.from_numpy(part.rows))
        total += quadratic_loss(error, fisher)
    return total


def quadratic_loss(error: torch.Tensor, fisher: KroneckerFisher) -> float:
    """½ tr(Eᵀ G E H) of an error E (m, n) float32; with contexts the H of row r is H + v_r v_rᵀ."""
    if fisher.outputs.dim() == 2:
        return 0.5 * float(((fisher.outputs @ error) * (error @ fisher.inputs)).sum(dtype=torch.float64))
    total = 0.0
    for begin in range(0, len(error), _ROWS):
        rows = slice(begin, begin + _ROWS)
        energy = ((error[rows] @ fisher.inputs) * error[rows]).sum(1)
        if fisher.contexts is not None:
            energy += (error[rows] * fisher.contexts.rows(rows).float32()).sum(1).square()
        total += float((energy * fisher.outputs[rows]).sum(dtype=torch.float64))
    return 0.5 * total
