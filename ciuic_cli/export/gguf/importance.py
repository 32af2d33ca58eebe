"""The importance matrix of llama.cpp from ciuic's statistics: how much the error of each column of a tensor matters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ciuic_cli.allocation.matrices import fisher_of
from ciuic_cli.export.gguf.tensors import GgufTensor
from ciuic_cli.statistics.files import Statistics

_LEAST = 1e-6
"""Least importance of a column, relative to the mean of its tensor (chosen): llama.cpp's quantizers divide by sums of
importances, which must not be 0."""


def write_importance(
    path: Path, tensors: Iterable[GgufTensor], statistics: Statistics, sequences: int, length: int
) -> None:
    """Write the diagonal of H of every tensor as a GGUF file of importances.

    llama-quantize minimises the sum over a row of importance times squared error. The importance of a column is the
    mean square of its input in ciuic's statistics, in which a token counts more where the model is unsure; embeddings
    and heads have one, too.

    Args:
        sequences, length: of the calibration text, for the file's metadata.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["ciuic"])
    writer.add_uint32("imatrix.chunk_count", sequences)
    writer.add_uint32("imatrix.chunk_size", length)
    for tensor in tensors:
        rows = [fisher_of(part.matrix, statistics).inputs.diagonal().numpy() for part in tensor.parts]
        values = np.stack(rows).astype(np.float32)
        mean = np.maximum(values.mean(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        writer.add_tensor(f"{tensor.name}.in_sum2", np.maximum(values / mean, np.float32(_LEAST)))
        writer.add_tensor(f"{tensor.name}.counts", np.ones((len(values), 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
